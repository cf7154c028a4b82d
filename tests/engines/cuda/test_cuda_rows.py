"""Rows on the CUDA engine, forward and backward: every tier forced, and the plans' own choice at any length and
alignment."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import onepass
from lib import plan_tables, plans
from lib.gradients import gradient
from lib.plan_tables import BF16, F16, F32, F64, Access, Plan, Tier, names
from onepass import native

pytestmark = pytest.mark.gpu
_ops = torch.ops.onepass


@pytest.mark.parametrize("function", native.FUNCTIONS)
@pytest.mark.parametrize("types", plan_tables.PAIRS, ids=names)
def test_every_tier(runner, function, types):
    if not plans.is_served(function, *types):
        pytest.skip("the function does not give that")
    for plan, lengths in plan_tables.ROW_PLANS:
        plans.check_rows(runner, function, types, plan, lengths)


# Gradients ------------------------------------------------------------------------------------------------------------

GRADIENT_PAIRS = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (F32, BF16), (BF16, F32), (F64, F32)]


def check(
    runner: plans.Runner,
    function: str,
    shape: tuple[int, int],
    types: tuple[torch.dtype, torch.dtype] = (F32, F32),
    offsets: tuple[int, int, int] = (0, 0, 0),
    paddings: tuple[int, int, int] = (0, 0, 0),
    broadcast: bool = False,
    plan: Plan | None = None,
) -> None:
    """One gradient. Offsets and elements between rows: of what was saved, of the result's gradient, of the result."""
    rows, n = shape
    y, g, dx = (plan_tables.Place((n + gap, 1, 1), at) for at, gap in zip(offsets, paddings, strict=True))
    kind = plans.ONE_A_BLOCK if broadcast else plans.ONE_EACH
    plans.backward(
        runner, function, (rows, n, 1), types, kind, (y, plan_tables.Place((1, 1, 1), 0) if broadcast else g, dx), plan
    )


def lengths_of(plan: Plan, longest: int) -> list[int]:
    """Lengths about the vectors, and the longest, that a plan serves."""
    vector = plan.vec_size
    room = plan.threads_per_row * plan.items_per_thread * plan.blocks_per_row
    room = room if plan.tier in (Tier.WARP, Tier.STAGED, Tier.BLOCK, Tier.CLUSTER) else longest
    chosen = {1, vector, 37, room // 2 + 1, room - vector} | ({5000} if plan.tier == Tier.TWOPASS else set())
    if plan.tier == Tier.PIPELINED:
        vectors = plan.items_per_thread // vector
        longest = (plan.smem_vecs // vectors - 1) * plan.threads_per_row * plan.items_per_thread * plan.blocks_per_row
        chosen = {n for n in {*chosen, longest + vector - 1} if n <= longest + vector - 1}
    return [n for n in sorted(chosen) if n >= 1 and (n <= room - vector + 1 or plan.tier == Tier.TWOPASS)]


FORCED = [  # the tier staged reads each element of a gradient
    pytest.param(name, broadcast, id=name + " broadcast" * broadcast)
    for name, plan in plan_tables.ROW_GRADIENT_PLANS.items()
    for broadcast in ((False,) if plan.tier == Tier.STAGED else (False, True))
]


@pytest.mark.parametrize("types", GRADIENT_PAIRS, ids=names)
@pytest.mark.parametrize(("tier", "broadcast"), FORCED)
def test_gradients_in_every_tier(runner, tier, types, broadcast):
    vector, plan = 16 // max(t.itemsize for t in types), plan_tables.ROW_GRADIENT_PLANS[tier]
    vectors = plan.items_per_thread
    if vectors * vector > 64 or (plan.tier == Tier.GRID and vectors > (4 if vector == 2 else 8)):
        plan = plan._replace(items_per_thread=64 // vector)
    if plan.tier == Tier.CLUSTER and plan.blocks_per_row > runner.most_cluster:
        pytest.skip("no clusters of so many blocks here")
    plan = plan_tables.widen(plan, vector)
    check_every_access(runner, plan_tables.FAMILY, types, plan, 5000, broadcast)


def check_every_access(
    runner: plans.Runner, functions: Sequence[str], types: plan_tables.Types, plan: Plan, longest: int, broadcast=False
) -> None:
    """Rows of whole vectors and rows that begin and end within one, beside each other and apart."""
    vector = plan.vec_size
    for function, n in itertools.product(functions, lengths_of(plan, longest)):
        for access in (Access.PREDICATED, Access.SCALAR, Access.ALIGNED):
            streams = plan.tier in (Tier.GRID, Tier.TWOPASS, Tier.PIPELINED) and function != "logsumexp"
            if access == Access.ALIGNED and (n % vector or streams):
                continue
            if access == Access.PREDICATED and n < vector:  # no such vector lies in a row
                continue
            if plan.tier in (Tier.STAGED, Tier.PIPELINED) and access != Access.PREDICATED:
                continue
            for at, gap in {(0, 0), (0, 0) if access == Access.ALIGNED else (1, 3)}:
                gap = min(gap, n // 2) if plan.tier == Tier.STAGED else gap
                if n == 1 and gap == 0:  # elements side by side are columns
                    continue
                check(runner, function, (5, n), types, (at,) * 3, (gap,) * 3, broadcast, plan._replace(access=access))


LENGTHS = [1, 2, 7, 16, 33, 64, 100, 129, 200, 513, 781, 1000, 1025, 2048, 4097, 8192, 12289, 32001, 50257]
LONG = [(1, 131072), (5, 131073), (1, 300001), (3, 1 << 20), (2, (1 << 22) + 3), (40, 128256)]


@pytest.fixture
def gpu() -> plans.Engine:
    return plans.Engine("cuda")


@pytest.mark.parametrize("n", LENGTHS)
def test_gradients_by_the_engines_own_plans(gpu, n):
    rng = random.Random(n)
    places = [((0, 0, 0), (0, 0, 0)), ((1, 1, 1), (0, 0, 0)), ((1, 2, 3), (0, 8, 1)), ((0, 4, 0), (8, 0, 8))]
    for function, types in itertools.product(plan_tables.FAMILY, GRADIENT_PAIRS):
        if n > 300 and types[0] is not types[1] and rng.random() < 0.5:
            continue
        for offsets, paddings in places:
            check(gpu, function, (rng.choice((1, 3, 37, 130)), n), types, offsets, paddings, rng.random() < 0.2)


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
def test_gradients_of_long_rows(gpu, shape, dtype):
    for function in plan_tables.FAMILY[:2]:
        check(gpu, function, shape, (dtype, dtype))
        check(gpu, function, shape, (dtype, dtype), (1, 1, 1), (3, 3, 3), broadcast=True)


@pytest.mark.parametrize("types", plan_tables.TYPES["logsumexp"], ids=names)
@pytest.mark.parametrize("n", [1, 9, 33, 500, 513, 4096, 50257])
def test_gradients_of_logsumexp_by_the_engines_own_plans(gpu, n, types):
    for rows, offset, padding in ((1, 0, 0), (37, 0, 0), (130, 1, 1), (5, 3, 8)):
        check(gpu, "logsumexp", (rows, n), types, (offset,) * 3, (padding,) * 3)
        check(gpu, "logsumexp", (rows, n), types, (offset, 0, 0), (padding, 0, 0))


@pytest.mark.parametrize("types", plan_tables.TYPES["logsumexp"], ids=names)
@pytest.mark.parametrize("plan", plan_tables.LOGSUMEXP_GRADIENT_PLANS, ids=names)
def test_gradients_of_logsumexp_in_every_tier(runner, plan, types):
    for vector in (16 // types[0].itemsize, 1):
        wide = plan_tables.widen(plan, vector)
        check_every_access(runner, ["logsumexp"], types, wide, wide.threads_per_row * wide.items_per_thread)


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 33, 200, 1000, 4099, 30001, 131073])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
def test_bits_of_a_rows_gradient_do_not_depend_on_its_neighbours(n, dtype):
    for number, function in enumerate(plan_tables.FAMILY[:2]):
        y = getattr(onepass, function)(torch.randn(50, n, device="cuda"), -1).to(dtype)
        g = torch.randn(50, n, device="cuda").to(dtype)
        with onepass.batch_invariant():
            together = _ops._softmax_backward(g, y, number, [1], dtype)
            for first, count in ((0, 1), (7, 1), (13, 20), (49, 1)):
                part = slice(first, first + count)
                alone = _ops._softmax_backward(g[part].clone(), y[part].clone(), number, [1], dtype)
                assert torch.equal(alone, together[part])


def test_gradients_of_more_than_2_to_the_31_elements(room):
    rows, n = 2**21 + 3, 1025
    y, g = (torch.empty(rows, n, device="cuda", dtype=BF16) for _ in range(2))
    y.fill_(1 / n), g.normal_()
    dx = _ops._softmax_backward(g, y, 0, [1], BF16)
    for at in (0, 1, 2**21 // 2, 2**21 - 1, 2**21, rows - 1):
        want, scale = gradient("softmax", g[at : at + 1], y[at : at + 1], [1])
        assert ((dx[at].double() - want[0]).abs() / scale[0]).max() <= plans.TOLERANCE[BF16]
