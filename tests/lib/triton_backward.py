"""What the tests of the Triton engine's gradients share: operands, the definition in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lib.support import maker
from onepass import reference
from onepass.triton import Plan, backward

# Plans that force a tier on rows of up to 32, as TIERS of triton_support.py.
TIERS = {
    "row": Plan("row", block=32, rows=1, depth=1, num_warps=1, num_stages=1, grid=1000),
    "rows of 4 a program, split launch": Plan("row", block=32, rows=4, depth=1, num_warps=1, num_stages=1, grid=1),
    "online": Plan("online", block=8, rows=1, depth=2, num_warps=1, num_stages=1, grid=1000),
    "online, split launch": Plan("online", block=16, rows=1, depth=1, num_warps=1, num_stages=1, grid=2),
}


class Case(NamedTuple):
    """A call of a gradient, with a result that no answer looks like."""

    function: str
    grad: Tensor
    saved: tuple[Tensor, ...]
    dx: Tensor
    dims: tuple[int, ...]


def case(function: str, x: Tensor, dims: Sequence[int], dtype: torch.dtype | None = None) -> Case:
    """The gradient of a call on `x`, which is of the result's dtype; `dtype`: the input's. What is saved lies as x."""
    dims = tuple(sorted(d % max(x.dim(), 1) for d in dims)) if x.dim() else ()
    over = dims or (0,)
    if function == "logsumexp":
        lse = reference.logsumexp(x, over, True).to(x.dtype)
        saved: tuple[Tensor, ...] = (x, lse)
    else:
        y = getattr(reference, function)(x, over) if x.numel() else x
        saved = (torch.empty_like(x).copy_(y),)
    grad = maker(x.dtype, x.device.type, 5)(*saved[-1].shape)
    return Case(function, grad, saved, torch.full_like(x, 777.0, dtype=dtype or x.dtype), dims)


def definition(given: Case) -> tuple[Tensor, Tensor]:
    """The gradient in float64, and the size of the terms that it is the difference of."""
    function, g, y, dims = given.function, given.grad.double(), given.saved[0].double(), given.dims or (0,)
    if function == "logsumexp":
        dx = g * (y - given.saved[1].double()).exp()
        distance = (y - given.saved[1].double()).nan_to_num(0, 0, 0).abs()
        return dx, dx.abs() * (1 + distance)
    if function == "log_softmax":
        return (
            g - y.exp() * g.sum(dims, keepdim=True),
            g.abs() + y.exp() * (1 + y.nan_to_num(0, 0, 0).abs()) * g.abs().sum(dims, keepdim=True),
        )
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    terms = y.abs() * (g.abs() + (g * y).abs().sum(dims, keepdim=True))
    return (dx if function == "softmax" else -dx), terms


def run(given: Case, plan: Plan | None = None) -> Tensor:
    function, grad, saved, dx, dims = given
    backward(function, grad, saved, dx, dims, plan=plan)
    return dx


def assert_gradient(got: Tensor, given: Case, note: str = "") -> None:
    """One rounding of the result, and a few of its terms in the type that they are computed in."""
    want, terms = definition(given)
    wide = torch.float64 in (given.grad.dtype, given.saved[0].dtype)
    kind = torch.finfo(got.dtype)
    limit = kind.eps * want.abs() + 6 * torch.finfo(torch.float64 if wide else torch.float32).eps * terms
    limit = limit + 2 * kind.smallest_normal
    y = got.double()
    good = (y == want) | (y.isnan() & want.isnan()) | ((y - want).abs() <= limit)
    if not bool(good.all()):
        at = tuple((~good).nonzero()[0].tolist())
        raise AssertionError(
            f"gradient of {given.function} over {given.dims} of {tuple(got.shape)}, {given.saved[0].dtype} -> "
            f"{got.dtype}{note}: {int((~good).sum())} of {good.numel()} wrong, first at {at}: got {y[at].item()!r}, "
            f"want {want[at].item()!r} within {limit[at].item():.3g}"
        )
