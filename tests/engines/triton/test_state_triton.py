"""The state on the Triton engine: every tier forced on small shapes under Triton's interpreter."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.state import assert_state, type_of
from lib.support import LAYOUTS, maker, some_tuples
from lib.triton import TIERS, needs_triton, process, special, unavailable
from onepass import State

pytestmark = needs_triton


@pytest.fixture(scope="module")
def forward() -> Iterator[Callable[..., State]]:
    """forward(x, dims, plan=None, strides=None) -> the state with its dims kept, in a process where Triton interprets.

    `strides`: how many elements apart the results are to lie.
    """
    for call in process("1"):
        reason = call(unavailable, "cpu")
        if reason is not None and "NumPy" in reason:
            pytest.skip(reason)
        assert reason is None

        def run(x: Tensor, dims: Any, plan: engine.Plan | None = None, step: int = 1, call: Any = call) -> State:
            box = io.BytesIO()
            torch.save(x, box)
            return State(*torch.load(io.BytesIO(call(_forward, box.getvalue(), tuple(dims), plan, step))))

        yield run


def _forward(data: bytes, dims: tuple[int, ...], plan: engine.Plan | None, step: int) -> bytes:
    x = torch.load(io.BytesIO(data))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    whole = torch.full((2, *shape, step), 777.0, dtype=type_of(x.dtype))  # a result that no answer looks like
    engine.forward("state", x, whole[..., 0], dims, plan=plan)
    assert bool((whole[..., 1:] == 777).all())
    box = io.BytesIO()
    torch.save((whole[0, ..., 0].clone(), whole[1, ..., 0].clone()), box)
    return box.getvalue()


@pytest.mark.parametrize("tier", TIERS)
def test_special_rows_in_every_tier(forward, dtype, tier):
    x = special(dtype)
    assert_state(forward(x, (1,), TIERS[tier]), x, 1, True)
    assert_state(forward(x, (1,), TIERS[tier], step=3), x, 1, True)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
def test_row_lengths_about_the_edges_of_a_tile(forward, tier, n):
    x = maker(torch.float32)(3, n)
    assert_state(forward(x, (1,), TIERS[tier]), x, 1, True)
    nothing = torch.full((2, n), torch.nan)  # a tile without a padded lane has nothing but NaN
    assert_state(forward(nothing, (1,), TIERS[tier]), nothing, 1, True)


@pytest.mark.parametrize("layout", list(LAYOUTS)[::2])  # logsumexp, of which the kernel is one, takes all of them
def test_layouts_and_dims(forward, layout):
    x = LAYOUTS[layout](maker(torch.bfloat16))
    for spelled in some_tuples(x):
        dims = tuple(sorted(d % max(x.ndim, 1) for d in spelled)) if x.ndim else ()
        assert_state(forward(x, dims), x, dims or 0, True, f", layout {layout}")
