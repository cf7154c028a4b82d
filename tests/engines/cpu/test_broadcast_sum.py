"""Sums over the dims that a tensor was broadcast along, which gradients of scores are, on the CPU engine."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import onepass
from lib.random_calls import equal_bits
from lib.support import DTYPES, accumulator
from onepass.score_gradients import _SUM_KERNEL

F32, F64, F16, BF16 = DTYPES
# The shape of a tensor and of its sums: columns in one tile, in several, narrow ones, rows of one and of more runs, of
# several chunks, and both in turn.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((9, 33), (1, 33)),
    ((3, 5, 9001), (5, 9001)),
    ((700, 2, 19), (19,)),
    ((700, 2, 19), (2, 19)),
    ((300, 5000), (1, 5000)),
    ((7, 1003), (7, 1)),
    ((3, 50_001), (3, 1)),
    ((5, 3, 40_000), (3, 1)),
    ((50_001,), ()),
    ((4, 6, 5, 7), (4, 1, 5, 1)),
    ((4, 6, 5, 7), (6, 1, 7)),
    ((6, 7), (6, 7)),
]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sums(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    y = torch.full(shape, torch.nan, dtype=dtype)
    assert _SUM_KERNEL(x, y, divisor)
    return y


@pytest.mark.parametrize(("shape", "like"), SHAPES, ids=str)
def test_sums(shape: tuple[int, ...], like: tuple[int, ...], dtype: torch.dtype) -> None:
    pick = random.Random(f"{shape} {dtype}")
    for order in (list(range(len(shape))), pick.sample(range(len(shape)), len(shape))):
        x = torch.randn([shape[d] for d in order]).to(dtype).permute([order.index(d) for d in range(len(shape))])
        to, divisor = pick.choice(DTYPES), pick.choice([1.0, 0.125, -3.0])
        with threads(1):
            y = sums(x, like, to, divisor)
        for count in (2, 5):
            with threads(count):
                assert equal_bits(sums(x, like, to, divisor), y)
        want, size = (t.sum_to_size(like) / divisor for t in (x.double(), x.double().abs()))
        limit = torch.finfo(to).eps * want.abs() + 16 * torch.finfo(accumulator(dtype)).eps * size.abs() + 1e-7
        assert ((y.double() - want).abs() <= limit).all()


def test_a_number_that_is_none_stays_in_its_sum() -> None:
    x = torch.randn(300, 40)
    x[7, 3], x[9, 4], x[10, 4] = torch.nan, torch.inf, -torch.inf
    for t, like in ((x, (40,)), (x.t().contiguous(), (40, 1))):
        y = sums(t, like, F32).flatten()
        assert y.isnan().nonzero().flatten().tolist() == [3, 4]
    x[10, 4] = 0
    assert sums(x, (40,), BF16)[4] == torch.inf
    assert sums(x.t().contiguous(), (40, 1), BF16)[4] == torch.inf


def test_only_neighbours_in_memory_are_served() -> None:
    assert not _SUM_KERNEL(torch.randn(6, 8)[:, ::2], torch.empty(4), 1.0)
    assert not _SUM_KERNEL(torch.randn(0, 8), torch.empty(8), 1.0)


@pytest.mark.parametrize("shape", [(2, 6, 8), (5,), (3, 8)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="sums have"):
        _SUM_KERNEL(torch.randn(6, 8), torch.empty(shape), 1.0)


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_gradients_of_all_operands_have_the_same_bits_with_any_number_of_threads(function: str) -> None:
    x = torch.randn(4, 6, 100, 120)
    beside = {"scale": torch.rand(()), "bias": torch.randn(6, 1, 120), "alibi": torch.rand(()), "sink": torch.randn(())}
    leaves = [t.requires_grad_() for t in (x, *beside.values())]
    y = getattr(onepass, function)(x, -1, **beside)
    g, made = torch.randn_like(y), []
    for count in (1, 2, 3, 7):
        with threads(count):
            made.append(torch.autograd.grad(y, leaves, g, retain_graph=True))
    for each in made[1:]:
        assert all(equal_bits(a, b) for a, b in zip(made[0], each, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_a_gradient_without_neighbours_in_memory_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    """A sink's, of one long row: it is a sum over all of the row."""
    x, sink = torch.randn(1, 150_000, dtype=dtype), torch.zeros((), dtype=dtype, requires_grad=True)
    y = onepass.log_softmax(x, -1, sink=sink)
    g, made = torch.randn(1, 300_000, dtype=dtype)[:, ::2], []
    for count in (1, 2, 7):
        with threads(count):
            made.append(torch.autograd.grad(y, sink, g, retain_graph=True)[0])
    assert all(equal_bits(made[0], each) for each in made[1:])
