"""Items that move to the order of their segments: their route, and calls that go by it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from emulator import Emulator, missing
from lib.support import slow
from onepass import item_route
from onepass.item_route import CHUNK, Route, moves, route_of, routed_call
from onepass.segment_arithmetic import SegmentSpec

OFFSETS = torch.tensor([0, 3, 3, 90, 91, 700, 1000])


def moved(t: Tensor, route: Route, is_into_order: bool, to: Tensor | None = None, chunk: int = 64) -> Tensor:
    """What the two passes of the kernel do."""
    first = torch.arange(len(t)) // chunk * chunk
    from_memory, to_order = (first + (local.int() & 0xFFFF) for local in (route.from_memory, route.to_order))
    between, result = torch.empty_like(t), torch.empty_like(t) if to is None else to
    if is_into_order:
        between[route.places] = t[from_memory]
        return result.copy_(between[to_order])
    between[to_order] = t
    result[from_memory] = between[route.places]
    return result


@pytest.mark.parametrize("items", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_route_leads_to_the_order_and_back(items, dtype):
    order = torch.randperm(items, generator=torch.Generator().manual_seed(items)).to(dtype)
    route, x = route_of(order, 64), torch.arange(items)
    assert torch.equal(moved(x, route, True), order.long())
    assert torch.equal(moved(moved(x, route, True), route, False), x)


def test_items_that_do_not_move_far_stay_in_runs():
    """Between the passes items of one chunk that have the same bucket lie side by side."""
    route = route_of(torch.arange(1000), 64)
    assert torch.equal(route.places.long(), torch.arange(1000))


@pytest.fixture
def by_route(monkeypatch):
    """Calls whose items move, by the arithmetic of the passes."""
    monkeypatch.setattr(item_route, "_moved", moved)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    return order, route_of(order, 64)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp", "state"])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_a_call_by_a_route(by_route, function, inner):
    order, route = by_route
    x = torch.randn(1000, *inner, generator=torch.Generator().manual_seed(1))
    segments = onepass.Segments.from_offsets(OFFSETS, order)
    want = getattr(onepass, f"segment_{function}")(x, segments, scale=0.5)
    got = routed_call(x, OFFSETS, route, SegmentSpec(0, function, 0.5))
    if function == "state":
        got, want = got[0] + got[1].log(), want.m + want.l.log()
    torch.testing.assert_close(got, want)


def test_a_result_goes_where_it_is_asked_for(by_route):
    order, route = by_route
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    want = onepass.segment_softmax(x, onepass.Segments.from_offsets(OFFSETS, order))
    for out in (torch.empty(1000), torch.empty(2000)[::2]):
        assert routed_call(x, OFFSETS, route, SegmentSpec(0, "softmax"), out) is out
        torch.testing.assert_close(out, want)
    assert routed_call(x, OFFSETS, route, SegmentSpec(0, "softmax"), x) is x
    torch.testing.assert_close(x, want)


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_gradients_of_every_order_go_back(by_route, function):
    order, route = by_route
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    segments = onepass.Segments.from_offsets(OFFSETS, order)

    def derivatives(y: Tensor) -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad((first * first).sum(), x)[0]

    want = derivatives(getattr(onepass, f"segment_{function}")(x, segments))
    got = derivatives(routed_call(x, OFFSETS, route, SegmentSpec(0, function)))
    torch.testing.assert_close(got, want)


def test_no_item_lies_between_places_of_its_size(monkeypatch):
    """The kernel takes an item as one number."""
    route, passes = route_of(torch.randperm(1000, generator=torch.Generator().manual_seed(0)), 64), []

    def one_pass(source: Tensor, to: Tensor, local: Tensor, places: Tensor | None, is_into_order: bool) -> None:
        assert source.data_ptr() % 4 == to.data_ptr() % 4 == 0
        passes.append(to.copy_(source))

    monkeypatch.setattr(item_route, "_move_kernel", one_pass)
    x, out = (torch.randn(2001).bfloat16()[1:].view(1000, 2) for _ in range(2))
    assert x.data_ptr() % 4
    y = routed_call(x, OFFSETS, route, SegmentSpec(0, "softmax"), out)
    assert y is out
    assert len(passes) == 4
    torch.testing.assert_close(out, onepass.segment_softmax(x, OFFSETS))


def test_which_items_move():
    order, spec = torch.randperm(100), SegmentSpec(0, "softmax", engine="cuda")
    x = torch.zeros(100, 2)

    def answer(x: Tensor = x, order: Tensor | None = order, bias: Tensor | None = None, **given: Any) -> bool:
        return moves(x, order, bias, spec._replace(**given), least=100)

    taken = [{}, {"x": x[:, 0].contiguous()}, {"x": x.half()}]
    left = [{"order": None}, {"bias": x}, {"engine": "triton"}, {"dim": 1}]
    left += [{"x": t} for t in (x[:99], x[:, 0], torch.zeros(100, 3), x.double())]
    left += [{"x": torch.zeros(100, 4).half(), "dtype": torch.float32}]  # results of 16 bytes
    assert [answer(**given) for given in taken + left] == [True] * len(taken) + [False] * len(left)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("dtype", [slow(torch.float16), torch.float32, slow(torch.float64)])
def test_the_kernel_of_moves(dtype):
    emulator = Emulator()
    items = 2 * CHUNK + 1001
    order = torch.randperm(items, generator=torch.Generator().manual_seed(0))
    route, x = route_of(order), torch.randn(items, generator=torch.Generator().manual_seed(1)).to(dtype)
    between, there, back = (torch.zeros_like(x) for _ in range(3))
    emulator.moves(x, between, route.from_memory, route.places, True)
    emulator.moves(between, there, route.to_order, None, True)
    assert torch.equal(there, x[order])
    emulator.moves(there, between, route.to_order, None, False)
    emulator.moves(between, back, route.from_memory, route.places, False)
    assert torch.equal(back, x)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_items_move_on_a_gpu(inner, dtype):
    items, generator = item_route.LEAST + 5001, torch.Generator("cuda").manual_seed(0)
    index = torch.randint(0, 30000, (items,), device="cuda", generator=generator)
    x = torch.randn(items, *inner, device="cuda", generator=generator).to(dtype).requires_grad_()
    segments = onepass.Segments(index, 30000)
    y = onepass.segment_softmax(x, segments)
    g = torch.randn(y.shape, device="cuda", generator=generator).to(dtype)
    (dx,) = torch.autograd.grad(y, x, g)
    assert segments._route is not None
    wide = x.detach().double().requires_grad_()
    order = index.sort(stable=True).indices
    want = torch.empty_like(wide)
    want[order] = onepass.segment_softmax(wide[order], segments.offsets)
    (want_dx,) = torch.autograd.grad(want, wide, g.double())
    tolerance = 2 ** (-7 if dtype is torch.bfloat16 else -20)
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=1e-30)
    torch.testing.assert_close(dx.double(), want_dx, rtol=tolerance, atol=tolerance * float(want_dx.abs().max()))


@pytest.mark.gpu
def test_no_route_is_looked_for_while_a_graph_is_captured():
    items, generator = item_route.LEAST, torch.Generator("cuda").manual_seed(0)
    index = torch.randint(0, 3000, (items,), device="cuda", generator=generator)
    x = torch.randn(items, device="cuda", generator=generator)
    segments = onepass.Segments(index, 3000)
    onepass.warmup("cuda", [torch.float32], ["segment_softmax"], options=["order"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = onepass.segment_softmax(x, segments)
    assert segments._route is None
    graph.replay()
    torch.testing.assert_close(y, onepass.segment_softmax(x, segments), rtol=1e-6, atol=1e-30)
    assert segments._route is not None
