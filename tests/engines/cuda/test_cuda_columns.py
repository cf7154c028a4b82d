"""Columns on the CUDA engine, forward and backward: every tier forced with every access, and the plans' own choice (no
memory beside the result, more than 2^31 elements, graphs and streams)."""

import pytest
import torch
from torch import Tensor

import onepass
from lib import plan_tables, plans
from lib.gradients import gradient
from lib.plan_tables import BF16, F16, F32, PREFETCH, Access, Plan, Tier, names
from lib.support import assert_defined, peak
from onepass import native, reference

pytestmark = pytest.mark.gpu
_ops = torch.ops.onepass

every_tier_and_access = pytest.mark.parametrize(("tier", "access"), plan_tables.COLUMN_PLANS, ids=names)


@every_tier_and_access
@pytest.mark.parametrize("function", native.FUNCTIONS)
def test_every_tier(runner, function, tier, access):
    torch.manual_seed(0)
    for turn, types in enumerate(plan_tables.TYPES.get(function, plan_tables.PAIRS), native.FUNCTIONS.index(function)):
        for plan in plan_tables.select(
            plan_tables.COLUMN_PLANS[tier, access], types == (F32, F32), turn, runner.most_cluster
        ):
            plans.check_columns(runner, function, types, plan)


@every_tier_and_access
def test_gradients_in_every_tier(runner, function, tier, access):
    torch.manual_seed(0)
    for turn, types in enumerate(plan_tables.TYPES.get(function, plan_tables.PAIRS), native.FUNCTIONS.index(function)):
        kinds = plans.kinds_of(function, access, tier)
        if types != (F32, F32) and turn % 2:  # one value has a kernel of its own
            kinds = kinds[:1]
        for plan in plan_tables.select(
            plan_tables.COLUMN_PLANS[tier, access], types == (F32, F32), turn, runner.most_cluster
        ):
            plans.check_column_gradients(runner, function, types, plan, kinds)


# Narrow vectors, of which two-byte elements go one by one or two at a time
@pytest.mark.parametrize("vector", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
def test_narrow_vectors(runner, dtype, vector):
    tiers = (
        (Tier.COLUMNS, Access.PREDICATED),
        (Tier.COLUMNS, Access.ALIGNED),
        (Tier.COLUMNS_GRID, Access.SLAB),
        (Tier.COLUMNS_TWOPASS, Access.SLAB),
    )
    for tier in tiers:
        for n, inner, place, given in plan_tables.shapes(plan_tables.COLUMN_PLANS[tier][0], vector):
            x = plans.operand(plans.special(3, n, inner, dtype, runner.device), place, dtype)
            plans.forward(runner, "softmax", x, dtype, place, given)
            plans.backward(runner, "softmax", (3, n, inner), (dtype, dtype), plans.ONE_EACH, place, given)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=names)
@pytest.mark.parametrize("function", ["softmax", "softmin"])
@pytest.mark.parametrize("plan", plan_tables.LATE_PLANS, ids=names)
def test_maxima_that_come_late(runner, function, plan, dtype):
    if not plan_tables.select([plan], True, 0, runner.most_cluster):
        pytest.skip("no clusters of so many blocks here")
    torch.manual_seed(0)
    plans.check_late_maxima(runner, function, plan, dtype)


# More tiles than blocks run at a time: one takes several, of which it prefetches the next, or announces it by messages
MANY = [
    Plan(Tier.COLUMNS, 8, 8, 4, 1, 1, PREFETCH, Access.PREDICATED),
    Plan(Tier.COLUMNS, 4, 8, 2, 1, 2, PREFETCH, Access.ALIGNED),
    Plan(Tier.COLUMNS, 16, 16, 3, 1, 8, PREFETCH, Access.ALIGNED),
    Plan(Tier.COLUMNS, 200, 1, 4, 1, 4, PREFETCH, Access.SLAB_ALIGNED),
    Plan(Tier.COLUMNS, 200, 1, 4, 1, 1, PREFETCH, Access.SLAB_ALIGNED),
    Plan(Tier.COLUMNS_GRID, 4, 16, 2, 1, 3, 0, Access.ALIGNED),
    Plan(Tier.COLUMNS_GRID, 4, 16, 2, 1, 33, 0, Access.PREDICATED),
    Plan(Tier.COLUMNS_GRID, 64, 1, 4, 1, 3, 0, Access.SLAB),
    Plan(Tier.COLUMNS_GRID, 32, 4, 4, 1, 3, 0, Access.STRIDED),
    Plan(Tier.COLUMNS_TWOPASS, 8, 8, 3, 1, 3, 0, Access.ALIGNED),
]


@pytest.mark.parametrize("plan", MANY, ids=names)
def test_many_tiles(runner, plan):
    torch.manual_seed(0)
    outer = 6000 if runner.device == "cuda" else 300
    n, inner, place, given = list(plan_tables.shapes(plan, 4 if plan.access != Access.STRIDED else 1))[1]
    x = plans.operand(plans.special(outer, n, inner, F32, runner.device), place, F32)
    for function in ("softmax", "logsumexp"):
        plans.forward(runner, function, x, F32, place, given)
    for kind in (plans.ONE_EACH, plans.ONE_A_BLOCK):
        plans.backward(runner, "log_softmax", (outer, n, inner), (F32, F32), kind, place, given)


BITS = [  # a plan, a shape over whose middle dim it goes
    (Plan(Tier.COLUMNS, 4, 16, 4, 1, 1, 0, Access.ALIGNED), (5, 60, 40)),
    (Plan(Tier.COLUMNS, 4, 16, 4, 1, 4, 0, Access.PREDICATED), (5, 250, 41)),
    (Plan(Tier.COLUMNS_GRID, 4, 64, 8, 1, 32, 0, Access.ALIGNED), (2, 9000, 16)),
    (Plan(Tier.COLUMNS_GRID, 64, 1, 4, 1, 8, 0, Access.SLAB), (9, 800, 7)),
    (Plan(Tier.COLUMNS_TWOPASS, 4, 64, 8, 1, 16, 0, Access.ALIGNED), (2, 9000, 16)),
]


@pytest.mark.parametrize(("plan", "shape"), BITS, ids=names)
def test_bits_are_the_same_from_run_to_run(runner, plan, shape):
    _, n, inner = shape
    place, given = plan_tables.place_of(plan.access, n, inner, 4), plan_tables.widen(plan, 4, inner)
    x, g = (plans.operand(torch.randn(shape, device=runner.device), place, F32) for _ in range(2))
    results = []
    for _ in range(6):
        y, dx = (plans.operand(torch.zeros_like(x), place, F32) for _ in range(2))
        runner.call("softmax", x, [1], y, given)
        runner.gradient("softmax", g, y, None, [1], dx, given)
        results.append((y, dx))
    assert all(torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1]) for y, dx in results)


@pytest.mark.parametrize("access", [Access.ALIGNED, Access.SLAB_ALIGNED], ids=names)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_pipeline_runs_on_into_the_next_tile(runner, dtype, access):
    """More tiles than the chip takes at a time; shared memory has what registers do not, or some of the next."""
    torch.manual_seed(0)
    vector = 16 // dtype.itemsize
    threads, down, n, inner = (2, 16, 250, 2 * vector) if access == Access.ALIGNED else (98, 1, 31 * vector, 49)
    x, g = (torch.randn(300, n, inner, device=runner.device).mul(4).to(dtype) for _ in range(2))
    for smem_vecs in (4, 8, 12):
        plan = Plan(Tier.COLUMNS_GRID, threads, down, 4 * vector, vector, 2, smem_vecs, access)
        out, lse, dx = torch.full_like(x, torch.nan), x.new_full((300, inner), torch.nan), torch.full_like(x, torch.nan)
        for function, y in (("softmax", out), ("logsumexp", lse)):
            runner.call(function, x, [1], y, plan)
            assert_defined(function, y, x, 1, f", plan {plan}")
        runner.gradient("softmax", g, out, None, [1], dx, plan)
        plans.assert_gradient(dx, *gradient("softmax", g, out, [1]))


# By the engine's own plans --------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


IN_PLACE = {
    "maps": lambda: (randn(4, 21, 256, 256), [1]),
    "maps of 49": lambda: (randn(32, 1000, 7, 7), [1]),
    "channels last": lambda: (randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last), [1]),
    "channels last, along": lambda: (randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last), [3]),
    "transposed": lambda: (randn(2048, 2048).t(), [1]),
    "sliced": lambda: (randn(64, 300, 300)[:, 5:290, 3:291], [1]),
    "stepped": lambda: (randn(64, 300, 300)[:, :, ::2], [1]),
    "two dims": lambda: (randn(64, 80, 196), [0, 2]),
    "long": lambda: (randn(300_000, 16), [0]),
}


@pytest.mark.parametrize("layout", IN_PLACE)
def test_nothing_as_large_as_the_input_is_made(layout):
    x, dims = IN_PLACE[layout]()
    size = x.numel() * x.element_size()
    y, g = onepass.softmax(x, dims), torch.randn_like(x)
    dx = torch.empty_like(y)
    lse, broadcast = onepass.logsumexp(x, dims), torch.ones((), device="cuda").expand_as(x)
    ones = torch.ones_like(lse)
    for call in (
        lambda: onepass.softmax(x, dims, out=y),
        lambda: onepass.logsumexp(x, dims),
        lambda: _ops._softmax_backward.out(g, y, 0, dims, dx),
        lambda: _ops._softmax_backward.out(broadcast, y, 0, dims, dx),
        lambda: _ops._logsumexp_backward.out(ones, x, lse, dims, False, dx),
    ):
        assert peak(call, "cuda") < size / 8


HUGE = {  # more than 2^31 elements
    "long columns": ((2**24 + 3, 129), 0),
    "many tiles": ((2**20 + 1, 21, 98), 1),
    "many slabs": ((2**21 + 1, 21, 49), 1),
    "long lines": ((3, 2**23 + 1, 86), 1),
}


@pytest.mark.parametrize("shape", HUGE)
def test_more_than_2_to_the_31_elements(room, shape):
    """Of bfloat16; some columns are compared, the first and the last among them."""
    sizes, dim = HUGE[shape]
    x = torch.empty(sizes, device="cuda", dtype=BF16).normal_()
    assert x.numel() > 2**31
    y = torch.full_like(x, torch.nan)
    onepass.softmax(x, dim, out=y)
    if dim == 0:
        some = [(slice(None), column) for column in (0, 1, 64, 128)]
    else:
        inner = sizes[2] - 1
        places = (0, 1, sizes[0] // 2, sizes[0] - 2, sizes[0] - 1)
        some = [(outer, slice(None), column) for outer in places for column in (0, inner // 2, inner)]
    for at in some:
        want = reference.softmax(x[at], 0)
        torch.testing.assert_close(y[at].double(), want, rtol=plans.TOLERANCE[BF16], atol=torch.finfo(BF16).tiny)
    lse = onepass.logsumexp(x, dim)
    for at in some:
        rest = tuple(i for i in at if not isinstance(i, slice))
        torch.testing.assert_close(lse[rest].double(), reference.logsumexp(x[at], 0), rtol=1e-2, atol=1e-2)
    assert not any(bool(part.isnan().any()) for part in y.view(-1).split(2**28))
    g = x  # its values are as good as any
    dx = torch.full_like(x, torch.nan)
    _ops._softmax_backward.out(g, y, 0, [dim], dx)
    for at in some:
        plans.assert_gradient(dx[at], *gradient("softmax", g[at], y[at], [0]))
    assert not any(bool(part.isnan().any()) for part in dx.view(-1).split(2**28))
