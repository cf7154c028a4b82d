"""Columns without a GPU, by the emulator of their kernels: a part of what test_cuda_columns.py does (all of it with
`--emulate`)."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from emulator import Emulator, missing
from lib.columns import BF16, F16, F32, F64, FAMILY, PLANS
from lib.forced import (
    COMING,
    PAIRS,
    TYPES,
    check_backward,
    check_coming,
    check_forward,
    kinds_of,
)
from lib.samples import ROWS
from lib.views import check_views
from onepass import native

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PLACES = list(enumerate(PLANS))  # each tier with each kind of edges; functions, types and plans take turns


@pytest.mark.parametrize(("turn", "place"), PLACES, ids=str)
def test_every_tier(emulator, turn, place):
    torch.manual_seed(0)
    function = native.FUNCTIONS[turn % 5]
    types = TYPES.get(function, PAIRS)
    plan = PLANS[place][turn % len(PLANS[place])]
    check_forward(emulator, function, types[turn * 3 % len(types)], plan, place[1])


@pytest.mark.parametrize(("turn", "place"), PLACES[::2], ids=str)
def test_every_tier_of_gradients(emulator, turn, place):
    torch.manual_seed(0)
    function = [*FAMILY, "logsumexp"][turn // 2 % 4]
    types, kinds = TYPES.get(function, PAIRS), kinds_of(function, place[1])
    plan = PLANS[place][(turn + 1) % len(PLANS[place])]
    check_backward(emulator, function, types[turn * 5 // 2 % len(types)], plan, place[1], kinds[turn // 2 % 2 :][:1])


SHELVED = [(plan, edges) for (_, edges), plans in PLANS.items() for plan in plans if plan.shelf > 1]


@pytest.mark.parametrize(("plan", "edges"), SHELVED[::2], ids=str)
def test_shelves(emulator, plan, edges):
    torch.manual_seed(0)
    check_forward(emulator, "softmax", (F32, F32), plan, edges)


def test_shelves_of_doubles(emulator):
    torch.manual_seed(0)
    check_forward(emulator, "log_softmax", (F64, F64), *SHELVED[0])


@pytest.mark.parametrize(("plan", "edges"), [case for case in COMING if case[0].shelf > 1], ids=str)
def test_maxima_that_come_late(emulator, plan, edges):
    torch.manual_seed(0)
    check_coming(emulator, "softmax", plan, edges)


# In clusters, without, over the chip
@pytest.mark.parametrize(("dtype", "at"), [(BF16, 1), (F16, 0), (BF16, 6)], ids=str)
def test_maxima_of_halves_that_come_late(emulator, dtype, at):
    torch.manual_seed(0)
    check_coming(emulator, "softmin" if at else "softmax", *COMING[at], dtype)


# Normal ones of standard deviation 4, one far above the others, and those that grow: error in units of the last place
@pytest.mark.parametrize(("kind", "most"), [("huge offset", 3.0), ("one-hot", 3.0), ("rising", 4.5)])
def test_what_is_raised_stays_exact(emulator, kind, most):
    x = ROWS[kind](32, 2048, torch.Generator().manual_seed(2)).to(F32).t().contiguous()
    y = torch.full_like(x, torch.nan)
    emulator.forced(x, native.FUNCTIONS.index("softmax"), [0], False, (6, 8, 16, 48, 4, 4, 20, 2), y)
    want = torch.softmax(x.double(), 0)
    error = ((y - want).abs() / want)[want > torch.finfo(F32).smallest_normal]
    assert error.max() <= most * torch.finfo(F32).eps


# One element, not among the first, that is the farther above the others the less is left of its result
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_log_softmax_next_to_nothing_stays_exact(emulator, dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 2048)
    x[torch.arange(64), torch.randint(1024, 2048, (64,))] = torch.linspace(6, 24, 64)
    x = x.to(dtype).t().contiguous()
    y = torch.full_like(x, torch.nan)
    emulator.forced(x, native.FUNCTIONS.index("log_softmax"), [0], False, (6, 8, 16, 96, 8, 8, 4, 2), y)
    want = torch.log_softmax(x.double(), 0)
    rounding = want.abs() * torch.finfo(dtype).eps / 2
    assert (y - want).abs().le(rounding * 1.001 + 2 * torch.finfo(F32).eps).all()


class OwnPlans:
    """As an H200 serves them."""

    device = "cpu"

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator

    def call(self, function: str, x: Tensor, dims: Sequence[int], y: Tensor) -> None:
        self.emulator.forced(x, native.FUNCTIONS.index(function), dims, False, None, y)

    def gradient(
        self, function: str, g: Tensor, saved: Tensor, lse: Tensor | None, dims: Sequence[int], dx: Tensor
    ) -> None:
        self.emulator.forced_backward(g, saved, lse, native.FUNCTIONS.index(function), dims, None, dx)


@pytest.mark.parametrize("seed", range(5))
def test_any_views(emulator, seed):
    check_views(OwnPlans(emulator), seed)
