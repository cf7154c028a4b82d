"""Gradients of first and second order, on every engine and by every way of asking for them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import onepass
from lib.samples import SAMPLES
from lib.support import DTYPES, TORCH, every_softmax, maker, ours, same
from onepass import reference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

every_case = pytest.mark.parametrize("case", [case for case in SAMPLES if case not in ("channels_last", "empty dim")])


def _case(case: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, tuple[int, ...]]:
    make, dim = SAMPLES[case]
    return make(maker(dtype, device)).detach().requires_grad_(), dim


@every_case
def test_gradcheck(function, case, engine, device):
    x, dim = _case(case, device)
    f = functools.partial(ours(function), dim=dim, engine=engine)
    assert gradcheck(
        f, x, check_forward_ad=True, check_batched_grad=x.numel() > 0, check_batched_forward_grad=x.numel() > 0
    )


@every_case
def test_gradgradcheck(function, case, engine, device):
    x, dim = _case(case, device)
    assert gradgradcheck(functools.partial(ours(function), dim=dim, engine=engine), x)


def test_logsumexp_keepdim(engine, device):
    x, _ = _case("middle", device)
    for dim in (1, (0, 2), (0, 1, 2)):
        f = functools.partial(onepass.logsumexp, dim=dim, keepdim=True, engine=engine)
        assert gradcheck(f, x, check_forward_ad=True)
        assert gradgradcheck(f, x)


def _reversed(y: Tensor) -> Tensor:
    return y.permute(*range(y.dim())[::-1])


def _gradient(f, x: Tensor, g: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    f(x).backward(g)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("shape", [(6, 50), (3, 781), (2, 5003), (4, 19, 7), (300, 3)], ids=str)
def test_against_the_reference(function, dtype, shape, engine, device):
    """The gradient has the input's dtype, and the accuracy that it allows: half types compute in float32."""
    eps = torch.finfo(dtype).eps
    for dim in (1, 0, (0, 1)):
        x = maker(dtype, device)(*shape)
        y = ours(function)(x, dim, engine=engine)
        g = maker(dtype, device, 5)(*y.shape)
        got = _gradient(functools.partial(ours(function), dim=dim, engine=engine), x, g)
        want = _gradient(functools.partial(getattr(reference, function), dim=dim), x.double(), g.double())
        assert got.dtype is dtype
        assert got.shape == x.shape
        n = x.numel() // (1 if function != "logsumexp" else y.numel())
        scale = g.double().abs().max() * (n**0.5 if function == "log_softmax" else 1)
        torch.testing.assert_close(got.double(), want, rtol=8 * eps + 1e-6 * (eps > 1e-10), atol=float(4 * eps * scale))


@pytest.mark.parametrize("given", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@every_softmax
def test_dtype_keeps_the_gradient_in_the_inputs_dtype(function, given, engine, device):
    x = maker(given, device)(5, 33)
    for dtype in DTYPES:
        g = maker(dtype, device, 5)(5, 33)
        got = _gradient(functools.partial(ours(function), dim=-1, dtype=dtype, engine=engine), x, g)
        want = _gradient(functools.partial(TORCH[function], dim=-1, dtype=dtype), x, g)
        assert got.dtype is given
        coarse = max(torch.finfo(given).eps, torch.finfo(dtype).eps)
        torch.testing.assert_close(got, want, rtol=16 * coarse, atol=16 * coarse)


def test_expanded_and_strided_incoming_gradients(function, engine, device):
    x = maker(torch.float64, device)(4, 6, 5).requires_grad_()
    for dim in (0, 1, 2, (0, 2)):
        f = functools.partial(ours(function), dim=dim, engine=engine)
        ref = functools.partial(getattr(reference, function), dim=dim)
        reductions = [  # whose gradients arrive expanded, strided, and with gaps
            torch.sum,
            torch.mean,
            lambda y: y.movedim(-1, 0)[::2].sum(),
            lambda y: (_reversed(y).contiguous() * torch.arange(y.numel(), device=y.device).view(y.shape[::-1])).sum(),
            lambda y: y.flatten()[1:].square().sum(),
        ]
        for reduce in reductions:
            (got,) = torch.autograd.grad(reduce(f(x)), x)
            (want,) = torch.autograd.grad(reduce(ref(x)), x)
            torch.testing.assert_close(got, want)


def test_layouts_of_input_and_gradient(function, engine, device):
    x = maker(torch.float64, device)(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)
    y = ours(function)(x, 1, engine=engine)
    for g in (
        maker(torch.float64, device, 3)(*y.shape),
        maker(torch.float64, device, 3)(*y.shape[::-1]).permute(*range(y.dim())[::-1]),
    ):
        got = _gradient(functools.partial(ours(function), dim=1, engine=engine), x, g)
        torch.testing.assert_close(got, _gradient(functools.partial(getattr(reference, function), dim=1), x, g))


SPECIAL_ROWS = torch.tensor(
    [
        [0.0, 1.0, 2.0],
        [-torch.inf, 1.0, 2.0],
        [-torch.inf, -torch.inf, 3.0],
        [-torch.inf] * 3,
        [torch.inf, 0.0, 1.0],
        [torch.nan, 0.0, 1.0],
        [-1e4, 0.0, 1e4],
    ],
    dtype=torch.float64,
)


def _reverse(f, x: Tensor) -> Tensor:
    return torch.func.vjp(f, x)[1](maker(x.dtype, x.device, 7)(*f(x).shape))[0]


ORDERS = {  # of the derivative, v a direction
    "gradient": lambda f, x, v: _gradient(f, x, maker(x.dtype, x.device, 7)(*f(x).shape)),
    "gradient of the gradient": lambda f, x, v: _gradient(lambda t: _reverse(f, t), x, v),
    "tangent": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "tangent of the gradient": lambda f, x, v: torch.func.jvp(lambda t: _reverse(f, t), (x,), (v,))[1],
    "tangent of the tangent": lambda f, x, v: torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (v,))[1], (x,), (v,))[1],
}


@pytest.mark.parametrize("order", ORDERS)
def test_masked_rows_and_special_values_have_torchs_derivatives(function, order, engine, device):
    """NaN where torch has NaN (rows of all -inf, or with a +inf or a NaN), and nowhere else: docs/gradients.md."""
    x = (-SPECIAL_ROWS if function == "softmin" else SPECIAL_ROWS).to(device)
    v = maker(torch.float64, device)(*x.shape)
    got = ORDERS[order](functools.partial(ours(function), dim=1, engine=engine), x, v)
    want = ORDERS[order](functools.partial(TORCH[function], dim=1), x, v)
    assert same(got.isnan(), want.isnan()), f"{got}\n{want}"
    assert got[3:6].isnan().flatten(1).any(1).all() if got.dim() > 1 else got[3:6].isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_accumulation_and_reuse(function, engine, device):
    """The graph may be retained, run twice, and joined with others; the saved tensors are not changed by it."""
    x = maker(torch.float64, device)(3, 4).requires_grad_()
    f, ref = (functools.partial(m, dim=1) for m in (ours(function), getattr(reference, function)))
    total = (f(x, engine=engine) * 2).sum() + f(x * x, engine=engine).square().sum()
    total.backward(retain_graph=True)
    first = x.grad.clone()
    total.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    x.grad = None
    ((ref(x) * 2).sum() + ref(x * x).square().sum()).backward()
    torch.testing.assert_close(first, x.grad)


def test_only_what_requires_a_gradient_has_one(function, engine, device):
    x = maker(torch.float32, device)(3, 4)
    f = functools.partial(ours(function), dim=1, engine=engine)
    assert f(x).grad_fn is None
    assert f(x.clone().requires_grad_()).grad_fn is not None
    with torch.no_grad():
        assert not f(x.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert f(x).is_inference()
        inner = maker(torch.float32, device)(3, 4)
        assert torch.equal(f(inner), f(x))
    assert f(torch.nn.Parameter(x)).requires_grad
    with torch.enable_grad():
        assert f(x.clone().requires_grad_()).requires_grad


def test_a_later_write_to_what_was_saved_is_noticed(function, engine, device):
    x = maker(torch.float32, device)(3, 4).requires_grad_()
    y = ours(function)(x, 1, engine=engine)
    loss = y.sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
