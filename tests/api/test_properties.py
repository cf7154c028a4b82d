"""Properties that hold for any row, on random shapes, strides, offsets and values (hypothesis)."""

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lib.support import DTYPES, OPERATORS, SOFTMAXES, assert_defined, keepdims, maker, ours, same

checked = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
OFFSETS = [0.0, -500.0, 2.5e3, -1e3, 3e4, -3e4, 2.0**20, 1e30, -1e30]  # nothing overflows far from zero
SPECIALS = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 88.7, -103.9, 6e4, -6e4, 1e-40]


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
def rows(draw: st.DrawFn, device: str) -> Tensor:
    """A few rows of one dtype, finite or -inf, with some mass in each."""
    m, n = draw(st.integers(1, 5)), draw(st.one_of(st.integers(1, 70), st.integers(1, 5000)))
    scale, offset = draw(st.sampled_from([0.01, 1.0, 30.0])), draw(st.sampled_from(OFFSETS))
    x = maker(draw(st.sampled_from(DTYPES)), device, draw(st.integers(0, 10**6)), scale)(m, n) + offset
    x = x.clamp(-6e4, 6e4) if x.dtype is torch.float16 else x
    if n > 1 and draw(st.booleans()):
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
        dx = torch.ops.onepass._softmax_backward(x, x, 0, [0], torch.bfloat16) if engine != "triton" else y
        assert y.shape == x.shape
        assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    assert_defined(function, y, x, tuple(dims))


@given(data=st.data())
@settings(checked, max_examples=200)
def test_rows_have_the_definitions_values(engine, device, data):
    """Which are the same whatever is added to a row, and in whatever order its elements stand."""
    x = data.draw(rows(device))
    function = data.draw(st.sampled_from(OPERATORS))
    x = -x if function == "softmin" else x
    assert_defined(function, ours(function)(x, 1, engine=engine), x, 1)


@given(data=st.data())
@checked
def test_monotone(engine, device, data):
    """Within a row, a larger input has no smaller result (but for a rounding), and an equal input the same one."""
    x = data.draw(rows(device)).sort(1).values
    for function, sign in (("softmax", 1), ("log_softmax", 1), ("softmin", -1)):
        v = x.nan_to_num(neginf=torch.finfo(x.dtype).min) if function == "softmin" else x
        d = ours(function)(v, 1, engine=engine).double()
        up = sign * (d[:, 1:] - d[:, :-1])
        tiny = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).tiny
        slack = 2 * torch.finfo(x.dtype).eps * d[:, 1:].abs() + tiny
        assert bool(((up >= -slack) | up.isnan()).all())
        assert bool((up[v[:, 1:] == v[:, :-1]].nan_to_num(0) == 0).all())


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
    """Of the gradient too."""
    columns = ((3, 700, 40), (5, 20, 40), (40, 7, 49), (3, 5000, 24), (2, 60_000, 16))
    rows = ((64, 1000), (1, 300_001), (2000, 3))
    for shape, dim in (*((shape, 1) for shape in rows + columns), ((5, 6, 7), (0, 2))):
        x = maker(torch.bfloat16, device)(*shape).requires_grad_()

        def run(x=x, dim=dim):
            y = ours(function)(x, dim, engine=engine)
            return y, *torch.autograd.grad(y, x, maker(y.dtype, device, 5)(*y.shape))

        first = run()
        for _ in range(3):
            assert all(torch.equal(*pair) for pair in zip(run(), first, strict=True))
