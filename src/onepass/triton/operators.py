"""The operator of the Triton engine's gradients: what autograd.py calls, and a graph keeps by name."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decompositions import unsqueeze_reduced
from .backward import backward

library = torch.library.Library("onepass", "FRAGMENT")
library.define(
    "triton_backward(Tensor grad, Tensor saved, Tensor? lse, str function, int[] dim, ScalarType dtype, bool keepdim)"
    " -> Tensor"
)


# A graph calls this; what it launches is not to be traced when it runs.
@torch._disable_dynamo
def _kernel(
    grad: Tensor, saved: Tensor, lse: Tensor | None, function: str, dim: list[int], dtype: torch.dtype, keepdim: bool
) -> Tensor:
    """`saved`: of logsumexp the input, which has `lse` too; else the result."""
    dims = tuple(sorted(d % saved.dim() for d in dim)) if saved.dim() else ()
    given: tuple[Tensor, ...] = (saved,)
    if lse is not None:
        grad, given = unsqueeze_reduced(grad, dims, keepdim), (saved, unsqueeze_reduced(lse, dims, keepdim))
    dx = torch.empty_like(saved, dtype=dtype)
    backward(function, grad, given, dx, dims)
    return dx


for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton_backward", _kernel, _key)


@torch.library.register_fake("onepass::triton_backward", lib=library)
def _(
    grad: Tensor, saved: Tensor, lse: Tensor | None, function: str, dim: list[int], dtype: torch.dtype, keepdim: bool
) -> Tensor:
    return torch.empty_like(saved, dtype=dtype)
