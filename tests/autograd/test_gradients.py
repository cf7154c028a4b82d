"""Gradients of first and second order, of the functions and of states, on every engine, by every way of asking."""

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import onepass
from lib import support
from lib.samples import SAMPLES
from lib.support import DTYPES, SOFTMAXES, TORCH, both, every_softmax, keepdims, maker, ours, same
from onepass import reference

# torch.autograd's batched checks warn of operators without a batching rule.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
F64 = torch.float64


@support.thin_product(
    2, case=[case for case in SAMPLES if case not in ("channels_last", "empty dim")], function=support.OPERATORS
)
def test_derivatives(function, case, engine, device):
    """Backward and forward, twice, and batches of each."""
    if function == "state" and case == "expanded":
        pytest.skip("where a maximum is there twice there is no derivative to measure")
    make, dim = SAMPLES[case]
    x = make(maker(F64, device)).detach().requires_grad_()
    batched = x.numel() > 0
    for named in [*keepdims(function), *[{"dtype": F64}] * (case == "rows" and function in SOFTMAXES)]:
        f = functools.partial(ours(function), dim=dim, engine=engine, **named)
        assert gradcheck(f, x, check_forward_ad=True, check_batched_grad=batched, check_batched_forward_grad=batched)
        assert gradgradcheck(f, x, check_batched_grad=batched, gen_non_contig_grad_outputs=True)
        assert not batched or gradgradcheck(
            f, x, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
        )


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
        f, ref = both(function, engine, dim=dim)
        y = f(x)
        g = maker(dtype, device, 5)(*y.shape)
        got, want = _gradient(f, x, g), _gradient(ref, x.double(), g.double())
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


REDUCTIONS = [  # whose gradients arrive expanded, strided, in another order of dims, and with gaps
    torch.sum,
    torch.mean,
    lambda y: y.movedim(-1, 0)[::2].sum(),
    lambda y: (y.mT.contiguous() * torch.arange(y.numel(), device=y.device).view(y.mT.shape)).sum(),
    lambda y: y.flatten()[1:].square().sum(),
]


def test_expanded_and_strided_incoming_gradients(function, engine, device):
    make = maker(F64, device)
    for x in (make(4, 6, 5, 2), make(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)):
        x.requires_grad_()
        for dim in (0, 1, 2, (0, 2)):
            f, ref = both(function, engine, dim=dim)
            for reduce in REDUCTIONS:
                (got,), (want,) = (torch.autograd.grad(reduce(call(x)), x) for call in (f, ref))
                torch.testing.assert_close(got, want)


INF, NAN = torch.inf, torch.nan
SPECIAL_ROWS = torch.tensor(
    [[0, 1, 2], [-INF, 1, 2], [-INF, -INF, 3], [-INF] * 3, [INF, 0, 1], [NAN, 0, 1], [-1e4, 0, 1e4]], dtype=F64
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
    v = maker(F64, device)(*x.shape)
    got = ORDERS[order](functools.partial(ours(function), dim=1, engine=engine), x, v)
    want = ORDERS[order](functools.partial(TORCH[function], dim=1), x, v)
    assert same(got.isnan(), want.isnan()), f"{got}\n{want}"
    assert got[3:6].isnan().flatten(1).any(1).all() if got.dim() > 1 else got[3:6].isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_accumulation_and_reuse(function, engine, device):
    """The graph may be retained, run twice, and joined with others; the saved tensors are not changed by it."""
    x = maker(F64, device)(3, 4).requires_grad_()
    f, ref = both(function, engine, dim=1)
    total = (f(x) * 2).sum() + f(x * x).square().sum()
    total.backward(retain_graph=True)
    first = x.grad.clone()
    total.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    torch.testing.assert_close(first, torch.autograd.grad((ref(x) * 2).sum() + ref(x * x).square().sum(), x)[0])


@pytest.mark.parametrize("dim", [0, 1, (0, 2), (0, 1, 2)], ids=str)
def test_a_maximum_that_is_there_several_times_is_shared_evenly(dtype, dim, engine, device):
    """As torch.amax does."""
    x = maker(dtype, device)(4, 50, 3)
    x[:, ::7] = x.amax()
    x[1] = -INF
    x[2, 1:, 0] = -INF
    f, ref = both("state", engine, dim=dim)
    planes = f(x)
    g = maker(planes.dtype, device, 3)(*planes.shape)
    got, want = _gradient(f, x, g), _gradient(ref, x.double(), g.double())
    assert got.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=16 * eps, atol=float(64 * eps * g[1].abs().max()))


def test_gradients_of_special_rows(engine, device):
    rows = [[INF, 0.0, 1.0], [-INF, -INF, -INF], [NAN, 0.0, 1.0], [NAN, NAN, NAN], [-INF, 2.0, 2.0]]
    x = torch.tensor(rows, dtype=F64, device=device)
    got = _gradient(both("state", engine)[0], x, torch.ones(2, 5, dtype=F64, device=device))
    share = 1 / 3
    assert got[[0, 1, 4]].flatten().tolist() == pytest.approx([INF, 1, torch.e, share, share, share, 0, 0.5, 0.5])
    assert got[2:4].isnan().all()


def test_gradients_through_a_merge_are_those_of_the_whole(engine, device):
    x = maker(F64, device)(3, 40)

    def merged(x: Tensor) -> Tensor:
        parts = [onepass.state(part, engine=engine) for part in x.split(15, 1)]
        return functools.reduce(onepass.merge, parts).logsumexp()

    def whole(x: Tensor) -> Tensor:
        return reference.logsumexp(x, 1)

    assert gradcheck(merged, x.clone().requires_grad_(), check_forward_ad=True)
    got, want = (torch.func.grad(lambda x, f=f: f(x).square().sum())(x) for f in (merged, whole))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.hessian(merged)(x), torch.func.hessian(whole)(x))


def test_a_state_changed_in_place_is_missed_by_backward():
    got = onepass.state(maker(torch.float32)(3, 4).requires_grad_())
    with torch.no_grad():
        got.m.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.l.sum().backward()
