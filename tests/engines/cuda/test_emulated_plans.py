"""Forced plans without a GPU, by the emulator of CUDA kernels: a part of what the tests of rows and of columns do (with
`--emulate` they do all of it). Functions, types and plans take turns."""

import random

import pytest
import torch

from emulator import missing
from lib import plan_tables, plans
from lib.plan_tables import BF16, F16, F32, F64, PREFETCH, Access, Plan, Tier, names
from lib.samples import ROWS
from lib.support import slow, thin, thin_tuples
from lib.views import check_views
from onepass import native

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PLACES = list(enumerate(plan_tables.COLUMN_PLANS))  # each tier with each access
GRADIENTS = list(plan_tables.ROW_GRADIENT_PLANS)
FIRST = {plan.tier: turn for turn, (plan, _) in [*enumerate(plan_tables.ROW_PLANS)][::-1]}  # of each tier


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "turn", [turn if turn in FIRST.values() else slow(turn) for turn in range(len(plan_tables.ROW_PLANS))]
)
def test_rows_in_every_tier(emulator, turn):
    serves = plan_tables.FAMILY if plan_tables.ROW_PLANS[turn][0].tier == Tier.PIPELINED else native.FUNCTIONS
    function = serves[turn // 2 % len(serves)]
    types = [pair for pair in plan_tables.PAIRS if plans.is_served(function, *pair)]
    plans.check_rows(emulator, function, types[turn // 4 % len(types)], *plan_tables.ROW_PLANS[turn])


@pytest.mark.parametrize("tier", thin(GRADIENTS[::-1], 3))  # in twopass, over the grid, in a cluster, staged
def test_gradients_of_rows_in_every_tier(emulator, tier):
    """Aligned rows, and rows that begin within a vector; the result's gradient has every element, or one per row."""
    turn = GRADIENTS.index(tier)
    types = [(BF16, BF16), (F32, F32), (F16, F16), (BF16, F32), (F32, BF16)][turn % 5]
    vector = 16 // max(t.itemsize for t in types)
    plan = plan_tables.widen(plan_tables.ROW_GRADIENT_PLANS[tier], vector)
    lengths = ((9 * vector, 0, 0, False), (37, 1, 3, False), (37, 1, 3, True))
    if plan.tier == Tier.STAGED:
        lengths = ((33, 0, 0, False), (34, 1, 3, False))
    for n, at, gap, broadcast in lengths:
        place = plan_tables.Place((n + gap, 1, 1), at)
        places = (place, plan_tables.Place((1, 1, 1), 0) if broadcast else place, place)
        kind = plans.ONE_A_BLOCK if broadcast else plans.ONE_EACH
        plans.backward(emulator, plan_tables.FAMILY[turn % 3], (5, n, 1), types, kind, places, plan)


@pytest.mark.parametrize(("turn", "place"), thin_tuples(PLACES, 4), ids=names)
def test_columns_in_every_tier(emulator, turn, place):
    function = native.FUNCTIONS[turn % 5]
    types = plan_tables.TYPES.get(function, plan_tables.PAIRS)
    plans.check_columns(
        emulator,
        function,
        types[turn * 3 % len(types)],
        plan_tables.COLUMN_PLANS[place][turn % len(plan_tables.COLUMN_PLANS[place])],
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_a_group_before_one_of_few_bytes_is_not_read_beyond_the_tensor(emulator, stages):
    x, y = (torch.randn(13).to(BF16)[1:].view(3, 2, 2) for _ in range(2))  # two slices are a vector, the third half one
    emulator.call("softmax", x, [1], y, Plan(Tier.COLUMNS_STAGED, 4, 1, 2, 1, stages, 2, Access.ALIGNED))
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), 1), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("seed", "count"), [(0, 6), slow(1, 160)])
def test_small_groups_of_any_place(emulator, seed, count):
    """Few slices of few elements, which begin anywhere, with gaps between lines and slices, or in place."""
    rng = random.Random(seed)

    def draw(*values: int) -> int:
        return rng.choice(values)

    for _ in range(count):
        outer, (n, columns), inner = rng.randint(1, 9), rng.choice([(2, 4), (3, 1)]), rng.randint(2, 9)
        group = max(rng.randint(1, 4), -(-8 // (n * inner)))
        plan = Plan(Tier.COLUMNS_STAGED, draw(4, 8, 16), 1, n * columns, columns, draw(1, 2), group, Access.ALIGNED)
        places = []
        for _ in "xy":
            line = inner + draw(0, 0, 1, 3)
            places.append(plan_tables.Place((n * line + draw(0, 0, 1, 5), line, 1), rng.randint(0, 9)))
        if any(place.strides[0] > 4 * n * inner for place in places):
            continue  # too far apart
        if rng.random() < 0.7:
            x = plans.operand(torch.randn(outer, n, inner), places[0], BF16)
            plans.forward(emulator, "softmax", x, BF16, places[1], plan)
        else:
            where = (places[0], places[1], places[draw(0, 1)])
            plans.backward(emulator, "softmax", (outer, n, inner), (BF16, BF16), plans.ONE_EACH, where, plan)


PAIRS_OF_COLUMNS = [p for p in plan_tables.COLUMN_PLANS[Tier.COLUMNS_STAGED, Access.ALIGNED] if p.vec_size == 2]


@pytest.mark.parametrize("types", thin(plan_tables.PAIRS[::-1], 8), ids=names)  # all widths, of input and result
@pytest.mark.parametrize("plan", thin(PAIRS_OF_COLUMNS, 4), ids=names)
def test_pairs_of_columns_of_any_types(emulator, plan, types):
    """Of two elements of a half type that are one word in the input, the results may be two, and the other way."""
    plans.check_columns(emulator, "softmax", types, plan)


@pytest.mark.parametrize(
    ("turn", "place"),  # other places than those whose values are quick
    [(turn, place) if turn % 8 == 2 else slow(turn, place) for turn, place in PLACES[::2]],
    ids=names,
)
def test_gradients_of_columns_in_every_tier(emulator, turn, place):
    function = [*plan_tables.FAMILY, "logsumexp"][turn // 4 % 4]
    types, kinds = plan_tables.TYPES.get(function, plan_tables.PAIRS), plans.kinds_of(function, place[1], place[0])
    plan = plan_tables.COLUMN_PLANS[place][(turn + 1) % len(plan_tables.COLUMN_PLANS[place])]
    plans.check_column_gradients(
        emulator, function, types[turn * 5 // 2 % len(types)], plan, kinds[turn // 4 % 2 :][:1]
    )


IN_SMEM = [plan for each in plan_tables.COLUMN_PLANS.values() for plan in each if plan.smem_vecs > PREFETCH]


@pytest.mark.slow
@pytest.mark.parametrize("plan", IN_SMEM[::2], ids=names)
def test_columns_in_shared_memory(emulator, plan):
    plans.check_columns(emulator, "softmax", (F32, F32), plan)


def test_columns_of_float64_in_shared_memory(emulator):
    plans.check_columns(emulator, "log_softmax", (F64, F64), IN_SMEM[0])


@pytest.mark.parametrize("plan", thin([p for p in plan_tables.LATE_PLANS if p.smem_vecs > PREFETCH], 6), ids=names)
def test_maxima_that_come_late(emulator, plan):
    plans.check_late_maxima(emulator, "softmax", plan)


# In clusters, without, over the chip
@pytest.mark.parametrize(("dtype", "at"), [(BF16, 1), slow(F16, 0), slow(BF16, 6)], ids=str)
def test_maxima_of_half_types_that_come_late(emulator, dtype, at):
    plans.check_late_maxima(emulator, "softmin" if at else "softmax", plan_tables.LATE_PLANS[at], dtype)


# Normal ones of standard deviation 4, one far above the others, and those that grow: error in units of the last place
@pytest.mark.parametrize(("kind", "most"), [("huge offset", 3.0), ("one-hot", 3.0), ("rising", 4.5)])
def test_what_is_rescaled_stays_exact(emulator, kind, most):
    x = ROWS[kind](32, 2048, torch.Generator().manual_seed(2)).to(F32).t().contiguous()
    y = torch.full_like(x, torch.nan)
    emulator.call("softmax", x, [0], y, Plan(Tier.COLUMNS, 8, 16, 48, 4, 4, 20, Access.ALIGNED))
    want = torch.softmax(x.double(), 0)
    error = ((y - want).abs() / want)[want > torch.finfo(F32).smallest_normal]
    assert error.max() <= most * torch.finfo(F32).eps


# One element, not among the first, that is the farther above the others the less is left of its result
@pytest.mark.parametrize("dtype", [F16, slow(BF16)])
def test_log_softmax_next_to_nothing_stays_exact(emulator, dtype):
    x = torch.randn(64, 2048)
    x[torch.arange(64), torch.randint(1024, 2048, (64,))] = torch.linspace(6, 24, 64)
    x = x.to(dtype).t().contiguous()
    y = torch.full_like(x, torch.nan)
    emulator.call("log_softmax", x, [0], y, Plan(Tier.COLUMNS, 8, 16, 96, 8, 8, 4, Access.ALIGNED))
    want = torch.log_softmax(x.double(), 0)
    rounding = want.abs() * torch.finfo(dtype).eps / 2
    assert (y - want).abs().le(rounding * 1.001 + 2 * torch.finfo(F32).eps).all()


@pytest.mark.parametrize("seed", thin(range(5), 5))
def test_any_views_by_an_h200s_own_plans(emulator, seed):
    check_views(emulator, seed)
