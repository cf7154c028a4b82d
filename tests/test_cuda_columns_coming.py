"""Columns of float32 of which a part is on the shelf: exponentials take their places as elements come, relative to the
maximum of those in registers, which later ones may leave far behind, in one thread or in all (cuda/columns.cu)."""

import pytest
import torch
from torch import Tensor

from columns_support import AHEAD, COLUMNS, F32, GRID, WHOLE, WHOLE_SLAB, WINDOW, Place, Plan, amid, some
from onepass import native
from support import assert_defined

pytestmark = pytest.mark.gpu

PLANS = [  # a few threads have many vectors each, so that elements come in five turns and more
    (Plan(COLUMNS, 4, 4, 5, 1, 16), WHOLE),
    (Plan(COLUMNS, 2, 8, 4, 4, 8), WHOLE),
    (Plan(COLUMNS, 4, 4, 12, 2), WHOLE),
    (Plan(COLUMNS, 4, 4, 9, 2), WINDOW),
    (Plan(COLUMNS, 4, 8, 8, 2, AHEAD), WHOLE),
    (Plan(COLUMNS, 64, 1, 4, 2, 12), WHOLE_SLAB),
    (Plan(GRID, 2, 8, 5, 2, 8), WHOLE),
]


def columns(n: int, inner: int) -> Tensor:
    """One kind of column beside another: (9, n, inner), as close as `inner` to the next kind."""
    at = torch.arange(n, device="cuda", dtype=F32).unsqueeze(1)
    noise = torch.randn(n, inner, device="cuda")
    rising = (at / n - 0.5) * 800
    spike = torch.where(at == torch.randint(n, (inner,), device="cuda"), 300.0, -300.0)
    kinds = [
        rising + noise,
        -rising + noise,
        spike + noise,
        59 * (at % 13 == 7) + 40 * (at % 5 == 3) + noise,  # just under what makes a thread begin anew
        torch.where(at < n // 2, -torch.inf, noise + 100),
        torch.where(at == n - 1, torch.inf, noise),
        torch.where(at == n // 2, torch.nan, rising + noise),
        torch.full_like(noise, -torch.inf),
        torch.where(at % 2 == 0, 3e38, -3e38) + noise,
    ]
    return torch.stack(kinds)


@pytest.mark.parametrize("function", ["softmax", "softmin"])
def test_maxima_that_come_late(function):
    able = some([plan for plan, _ in PLANS], every=True, turn=0)
    for plan, edges in PLANS:
        if plan in able:
            check(function, plan, edges)


def check(function: str, plan: Plan, edges: int) -> None:
    torch.manual_seed(0)
    inner = {WINDOW: 19, WHOLE: 24}.get(edges, 7)
    for n in plan.lengths(edges, 4, inner):
        x = columns(n, inner)
        x = torch.cat([x, x.flip(0).roll(3, 2)])  # neighbours of all kinds
        x = torch.cat([x, torch.where(torch.arange(inner, device="cuda") % 2 == 0, x, x.flip(0))])
        if function == "softmin":
            x = -x
        pitch = -(-inner // 4) * 4 if edges != WHOLE_SLAB else inner
        _, there = amid(torch.nan, x.shape, Place((n * pitch, pitch, 1), 4), F32, "cuda")
        there.copy_(x)
        _, out = amid(torch.nan, x.shape, Place((n * pitch, pitch, 1), 4), F32, "cuda")
        given = plan.given(edges, 4, inner)
        torch.ops.onepass._forced(there, native.FUNCTIONS.index(function), [1], False, given, out)
        assert_defined(function, out, x, 1, f", plan {given}")
        want = torch.softmax(-x.double() if function == "softmin" else x.double(), 1)
        small = (want > 1e-37) & (want < 1e-20)  # as exact as the others
        if n > 40:
            assert bool(small.any())
        torch.testing.assert_close(out[small].double(), want[small], rtol=2e-5, atol=0)
