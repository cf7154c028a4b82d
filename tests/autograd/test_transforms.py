"""torch.func on the functions, on states, and on the operators of gradients themselves: derivatives and batches."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from lib import support
from lib.modes import Operators
from lib.support import SOFTMAXES, TORCH, both, every_operator, every_softmax, keepdims, maker, ours

ops = torch.ops.onepass
F64 = torch.float64


def _loss(f):
    return lambda v: f(v).square().sum()


@pytest.mark.parametrize(("in_dim", "out_dim"), [(0, 0), (1, -1), (-1, 1), (2, 0)])
@every_operator
def test_vmap_calls_the_kernels_once(function, in_dim, out_dim, engine, device):
    """Forward and backward of a batch are one operator each, whatever the dims: no loop in Python nor below it."""
    x = maker(F64, device)(3, 4, 5)
    for dim, named in itertools.product((0, -1, (0, 1)), keepdims(function)):
        f, ref = both(function, engine, dim=dim, **named)
        with Operators() as mode:
            got = torch.func.vmap(f, in_dims=in_dim)(x)
        assert len(mode.ours()) == 1
        torch.testing.assert_close(got, torch.stack([ref(v) for v in x.unbind(in_dim)]))
        with Operators() as mode:
            got = torch.func.vmap(torch.func.grad(_loss(f)), in_dims=in_dim, out_dims=out_dim)(x)
        assert len(mode.ours()) == (1 if function == "state" else 2)
        want = torch.stack([torch.func.grad(_loss(ref))(v) for v in x.unbind(in_dim)], out_dim)
        torch.testing.assert_close(got, want)


@every_softmax
def test_vmap_with_dtype_and_of_half_types(function, engine, device):
    x = maker(torch.float16, device)(3, 4, 5)
    f = functools.partial(ours(function), dim=0, dtype=torch.float32, engine=engine)
    torch.testing.assert_close(torch.func.vmap(f, in_dims=2)(x), torch.stack([f(v) for v in x.unbind(2)]))


@every_operator
def test_batches_of_batches_and_of_0_d(function, engine, device):
    x = maker(F64, device)(2, 3, 4)
    vmap, (f, ref) = torch.func.vmap, both(function, engine, dim=0)
    torch.testing.assert_close(vmap(vmap(f))(x), vmap(vmap(ref))(x))
    torch.testing.assert_close(vmap(f)(x[0, 0]), torch.stack([ref(v) for v in x[0, 0]]))
    for transform in (torch.func.jacrev, torch.func.jacfwd, lambda f: torch.func.hessian(_loss(f))):
        torch.testing.assert_close(transform(f)(x[0]), transform(ref)(x[0]))


@support.thin_product(3, function=support.OPERATORS)
def test_every_nesting_of_up_to_three_and_vmap_of_it(function, engine, device):
    """Forward over forward too: torch runs a jvp with forward mode off, so that an outer one may see constants."""
    x, t = maker(F64, device)(2, 3, 4), maker(F64, device, 9)(2, 3, 4)
    transforms = {
        "jvp": lambda f, t: lambda v: torch.func.jvp(f, (v,), (t,))[1],
        "grad": lambda f, t: torch.func.grad(_loss(f)),
    }
    nestings = [names for count in (1, 2, 3) for names in itertools.product(transforms, repeat=count)]
    for dim, names in itertools.product((1, (0, 1)), nestings):

        def nested(f, x, t, names=names):
            return functools.reduce(lambda f, name: transforms[name](f, t), names, f)(x)

        f, ref = both(function, engine, dim=dim)
        want = torch.stack([nested(ref, *pair) for pair in zip(x, t, strict=True)])
        got = torch.func.vmap(functools.partial(nested, f), in_dims=(0, -1))(x, t.movedim(0, -1))
        for values in (got[0], nested(f, x[0], t[0])):
            torch.testing.assert_close(values, want[0], msg=lambda m, names=names: f"{names}: {m}")
        torch.testing.assert_close(got[1], want[1])


def test_tangents_and_transforms_of_the_operators_by_name(function):
    """A direct call of a registered operator is differentiated as the function's: never zeros, never a loop."""
    x, t = maker(F64)(3, 4), maker(F64, seed=5)(3, 4)
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


def operator(function: str, dims: list[int], keepdim: bool = False) -> Any:
    """The gradient of a function as a function of tensors alone: g and what was saved."""
    if function == "logsumexp":
        return lambda g, x, lse: ops._logsumexp_backward(g, x, lse, dims, keepdim)
    return lambda g, y: ops._softmax_backward(g, y, SOFTMAXES.index(function), dims, F64)


def operands(function: str, shape: Any, dims: list[int], device: str, keepdim: bool = False) -> list[Tensor]:
    """g, and tensors of the shapes of what was saved: any values, so that the derivative in each shows."""
    make = maker(F64, device, scale=0.5)
    x = make(*shape)
    if function != "logsumexp":
        return [make(*shape).requires_grad_(), x.requires_grad_()]
    lse = TORCH["logsumexp"](x, dims, keepdim)
    return [t.requires_grad_() for t in (make(*lse.shape), x, lse)]


@support.thin_product(
    3, function=support.FUNCTIONS, place=[((3, 5), [1]), ((2, 4, 3), [-2]), ((2, 3, 2), [0, -1]), ((), [0])]
)
def test_derivatives_of_every_order(function, place, device):
    shape, dims = place
    for keepdim in (False, True)[: 1 + (function == "logsumexp")]:
        given, f = operands(function, shape, dims, device, keepdim), operator(function, dims, keepdim)
        assert gradcheck(f, given, check_forward_ad=True)
        assert gradgradcheck(f, given)
        for wanted in range(len(given)):  # one operand alone, so that none leans on the others
            one = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(given)]
            assert gradcheck(f, one, check_forward_ad=True)


@pytest.mark.parametrize(("shape", "dims"), [((4, 3), [1]), ((), [0])], ids=str)
def test_batches_of_every_operand(function, shape, dims, device):
    """Any of the operands batched, at any dim, the others not: one call, and what a loop gives."""
    single, f = [t.detach() for t in operands(function, shape, dims, device)], operator(function, dims)
    for batched in list(itertools.product((False, True), repeat=len(single)))[1:]:
        for at in (0, 1, -1) if shape else (0,):
            make = maker(F64, device, seed=3, scale=0.5)
            given = [make(5, *t.shape) if b else t for t, b in zip(single, batched, strict=True)]
            want = torch.stack([f(*(t[i] if b else t for t, b in zip(given, batched, strict=True))) for i in range(5)])
            moved = [t.movedim(0, at) if b else t for t, b in zip(given, batched, strict=True)]
            in_dims = tuple(at if b else None for b in batched)
            with Operators() as mode:
                got = torch.func.vmap(f, in_dims, out_dims=at)(*moved)
            assert len(mode.ours()) == 1
            torch.testing.assert_close(got.movedim(at, 0), want)
