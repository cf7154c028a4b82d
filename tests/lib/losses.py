"""For tests of losses: shapes, classes of rows, and tolerances."""

from typing import Any

import torch
from torch import Tensor

from lib.support import DTYPES

F32, F64, F16, BF16 = DTYPES
REDUCTIONS = ("mean", "sum", "none")


def tolerance(dtype: torch.dtype) -> float:
    return {F64: 1e-12, F32: 2e-5, F16: 2e-3, BF16: 2e-2}[dtype]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, note: Any = "") -> None:
    """Compares with a tolerance relative to the largest number, or to the terms of a sum that cancel."""
    eps = tolerance(dtype)
    size = float(want.masked_fill(~want.isfinite(), 0).abs().amax()) if want.numel() else 0.0
    torch.testing.assert_close(
        got.double(), want.double(), rtol=eps, atol=eps * max(size, 0.1), equal_nan=True, msg=lambda t: f"{note}: {t}"
    )


def classes(x: Tensor, dim: int = 1, seed: int = 1, ignored: int | None = None) -> Tensor:
    """A class per row, some of them `ignored`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [size for d, size in enumerate(x.shape) if d != dim]
    target = torch.randint(0, x.shape[dim], rows, generator=generator)
    if ignored is not None:
        target = target.masked_fill(torch.rand(rows, generator=generator) < 0.3, ignored)
    return target.to(x.device)


SHAPES = {
    "rows": lambda r: r(9, 13),
    "whole vectors": lambda r: r(5, 64),
    "one row": lambda r: r(1, 1031),
    "a vector": lambda r: r(37),
    "one class": lambda r: r(4, 1),
    "many short rows": lambda r: r(600, 3),
    "long rows": lambda r: r(3, 9001),
    "columns": lambda r: r(2, 21, 5, 16),
    "odd columns": lambda r: r(3, 10, 7),
    "many classes of columns": lambda r: r(1, 700, 8),
    "channels last": lambda r: r(2, 4, 6, 11).movedim(-1, 1),
    "transposed": lambda r: r(33, 12).t(),
    "stepped": lambda r: r(8, 60, 3)[::2, ::3, 1],
    "offset": lambda r: r(67)[3:63].view(4, 15),
}
