"""What the tests of state and merge share: the tolerance of the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lib.support import same
from onepass import State, reference


def type_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def assert_state(got: State, x: Tensor, dim: Any, keepdim: bool = False, note: str = "") -> None:
    """`got` is the state of x: its maxima exactly, its sums within a few roundings, however long a row is."""
    call = f"state over dim {dim} of {tuple(x.shape)} strides {x.stride()} {x.dtype}{note}"
    m, total = reference.state(x, dim, keepdim)
    dtype = type_of(x.dtype)
    assert got.m.dtype == got.l.dtype == dtype, call
    assert got.m.device == got.l.device == x.device, call
    assert same(got.m.double(), m), f"{call}: got m = {got.m}, want {m}"
    assert got.l.shape == total.shape, call
    l = got.l.double()  # noqa: E741
    near = total.isfinite() & ((l - total).abs() <= 16 * torch.finfo(dtype).eps * total)
    good = (l == total) | (l.isnan() & total.isnan()) | near
    assert bool(good.all()), f"{call}: {int((~good).sum())} sums of {good.numel()} wrong: {l[~good]}, {total[~good]}"


def special(n: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of n that hold special values, each with an ordinary row behind it."""
    rows = torch.randn(22, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    inf, nan, half, x = torch.inf, torch.nan, n // 2, rows[::2]
    x[0] = -inf
    x[1] = inf
    x[2] = nan
    x[3, -1] = inf
    x[4, half] = nan
    x[5] = -inf
    x[5, half] = nan
    x[6, 0], x[6, -1] = nan, inf
    x[7, half:] = -inf
    x[8, : half + 1] = -inf
    x[9] = torch.finfo(dtype).max
    x[10] = torch.finfo(dtype).min
    return rows.to(dtype).to(device)
