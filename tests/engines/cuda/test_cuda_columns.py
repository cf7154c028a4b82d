"""Columns on the CUDA engine: every tier forced with every kind of edges, forward and backward."""

import pytest
import torch
from torch import Tensor

from lib.columns import (
    AHEAD,
    BF16,
    COLUMNS,
    F16,
    F32,
    FAMILY,
    GRID,
    PLANS,
    SLAB,
    STRIDED,
    TWOPASS,
    WHOLE,
    WHOLE_SLAB,
    WINDOW,
    Plan,
    assert_gradient,
    gradient,
    names,
    operand,
    place_of,
    some,
    special,
)
from lib.forced import (
    COMING,
    ONE_A_BLOCK,
    ONE_EACH,
    PAIRS,
    TYPES,
    backward,
    check_backward,
    check_coming,
    check_forward,
    forward,
    kinds_of,
    shapes,
)
from lib.support import assert_defined
from onepass import native

pytestmark = pytest.mark.gpu

every_tier = pytest.mark.parametrize("edges", [WINDOW, WHOLE, SLAB, WHOLE_SLAB, STRIDED])
every_edge = pytest.mark.parametrize("tier", [COLUMNS, GRID, TWOPASS])


@every_edge
@every_tier
@pytest.mark.parametrize("function", native.FUNCTIONS)
def test_every_tier(runner, function, tier, edges):
    torch.manual_seed(0)
    for turn, types in enumerate(TYPES.get(function, PAIRS), native.FUNCTIONS.index(function)):
        for plan in some(PLANS[tier, edges], types == (F32, F32), turn, runner.most_cluster):
            check_forward(runner, function, types, plan, edges)


@every_edge
@every_tier
@pytest.mark.parametrize("function", [*FAMILY, "logsumexp"])
def test_every_tier_of_gradients(runner, function, tier, edges):
    torch.manual_seed(0)
    for turn, types in enumerate(TYPES.get(function, PAIRS), native.FUNCTIONS.index(function)):
        kinds = kinds_of(function, edges)
        if types != (F32, F32) and turn % 2:  # one value has a kernel of its own
            kinds = kinds[:1]
        for plan in some(PLANS[tier, edges], types == (F32, F32), turn, runner.most_cluster):
            check_backward(runner, function, types, plan, edges, kinds)


# Narrow vectors, whose halves go one by one or two at a time
@pytest.mark.parametrize("vector", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
def test_narrow_vectors(runner, dtype, vector):
    for tier, edges in ((COLUMNS, WINDOW), (COLUMNS, WHOLE), (GRID, SLAB), (TWOPASS, SLAB)):
        for n, inner, place, given in shapes(PLANS[tier, edges][0], edges, vector):
            x = operand(special(3, n, inner, dtype, runner.device), place, dtype)
            forward(runner, "softmax", x, dtype, place, given)
            backward(runner, "softmax", (3, n, inner), (dtype, dtype), ONE_EACH, place, given)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("function", ["softmax", "softmin"])
@pytest.mark.parametrize(("plan", "edges"), COMING, ids=str)
def test_maxima_that_come_late(runner, function, plan, edges, dtype):
    if not some([plan], True, 0, runner.most_cluster):
        pytest.skip("no clusters of so many blocks here")
    torch.manual_seed(0)
    check_coming(runner, function, plan, edges, dtype)


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
    (Plan(TWOPASS, 8, 8, 3, 3), WHOLE),
]


@pytest.mark.parametrize(("plan", "edges"), MANY, ids=str)
def test_many_tiles(runner, plan, edges):
    torch.manual_seed(0)
    outer = 6000 if runner.device == "cuda" else 300
    vector = 4 if edges != STRIDED else 1
    n, inner, place, given = list(shapes(plan, edges, vector))[1]
    x = operand(special(outer, n, inner, F32, runner.device), place, F32)
    for function in ("softmax", "logsumexp"):
        forward(runner, function, x, F32, place, given)
    for kind in (ONE_EACH, ONE_A_BLOCK):
        backward(runner, "log_softmax", (outer, n, inner), (F32, F32), kind, place, given)


# A plan, its edges, a shape over whose middle dim it goes
BITS = [
    (Plan(COLUMNS, 4, 16, 4), WHOLE, (5, 60, 40)),
    (Plan(COLUMNS, 4, 16, 4, 4), WINDOW, (5, 250, 41)),
    (Plan(GRID, 4, 64, 8, 32), WHOLE, (2, 9000, 16)),
    (Plan(GRID, 64, 1, 4, 8), SLAB, (9, 800, 7)),
    (Plan(TWOPASS, 4, 64, 8, 16), WHOLE, (2, 9000, 16)),
]


@pytest.mark.parametrize(("plan", "edges", "shape"), BITS, ids=str)
def test_bits_are_the_same_from_run_to_run(runner, plan, edges, shape):
    _, n, inner = shape
    place, given = place_of(edges, n, inner, 4), plan.given(edges, 4, inner)
    x, g = (operand(torch.randn(shape, device=runner.device), place, F32) for _ in range(2))
    results = []
    for _ in range(6):
        y, dx = (operand(torch.zeros_like(x), place, F32) for _ in range(2))
        runner.forced(x, 0, [1], False, given, y)
        runner.forced_backward(g, y, None, 0, [1], given, dx)
        results.append((y, dx))
    assert all(torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1]) for y, dx in results)


@pytest.mark.parametrize("edges", [WHOLE, WHOLE_SLAB])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_ring_runs_on_into_the_next_tile(runner, dtype, edges):
    """More tiles than the chip takes at a time, and a shelf that holds what registers do not, or some of the next."""
    torch.manual_seed(0)
    vector = 16 // dtype.itemsize
    across, down, n, inner = (2, 16, 250, 2 * vector) if edges == WHOLE else (98, 1, 31 * vector, 49)
    x, g = (torch.randn(300, n, inner, device=runner.device).mul(4).to(dtype) for _ in range(2))
    for shelf in (4, 8, 12):
        plan = (GRID, across, down, 4 * vector, vector, 2, shelf, edges)
        out, lse, dx = torch.full_like(x, torch.nan), x.new_full((300, inner), torch.nan), torch.full_like(x, torch.nan)
        runner.forced(x, 0, [1], False, plan, out)
        assert_defined("softmax", out, x, 1, f", plan {plan}")
        runner.forced(x, native.FUNCTIONS.index("logsumexp"), [1], False, plan, lse)
        assert_defined("logsumexp", lse, x, 1, f", plan {plan}")
        runner.forced_backward(g, out, None, 0, [1], plan, dx)
        assert_gradient(dx, *gradient("softmax", g, out, [1]))


LONG = (2, 9000, 16)  # over the chip
OVER_THE_CHIP = [Plan(GRID, 4, 64, 8, 32).given(WHOLE, 4, 16), Plan(TWOPASS, 4, 64, 8, 32).given(WHOLE, 4, 16)]


@pytest.mark.parametrize("plan", OVER_THE_CHIP, ids=str)
def test_in_a_graph(plan):
    x, g = torch.randn(LONG, device="cuda"), torch.randn(LONG, device="cuda")
    y, dx = torch.zeros_like(x), torch.zeros_like(x)

    def call() -> None:
        torch.ops.onepass._softmax_with_plan(x, 0, [1], False, plan, y)
        torch.ops.onepass._softmax_backward_with_plan(g, y, None, 0, [1], plan, dx)

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
        torch.ops.onepass._softmax_with_plan(x, 0, [1], False, plan, y)
        assert_defined("softmax", y, x, 1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    made: list[list[Tensor]] = [[torch.empty_like(x) for _ in range(50)] for x in xs]
    torch.cuda.synchronize()
    for turn in range(50):
        for x, stream, results in zip(xs, streams, made, strict=True):
            with torch.cuda.stream(stream):
                torch.ops.onepass._softmax_with_plan(x, 0, [1], False, plan, results[turn])
    torch.cuda.synchronize()
    for results, y in zip(made, want, strict=True):
        assert all(torch.equal(result, y) for result in results)
