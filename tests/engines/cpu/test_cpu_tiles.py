"""Tiles of rows on the CPU engine: every way in and out, lengths around its limits, and rows that share lanes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib import support
from lib.gradients import gradient

F32, F64, F16, BF16 = support.DTYPES
SMALLEST = {dtype: 2 * torch.finfo(dtype).smallest_normal for dtype in support.DTYPES}
EPS = {F32: 4e-6, F64: 4e-15, F16: 4e-3, BF16: 4e-2}

# (outer, n, inner) over the middle dim: slices that are transposed, parts of long ones, columns of some tiles,
# of whole vectors and not, and what is read twice
SHAPES = [(70, 5, 3), (33, 2, 17), (3, 40, 7), (9, 21, 31), (2, 700, 3), (3, 90, 33), (5, 1, 6), (2, 9, 64)]
SHAPES += [(1, 70_001, 2), (2, 30, 100), (1, 33, 300), (1, 2100, 70), (1, 3, 2049)]
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 33]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # the same values, lying in other ways
    "plain": lambda x: x,
    "gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "turned": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "sliced": lambda x: torch.cat([x, x, x], -1)[..., x.shape[2] : 2 * x.shape[2]],
    "odd": lambda x: torch.empty(x.numel() + 3, dtype=x.dtype)[3:].view_as(x).copy_(x),
}


@support.thin_product(2, shape=SHAPES, function=support.OPERATORS)
def test_functions_of_every_form(function: str, shape: tuple[int, ...]) -> None:
    for dtype, form in itertools.product(support.DTYPES, FORMS):
        x = support.maker(dtype)(*shape)
        y = FORMS[form](x)
        support.assert_defined(function, support.ours(function)(y, 1), x, 1, form)
        if function in support.SOFTMAXES:
            out = torch.full([*shape, 2], 9.0, dtype=dtype)
            support.ours(function)(y, 1, out=out[..., 0])
            support.assert_defined(function, out[..., 0], x, 1, form)
            assert (out[..., 1] == 9).all()
            own = y.clone(memory_format=torch.preserve_format)
            support.ours(function)(own, 1, out=own)
            support.assert_defined(function, own, x, 1, f"{form}, in place")


@pytest.mark.parametrize("n", LENGTHS)
def test_short_rows_of_every_length(function: str, n: int) -> None:
    for dtype, rows in itertools.product(support.DTYPES, (1, 15, 17, 600)):
        buffer = support.maker(dtype)(rows * n + 3)
        for offset in (0, 1, 3):
            x = buffer[offset : offset + rows * n].view(rows, n)
            memory = torch.full((rows * n + 40,), 9.0, dtype=dtype)
            if function in support.SOFTMAXES:
                y = memory[offset : offset + rows * n].view(rows, n)
                support.ours(function)(x, 1, out=y)
                assert (memory[offset + rows * n :] == 9).all()
                assert (memory[:offset] == 9).all()
            else:
                y = support.ours(function)(x, 1)
            support.assert_defined(function, y, x, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_gradients_of_every_form(function: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y = getattr(torch, function)(support.maker(F64)(*shape), 1).to(dtype)
    g = support.maker(dtype, seed=1)(*shape)
    number = ["softmax", "log_softmax"].index(function)
    per_row, one = g[:, :1].expand_as(g), g.view(-1)[:1].expand_as(g)
    pairs = [*((form(g), form(y)) for form in FORMS.values()), (per_row, y), (one, y), (g, FORMS["turned"](y))]
    for of_g, of_y in pairs:
        want, terms = gradient(function, of_g, of_y, [1])
        got = torch.ops.onepass._softmax_backward(of_g, of_y, number, [1], dtype)
        assert ((got.double() - want).abs() <= EPS[dtype] * (want.abs() + terms) + SMALLEST[dtype]).all()
    own = y.clone()
    torch.ops.onepass._softmax_backward.out(g, own, number, [1], out=own)
    assert torch.equal(own, torch.ops.onepass._softmax_backward(g, y, number, [1], dtype))


@pytest.mark.parametrize(("given", "made"), [(F64, F32), (F32, F64), (F16, BF16), (F64, F16), (BF16, F64)], ids=str)
def test_gradients_of_rare_pairs_of_dtypes(given: torch.dtype, made: torch.dtype) -> None:
    for shape in ((9, 40, 3), (5, 7, 64)):
        y, g = torch.softmax(support.maker(F64)(*shape), 1).to(given), support.maker(given)(*shape)
        want, terms = gradient("softmax", g, y, [1])
        out = torch.full([*shape, 2], 9.0, dtype=made)[..., 0]
        for got in (torch.ops.onepass._softmax_backward(g, y, 0, [1], made), out):
            if got is out:
                torch.ops.onepass._softmax_backward.out(g, y, 0, [1], out=out)
            assert got.dtype is made
            limit = max(EPS[made], EPS[F32]) * (want.abs() + terms) + SMALLEST[made]
            assert ((got.double() - want).abs() <= limit).all()


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan, 1e30, -1e30])
def test_extreme_values_stay_in_their_rows(value: float) -> None:
    for dtype in (F32, F64, BF16):
        for shape in SHAPES[:12]:
            x = support.maker(dtype)(*shape)
            x[0, : max(1, shape[1] // 2), 0] = value
            x[-1, :, -1] = value
            for function in support.FUNCTIONS:
                support.assert_defined(function, support.ours(function)(x, 1), x, 1)
            state = onepass.state(x, 1)
            support.assert_defined("state", state, x, 1)


def test_threads_and_streaming_stores_give_the_same_bits() -> None:
    before = torch.get_num_threads()
    try:
        for shape in ((900_000, 3), (600_000, 5, 1), (70_000, 8, 6), (300, 90, 100), (6, 30_001, 17), (3, 1000, 1000)):
            x = support.maker(F32)(*shape)
            dim = min(1, len(shape) - 1)
            torch.set_num_threads(1)
            y = onepass.softmax(x, dim)
            torch.set_num_threads(5)
            assert torch.equal(onepass.softmax(x, dim), y)
            half = shape[0] // 3
            assert torch.equal(onepass.softmax(x[:half], dim), y[:half])
    finally:
        torch.set_num_threads(before)


def assert_bits_of_parts(call: Callable[[slice], Any], out: Tensor, memory: Tensor) -> None:
    """All of a result, which is streamed, has the bits of its thirds, which are not; nothing beside it is written."""
    call(slice(0, len(out)))
    streamed = out.clone()
    assert (memory[:3] == 9).all()
    assert (memory[-5:] == 9).all()
    third = len(out) // 3
    for first in range(0, len(out), third):
        call(slice(first, first + third))
    torch.testing.assert_close(out, streamed, rtol=0, atol=0, equal_nan=True)


@support.thin_product(3, n=[2, 5, 14, 27, 45, 59, 77, 391], dtype=[F32, BF16])
def test_streamed_rows_that_are_no_whole_lines(n: int, dtype: torch.dtype) -> None:
    rows = (8 << 20) // (n * dtype.itemsize) + 3  # results are streamed; those of a third of the rows are not
    x = support.maker(dtype)(rows, n)
    x[1, 0], x[-2, -1] = torch.nan, torch.inf
    g = x.roll(3, 0)
    memory = torch.full((rows * n + 8,), 9.0, dtype=dtype)
    out = memory[3:-5].view(rows, n)
    calls = [
        lambda at: onepass.softmax(x[at], 1, out=out[at]),
        lambda at: onepass.log_softmax(x[at], 1, out=out[at]),
        lambda at: torch.ops.onepass._softmax_backward.out(g[at], x[at], 0, [1], out=out[at]),
    ]
    for call in calls:
        assert_bits_of_parts(call, out, memory)


@support.thin_product(3, shape=[(3, 17), (5, 33), (9, 65), (2, 601), (40, 433), (17, 16), (3, 160)], dtype=[F32, BF16])
def test_streamed_gradients_of_slices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, columns = shape
    slices = (8 << 20) // (n * columns * dtype.itemsize) + 3
    y = support.maker(dtype)(slices, n, columns).float().softmax(1).to(dtype)
    y[1, 0, 0], y[-2, -1, -1] = torch.nan, torch.inf
    g = y.roll(3, 0)
    size = slices * n * columns
    memory = torch.full((size + 8,), 9.0, dtype=dtype)
    out = memory[3:-5].view(slices, n, columns)
    for function in (0, 1):

        def call(at: slice, function: int = function) -> None:
            torch.ops.onepass._softmax_backward.out(g[at], y[at], function, [1], out=out[at])

        assert_bits_of_parts(call, out, memory)
        terms = y[2:5].double(), g[2:5].double()
        of_sum = (terms[0] * terms[1]).sum(1, True) if function == 0 else terms[1].sum(1, True)
        want = terms[0] * (terms[1] - of_sum) if function == 0 else terms[1] - terms[0].exp() * of_sum
        torch.testing.assert_close(out[2:5].double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4, equal_nan=True)


def check_all() -> None:  # by another instruction set
    for function in support.FUNCTIONS:
        for n in (1, 3, 8, 17, 24):
            test_short_rows_of_every_length(function, n)
        for shape in SHAPES[:8]:
            test_functions_of_every_form(function, shape)
            if function in ("softmax", "log_softmax"):
                for dtype in support.DTYPES:
                    test_gradients_of_every_form(function, shape, dtype)
    for n in (14, 391):
        for dtype in (F32, BF16):
            test_streamed_rows_that_are_no_whole_lines(n, dtype)
