"""Calls with scores, for tests of kernels."""

import math

import torch
from torch import Tensor

from lib.plan_tables import BF16, F16, F32, F64
from lib.support import maker
from onepass.scored import LEAST_FROM_RESULT
from onepass.scores import Scores, SideTensors

TOLERANCE = {F32: 2e-5, BF16: 1e-2, F16: 2e-3, F64: 1e-12}


def inner(t: Tensor) -> Tensor:
    """The same amid other elements, from an odd one on."""
    whole = torch.zeros(t.numel() + 3, dtype=t.dtype)
    whole[1:-2] = t.flatten()
    return whole[1:-2].view(t.shape)


def drawn(
    dtype: torch.dtype, shape: tuple[int, int, int], parts: set[str], seed: int
) -> tuple[Tensor, SideTensors, Scores]:
    """A call; the tensors beside the input begin at odd elements."""
    make = maker(dtype, seed=seed)
    wide = F64 if dtype is F64 else F32
    x = make(*shape) * (3 if "high softcap" in parts else 2)
    outer, lines, n = shape
    side = SideTensors(
        inner(make(outer, 1, 1).to(wide).abs() + 0.5) if "scale" in parts else None,
        inner(make(1, lines, n)) if "bias" in parts else make(n, lines).t() if "bias transposed" in parts else None,
        make(outer).to(wide).abs() / 10 if "alibi" in parts else None,
        inner(make(outer, 1, 1).to(wide)) if "sink" in parts else None,
        inner(make(lines, n) > -0.5)
        if "mask" in parts
        else make(outer, lines, 1) > 0
        if "mask of rows" in parts
        else None,
    )
    window = (5, 4, 6) if "window" in parts else (None, None, None)
    factor = -0.7 if "factor" in parts else 1.0
    softcap = 2.0 if "softcap" in parts else LEAST_FROM_RESULT if "high softcap" in parts else 0.0
    return x, side, Scores(factor, softcap, -math.inf, *window, "empty" in parts)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want.to(dtype).double(), equal_nan=True, rtol=TOLERANCE[dtype], atol=1e-3)


def window_of(scores: Scores, x: Tensor) -> tuple[int, int, int]:
    offset = x.size(-1) - x.size(-2) if scores.offset is None else scores.offset
    least = -(2**63) if scores.left is None else -scores.left
    return least, 2**63 - 1 if scores.right is None else scores.right, offset
