"""Rows of unequal length, against torch's softmax of each segment alone in float64: values, gradients and the
ways of a call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import onepass
from lib.losses import assert_close, tolerance
from lib.modes import Graphs, Operators
from lib.samples import SPECIAL_ROWS, special
from lib.support import DTYPES, maker, same, thin
from onepass.segment_arithmetic import SegmentSpec, forward_arithmetic

F32, F64, F16, BF16 = DTYPES
INF = torch.inf
NAMES = ("softmax", "log_softmax", "logsumexp", "state")
every_name = pytest.mark.parametrize("name", NAMES)
# Lengths of segments.
LENGTHS = {
    "one": [7],
    "empty ones": [0, 3, 0, 0, 5, 1, 0],
    "nothing": [0, 0],
    "no segments": [],
    "short": [k % 9 for k in range(150)],
    "some vectors": [(7 * k) % 41 for k in range(60)],
    "all lengths": list(range(90)),
    "powers": [2**k for k in range(14)],
    "equal": [16] * 40,
    "one huge": [3, 0, 70001, 2, 5, 0],
    "huge ones": [40000, 1, 33000, 0, 26000],
}
# Trailing dims, or dims around the ragged one, which is -1.
INNER = [(-1,), (-1, 1), (-1, 2), (-1, 3), (-1, 4), (-1, 8), (-1, 12), (-1, 130), (3, -1), (2, -1, 5), (-1, 2, 3)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """torch's softmax of another dim than the last asks for a second thread for the smallest tensor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def call(name: str, *given: Any, **named: Any) -> Tensor:
    """The function of a name; of a state both planes."""
    y = getattr(onepass, f"segment_{name}")(*given, **named)
    return torch.stack(y) if name == "state" else y


def offsets_of(lengths: list[int], device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype).to(device)


def expected(name: str, x: Tensor, offsets: Tensor, dim: int = 0, order: Tensor | None = None) -> Tensor:
    """By torch, segment by segment, in float64."""
    x = x.double()
    x = x if order is None else x.index_select(dim, order)
    parts = [x.narrow(dim, a, b - a) for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
    shape = [size for d, size in enumerate(x.shape) if d != dim]
    if name in ("softmax", "log_softmax"):
        y = torch.cat([getattr(torch, name)(part, dim) for part in parts], dim) if parts else x
        return y if order is None else torch.empty_like(y).index_copy(dim, order.long(), y)
    nothing = torch.full(shape, -INF, dtype=F64, device=x.device)
    if name == "logsumexp":
        rows = [part.logsumexp(dim) if part.shape[dim] else nothing for part in parts]
        return torch.stack(rows, dim) if rows else nothing.new_empty([*shape[:dim], 0, *shape[dim:]])
    tops = [part.amax(dim) if part.shape[dim] else nothing for part in parts]
    sums = [(part - m.unsqueeze(dim)).exp().sum(dim) for part, m in zip(parts, tops, strict=True)]
    empty = nothing.new_empty([*shape[:dim], 0, *shape[dim:]])
    return torch.stack([torch.stack(t, dim) if t else empty for t in (tops, sums)])


def shaped(make: Any, inner: tuple[int, ...], items: int) -> tuple[Tensor, int]:
    return make(*(items if size < 0 else size for size in inner)), inner.index(-1)


def drawn_order(items: int, device: str, seed: int = 5) -> Tensor:
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed)).to(device)


def assert_right(got: Tensor, want: Tensor, dtype: torch.dtype, note: Any = "") -> None:
    assert got.shape == want.shape
    rounded = dtype if got.dtype is dtype else got.dtype
    assert_close(got, want, rounded, note)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@every_name
def test_values(name, lengths, engine, device):
    offsets = offsets_of(LENGTHS[lengths], device)
    items = int(offsets[-1])
    is_huge = items > 50000
    for k, inner in enumerate([(-1,), (-1, 3), (-1, 8)] if is_huge else INNER):
        dtype = DTYPES[k % 4]
        x, dim = shaped(maker(dtype, device), inner, items)
        order = drawn_order(items, device) if k % 3 == 1 else None
        segments = offsets if order is None else onepass.Segments.from_offsets(offsets, order)
        got = call(name, x, segments, dim, engine=engine)
        want = expected(name, x, offsets, dim, order)
        assert got.dtype is (dtype if name != "state" else F64 if dtype is F64 else F32)
        assert_right(got, want, dtype, f"{inner} {dtype}")


@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
@every_name
def test_every_dtype_of_elements_and_indices(name, indices, dtype, engine, device):
    for lengths in ("some vectors", "one huge"):
        offsets = offsets_of(LENGTHS[lengths], device, indices)
        items = int(offsets[-1])
        x = maker(dtype, device)(items, 2)
        order = drawn_order(items, device).to(indices)
        for segments in (offsets, onepass.Segments.from_offsets(offsets, order)):
            where = None if segments is offsets else order
            assert_right(call(name, x, segments, engine=engine), expected(name, x, offsets, 0, where), dtype)


LAYOUTS: dict[str, Any] = {  # of (items, heads) or (heads, items)
    "turned": lambda r, n: (r(6, n).t(), 0),
    "stepped": lambda r, n: (r(2 * n, 9)[::2, 1::2], 0),
    "sliced": lambda r, n: (r(n + 7, 20)[3:-4, 2:10], 0),
    "expanded": lambda r, n: (r(n, 1).expand(n, 5), 0),
    "one item again and again": lambda r, n: (r(1, 5).expand(n, 5), 0),
    "offset": lambda r, n: (r(3 * n + 1)[1:].view(n, 3), 0),
    "rows": lambda r, n: (r(5, n), 1),
    "turned rows": lambda r, n: (r(n, 5).t(), 1),
    "middle, permuted": lambda r, n: (r(4, 3, n).permute(1, 2, 0), 1),
    "of other strides": lambda r, n: (r(2, n, 3, 4).movedim(1, 2), 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_name
def test_layouts_and_gradients(name, layout, dtype, engine, device):
    offsets = offsets_of([0, 40, 1, 7, 300, 0, 12], device)
    x, dim = LAYOUTS[layout](maker(dtype, device), int(offsets[-1]))
    mine, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    got, want = call(name, mine, offsets, dim, engine=engine), expected(name, theirs, offsets, dim)
    if name in ("softmax", "log_softmax"):
        assert got.stride() == torch.empty_like(x).stride()
    assert_right(got.detach(), want.detach(), dtype)
    g = maker(got.dtype, device, 3)(*got.shape)
    if name == "state":  # an infinite maximum is no function of x
        g[..., [0, -2]] = g.movedim(dim + 1, 0)[0].new_zeros(()) if dim == x.dim() - 1 else g[..., [0, -2]]
        g.movedim(dim + 1, 0)[[0, 5]] = 0
    (mine_g,), (theirs_g,) = torch.autograd.grad(got, mine, g), torch.autograd.grad(want, theirs, g.double())
    assert mine_g.dtype is dtype
    if name != "state" or dtype in (F32, F64):  # among equal maxima of half types torch takes one
        assert_right(mine_g, theirs_g, dtype, "gradient")


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("lengths", ["short", "some vectors", "all lengths", "huge ones"])
def test_gradients(name, lengths, engine, device):
    offsets = offsets_of(LENGTHS[lengths], device)
    items = int(offsets[-1])
    for inner, dtype in (((-1,), F32), ((-1,), F16), ((-1, 4), BF16), ((-1, 12), F32), ((2, -1), F64)):
        x, dim = shaped(maker(dtype, device), inner, items)
        order = drawn_order(items, device) if len(inner) == 1 else None
        segments = offsets if order is None else onepass.Segments.from_offsets(offsets, order)
        mine, theirs = x.requires_grad_(), x.detach().double().requires_grad_()
        got = call(name, mine, segments, dim, engine=engine)
        want = expected(name, theirs, offsets, dim, order)
        g = maker(dtype, device, 3)(*got.shape)
        (mine_g,), (theirs_g,) = torch.autograd.grad(got, mine, g), torch.autograd.grad(want, theirs, g.double())
        assert_right(mine_g, theirs_g, dtype, inner)


@pytest.mark.parametrize("length", [1, 5, 20, 40, 9000, 70000])
@every_name
def test_special_values_are_those_of_a_row_alone(name, length, dtype, engine, device):
    x = special(length, dtype, device)
    if length > 9000:
        x = x[:12]
    offsets = torch.arange(len(x) + 1, device=device) * length
    got = call(name, x.flatten(), offsets, engine=engine)
    if name == "state":
        whole = onepass.state(x, 1, engine="cpu" if device == "cpu" else engine)
        torch.testing.assert_close(got, torch.stack(whole), equal_nan=True, rtol=1e-5, atol=1e-30)
        return
    want = getattr(torch, name)(x.double(), 1).flatten()
    rounded = want.to(dtype).double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(got), kind(rounded)), list(SPECIAL_ROWS)
    finite = rounded.isfinite()
    assert_close(got[finite], rounded[finite], dtype)


@every_name
def test_scale_and_bias(name, dtype, engine, device):
    make = maker(dtype, device)
    offsets = offsets_of(LENGTHS["some vectors"], device)
    n = int(offsets[-1])
    x = make(n, 6)
    for bias in (make(n, 6), make(6), maker(F32, device)(n, 1), maker(F64, device)(1, 6)):
        for scale in (0.3, 0) if bias.dim() == 1 else (None, -1):
            leaves, others = ([t.detach().to(as_(t)).requires_grad_() for t in (x, bias)] for as_ in (_own, _double))
            got = call(name, leaves[0], offsets, scale=scale, bias=leaves[1], engine=engine)
            want = expected(name, others[0] * (1 if scale is None else scale) + others[1], offsets)
            if name == "state":
                got, want = got[1].log() + got[0], want[1].log() + want[0]
            assert_right(got.detach(), want.detach(), dtype, (scale, bias.shape))
            if name == "state":
                continue
            keep = got.isfinite()
            g = maker(got.dtype, device, 3)(*got.shape).masked_fill(~keep, 0)
            ours = torch.autograd.grad(got, leaves, g)
            theirs = torch.autograd.grad(want.masked_fill(~keep, 0), others, g.double())
            assert_close(ours[0], theirs[0], BF16 if scale == 0 else dtype, (scale, bias.shape))
            assert ours[1].dtype is bias.dtype
            # What a bias is added to may cancel.
            least = max(tolerance(dtype), tolerance(bias.dtype)) * float(g.double().abs().sum(0).max())
            assert float((ours[1].double() - theirs[1]).abs().max()) < least


def _own(t: Tensor) -> torch.dtype:
    return t.dtype


def _double(t: Tensor) -> torch.dtype:
    return F64


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_dtype_of_the_result(name, engine, device):
    offsets = offsets_of([3, 0, 40, 1, 17], device)
    for own in DTYPES:
        for to in DTYPES:
            x = maker(own, device)(int(offsets[-1]), 3).requires_grad_()
            got = call(name, x, offsets, dtype=to, engine=engine)
            assert got.dtype is to
            assert_right(got.detach(), expected(name, x.detach().to(to), offsets), to, (own, to))
            (g,) = torch.autograd.grad(got.sum() + got[got.isfinite()].square().sum(), x)
            assert g.dtype is own


@pytest.mark.parametrize("seed", thin(range(60), 4))
def test_random_calls(seed, engine, device):
    """Any lengths, dims, strides, types and arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    dtype, name = DTYPES[seed % 4], NAMES[seed % 3]
    lengths = (torch.rand(draw(40), generator=generator) ** -0.7 * draw(30) - 1).long().clamp(0, 30000).tolist()
    offsets = offsets_of(lengths, device, (torch.int32, torch.int64)[draw(2) - 1])
    shape = [draw(9) for _ in range(draw(3))]
    dim = draw(len(shape)) - 1
    shape[dim] = int(offsets[-1])

    def made() -> Tensor:
        whole = torch.randn([size + draw(3) - 1 for size in shape], dtype=F64, generator=generator) * 3
        turned = torch.randperm(len(shape), generator=generator).tolist()
        whole = whole.permute(turned).contiguous().permute([turned.index(d) for d in range(len(shape))])
        return whole.to(dtype).to(device)[
            tuple(slice(n - size, None) for n, size in zip(whole.shape, shape, strict=True))
        ]

    x, scale = made(), (None, 0.7, -1.3)[draw(3) - 1]
    bias = made() if draw(2) == 1 else None
    order = drawn_order(shape[dim], device, seed).to(offsets.dtype) if draw(2) == 1 else None
    segments = offsets if order is None else onepass.Segments.from_offsets(offsets, order)
    mine, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    got = call(name, mine, segments, dim, scale=scale, bias=bias, engine=engine)
    s = theirs * (1 if scale is None else scale)
    want = expected(name, s if bias is None else s + bias.double(), offsets, dim, order)
    note = f"{shape} over {dim}, {x.stride()}, {lengths}"
    assert_right(got.detach(), want.detach(), dtype, note)
    g = maker(dtype, device, 3)(*got.shape)
    (a,), (b,) = torch.autograd.grad(got, mine, g), torch.autograd.grad(want, theirs, g.double())
    assert_right(a, b, dtype, note)


# Bits -----------------------------------------------------------------------------------------------------------------


@every_name
def test_a_segment_has_the_bits_that_it_has_alone(name, engine, device):
    lengths = [5, 0, 33, 70001, 8, 1, 400, 64, 17]
    offsets = offsets_of(lengths, device)
    for dtype, heads in ((F32, (3,)), (BF16, (8,)), (F32, ()), (F64, (4,))):
        x = maker(dtype, device)(int(offsets[-1]), *heads)
        with onepass.batch_invariant():
            whole = call(name, x, offsets, engine=engine)
            for s, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
                for at in ((), (heads[0] - 1,)) if heads else ((),):
                    row = x[(slice(a, b), *(at and (slice(None),) * (len(heads) - 1)), *at)]
                    alone = call(name, row, torch.tensor([0, b - a], device=device), engine=engine)
                    if name == "state":
                        beside = whole[:, s : s + 1]
                    else:
                        beside = whole[s : s + 1] if name == "logsumexp" else whole[a:b]
                    assert same(alone, beside[(..., *at)] if at else beside), (dtype, heads, s)


@pytest.mark.parametrize("name", NAMES[:3])
def test_bits_do_not_depend_on_threads(name, device):
    offsets = offsets_of([k % 60 for k in range(2000)] + [90000, 3, 40000], device)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        x = maker(F32, device)(int(offsets[-1]), 2).requires_grad_()
        y = call(name, x, offsets)
        (g,) = torch.autograd.grad(y, x, maker(F32, device, 3)(*y.shape))
        results.append((y.detach(), g))
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# Segments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("items", [0, 1, 50, 300_000])
def test_segments_of_an_index(items, indices, device):
    count = max(items // 5, 3)
    generator = torch.Generator().manual_seed(items)
    index = torch.randint(0, count, (items,), generator=generator).to(indices).to(device)
    segments = onepass.Segments(index, count)
    want = torch.bincount(index.long(), minlength=count).cumsum(0)
    assert torch.equal(segments.offsets[1:].long(), want)
    assert segments.num_segments == count
    if items > 1:
        assert torch.equal(segments.order.long(), torch.sort(index.long(), stable=True).indices)
        assert "with an order" in repr(segments)
    if items:
        assert onepass.Segments(index).num_segments == int(index.max()) + 1
    ordered = onepass.Segments(index.sort().values, count)
    assert ordered.order is None
    assert torch.equal(ordered.offsets.long(), segments.offsets.long())
    moved = copy.copy(segments).to(torch.device(device))
    assert torch.equal(moved.offsets, segments.offsets)
    x = maker(F32, device)(items, 2)
    order = None if segments.order is None else segments.order.long()
    for name in ("softmax", "logsumexp"):
        offsets = segments.offsets
        want = forward_arithmetic(x.double(), offsets, order, None, SegmentSpec(0, name))
        assert_right(call(name, x, segments), want, F32)
    got = call("softmax", x, index=index.sort().values, num_segments=count)
    assert same(got, call("softmax", x, ordered))
    if items:
        assert same(got, call("softmax", x, index=index.sort().values))


def test_segments_of_lengths(device):
    lengths = torch.tensor([2, 0, 3], device=device)
    segments = onepass.Segments.from_lengths(lengths)
    assert segments.offsets.tolist() == [0, 2, 2, 5]
    x = torch.zeros(5, device=device)
    torch.testing.assert_close(
        onepass.segment_softmax(x, segments), torch.tensor([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], device=device)
    )


@every_name
def test_padded_rows(name, dtype, engine, device):
    make = maker(dtype, device)
    lengths = torch.tensor([5, 0, 9, 1], device=device)
    bias = maker(F32, device)(9, 1)
    for shape, dim in (((4, 9), 1), ((4, 9, 3), 1), ((4, 2, 9), 2)):
        x = make(*shape)
        for named in ({}, {"scale": 0.5}, {"bias": bias[:, 0] if dim == len(shape) - 1 else bias}):
            got = call(name, x, lengths=lengths, **({} if dim == 1 else {"dim": dim}), engine=engine, **named)
            s = x.double() * named.get("scale", 1)
            s = s + named["bias"].double() if "bias" in named else s
            for b, n in enumerate(lengths.tolist()):
                row = s[b].narrow(dim - 1, 0, n)
                here = got[:, b] if name == "state" else got[b]
                if name in ("softmax", "log_softmax"):
                    assert_right(here.narrow(dim - 1, 0, n), getattr(torch, name)(row, dim - 1), dtype)
                    assert (here.narrow(dim - 1, n, 9 - n) == (0 if name == "softmax" else -INF)).all()
                elif name == "logsumexp":
                    assert_right(here, row.logsumexp(dim - 1), dtype)
                elif n:
                    assert_right(here[0] + here[1].log(), row.logsumexp(dim - 1), F32)
                else:
                    assert (here[0] == -INF).all()
                    assert not here[1].any()


# Derivatives and transforms -------------------------------------------------------------------------------------------


@every_name
def test_derivatives_of_any_order(name, engine, device):
    make = maker(F64, device)
    offsets = torch.tensor([0, 3, 4, 4, 9], device=device)
    order = torch.tensor([4, 0, 3, 8, 1, 2, 7, 5, 6], device=device)
    bias = make(9, 1).requires_grad_()
    filled = [0, 1, 3]
    for segments in (offsets, onepass.Segments.from_offsets(offsets, order)):

        def f(x: Tensor, bias: Tensor, segments: Any = segments) -> Tensor:
            y = call(name, x, segments, scale=0.7, bias=bias, engine=engine)
            return y if name in ("softmax", "log_softmax") else y[..., filled, :]

        x = make(9, 2).requires_grad_()
        assert gradcheck(f, (x, bias), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(f, (x, bias))


@every_name
def test_transforms(name, device):
    make = maker(F64, device)
    offsets = torch.tensor([0, 3, 5, 9], device=device)
    x, t = make(9, 4), make(9, 4)

    def ours(v: Tensor) -> Tensor:
        return call(name, v, offsets)

    def theirs(v: Tensor) -> Tensor:
        return forward_arithmetic(v, offsets, None, None, SegmentSpec(0, name))

    torch.testing.assert_close(torch.func.jvp(ours, (x,), (t,)), torch.func.jvp(theirs, (x,), (t,)))
    for batch in (1, -1):
        torch.testing.assert_close(torch.func.vmap(ours, batch)(x), torch.stack([ours(v) for v in x.unbind(1)]))
    biased = torch.func.vmap(lambda b: call(name, x, offsets, bias=b))(torch.stack((t, x)))
    torch.testing.assert_close(biased, torch.stack([call(name, x, offsets, bias=b) for b in (t, x)]))
    twice = torch.func.vmap(torch.func.vmap(ours, 1), 2)(torch.stack((x, t), 2))
    torch.testing.assert_close(twice, torch.stack([torch.stack([ours(v) for v in w.unbind(1)]) for w in (x, t)]))
    with pytest.raises(NotImplementedError, match="one set of segments"):
        torch.func.vmap(lambda o: call(name, x, o))(torch.stack((offsets, offsets)))
    deep = torch.func.vmap(torch.func.grad(lambda v: ours(v).square().sum()), 1, 1)(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(deep, torch.autograd.grad(ours(leaf).square().sum(), leaf)[0])
    hessian = torch.func.hessian(lambda v: ours(v).square().sum())(x[:, 0])
    want = torch.autograd.functional.hessian(lambda v: theirs(v).square().sum(), x[:, 0])
    torch.testing.assert_close(hessian, want)


@pytest.mark.usefixtures("fresh_compiler")
@every_name
def test_a_compiled_call_is_one_operator_each_way(name, device):
    graphs = Graphs()

    def f(x: Tensor, offsets: Tensor) -> Tensor:
        return call(name, x, offsets, scale=0.5)

    compiled = torch.compile(f, backend=graphs, fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 5], [4, 4, 1, 9], [2] * 50):
        offsets = offsets_of(lengths, device)
        x = maker(F32, device)(int(offsets[-1]), 3).requires_grad_()
        got, want = compiled(x, offsets), f(x, offsets)
        torch.testing.assert_close(got, want)
        finite = torch.randn(want.shape, device=device).masked_fill(~want.isfinite(), 0)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, finite)[0] for y in (got, want)))
    names = [name for graph in graphs.operators() for name in graph]
    assert names == ["segment_forward", "segment_backward"]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_with_segments_and_an_index(device):
    index = torch.tensor([2, 0, 2, 1], device=device)
    segments, x = onepass.Segments(index, 3), torch.randn(4, device=device)
    compiled = torch.compile(lambda x: onepass.segment_softmax(x, segments), backend="aot_eager", fullgraph=True)
    assert same(compiled(x), onepass.segment_softmax(x, segments))
    given = {"index": index.sort().values, "num_segments": 4}
    compiled = torch.compile(lambda x: onepass.segment_softmax(x, **given), backend="aot_eager", fullgraph=True)
    assert same(compiled(x), onepass.segment_softmax(x, **given))


@pytest.mark.parametrize("name", NAMES[:3])
def test_out(name, engine, device):
    offsets = offsets_of(LENGTHS["some vectors"], device)
    for dtype in (F32, BF16):
        x = maker(dtype, device)(int(offsets[-1]), 3)
        want = call(name, x, offsets, engine=engine)
        out = torch.full_like(want, 7)
        version = out._version
        assert call(name, x, offsets, out=out, engine=engine) is out
        assert same(out, want)
        assert out._version > version
        if name == "logsumexp":
            with pytest.raises((RuntimeError, ValueError)):
                call(name, x, offsets, out=x)
            continue
        with torch.inference_mode():
            assert same(call(name, x, offsets, out=torch.empty_like(want), engine=engine), want)
        turned = torch.full(want.shape[::-1], 7, dtype=dtype, device=device).t()
        assert same(call(name, x, offsets, out=turned, engine=engine), want)
        assert same(call(name, x, offsets, out=x, engine=engine), want)


def test_operators_are_sound(device):
    """As torch looks at them: schemas, fake kernels, gradients, compilation."""
    offsets = torch.tensor([0, 3, 3, 7], device=device)
    for name in NAMES:
        x = maker(F32, device)(7, 2).requires_grad_()
        given = (x, offsets, None, None, 0, name, 0.5, None, "native")
        torch.library.opcheck(torch.ops.onepass.segment_forward.default, given)


def test_a_call_is_one_operator(device):
    offsets = torch.tensor([0, 3, 7], device=device)
    x = torch.randn(7, device=device)
    with Operators() as operators:
        onepass.segment_softmax(x, offsets)
    assert operators.ours() == ["segment_forward"]
    with Operators() as operators:
        torch.func.vmap(lambda v: onepass.segment_softmax(v, offsets), 1)(torch.randn(7, 3, device=device))
    assert operators.ours() == ["segment_forward"]


def test_the_module(device):
    offsets, x = offsets_of([2, 3], device), torch.randn(5, 2, device=device)
    module = onepass.nn.SegmentSoftmax(scale=0.5)
    assert same(module(x, offsets), onepass.segment_softmax(x, offsets, scale=0.5))
    index = torch.tensor([0, 0, 1, 1, 1], device=device)
    assert same(module(x, index=index), onepass.segment_softmax(x, offsets, scale=0.5))
    assert repr(module) == "SegmentSoftmax(dim=0, scale=0.5)"


def check_all() -> None:  # by another instruction set
    for lengths in ("some vectors", "all lengths", "one huge"):
        offsets = offsets_of(LENGTHS[lengths])
        for name in NAMES[:3]:
            for dtype, inner in ((F32, (-1,)), (BF16, (-1, 3)), (F64, (-1,)), (F32, (-1, 4)), (F64, (-1, 4))):
                x, dim = shaped(maker(dtype), inner, int(offsets[-1]))
                mine, theirs = x.requires_grad_(), x.detach().double().requires_grad_()
                got, want = call(name, mine, offsets, dim), expected(name, theirs, offsets, dim)
                assert_right(got.detach(), want.detach(), dtype)
                g = maker(dtype, seed=3)(*got.shape)
                (a,), (b,) = torch.autograd.grad(got, mine, g), torch.autograd.grad(want, theirs, g.double())
                assert_right(a, b, dtype)
