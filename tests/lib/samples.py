"""Inputs that several tests share: small views for checks of gradients and operators, values for judges of accuracy,
and torch's own samples (OpInfo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .support import Make

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
    # Every row is another one, or the largest of a few errors would be chance.
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


def op_db() -> Any:
    """torch's operators with their samples; tests that need them are skipped where expecttest is not installed."""
    pytest.importorskip("expecttest", reason="torch.testing's op_db needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db
