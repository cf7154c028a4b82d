"""What every rung asks of its tensors. Apart from `rung.py`, which lists and shows the rungs without torch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.validation import overlap

__all__ = ["DTYPES", "check_matrix", "check_out"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_matrix(rung: str, what: str, x: Tensor) -> None:
    """Raises TypeError or ValueError, in the name of the rung, for a tensor that no rung takes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{rung}: {what} must be a tensor, got {type(x).__name__}")
    if x.dim() != 2:
        raise ValueError(f"{rung}: takes a matrix (M, N), got {what} of shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: takes float32, float16 and bfloat16, got {what} of {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{rung}: takes rows of unit stride, got {what} with strides {x.stride()}")


def check_out(rung: str, x: Tensor, out: Tensor) -> None:
    """Likewise for an `out` that cannot take the result of `x`."""
    check_matrix(rung, "out", out)
    for name in ("shape", "dtype", "device"):
        if getattr(out, name) != getattr(x, name):
            raise ValueError(f"{rung}: out must have the {name} of x, {getattr(x, name)}; got {getattr(out, name)}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"{rung}: the rows of out must not overlap, got strides {out.stride()}")
    if overlap(x, out) != "none":
        raise ValueError(f"{rung}: out must not overlap x")
