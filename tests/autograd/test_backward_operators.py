"""The operators of gradients as operators: their own gradients, tangents, and batching."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import onepass  # noqa: F401  (loads the operators)
from lib.modes import Operators
from lib.support import SOFTMAXES, TORCH, maker

ops = torch.ops.onepass
SHAPES = {"rows": ((3, 5), [1]), "middle": ((2, 4, 3), [-2]), "two dims": ((2, 3, 2), [0, -1]), "0-d": ((), [0])}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def operator(function: str, dims: list[int], to: torch.dtype, keepdim: bool = False) -> Any:
    """The gradient of a function as a function of tensors alone: g and what was saved."""
    if function == "logsumexp":
        return lambda g, x, lse: ops._logsumexp_backward(g, x, lse, dims, keepdim)
    return lambda g, y: ops._softmax_backward(g, y, SOFTMAXES.index(function), dims, to)


def operands(
    function: str, shape: tuple[int, ...], dims: list[int], dtype: torch.dtype, device: str, keepdim: bool = False
) -> tuple[Tensor, ...]:
    """g, and tensors of the shapes of what was saved: any values, so that the derivative in each shows."""
    make = maker(dtype, device, scale=0.5)
    x = make(*shape)
    if function != "logsumexp":
        return make(*shape), x
    lse = TORCH["logsumexp"](x, dims, keepdim)
    return make(*lse.shape), x, lse


@every_shape
def test_derivatives_of_every_order(function, shape, device):
    size, dims = SHAPES[shape]
    for keepdim in (False, True)[: 1 + (function == "logsumexp")]:
        given = tuple(t.requires_grad_() for t in operands(function, size, dims, torch.float64, device, keepdim))
        f = operator(function, dims, torch.float64, keepdim)
        assert gradcheck(f, given, check_forward_ad=True)
        assert gradgradcheck(f, given)
        for wanted in range(len(given)):  # one operand alone, so that none leans on the others
            one = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(given)]
            assert gradcheck(f, one, check_forward_ad=True)


def test_third_order(function, device):
    given = tuple(t.requires_grad_() for t in operands(function, (2, 3), [1], torch.float64, device))
    f = operator(function, [1], torch.float64)

    def first(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True)

    assert gradgradcheck(first, given)


def test_batches_of_every_operand(function, device):
    """Any of the operands batched, at any dim, the others not: one call, and what a loop gives."""
    shape, dims, count = (4, 3), [1], 5
    single = operands(function, shape, dims, torch.float64, device)
    f = operator(function, dims, torch.float64)
    for batched in itertools.product((False, True), repeat=len(single)):
        if not any(batched):
            continue
        for at in (0, 1, -1):
            make = maker(torch.float64, device, seed=3, scale=0.5)
            given = [make(count, *t.shape) if b else t for t, b in zip(single, batched, strict=True)]
            want = torch.stack([f(*(t[i] if b else t for t, b in zip(given, batched, strict=True))) for i in range(5)])
            moved = [t.movedim(0, at) if b else t for t, b in zip(given, batched, strict=True)]
            in_dims = tuple(at if b else None for b in batched)
            with Operators() as mode:
                got = torch.func.vmap(f, in_dims, out_dims=at)(*moved)
            assert len(mode.ours()) == 1
            torch.testing.assert_close(got.movedim(at, 0), want)


def test_batches_of_0_d_tensors_and_of_batches(function, device):
    f = operator(function, [0], torch.float64)
    given = [maker(torch.float64, device, seed)(6) for seed in range(3 if function == "logsumexp" else 2)]
    want = torch.stack([f(*(t[i] for t in given)) for i in range(6)])
    torch.testing.assert_close(torch.func.vmap(f)(*given), want)
    rows = [maker(torch.float64, device, seed)(2, 3, 4) for seed in range(2)]
    if function == "logsumexp":
        rows = [rows[0][..., 0], rows[1], rows[0][..., 1]]
    got = torch.func.vmap(torch.func.vmap(f))(*rows)
    torch.testing.assert_close(got, operator(function, [2], torch.float64)(*rows))


def test_tangents_and_transforms_of_the_operators_by_name(function):
    """A direct call of a registered operator is differentiated as the function's: never zeros, never a loop."""
    x, t = maker(torch.float64)(3, 4), maker(torch.float64, seed=5)(3, 4)
    named = functools.partial(getattr(ops, function), dim=[1])
    theirs = functools.partial(TORCH[function], dim=1)
    torch.testing.assert_close(torch.func.jvp(named, (x,), (t,)), torch.func.jvp(theirs, (x,), (t,)))
    torch.testing.assert_close(torch.func.hessian(named)(x), torch.func.hessian(theirs)(x))
    with forward_ad.dual_level():
        got, want = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent for f in (named, theirs))
    torch.testing.assert_close(got, want)
    with Operators() as mode:
        rows = torch.func.vmap(functools.partial(getattr(ops, function), dim=[0]), in_dims=1)(x.t())
    assert mode.ours() == [function]
    torch.testing.assert_close(rows, theirs(x))
