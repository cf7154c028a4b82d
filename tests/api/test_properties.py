"""Properties that hold for any row, on random shapes, strides, offsets and values (hypothesis)."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from lib.support import DTYPES, OPERATORS, SOFTMAXES, assert_defined, engines_at_hand, keepdims, maker, ours, same

checked = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SPECIALS = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 88.7, -103.9, 6e4, -6e4, 1e-40]


def test_there_is_an_engine_to_test():
    assert engines_at_hand()


@st.composite
def views(draw: st.DrawFn, device: str = "cpu", dtypes: tuple[torch.dtype, ...] = DTYPES) -> tuple[Tensor, list[int]]:
    """(x, dims): a view of any rank up to 5 into a larger buffer, with any strides and offset, and some of its dims."""
    rank = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 17, 0]), min_size=rank, max_size=rank))
    if rank and draw(st.booleans()):
        sizes[draw(st.integers(0, rank - 1))] = draw(st.integers(1, 300))
    while math.prod(sizes) > 20_000:
        sizes[sizes.index(max(sizes))] //= 2
    order = draw(st.permutations(range(rank)))
    strides, step = [0] * rank, draw(st.integers(1, 3))
    for d in order:  # from the innermost out
        strides[d] = draw(st.sampled_from([step, step, step, step + 1, step * 2, 0]))
        step = max(step, strides[d] * max(sizes[d], 1))
    offset = draw(st.integers(0, 9))
    length = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True))
    buffer = maker(draw(st.sampled_from(dtypes)), device, draw(st.integers(0, 10**6)))(length)
    for _ in range(draw(st.integers(0, 4))):
        buffer[draw(st.integers(0, length - 1)) :: draw(st.sampled_from([1, 2, 7, 10**6]))] = draw(
            st.sampled_from(SPECIALS)
        )
    dims = draw(st.lists(st.integers(0, max(rank, 1) - 1), min_size=1, max_size=max(rank, 1), unique=True))
    return buffer.as_strided(sizes, strides, offset), dims


@st.composite
def rows(draw: st.DrawFn, device: str, most: int = 5000, ninf: bool = True) -> Tensor:
    """A few rows of one dtype, finite or -inf, with some mass in each."""
    m, n = draw(st.integers(1, 5)), draw(st.one_of(st.integers(1, 70), st.integers(1, most)))
    scale, offset = draw(st.sampled_from([0.01, 1.0, 30.0])), draw(st.sampled_from([0.0, -500.0, 2.5e3]))
    x = maker(draw(st.sampled_from(DTYPES)), device, draw(st.integers(0, 10**6)), scale)(m, n) + offset
    if ninf and n > 1 and draw(st.booleans()):
        start = draw(st.integers(0, n - 1))
        x[:, start : draw(st.integers(start, n - 1))] = -math.inf
    return x


@given(data=st.data())
@settings(checked, max_examples=400)
def test_any_view_over_any_dims_has_the_definitions_values(engine, device, data):
    x, dims = data.draw(views(device))
    spelled = dims[0] if len(dims) == 1 and data.draw(st.booleans()) else tuple(dims)
    function = data.draw(st.sampled_from(OPERATORS))
    named = data.draw(st.sampled_from(keepdims(function)))
    y = ours(function)(x, spelled, engine=engine, **named)
    if function in SOFTMAXES:
        assert y.shape == x.shape
        assert y.stride() == torch.empty_like(x).stride()
    assert_defined(function, y, x, tuple(dims))


@given(data=st.data())
@checked
def test_shift_invariance(engine, device, data):
    """An exact shift (a power of two, in float64) changes no result by more than its rounding."""
    x = data.draw(rows(device, ninf=False)).double().mul(64).round().div(64)
    shift = data.draw(st.sampled_from([1.0, -4096.0, 2.0**20]))
    for function in SOFTMAXES:
        a, b = (ours(function)(v, 1, engine=engine) for v in (x, x + shift))
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-300)
    a, b = (onepass.logsumexp(v, 1, engine=engine) for v in (x, x + shift))
    torch.testing.assert_close(a + shift, b, rtol=1e-13, atol=1e-10)


@given(data=st.data())
@checked
def test_rows_sum_to_one(engine, device, data):
    x = data.draw(rows(device))
    eps, n = torch.finfo(x.dtype).eps, x.size(1)
    for function in ("softmax", "softmin"):
        y = ours(function)(-x if function == "softmin" else x, 1, engine=engine)
        total = y.double().sum(1)
        assert bool(((y >= 0) & (y <= 1)).all())
        smallest = torch.finfo(x.dtype).smallest_normal * n  # what may round to zero
        assert bool(((total - 1).abs() <= (4 + n / 8 * (x.dtype in DTYPES[:2])) * eps + smallest).all())


@given(data=st.data())
@checked
def test_permutation_equivariance(engine, device, data):
    x = data.draw(rows(device)).double()
    order = torch.tensor(data.draw(st.permutations(range(x.size(1)))) if x.size(1) < 50 else 0, device=device)
    if order.dim() == 0:
        order = torch.randperm(x.size(1), generator=torch.Generator().manual_seed(7)).to(device)
    for function in SOFTMAXES:
        v = -x if function == "softmin" else x
        y = ours(function)(v, 1, engine=engine)
        torch.testing.assert_close(ours(function)(v[:, order], 1, engine=engine), y[:, order], rtol=1e-11, atol=1e-12)
    y = onepass.logsumexp(x, 1, engine=engine)
    torch.testing.assert_close(onepass.logsumexp(x[:, order], 1, engine=engine), y, rtol=1e-11, atol=1e-12)


@given(data=st.data())
@checked
def test_monotone(engine, device, data):
    """Within a row, a larger input has no smaller result (but for a rounding), and an equal input the same one."""
    x = data.draw(rows(device)).sort(1).values
    for function, sign in (("softmax", 1), ("log_softmax", 1), ("softmin", -1)):
        v = x.nan_to_num(neginf=-6e4) if function == "softmin" else x
        d = ours(function)(v, 1, engine=engine).double()
        up = sign * (d[:, 1:] - d[:, :-1])
        tiny = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).tiny
        slack = 2 * torch.finfo(x.dtype).eps * d[:, 1:].abs() + tiny
        assert bool(((up >= -slack) | up.isnan()).all())
        assert bool((up[v[:, 1:] == v[:, :-1]].nan_to_num(0) == 0).all())


@given(data=st.data())
@checked
def test_softmin_is_softmax_of_the_negative(engine, device, data):
    x, dims = data.draw(views(device))
    y = onepass.softmin(x, tuple(dims), engine=engine)
    want = onepass.softmax(-x, tuple(dims), engine=engine)
    torch.testing.assert_close(y, want, equal_nan=True)


@given(data=st.data())
@checked
def test_the_functions_agree_with_each_other(engine, device, data):
    """exp(log_softmax) = softmax, log_softmax = x - logsumexp, and logsumexp(log_softmax) = 0."""
    x = data.draw(rows(device)).double()
    soft, log = onepass.softmax(x, 1, engine=engine), onepass.log_softmax(x, 1, engine=engine)
    lse = onepass.logsumexp(x, 1, keepdim=True, engine=engine)
    scale = x.masked_fill(x.isinf(), 0).abs().max().item() + 1
    torch.testing.assert_close(log.exp(), soft, rtol=1e-11 * scale, atol=1e-300)
    torch.testing.assert_close(x - lse, log, rtol=1e-12, atol=1e-13 * scale)
    zero = onepass.logsumexp(log, 1, engine=engine)
    torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=1e-12 * scale)


@given(data=st.data())
@checked
def test_logsumexp_is_bounded_by_the_maximum(engine, device, data):
    """max <= logsumexp <= max + log(n), up to a rounding."""
    x = data.draw(rows(device))
    y = onepass.logsumexp(x, 1, engine=engine).double()
    m = x.double().amax(1)
    slack = torch.finfo(x.dtype).eps * 4 * m.abs().clamp(min=1)
    assert bool((y >= m - slack).all())
    assert bool((y <= m + math.log(x.size(1)) + slack * math.log(x.size(1) + 2)).all())


@given(data=st.data())
@checked
def test_rows_are_independent(engine, device, data):
    """What stands in one row, NaN included, changes no bit of the others."""
    x = data.draw(rows(device))
    spoiled = x.clone()
    victim = data.draw(st.integers(0, x.size(0) - 1))
    spoiled[victim, data.draw(st.integers(0, x.size(1) - 1))] = data.draw(st.sampled_from(SPECIALS))
    others = torch.arange(x.size(0), device=device) != victim
    for function in ("logsumexp", *SOFTMAXES):
        a, b = (ours(function)(v, 1, engine=engine) for v in (x, spoiled))
        assert same(a[others], b[others])


def test_the_same_bits_from_run_to_run(function, engine, device):
    for shape, dim in (((64, 1000), 1), ((1, 300_001), 1), ((3, 700, 40), 1), ((2000, 3), 1), ((5, 6, 7), (0, 2))):
        x = maker(torch.float32, device)(*shape)
        first = ours(function)(x, dim, engine=engine)
        for _ in range(3):
            assert torch.equal(ours(function)(x, dim, engine=engine), first)
