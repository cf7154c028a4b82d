"""Columns on the CUDA engine: every tier forced with every kind of edges, forward and backward."""

import pytest
import torch
from torch import Tensor

from columns_support import (
    AHEAD,
    BF16,
    COLUMNS,
    F16,
    F32,
    F64,
    FAMILY,
    GRID,
    PLANS,
    SLAB,
    STREAM,
    STRIDED,
    WHOLE,
    WHOLE_SLAB,
    WINDOW,
    Place,
    Plan,
    amid,
    assert_gradient,
    assert_untouched,
    gradient,
    inners,
    names,
    operand,
    place_of,
    some,
    special,
)
from onepass import native, reference
from support import assert_defined

pytestmark = pytest.mark.gpu

_ops = torch.ops.onepass
Types = tuple[torch.dtype, torch.dtype]
PAIRS = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
REDUCED = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]
STATES = [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)]
TYPES = {"logsumexp": REDUCED, "state": STATES}
OUTER = (1, 3)
every_tier = pytest.mark.parametrize("edges", [WINDOW, WHOLE, SLAB, WHOLE_SLAB, STRIDED])
every_edge = pytest.mark.parametrize("tier", [COLUMNS, GRID, STREAM])


def forward(function: str, x: Tensor, y_type: torch.dtype, place: Place, plan: tuple[int, ...]) -> None:
    """One forced call into a poisoned result amid untouched memory, compared with the definition."""
    outer, _, inner = x.shape
    shape, there = (tuple(x.shape), place)
    if function == "logsumexp":
        shape, there = (outer, inner), Place((inner + 3, 1), 1)
    if function == "state":
        shape, there = (2, outer, inner), Place((outer * inner, inner, 1), 1)  # a state is contiguous
    memory, out = amid(7.0, shape, there, y_type, "cuda")
    out.fill_(torch.nan)
    _ops._forced(x, native.FUNCTIONS.index(function), [1], False, plan, out)
    note = f", plan {plan}"
    if function == "state":
        m, total = reference.state(x, 1)
        torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
    else:
        assert_defined(function, out, x if function == "logsumexp" else x.to(y_type), 1, note)
    assert_untouched(memory, out, 7.0)


@every_edge
@every_tier
@pytest.mark.parametrize("function", native.FUNCTIONS)
def test_every_tier(function, tier, edges):
    torch.manual_seed(0)
    for turn, types in enumerate(TYPES.get(function, PAIRS), native.FUNCTIONS.index(function)):
        x_type, y_type = types
        widest = x_type.itemsize if function in TYPES else max(x_type.itemsize, y_type.itemsize)
        vector = 16 // widest if edges != STRIDED else 1
        for plan in some(PLANS[tier, edges], types == (F32, F32), turn):
            for inner in inners(plan, edges, vector):
                for n in plan.lengths(edges, vector, inner):
                    place = place_of(edges, n, inner, vector)
                    for outer in OUTER:
                        x = operand(special(outer, n, inner, x_type, "cuda"), place, x_type)
                        forward(function, x, y_type, place, plan.given(edges, vector, inner))


def backward(
    function: str, shape: tuple[int, int, int], types: Types, kind: str, place: Place, plan: tuple[int, ...]
) -> None:
    """As `forward`, for a gradient. `kind`: what the result's gradient has one value for."""
    outer, _, inner = shape
    saved_type, other = types  # of logsumexp those of the input and of the result
    memory, dx = amid(7.0, shape, place, saved_type if function == "logsumexp" else other, "cuda")
    dx.fill_(torch.nan)
    x = 2 * torch.randn(shape, device="cuda", dtype=F64)
    if function == "logsumexp":
        x = operand(x, place, saved_type)
        there = Place((inner + 2, 1), 1) if kind == "one each" else Place((2 * inner, 2), 0)
        g = operand(torch.randn(outer, inner, device="cuda"), there, other)
        lse = operand(reference.logsumexp(x, 1), there, other)
        _ops._forced_backward(g, x, lse, 3, [1], plan, dx)
        want, scale = gradient(function, g.unsqueeze(1), x, [1], lse.unsqueeze(1))
    else:
        y = operand(getattr(reference, function)(x, 1), place, saved_type)
        sizes = {"one a column": (outer, 1, inner), "one a block": (outer, 1, 1), "one for all": (1, 1, 1)}
        g = torch.randn(sizes.get(kind, shape), device="cuda")
        g = operand(g, place, saved_type).expand(shape)
        _ops._forced_backward(g, y, None, FAMILY.index(function), [1], plan, dx)
        want, scale = gradient(function, g, y, [1])
    assert_gradient(dx, want, scale)
    assert_untouched(memory, dx, 7.0)


@every_edge
@every_tier
@pytest.mark.parametrize("function", [*FAMILY, "logsumexp"])
def test_every_tier_of_gradients(function, tier, edges):
    torch.manual_seed(0)
    one = native.FUNCTIONS.index(function)
    for turn, types in enumerate(TYPES.get(function, PAIRS), one):
        widest = types[0].itemsize if function in TYPES else max(types[0].itemsize, types[1].itemsize)
        vector = 16 // widest if edges != STRIDED else 1
        kinds = ["one each", "one a column", "one a block", "one for all"]
        if function == "logsumexp":
            kinds = ["one each", "with steps"]
        elif edges in (SLAB, WHOLE_SLAB):  # a slab of one line is none
            kinds.remove("one a column")
        if types != (F32, F32) and turn % 2:  # one value has a kernel of its own
            kinds = kinds[:1]
        for plan in some(PLANS[tier, edges], types == (F32, F32), turn):
            for inner in inners(plan, edges, vector):
                for n in plan.lengths(edges, vector, inner):
                    place = place_of(edges, n, inner, vector)
                    for kind in kinds:
                        backward(function, (3, n, inner), types, kind, place, plan.given(edges, vector, inner))


# Narrow vectors, whose halves go one by one or two at a time
@pytest.mark.parametrize("vector", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
def test_narrow_vectors(dtype, vector):
    for tier, edges in ((COLUMNS, WINDOW), (COLUMNS, WHOLE), (GRID, SLAB), (STREAM, SLAB)):
        plan = PLANS[tier, edges][0]
        for inner in inners(plan, edges, vector):
            for n in plan.lengths(edges, vector, inner):
                place = place_of(edges, n, inner, vector)
                x = operand(special(3, n, inner, dtype, "cuda"), place, dtype)
                forward("softmax", x, dtype, place, plan.given(edges, vector, inner))
                backward("softmax", (3, n, inner), (dtype, dtype), "one each", place, plan.given(edges, vector, inner))


# More tiles than blocks run at a time: one takes several, of which it fetches the next, or tells of it by messages
MANY = [
    (Plan(COLUMNS, 8, 8, 4, 1, AHEAD), WINDOW),
    (Plan(COLUMNS, 4, 8, 2, 2, AHEAD), WHOLE),
    (Plan(COLUMNS, 16, 16, 3, 8, AHEAD), WHOLE),
    (Plan(COLUMNS, 200, 1, 4, 4, AHEAD), WHOLE_SLAB),
    (Plan(COLUMNS, 200, 1, 4, 1, AHEAD), WHOLE_SLAB),
    (Plan(GRID, 4, 16, 2, 3), WHOLE),
    (Plan(GRID, 4, 16, 2, 33), WINDOW),
    (Plan(GRID, 64, 1, 4, 3), SLAB),
    (Plan(GRID, 32, 4, 4, 3), STRIDED),
    (Plan(STREAM, 8, 8, 3, 3), WHOLE),
]


@pytest.mark.parametrize(("plan", "edges"), MANY, ids=str)
def test_many_tiles(plan, edges):
    torch.manual_seed(0)
    vector = 4 if edges != STRIDED else 1
    inner = inners(plan, edges, vector)[0]
    for n in plan.lengths(edges, vector, inner)[1:2]:
        place = place_of(edges, n, inner, vector)
        given = plan.given(edges, vector, inner)
        x = operand(special(6000, n, inner, F32, "cuda"), place, F32)
        for function in ("softmax", "logsumexp"):
            forward(function, x, F32, place, given)
        for kind in ("one each", "one a block"):
            backward("log_softmax", (6000, n, inner), (F32, F32), kind, place, given)


# A plan, its edges, a shape over whose middle dim it goes
BITS = [
    (Plan(COLUMNS, 4, 16, 4), WHOLE, (5, 60, 40)),
    (Plan(COLUMNS, 4, 16, 4, 4), WINDOW, (5, 250, 41)),
    (Plan(GRID, 4, 64, 8, 32), WHOLE, (2, 9000, 16)),
    (Plan(GRID, 64, 1, 4, 8), SLAB, (9, 800, 7)),
    (Plan(STREAM, 4, 64, 8, 16), WHOLE, (2, 9000, 16)),
]


@pytest.mark.parametrize(("plan", "edges", "shape"), BITS, ids=str)
def test_bits_are_the_same_from_run_to_run(plan, edges, shape):
    _, n, inner = shape
    place, given = place_of(edges, n, inner, 4), plan.given(edges, 4, inner)
    x, g = (operand(torch.randn(shape, device="cuda"), place, F32) for _ in range(2))
    results = []
    for _ in range(6):
        y, dx = (operand(torch.zeros_like(x), place, F32) for _ in range(2))
        _ops._forced(x, 0, [1], False, given, y)
        _ops._forced_backward(g, y, None, 0, [1], given, dx)
        results.append((y, dx))
    assert all(torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1]) for y, dx in results)


LONG = (2, 9000, 16)  # over the chip
OVER_THE_CHIP = [Plan(GRID, 4, 64, 8, 32).given(WHOLE, 4, 16), Plan(STREAM, 4, 64, 8, 32).given(WHOLE, 4, 16)]


@pytest.mark.parametrize("plan", OVER_THE_CHIP, ids=str)
def test_in_a_graph(plan):
    x, g = torch.randn(LONG, device="cuda"), torch.randn(LONG, device="cuda")
    y, dx = torch.zeros_like(x), torch.zeros_like(x)

    def call() -> None:
        _ops._forced(x, 0, [1], False, plan, y)
        _ops._forced_backward(g, y, None, 0, [1], plan, dx)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        x.normal_(), y.fill_(torch.nan), dx.fill_(torch.nan)
        graph.replay()
        assert_defined("softmax", y, x, 1)
        assert_gradient(dx, *gradient("softmax", g, y, [1]))


@pytest.mark.parametrize("plan", OVER_THE_CHIP, ids=str)
def test_on_two_streams_at_once(plan):
    xs = [torch.randn(LONG, device="cuda") for _ in range(2)]
    want = [torch.empty_like(x) for x in xs]
    for x, y in zip(xs, want, strict=True):
        _ops._forced(x, 0, [1], False, plan, y)
        assert_defined("softmax", y, x, 1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    made: list[list[Tensor]] = [[torch.empty_like(x) for _ in range(50)] for x in xs]
    torch.cuda.synchronize()
    for turn in range(50):
        for x, stream, results in zip(xs, streams, made, strict=True):
            with torch.cuda.stream(stream):
                _ops._forced(x, 0, [1], False, plan, results[turn])
    torch.cuda.synchronize()
    for results, y in zip(made, want, strict=True):
        assert all(torch.equal(result, y) for result in results)


@pytest.mark.parametrize("edges", [WHOLE, WHOLE_SLAB])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_ring_runs_on_into_the_next_tile(dtype, edges):
    """More tiles than the chip takes at a time, and a shelf that holds what registers do not, or some of the next."""
    torch.manual_seed(0)
    vector = 16 // dtype.itemsize
    across, down, n, inner = (2, 16, 250, 2 * vector) if edges == WHOLE else (98, 1, 31 * vector, 49)
    x, g = (torch.randn(300, n, inner, device="cuda").mul(4).to(dtype) for _ in range(2))
    for shelf in (4, 8, 12):
        plan = (GRID, across, down, 4 * vector, vector, 2, shelf, edges)
        out, lse, dx = torch.full_like(x, torch.nan), x.new_full((300, inner), torch.nan), torch.full_like(x, torch.nan)
        _ops._forced(x, 0, [1], False, plan, out)
        assert_defined("softmax", out, x, 1, f", plan {plan}")
        _ops._forced(x, native.FUNCTIONS.index("logsumexp"), [1], False, plan, lse)
        assert_defined("logsumexp", lse, x, 1, f", plan {plan}")
        _ops._forced_backward(g, out, None, 0, [1], plan, dx)
        assert_gradient(dx, *gradient("softmax", g, out, [1]))
