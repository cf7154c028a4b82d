"""onepass.state, merge and finish on every engine: the values of the definition, the laws of a monoid, gradients."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onepass
from lib.samples import special
from lib.support import assert_state, maker, same
from onepass import State, merge, reference

INF, NAN = math.inf, math.nan
EMPTY = State(torch.tensor(-INF), torch.tensor(0.0))


def test_special_rows_by_hand(engine, device):
    x = torch.tensor([[-INF, -INF], [INF, 5.0], [NAN, 5.0], [NAN, -INF], [NAN, NAN], [NAN, INF], [-INF, 2.0]])
    m, l = onepass.state(x.to(device), engine=engine)
    assert str(m.tolist()) == str([-INF, INF, 5.0, -INF, -INF, INF, 2.0])
    assert str(l.tolist()) == str([0.0, INF, NAN, NAN, NAN, NAN, 1.0])
    m, l = onepass.state(x[:, :0].to(device), engine=engine)
    assert (m.tolist(), l.tolist()) == ([-INF] * 7, [0.0] * 7)


def test_logsumexp_and_softmax_of_a_state(dtype, engine, device):
    x = torch.cat((maker(dtype, device)(6, 5003), special(5003, dtype, device)))
    got = onepass.state(x, keepdim=True, engine=engine)
    eps = torch.finfo(got.l.dtype).eps
    close = functools.partial(torch.testing.assert_close, equal_nan=True)
    close(got.logsumexp().double(), reference.logsumexp(x, 1, True), rtol=8 * eps, atol=8 * eps)
    close(((x[:6] - got.m[:6]).exp() / got.l[:6]).double(), reference.softmax(x[:6]), rtol=32 * eps, atol=0)
    assert onepass.state(x[:, :0], engine=engine).logsumexp().tolist() == [-INF] * len(x)


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
@settings(deadline=None, max_examples=150)
def test_merge_is_the_state_of_both(a, b):
    assert_merged(merge(of(a), of(b)), of(a + b))


@given(a=rows, b=rows, c=rows)
@settings(deadline=None, max_examples=150)
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


# finish ---------------------------------------------------------------------------------------------------------------


def whole_state(x: torch.Tensor, dim: int | tuple[int, ...], keepdim: bool = False, engine: str = "auto") -> State:
    return onepass.state(x, dim, keepdim, engine=engine)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_chunks_finished_are_the_whole(function, dtype, engine, device):
    x = torch.cat((maker(dtype, device, scale=4.0)(6, 1000), special(1000, dtype, device)))
    x[0, :300] = -INF
    want = getattr(onepass, function)(x, 1, engine=engine)
    for keepdim in (True, False):
        state = whole_state(x, 1, keepdim, engine)
        got = [onepass.finish(part, state, function, 1, engine=engine) for part in x.split(300, 1)]
        torch.testing.assert_close(torch.cat(got, 1), want, equal_nan=True)
        lse = onepass.finish(x[:, :5], state, "logsumexp", 1)
        torch.testing.assert_close(lse, onepass.logsumexp(x, 1, keepdim, engine=engine), equal_nan=True)


def test_finish_over_any_dims_and_dtypes():
    x = maker(torch.float32)(3, 4, 5)
    for dim in (0, -2, (0, 2), ()):
        every = dim if dim != () else (0, 1, 2)
        torch.testing.assert_close(onepass.finish(x, whole_state(x, every), dim=dim), onepass.softmax(x, every))
    half = x.bfloat16()
    got = onepass.finish(half, onepass.state(half), dtype=torch.float32)
    torch.testing.assert_close(got, onepass.softmax(half, dtype=torch.float32))
    wide = onepass.finish(x, onepass.state(x.double()), "log_softmax", dtype=torch.float64)
    torch.testing.assert_close(wide, onepass.log_softmax(x, dtype=torch.float64))
    numbers = torch.arange(6)
    state = onepass.state(numbers.double())
    torch.testing.assert_close(onepass.finish(numbers, state, dtype=torch.float64), numbers.double().softmax(0))
    assert onepass.finish(torch.tensor(2.0), onepass.state(torch.tensor(2.0))).item() == 1
    assert onepass.finish(x[:, :0], whole_state(x, 1), dim=1).shape == (3, 0, 5)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_gradients_of_a_stream_are_those_of_the_whole(function):
    def streamed(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(3, 1)
        state = functools.reduce(merge, map(onepass.state, parts))
        if function == "logsumexp":
            return onepass.finish(x, state, function)
        return torch.cat([onepass.finish(part, state, function) for part in parts], 1)

    x = maker(torch.float64)(2, 7).requires_grad_()
    want = getattr(onepass, function)(x, 1)
    g = torch.randn_like(want)
    (want_dx,) = torch.autograd.grad(want, x, g)
    (dx,) = torch.autograd.grad(streamed(x), x, g)
    torch.testing.assert_close(dx, want_dx)
    assert torch.autograd.gradgradcheck(streamed, x)
    torch.testing.assert_close(torch.func.jacfwd(streamed)(x), torch.func.jacrev(streamed)(x))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"input": [1.0]}, TypeError, r"finish\(\): input must be a Tensor"),
        ({"function": "softmin"}, ValueError, "function must be .*'softmin'"),
        ({"dim": 2}, IndexError, "dim must be"),
        ({"state": torch.zeros(2)}, TypeError, r"finish\(\): state must be a State"),
        ({"state": State(torch.zeros(3), torch.zeros(3))}, ValueError, r"\[2\] or \[2, 1\] .*got \[3\] and \[3\]"),
        ({"state": State(torch.zeros(2, device="meta"), torch.zeros(2))}, RuntimeError, "must be on cpu.*meta"),
        ({"input": torch.zeros(2, 3, dtype=torch.int64)}, NotImplementedError, "needs dtype="),
        ({"dtype": torch.int32}, NotImplementedError, "dtype must be one of"),
        ({"engine": "abacus"}, ValueError, "abacus"),
    ],
)
def test_finish_refuses(change, error, words):
    given = {"input": torch.zeros(2, 3), "state": onepass.state(torch.zeros(2, 3)), **change}
    with pytest.raises(error, match=words):
        onepass.finish(**given)
