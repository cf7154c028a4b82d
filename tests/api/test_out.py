"""out=: written wholly, in any layout, in place where it is the input, never beside itself; and `overlap` alone."""

import itertools
import math
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lib.support import DTYPES, assert_defined, every_softmax, keepdims, maker, ours, same, thin_product
from onepass.validation import overlap, self_overlap

POISON = -12345.0
OUTS = {  # whether its dims are reversed in memory, gaps, step, offset
    "contiguous": (False, 0, 1, 0),
    "offset by one": (False, 0, 1, 1),
    "transposed": (True, 0, 1, 0),
    "gaps": (False, 3, 1, 2),
    "stepped": (False, 1, 2, 5),
    "transposed and stepped": (True, 0, 2, 3),
}
INS = {
    "contiguous": lambda r: r(4, 6, 10),
    "transposed": lambda r: r(10, 6, 4).permute(2, 1, 0),
    "gaps": lambda r: r(4, 9, 21)[:, 2:8, ::2][..., :10],
    "expanded": lambda r: r(4, 1, 10).expand(4, 6, 10),
}


def _amid(layout: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A buffer, and an out that lies in it."""
    reverse, gap, step, first = OUTS[layout]
    buffer = torch.full((4000,), POISON, dtype=dtype, device=device)
    sizes = [n * step + gap for n in (shape[::-1] if reverse else shape)]
    out = buffer[first : first + math.prod(sizes)].view(sizes)[tuple(slice(gap, None, step) for _ in sizes)]
    return buffer, out.permute(list(range(len(sizes)))[::-1]) if reverse else out


def _untouched(buffer: Tensor, out: Tensor) -> bool:
    """Nothing of the buffer but `out` was written."""
    rest = buffer.clone()
    rest.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(POISON)
    return bool((rest == torch.tensor(POISON).to(buffer.dtype)).all())


@thin_product(3, layout=OUTS, source=[*INS, "in place"])
def test_any_layout(function, source, layout, engine, device):
    if source == "in place" and function == "logsumexp":
        pytest.skip("its result has another shape than its input")
    dims = (0, 1, 2, (0, 1), (2, 0), (0, 1, 2))
    for dtype, dim, named in itertools.product(DTYPES, dims, keepdims(function)):
        x = INS["contiguous" if source == "in place" else source](maker(dtype, device))
        given = x.clone()
        shape = torch.logsumexp(x, dim, **named).shape if function == "logsumexp" else x.shape
        buffer, out = _amid(layout, shape, dtype, device)
        x = out.copy_(x) if source == "in place" else x
        strides, pointer = out.stride(), out.data_ptr()
        assert ours(function)(x, dim, out=out, engine=engine, **named) is out
        assert (out.stride(), out.data_ptr()) == (strides, pointer)
        assert_defined(function, out, given, dim)
        assert _untouched(buffer, out)
        assert source == "in place" or torch.equal(x, given)


@pytest.mark.parametrize("given", [*DTYPES, torch.int64], ids=lambda d: str(d).removeprefix("torch."))
@every_softmax
def test_with_dtype(function, given, engine, device):
    x = INS["gaps"](maker(torch.float64, device)).to(given)
    for dtype, dim in itertools.product(DTYPES, (1, 2)):
        buffer, out = _amid("stepped", x.shape, dtype, device)
        ours(function)(x, dim, dtype=dtype, out=out, engine=engine)
        assert_defined(function, out, x.to(dtype), dim)
        assert _untouched(buffer, out)


@pytest.mark.parametrize(
    "shape", [(5, 7), (3, 4100), (2, 50_257), (300, 3), (2, 50, 9), (0, 4), (4, 0), (), (3, 1)], ids=str
)
@every_softmax
def test_in_place(function, dtype, shape, engine, device):
    """Also through another view of the same elements."""
    for dim, view in itertools.product(range(max(len(shape), 1)), (False, True)):
        x = maker(dtype, device)(*shape)
        want = ours(function)(x, dim, engine=engine)
        out = x.view(x.shape) if view else x
        assert ours(function)(x, dim, out=out, engine=engine) is out
        assert same(x, want)


# `overlap` and `self_overlap` -----------------------------------------------------------------------------------------


def _bytes_of(t: Tensor) -> list[int]:
    """Where its elements begin."""
    indices = itertools.product(*(range(n) for n in t.shape))
    steps = (sum(i * s for i, s in zip(index, t.stride(), strict=True)) for index in indices)
    return [t.data_ptr() + t.element_size() * step for step in steps]


def _check_overlap(a: Tensor, b: Tensor) -> None:
    """Against brute force."""
    at, bt = _bytes_of(a), _bytes_of(b)
    assert self_overlap(a) == (len(set(at)) < len(at))
    shared = {p + k for p in at for k in range(a.element_size())} & {p + k for p in bt for k in range(b.element_size())}
    alike = at == bt and a.shape == b.shape and a.element_size() == b.element_size()
    assert overlap(a, b) == overlap(b, a) == ("none" if not shared else "same" if alike else "partial")


@st.composite
def _view(draw: st.DrawFn, buffer: Tensor) -> Tensor:
    t = buffer.view(draw(st.sampled_from([torch.float32, torch.float16, torch.uint8, torch.float64])))
    rank = draw(st.integers(0, 4))
    sizes = draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.integers(0, 13), min_size=rank, max_size=rank))
    span = sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True))
    while span >= t.numel():
        strides = [s // 2 for s in strides]
        span = sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True))
    return t.as_strided(sizes, strides, draw(st.integers(0, t.numel() - 1 - span)))


@given(data=st.data())
@settings(deadline=None, max_examples=500)
def test_overlaps_of_any_views(data):
    buffer = torch.zeros(40, dtype=torch.float64)
    _check_overlap(data.draw(_view(buffer)), data.draw(_view(buffer)))


def test_overlaps_of_usual_views():
    x = torch.zeros(6, 6)
    pairs = x.view(torch.float16)
    views = [x, x.view(6, 6), x.view(torch.int32), x.t(), x.view(36), x[:-1], x[1:], x[::2], x[1::2], x[::2, 1::3]]
    views += [x[:, :3], x[:, 3:], x[:, :4], x[:0], x[0, :0], x[:1], x.as_strided((1, 6), (99, 1)), torch.zeros(6, 6)]
    views += [pairs[:, ::2], pairs[:, 1::2], x[:, :1].expand(6, 4), x[:1, :1].expand(1, 1), x[:, :0].expand(6, 0)]
    views += [x.view(36).unfold(0, 3, step) for step in (1, 3)]
    views += [x.as_strided(size, (3, 5)) for size in ((3, 4), (6, 4))]
    for a, b in itertools.product(views, repeat=2):
        _check_overlap(a, b)


def test_overlaps_without_memory_and_across_storages():
    x = torch.zeros(6, 6, device="meta")
    assert [overlap(x, x), overlap(x[:3], x[3:]), overlap(x[:4], x[3:])] == ["same", "none", "partial"]
    assert overlap(x, torch.zeros(6, 6)) == overlap(x, torch.zeros(6, 6, device="meta")) == "none"
    array = torch.zeros(8).numpy()
    assert overlap(torch.from_numpy(array[:5]), torch.from_numpy(array[3:])) == "partial"
    assert overlap(torch.from_numpy(array[:4]), torch.from_numpy(array[4:])) == "none"


def test_a_hard_case_ends_and_is_called_an_overlap():
    big = torch.empty(4_000_000, dtype=torch.uint8)  # never touched: no page of it is real
    a = big.as_strided((60, 61, 62, 63, 59), (10_007, 10_009, 10_037, 10_039, 10_061))
    start = time.perf_counter()
    assert self_overlap(a)
    assert overlap(a, a.permute(1, 0, 2, 3, 4)) == "partial"
    assert time.perf_counter() - start < 1
