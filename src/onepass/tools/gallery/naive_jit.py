"""naive-jit: the same five steps through `torch.jit.script`.

Idea: let a compiler of whole functions see all five calls. TorchScript's fuser joins neighbouring elementwise steps
(subtract and exponentiate), and keeps the reductions as kernels of their own.

Traffic: reads 5MN + 2M, writes 3MN + 2M where nothing is fused. On a GPU subtract and exponentiate are fused: 4MN +
2M and 2MN + 2M.

Limit: memory, as before: a reduction ends a fused kernel, and the next one begins by reading everything again.
torch.jit.script is deprecated, and gone for some versions of Python.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["softmax"]


def _steps(x: Tensor, dtype: int) -> Tensor:
    maximum = torch.amax(x, [1]).float()
    shifted = x - maximum[:, None]
    numerator = torch.exp(shifted)
    denominator = torch.sum(numerator, [1])
    return (numerator / denominator[:, None]).to(dtype)


@functools.cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecation, which the header mentions
        return torch.jit.script(_steps)


def softmax(x: Tensor, out: Tensor | None = None) -> Tensor:
    return _scripted()(x, x.dtype)


@functools.cache
def missing() -> str | None:
    try:
        _scripted()
    except Exception as error:  # a torch without TorchScript, or with a part of it, raises various types
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        return f"torch.jit.script does not work with this Python and torch {torch.__version__}: {reason}"
    return None
