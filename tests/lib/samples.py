"""Inputs that several tests share: small views for checks of gradients and operators, and values for accuracy tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .support import Make, maker

SAMPLES: dict[str, tuple[Callable[[Make], Tensor], tuple[int, ...]]] = {  # a tensor and the dims that a call is over
    "rows": (lambda r: r(3, 5), (-1,)),
    "columns": (lambda r: r(4, 3), (0,)),
    "middle": (lambda r: r(2, 4, 3), (1,)),
    "two dims": (lambda r: r(2, 3, 2), (0, -1)),
    "all dims": (lambda r: r(2, 3), (1, 0)),
    "transposed": (lambda r: r(5, 3).t(), (1,)),
    "channels_last": (lambda r: r(2, 3, 2, 2).contiguous(memory_format=torch.channels_last), (1,)),
    "sliced": (lambda r: r(6, 7)[1:5, ::2], (0,)),
    "expanded": (lambda r: r(1, 4).expand(3, 4).clone(memory_format=torch.preserve_format), (0,)),
    "0-d": (lambda r: r(), (0,)),
    "rows of one": (lambda r: r(3, 1), (1,)),
    "empty batch": (lambda r: r(0, 3), (1,)),
    "empty dim": (lambda r: r(3, 0), (1,)),
    "longer": (lambda r: r(1, 40), (1,)),
}


def _normal(rows: int, n: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, n, generator=g, dtype=torch.float64)


def _one_hot(rows: int, n: int, g: torch.Generator) -> Tensor:
    x = torch.zeros(rows, n, dtype=torch.float64)
    x[torch.arange(rows), torch.randint(n, (rows,), generator=g)] = 9 + _normal(rows, 1, g)[:, 0]
    return x


ROWS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    # All rows differ; otherwise the largest of a few errors would be chance.
    "normal": _normal,
    "offset": lambda rows, n, g: _normal(rows, n, g) + 1234.567,
    "huge offset": lambda rows, n, g: _normal(rows, n, g) * 4 - 3.0e4,
    "integers": lambda rows, n, g: torch.randint(-9, 10, (rows, n), generator=g).double(),
    "large integers": lambda rows, n, g: torch.randint(0, 12, (rows, n), generator=g).double() + 1000,
    "constant": lambda rows, n, g: _normal(rows, 1, g).expand(rows, n),
    "one-hot": _one_hot,
    "wide": lambda rows, n, g: _normal(rows, n, g) * 25,
    "half -inf": lambda rows, n, g: _normal(rows, n, g).masked_fill(torch.arange(n) % 2 == 1, -torch.inf),
    "rising": lambda rows, n, g: torch.linspace(-20, 0, n, dtype=torch.float64) * (1 + 0.1 * _normal(rows, 1, g)),
}


SPECIAL_ROWS: dict[str, Callable[[Tensor], Any]] = {  # changes to a row of 1.0
    "all -inf": lambda r: r.fill_(-torch.inf),
    "all +inf": lambda r: r.fill_(torch.inf),
    "all NaN": lambda r: r.fill_(torch.nan),
    "one +inf": lambda r: r.index_fill_(0, _at(r, -1), torch.inf),
    "one -inf": lambda r: r.index_fill_(0, _at(r, 0), -torch.inf),
    "one NaN": lambda r: r.index_fill_(0, _at(r, len(r) // 2), torch.nan),
    "+inf and -inf": lambda r: r.fill_(-torch.inf).index_fill_(0, _at(r, len(r) // 3), torch.inf),
    "NaN among -inf": lambda r: r.fill_(-torch.inf).index_fill_(0, _at(r, -1), torch.nan),
    "NaN, then +inf": lambda r: r.index_fill_(0, _at(r, 0), torch.nan).index_fill_(0, _at(r, -1), torch.inf),
    "-inf but the first": lambda r: r[1:].fill_(-torch.inf),
    "-inf but the last": lambda r: r[:-1].fill_(-torch.inf),
    "-inf in the second half": lambda r: r[len(r) // 2 :].fill_(-torch.inf),
    "-inf in the first half": lambda r: r[: len(r) // 2].fill_(-torch.inf),
    "-inf at every other": lambda r: r[::2].fill_(-torch.inf),
    "all the largest": lambda r: r.fill_(torch.finfo(r.dtype).max),
    "all the lowest": lambda r: r.fill_(torch.finfo(r.dtype).min),
    "largest and lowest": lambda r: r.fill_(torch.finfo(r.dtype).min)[:1].fill_(torch.finfo(r.dtype).max),
    "the largest and half of it": lambda r: r.fill_(torch.finfo(r.dtype).max)[1::2].fill_(_half(r.dtype)),
    "all negative": lambda r: r.neg_().sub_(100),
    "denormal": lambda r: r.fill_(torch.finfo(r.dtype).smallest_normal / 4),
    "0 and one far above": lambda r: r.zero_().index_fill_(0, _at(r, len(r) // 2 + 2), 1000.0),
    "rising": lambda r: r.copy_(torch.arange(len(r), device=r.device) * 3.0),
    "-0 and 0": lambda r: r.zero_()[::2].neg_(),
}


def _at(row: Tensor, index: int) -> Tensor:
    return torch.tensor([index % len(row)], device=row.device)


def _half(dtype: torch.dtype) -> float:
    """Some half of the largest number. What it is off the largest double is rounded so that the two differ by more than
    the largest again: a difference that is compensated for its rounding overflows."""
    return min(torch.finfo(dtype).max * 0.4815, 8.654758977187404e307)


def special(length: int, dtype: torch.dtype, device: str) -> Tensor:
    """One row for each of SPECIAL_ROWS, with an ordinary row after each."""
    x = torch.ones(2 * len(SPECIAL_ROWS), length, dtype=dtype, device=device)
    x[1::2] = maker(dtype, device)(len(SPECIAL_ROWS), length)
    for k, spoil in enumerate(SPECIAL_ROWS.values()):
        spoil(x[2 * k])
    return x
