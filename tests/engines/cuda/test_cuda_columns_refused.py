"""Plans of columns that cannot serve a call on the CUDA engine: an error says why, and nothing is written."""

import pytest
import torch

from lib.columns import (
    AHEAD,
    COLUMNS,
    F32,
    GRID,
    SLAB,
    STRIDED,
    TWOPASS,
    WHOLE,
    WHOLE_SLAB,
    WINDOW,
    Place,
    amid,
    operand,
)

pytestmark = pytest.mark.gpu

_ops = torch.ops.onepass
REFUSED = [  # of (3, 20, 12) floats over dim 1
    ((9, 4, 4, 16, 4, 1, 0, WINDOW), "tier is 0"),
    ((COLUMNS, 4, 4, 16, 4), "a plan is"),
    ((COLUMNS, 4, 4, 6, 4, 1, 0, WINDOW), "items_per_thread 1 to 32 times as many"),
    ((COLUMNS, 4, 4, 132, 4, 1, 0, WINDOW), "items_per_thread 1 to 32 times as many"),
    ((COLUMNS, 4, 4, 12, 3, 1, 0, WINDOW), "vec_size is a power of two up to 8"),
    ((COLUMNS, 4, 4, 16, 4, 3, 0, WINDOW), "blocks_per_tile is a power of two up to 16 in the tier columns"),
    ((GRID, 4, 4, 16, 4, 0, 0, WINDOW), "1 to 1024 in the other tiers"),
    ((COLUMNS, 0, 4, 16, 4, 1, 0, WINDOW), "have 1 to 1024 threads"),
    ((COLUMNS, 64, 32, 16, 4, 1, 0, WINDOW), "have 1 to 1024 threads"),
    ((COLUMNS, 4, 4, 16, 4, 1, 3, WHOLE), "smem_vecs is a multiple of 4 up to 64"),
    ((COLUMNS, 4, 4, 16, 4, 1, 68, WHOLE), "smem_vecs is a multiple of 4 up to 64"),
    ((COLUMNS, 4, 4, 4, 1, 1, 4, WHOLE), "smem_vecs is a multiple of 4 up to 64"),
    ((GRID, 4, 4, 16, 4, 2, AHEAD, WHOLE), "or 1 for the next tile"),
    ((TWOPASS, 4, 4, 16, 4, 1, 4, WHOLE), "smem_vecs is a multiple of 4 up to 64"),
    ((COLUMNS, 4, 4, 16, 4, 1, 0, 1), "access is 0"),
    ((COLUMNS, 4, 4, 16, 4, 1, 0, 6), "access is 0"),
    ((COLUMNS, 4, 4, 16, 4, 1, 4, WINDOW), "shared memory holds whole vectors"),
    ((COLUMNS, 4, 4, 16, 1, 1, 0, STRIDED), "access strided is for strides"),
    ((COLUMNS, 4, 4, 32, 8, 1, 0, WINDOW), "allow vectors of 4"),
    ((COLUMNS, 4, 4, 16, 4, 1, 0, WINDOW), "of so many elements: 16"),
    ((GRID, 4, 4, 8, 4, 2, 0, WINDOW), "of so many elements: 16"),
    ((COLUMNS, 32, 1, 16, 4, 1, 0, SLAB), "a whole number of lines of a slab"),
    ((COLUMNS, 3, 2, 16, 4, 1, 0, SLAB), "a whole number of lines of a slab"),
    ((GRID, 3, 1, 16, 4, 4, 0, WHOLE_SLAB), "of so many elements: 192"),
    ((GRID, 4, 4, 16, 4, 1000, 0, WINDOW), "blocks that share columns: up to"),
    ((GRID, 32, 32, 4, 4, 1, 64, WHOLE), "bytes of shared memory"),
]


@pytest.mark.parametrize(("plan", "words"), REFUSED, ids=str)
def test_a_plan_that_cannot_serve_is_refused(plan, words):
    x = torch.randn(3, 20, 12, device="cuda")
    out = torch.full_like(x, 5.0)
    with pytest.raises(RuntimeError, match=words):
        _ops._softmax_with_plan(x, 0, [1], False, plan, out)
    with pytest.raises(RuntimeError, match=words):
        _ops._softmax_backward_with_plan(x, x, None, 0, [1], plan, out)
    assert (out == 5).all()


BESIDE = [  # the place of (3, 20, 12), the dim, a plan that would serve others
    (Place((240, 12, 1), 1), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, WINDOW), "allow vectors of 1"),
    (Place((280, 14, 1), 0), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, WINDOW), "allow vectors of 2"),
    (Place((280, 14, 1), 0), 1, (COLUMNS, 3, 1, 128, 4, 1, 0, SLAB), "these columns are no slab"),
    (Place((242, 12, 1), 0), 1, (COLUMNS, 3, 1, 128, 4, 1, 0, WHOLE_SLAB), "these slabs are no whole vectors"),
    (Place((500, 25, 2), 0), 1, (COLUMNS, 4, 8, 4, 1, 1, 0, WINDOW), "access strided is for strides"),
    (Place((500, 25, 2), 0), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, STRIDED), "allow vectors of 1"),
    (Place((240, 12, 1), 0), 2, (COLUMNS, 4, 8, 16, 4, 1, 0, WINDOW), "rows that are not one piece of memory each"),
]


@pytest.mark.parametrize(("place", "dim", "plan", "words"), BESIDE, ids=str)
def test_a_plan_for_other_places_is_refused(place, dim, plan, words):
    x = operand(torch.randn(3, 20, 12, device="cuda"), place, F32)
    memory, out = amid(7.0, x.shape, place, F32, "cuda")
    with pytest.raises(RuntimeError, match=words):
        _ops._softmax_with_plan(x, 0, [dim], False, plan, out)
    with pytest.raises(RuntimeError, match=words):
        _ops._softmax_backward_with_plan(x, x, None, 0, [dim], plan, out)
    assert (memory == 7).all()


def test_aligned_access_takes_columns_of_whole_vectors():
    x = operand(torch.randn(3, 20, 10, device="cuda"), Place((240, 12, 1), 0), F32)
    for call in (
        lambda out: _ops._softmax_with_plan(x, 0, [1], False, (COLUMNS, 4, 8, 16, 4, 1, 0, WHOLE), out),
        lambda out: _ops._softmax_backward_with_plan(x, x, None, 0, [1], (COLUMNS, 4, 8, 16, 4, 1, 0, WHOLE), out),
    ):
        with pytest.raises(RuntimeError, match="access aligned: the columns are no whole vectors"):
            call(operand(torch.zeros_like(x), Place((240, 12, 1), 0), F32))
