"""What the tests of CUDA programs and of huge tensors share."""

import torch
from torch import Tensor

import onepass

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
TOLERANCE = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def call(function: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    return getattr(onepass, function)(x, -1, out=out, engine="cuda")


def close(function: str, got: Tensor, want: Tensor) -> None:
    least = torch.finfo(got.dtype).smallest_normal if function == "softmax" else TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[got.dtype], atol=least)
