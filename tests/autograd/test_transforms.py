"""torch.func and forward-mode gradients agree with those of the reference."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.autograd import forward_ad

import onepass
from lib.modes import Operators
from lib.support import every_softmax, maker, ours
from onepass import reference


class TestTransforms:
    """torch.func agrees with autograd of the reference: never silently wrong."""

    @staticmethod
    def loss(f, dim):
        return lambda x: (f(x, dim) * torch.arange(1.0, 1.0 + x.shape[0], device=x.device)[:, None]).square().sum()

    def both(self, function, engine, dim):
        """The same loss of ours and of the reference."""
        return self.loss(functools.partial(ours(function), engine=engine), dim), self.loss(
            getattr(reference, function), dim
        )

    def test_grad(self, function, engine, device):
        x = maker(torch.float64, device)(3, 4)
        got, want = (torch.func.grad(loss)(x) for loss in self.both(function, engine, 0))
        torch.testing.assert_close(got, want)

    def test_hessian_and_jacobians(self, function, engine, device):
        x = maker(torch.float64, device)(2, 3)
        f, ref = (
            functools.partial(ours(function), dim=1, engine=engine),
            functools.partial(getattr(reference, function), dim=1),
        )
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(transform(f)(x), transform(ref)(x))
        got, want = (torch.func.hessian(loss)(x) for loss in self.both(function, engine, 1))
        torch.testing.assert_close(got, want)

    def test_jvp_and_vjp(self, function, engine, device):
        x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)
        f, ref = (
            functools.partial(ours(function), dim=0, engine=engine),
            functools.partial(getattr(reference, function), dim=0),
        )
        torch.testing.assert_close(torch.func.jvp(f, (x,), (t,)), torch.func.jvp(ref, (x,), (t,)))
        y, pull = torch.func.vjp(f, x)
        torch.testing.assert_close(pull(y), torch.func.vjp(ref, x)[1](ref(x)))

    def test_forward_ad(self, function, engine, device):
        x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(ours(function)(forward_ad.make_dual(x, t), 1, engine=engine))
            want = forward_ad.unpack_dual(getattr(reference, function)(forward_ad.make_dual(x, t), 1))
            assert dual.tangent is not None
            torch.testing.assert_close(dual.tangent, want.tangent)

    @pytest.mark.parametrize("in_dim", [0, 1, -1, 2])
    def test_vmap(self, function, engine, device, in_dim):
        x = maker(torch.float64, device)(3, 4, 5)
        for dim in (0, -1, (0, 1)):
            f, ref = (functools.partial(m, dim=dim) for m in (ours(function), getattr(reference, function)))
            got = torch.func.vmap(functools.partial(f, engine=engine), in_dims=in_dim)(x)
            want = torch.stack([ref(v) for v in x.unbind(in_dim)])
            torch.testing.assert_close(got, want)

    def test_nested_vmap_of_grad(self, function, engine, device):
        x = maker(torch.float64, device)(2, 3, 4)
        loss, want_loss = self.both(function, engine, 1)
        got = torch.func.vmap(torch.func.grad(loss))(x)
        want = torch.stack([torch.func.grad(want_loss)(v) for v in x])
        torch.testing.assert_close(got, want)
        rows = torch.func.vmap(torch.func.vmap(lambda v: ours(function)(v, 0, engine=engine)))(x)
        torch.testing.assert_close(rows, getattr(reference, function)(x, -1))

    def test_vmap_down_to_0_d(self, function, engine, device):
        x = maker(torch.float64, device)(4)
        got = torch.func.vmap(lambda v: ours(function)(v, 0, engine=engine))(x)
        torch.testing.assert_close(got, torch.stack([getattr(reference, function)(v, 0) for v in x]))


@every_softmax
def test_vmap_with_dtype_and_of_half_types(function, engine, device):
    x = maker(torch.float16, device)(3, 4, 5)
    got = torch.func.vmap(lambda v: ours(function)(v, 0, dtype=torch.float32, engine=engine), in_dims=2)(x)
    want = torch.stack([ours(function)(v, 0, dtype=torch.float32, engine=engine) for v in x.unbind(2)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("in_dim", "out_dim"), [(0, 0), (1, -1), (-1, 1), (2, 0)])
def test_vmap_calls_the_kernels_once(function, in_dim, out_dim, engine, device):
    """Forward and backward of a batch are one operator each, whatever the dims: no loop in Python nor below it."""
    x = maker(torch.float64, device)(3, 4, 5)

    def f(v):
        return ours(function)(v, 1, engine=engine)

    with Operators() as mode:
        torch.func.vmap(f, in_dims=in_dim)(x)
    assert len(mode.ours()) == 1
    gradient = torch.func.vmap(torch.func.grad(lambda v: f(v).square().sum()), in_dims=in_dim, out_dims=out_dim)
    with Operators() as mode:
        got = gradient(x)
    assert len(mode.ours()) == 2
    want = torch.stack([torch.func.grad(lambda v: f(v).square().sum())(v) for v in x.unbind(in_dim)], out_dim)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "softmin", "logsumexp", "state"])
def test_every_nesting_of_two_and_three(function, engine, device):
    """Forward over forward too: torch runs a jvp with forward mode off, so that an outer one may see constants."""
    x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)
    transforms = {
        "jvp": lambda f: lambda v: torch.func.jvp(f, (v,), (t,))[1],
        "grad": lambda f: torch.func.grad(lambda v: f(v).square().sum()),
    }

    def mine(v):
        return (
            torch.stack(onepass.state(v, 1, engine=engine))
            if function == "state"
            else ours(function)(v, 1, engine=engine)
        )

    def definition(v):
        return torch.stack(reference.state(v, 1)) if function == "state" else getattr(reference, function)(v, 1)

    for count in (2, 3):
        for names in itertools.product(transforms, repeat=count):
            got, want = (functools.reduce(lambda f, n: transforms[n](f), names, f)(x) for f in (mine, definition))
            torch.testing.assert_close(got, want, msg=lambda m, names=names: f"{names}: {m}")
