"""Gradients on the CPU as accurate as torch's: error against the formula in float64, of the same saved result and
gradient, at most 1.25 times that of torch's fused operator, or 2 ulp.

Errors are relative to the size of the terms that a gradient is the difference of. The largest of many elements counts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lib.support import DTYPES

ops = torch.ops.onepass
SHAPES = (
    *(((4000, 3), 1), ((3000, 16), 1), ((1500, 33), 1), ((600, 64), 1), ((150, 300), 1), ((60, 1025), 1)),
    *(((12, 5003), 1), ((2, 70_001), 1), ((33, 900), 0), ((700, 50), 0), ((8, 21, 300), 1)),
)
MAKERS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape, dim, made: torch.randn(shape, generator=made, dtype=torch.float64),
    "wide": lambda shape, dim, made: 20 * torch.randn(shape, generator=made, dtype=torch.float64),
    # one weight is nearly 1 in each row, so that two terms nearly cancel
    "one-hot": lambda shape, dim, made: torch.randn(shape, generator=made, dtype=torch.float64).scatter(
        dim, torch.zeros([1 if i == dim else size for i, size in enumerate(shape)], dtype=torch.int64), 12.0
    ),
}
GRADS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape, made: torch.randn(shape, generator=made, dtype=torch.float64),
    "nearly one": lambda shape, made: 1 + 0.01 * torch.randn(shape, generator=made, dtype=torch.float64),
}


def _softmax(g: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    dot = (g * y).sum(dim, keepdim=True)
    return y * (g - dot), y * (g.abs() + (g * y).abs().sum(dim, keepdim=True))


def _log_softmax(g: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    size = y.exp() * g.abs().sum(dim, keepdim=True)
    return g - y.exp() * g.sum(dim, keepdim=True), g.abs() + size * (1 + y.abs() / 8)


def _worst(got: Tensor, want: Tensor, terms: Tensor) -> float:
    """The largest error in ulp of the terms; results that are subnormal have fewer digits and do not count."""
    kind = torch.finfo(got.dtype)
    error = (got.double() - want).abs() / terms / kind.eps
    return float(error[terms > 4 * kind.smallest_normal].max())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.float64], ids=str)  # the judge is float64
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_no_less_accurate_than_torch(function: str, dtype: torch.dtype, kind: str) -> None:
    made = torch.Generator().manual_seed(len(kind) + len(function))
    misses = []
    for (shape, dim), (name, grads) in ((s, g) for s in SHAPES for g in GRADS.items()):
        x = MAKERS[kind](shape, dim, made)
        g = grads(shape, made).to(dtype)
        if function == "logsumexp":
            x, g = x.to(dtype), g.select(dim, 0).contiguous()
            lse = torch.logsumexp(x.double(), dim).to(dtype)
            mine = ops._logsumexp_backward(g, x, lse, [dim])
            torchs = g.unsqueeze(dim) * (x - lse.unsqueeze(dim)).exp()
            d = x.double() - lse.double().unsqueeze(dim)
            want = g.double().unsqueeze(dim) * d.exp()
            terms = want.abs() * (1 + d.abs() / 8)  # the difference is rounded
        else:
            y = x - torch.logsumexp(x, dim, keepdim=True)
            y = (y if function == "log_softmax" else y.exp()).to(dtype)
            theirs = torch._log_softmax_backward_data if function == "log_softmax" else torch._softmax_backward_data
            mine = ops._softmax_backward(g, y, int(function == "log_softmax"), [dim], dtype)
            torchs = theirs(g, y, dim, dtype)
            want, terms = (_log_softmax if function == "log_softmax" else _softmax)(g.double(), y.double(), dim)
        ours, limit = _worst(mine, want, terms), _worst(torchs, want, terms)
        if not ours <= max(1.25 * limit, 2):
            misses.append(f"{shape} dim {dim}, gradient {name}: {ours:.2f} ulp, torch has {limit:.2f}")
    assert not misses, "\n".join(misses)


def test_the_judge_can_fail() -> None:
    y = torch.softmax(torch.randn(50, 40, generator=torch.Generator().manual_seed(0)), -1)
    g = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    want, terms = _softmax(g.double(), y.double(), 1)
    assert _worst(want.float(), want, terms) <= 0.5
    assert _worst((want * (1 + 1e-5)).float(), want, terms) > 2
