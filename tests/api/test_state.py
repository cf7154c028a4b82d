"""onepass.state on every engine, and onepass.merge: the definition's values, and the laws of a monoid."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_no_torch_softmax import forbidden
from test_properties import checked, views

import onepass
from lib.state import assert_state, special, type_of
from lib.support import INTEGERS, LAYOUTS, ints, maker, refused, same, tuples
from onepass import State, merge, reference

INF, NAN = math.inf, math.nan
EMPTY = State(torch.tensor(-INF), torch.tensor(0.0))


# Values -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dims(dtype, layout, engine, device):
    x = LAYOUTS[layout](maker(dtype, device))
    before = x.clone()
    for dim in (*ints(x), *tuples(x), ()):
        for keepdim in (False, True):
            got = onepass.state(x, dim, keepdim, engine=engine)
            assert isinstance(got, State)
            theirs = torch.logsumexp(x, dim if dim != () else tuple(range(x.dim())), keepdim)
            assert got.m.shape == got.l.shape == theirs.shape
            assert got.m.is_contiguous()
            assert got.l.is_contiguous()
            assert_state(got, x, dim if dim != () else tuple(range(max(x.dim(), 1))), keepdim, f", layout {layout}")
    assert same(x, before)


@given(data=st.data())
@checked
def test_any_view_over_any_dims(engine, device, data):
    x, dims = data.draw(views(device))
    keepdim = data.draw(st.booleans())
    assert_state(onepass.state(x, tuple(dims), keepdim, engine=engine), x, tuple(dims), keepdim)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 33, 1000, 1025, 4100, 20011])
def test_special_rows(dtype, n, engine, device):
    x = special(n, dtype, device)
    assert_state(onepass.state(x, engine=engine), x, 1)
    columns = x.t().contiguous()
    assert_state(onepass.state(columns, 0, engine=engine), columns, 0)
    assert_state(onepass.state(x.t(), 0, engine=engine), x.t(), 0)


def test_special_rows_by_hand(engine, device):
    x = torch.tensor([[-INF, -INF], [INF, 5.0], [NAN, 5.0], [NAN, -INF], [NAN, NAN], [NAN, INF], [-INF, 2.0]])
    m, l = onepass.state(x.to(device), engine=engine)  # noqa: E741
    assert str(m.tolist()) == str([-INF, INF, 5.0, -INF, -INF, INF, 2.0])
    assert str(l.tolist()) == str([0.0, INF, NAN, NAN, NAN, NAN, 1.0])


def test_of_nothing(dtype, engine, device):
    for shape, dim in (((2, 0), 1), ((0,), 0), ((2, 0, 3), (0, 1)), ((2, 0, 3), (0, 1, 2)), ((3, 0, 2), 1)):
        x = torch.empty(shape, dtype=dtype, device=device)
        for keepdim in (False, True):
            got = onepass.state(x, dim, keepdim, engine=engine)
            assert got.m.numel() > 0
            assert bool((got.m == -INF).all())
            assert bool((got.l == 0).all())
            assert_state(got, x, dim, keepdim)
    assert onepass.state(torch.empty(0, 4, dtype=dtype, device=device), engine=engine).l.shape == (0,)


@pytest.mark.parametrize("given", INTEGERS, ids=str)
def test_integers_are_taken_as_the_default_dtype(given, engine, device):
    x = maker(torch.float64, device)(5, 7).abs().to(given)
    got = onepass.state(x, 0, engine=engine)
    assert got.m.dtype == torch.float32
    assert_state(got, x.float(), 0)
    torch.set_default_dtype(torch.float64)
    try:
        assert_state(onepass.state(x, 0, engine=engine), x.double(), 0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_long_rows_and_many(dtype, engine, device):
    for shape in ((1, 100_003), (3, 50_257), (40_001, 5), (2, 7, 9000)):
        x = maker(dtype, device, scale=4.0)(*shape)
        assert_state(onepass.state(x, engine=engine), x, -1)


def test_agrees_with_logsumexp_and_softmax(dtype, engine, device):
    x = maker(dtype, device)(6, 5003)
    got = onepass.state(x, keepdim=True, engine=engine)
    eps = torch.finfo(type_of(dtype)).eps
    torch.testing.assert_close(got.logsumexp().double(), reference.logsumexp(x, 1, True), rtol=8 * eps, atol=8 * eps)
    y = (x - got.m).exp() / got.l
    torch.testing.assert_close(y.double(), reference.softmax(x), rtol=32 * eps, atol=0)


def test_logsumexp_of_a_state_at_special_values(engine, device):
    x = special(50, torch.float32, device)
    got, want = onepass.state(x, engine=engine).logsumexp(), reference.logsumexp(x, 1)
    assert same(got.isnan(), want.isnan())
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert onepass.state(x[:, :0], engine=engine).logsumexp().tolist() == [-INF] * len(x)


def test_no_function_of_torchs_family_is_called(engine, device):
    x = maker(torch.float32, device)(4, 900)
    with forbidden(device):
        got = merge(onepass.state(x[:, :400], engine=engine), onepass.state(x[:, 400:], engine=engine))
        lse = got.logsumexp()
    assert_state(got, x, 1)
    torch.testing.assert_close(lse.double(), reference.logsumexp(x, 1), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("n", [4, 33, 256, 1024, 1025, 12_288, 32_000, 50_257, 65_536, 151_936, 262_145, 1_000_003])
def test_every_length_that_the_cuda_engine_plans_for(dtype, n, rows):
    rows = min(rows, 2**25 // n)
    x = maker(dtype, "cuda", scale=4.0)(rows, n)
    x[0, : n // 2] = -INF
    assert_state(onepass.state(x, engine="cuda"), x, 1)
    whole = torch.full((rows * (n + 3) + 1,), 9.0, device="cuda", dtype=dtype)[1:].view(rows, n + 3)
    whole[:, :n] = x
    assert_state(onepass.state(whole[:, :n], engine="cuda"), x, 1)


# Merging ------------------------------------------------------------------------------------------------------------


def assert_merged(got: State, want: State) -> None:
    """Equal but for roundings of the sums."""
    assert same(got.m, want.m)
    rtol = 64 * torch.finfo(want.l.dtype).eps
    torch.testing.assert_close(got.l, want.l, rtol=rtol, atol=0, equal_nan=True)


values = st.one_of(st.sampled_from([INF, -INF, NAN, 0.0, 1e30, -1e30, 6e4, 88.7, -103.9]), st.floats(-30, 30, width=32))
rows = st.lists(values, max_size=6)


def of(row: list[float]) -> State:
    m, total = reference.state(torch.tensor(row, dtype=torch.float64))
    return State(m.float(), total.float())


@given(a=rows, b=rows)
@settings(deadline=None, max_examples=300)
def test_merge_is_the_state_of_both(a, b):
    assert_merged(merge(of(a), of(b)), of(a + b))


@given(a=rows, b=rows, c=rows)
@settings(deadline=None, max_examples=300)
def test_merge_is_a_commutative_monoid(a, b, c):
    first, second, third = of(a), of(b), of(c)
    assert_merged(merge(merge(first, second), third), merge(first, merge(second, third)))
    for part in zip(merge(first, second), merge(second, first), strict=True):
        assert same(*part)
    for with_nothing in (merge(first, EMPTY), merge(EMPTY, first)):  # to the bit
        assert same(with_nothing.m, first.m)
        assert same(with_nothing.l, first.l)


def test_chunks_merged_are_the_whole(dtype, engine, device):
    x = torch.cat((maker(dtype, device, scale=4.0)(6, 4000), special(4000, dtype, device)))
    for step in (1999, 700, 4000):
        parts = [onepass.state(part, engine=engine) for part in x.split(step, 1)]
        for order in (parts, parts[::-1]):
            got = functools.reduce(merge, order, State(torch.full_like(parts[0].m, -INF), torch.zeros_like(parts[0].l)))
            assert_state(got, x, 1)


def test_merge_broadcasts_and_takes_pairs():
    x = maker(torch.float32)(3, 5)
    one = onepass.state(x[0])
    assert_merged(merge(onepass.state(x), one), merge(onepass.state(x), State(one.m.expand(3), one.l.expand(3))))
    assert_merged(merge(tuple(onepass.state(x)), EMPTY), onepass.state(x))
    assert merge(onepass.state(x), onepass.state(x.double())).l.dtype is torch.float64


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "got"),
    [
        (([1.0, 2.0],), {}, TypeError, "list"),
        ((torch.randn(3, 4), 2), {}, IndexError, "2"),
        ((torch.randn(3, 4), (0, 5)), {}, IndexError, "5"),
        ((torch.randn(3, 4), (1, -1)), {}, RuntimeError, "once"),
        ((torch.randn(3, 4), True), {}, TypeError, "True"),
        ((torch.randn(3, 4), "1"), {}, TypeError, "'1'"),
        ((torch.randn(3, 4), 1, 1), {}, TypeError, "keepdim must be a bool, got 1"),
        ((torch.randn(3, 4, dtype=torch.complex64),), {}, NotImplementedError, "complex64"),
        ((torch.randn(3, 4).to_sparse(),), {}, NotImplementedError, "sparse"),
        ((torch.randn(3, 4),), {"engine": "gpu"}, ValueError, "gpu"),
        ((torch.randn(3, 4),), {"engine": "cuda"}, RuntimeError, "cuda"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(arguments, options, error, got):
    refused("state", error, got, *arguments, **options)


def test_more_dims_than_torch_has():
    x = torch.zeros([1] * 64)
    assert onepass.state(x).m.dim() == 63
    with pytest.raises(RuntimeError, match="at most 64 dims, got 65"):
        onepass.state(x, keepdim=True)


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        (torch.zeros(2, 3), EMPTY, TypeError, "a must be a State.*Tensor"),
        (EMPTY, (torch.zeros(3),), TypeError, "b must be a State.*tuple"),
        (EMPTY, (0.0, 1.0), TypeError, "b must be a State.*tuple"),
        (EMPTY, State(torch.zeros(3, dtype=torch.int64), torch.zeros(3)), TypeError, "int64"),
        (State(torch.zeros(3), torch.zeros(3)), State(torch.zeros(4), torch.zeros(4)), ValueError, r"\[3\].*\[4\]"),
        (EMPTY, State(torch.zeros(3, device="meta"), torch.zeros(3, device="meta")), RuntimeError, "cpu and meta"),
    ],
)
def test_merge_refuses(a, b, error, words):
    with pytest.raises(error, match=words):
        merge(a, b)
