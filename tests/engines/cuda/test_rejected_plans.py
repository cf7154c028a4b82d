"""Plans that cannot serve a call on the CUDA engine: an error says why, and nothing is written."""

import pytest
import torch
from torch import Tensor

from lib.plans import (
    ALIGNED,
    BLOCK,
    CLUSTER,
    COLUMNS,
    COLUMNS_GRID,
    COLUMNS_TWOPASS,
    F32,
    GRID,
    PREDICATED,
    PREFETCH,
    SLAB,
    SLAB_ALIGNED,
    STAGED,
    STRIDED,
    TWOPASS,
    WARP,
    Engine,
    Place,
    amid,
    operand,
)

pytestmark = pytest.mark.gpu
FORWARD, BACKWARD, BOTH = ("forward",), ("backward",), ("forward", "backward")
ROWS, WIDE_ROWS, COLUMN_SHAPE = (4, 100), (4, 1000), (3, 20, 12)

# Passes, the shape (over dim 1), the plan, what the error says.
REJECTED = [
    (FORWARD, ROWS, (WARP, 32, 4, 2, 1, 1, 0, PREDICATED), "rows of up to 64 elements, got 100"),
    (
        FORWARD,
        ROWS,
        (WARP, 64, 2, 4, 1, 1, 0, PREDICATED),
        "threads_per_row is a power of two up to 32 in the tiers warp and staged",
    ),
    (FORWARD, ROWS, (STAGED, 32, 4, 4, 4, 1, 1, PREDICATED), "vectors of one element"),
    (FORWARD, ROWS, (STAGED, 32, 4, 4, 1, 1, 0, PREDICATED), "rows_per_thread from 1 to 1024"),
    (FORWARD, ROWS, (BLOCK, 48, 1, 4, 1, 1, 0, PREDICATED), "a multiple of 32"),
    (FORWARD, ROWS, (BLOCK, 64, 2, 4, 1, 1, 0, PREDICATED), "one row per block"),
    (FORWARD, ROWS, (BLOCK, 64, 1, 4, 1, 2, 0, PREDICATED), "1 in the others"),
    (FORWARD, ROWS, (CLUSTER, 64, 1, 4, 1, 3, 0, PREDICATED), "blocks_per_row is a power of two"),
    (FORWARD, ROWS, (CLUSTER, 64, 1, 4, 1, 1, 0, PREDICATED), "2 to 16 in the tier cluster"),
    (FORWARD, ROWS, (GRID, 64, 1, 16, 4, 1000, 0, PREDICATED), "blocks per row here"),
    (FORWARD, ROWS, (GRID, 64, 1, 8, 4, 1, 0, PREDICATED), "0, 4, 8, 12 or 16 vectors"),
    (FORWARD, ROWS, (GRID, 480, 1, 16, 4, 1, 60, PREDICATED), "bytes of shared memory"),
    (FORWARD, ROWS, (BLOCK, 64, 1, 4, 4, 1, 3, PREDICATED), "of 2 in the tiers block"),
    (FORWARD, ROWS, (TWOPASS, 64, 1, 4, 4, 1, 2, PREDICATED), "keep no vectors in shared memory"),
    (FORWARD, ROWS, (BLOCK, 64, 1, 4, 4, 1, 0, SLAB), "access is 0"),
    (FORWARD, ROWS, (TWOPASS, 64, 1, 4, 4, 1, 0, ALIGNED), "the tiers warp, block and cluster"),
    (FORWARD, ROWS, (BLOCK, 64, 1, 6, 4, 1, 0, PREDICATED), "items_per_thread a multiple of it"),
    (FORWARD, ROWS, (BLOCK, 64, 1, 68, 4, 1, 0, PREDICATED), "up to 64"),
    (FORWARD, ROWS, (9, 32, 4, 4, 1, 1, 0, PREDICATED), "tier is 0"),
    (FORWARD, ROWS, (WARP, 32, 4, 4, 1), "a plan is"),
    (BACKWARD, WIDE_ROWS, (STAGED, 4, 32, 8, 1, 1, 2, PREDICATED), "tiers warp, block"),
    (BACKWARD, WIDE_ROWS, (BLOCK, 64, 1, 8, 8, 1, 0, PREDICATED), "allow 4"),
    (BACKWARD, WIDE_ROWS, (BLOCK, 32, 1, 4, 4, 1, 0, PREDICATED), "rows of up to 128"),
    (BACKWARD, WIDE_ROWS, (TWOPASS, 1024, 1, 8, 4, 1, 0, PREDICATED), "up to 512 threads"),
    (BACKWARD, WIDE_ROWS, (GRID, 64, 1, 48, 4, 2, 0, PREDICATED), "keep up to 8 vectors"),
    (BOTH, COLUMN_SHAPE, (9, 4, 4, 16, 4, 1, 0, PREDICATED), "tier is 0"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4), "a plan is"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 6, 4, 1, 0, PREDICATED), "items_per_thread 1 to 32 times as many"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 132, 4, 1, 0, PREDICATED), "items_per_thread 1 to 32 times as many"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 12, 3, 1, 0, PREDICATED), "vec_size is a power of two up to 8"),
    (
        BOTH,
        COLUMN_SHAPE,
        (COLUMNS, 4, 4, 16, 4, 3, 0, PREDICATED),
        "blocks_per_tile is a power of two up to 16 in the tier",
    ),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 4, 4, 16, 4, 0, 0, PREDICATED), "1 to 1024 in the other tiers"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 0, 4, 16, 4, 1, 0, PREDICATED), "have 1 to 1024 threads"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 64, 32, 16, 4, 1, 0, PREDICATED), "have 1 to 1024 threads"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 3, ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 68, ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 4, 1, 1, 4, ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 4, 4, 16, 4, 2, PREFETCH, ALIGNED), "or 1 for the next tile"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_TWOPASS, 4, 4, 16, 4, 1, 4, ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 0, 1), "access is 0"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 0, 6), "access is 0"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 4, PREDICATED), "shared memory holds whole vectors"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 1, 1, 0, STRIDED), "access strided is for strides"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 32, 8, 1, 0, PREDICATED), "allow vectors of 4"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 4, 4, 16, 4, 1, 0, PREDICATED), "of so many elements: 16"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 4, 4, 8, 4, 2, 0, PREDICATED), "of so many elements: 16"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 32, 1, 16, 4, 1, 0, SLAB), "a whole number of lines of a slab"),
    (BOTH, COLUMN_SHAPE, (COLUMNS, 3, 2, 16, 4, 1, 0, SLAB), "a whole number of lines of a slab"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 3, 1, 16, 4, 4, 0, SLAB_ALIGNED), "of so many elements: 192"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 4, 4, 16, 4, 1000, 0, PREDICATED), "blocks that share columns: up to"),
    (BOTH, COLUMN_SHAPE, (COLUMNS_GRID, 32, 32, 4, 4, 1, 64, ALIGNED), "bytes of shared memory"),
]


def check(x: Tensor, dim: int, plan: tuple[int, ...], words: str, out: Tensor, passes: tuple[str, ...] = BOTH) -> None:
    gpu, before = Engine("cuda"), out.clone()
    if "forward" in passes:
        with pytest.raises(RuntimeError, match=words):
            gpu.call("softmax", x, [dim], out, plan)
    if "backward" in passes:
        with pytest.raises(RuntimeError, match=words):
            gpu.gradient("softmax", x, x, None, [dim], out, plan)
    assert torch.equal(out, before)


@pytest.mark.parametrize(("passes", "shape", "plan", "words"), REJECTED, ids=str)
def test_a_plan_that_cannot_serve_is_rejected(passes, shape, plan, words):
    x = torch.randn(shape, device="cuda")
    check(x, 1, plan, words, torch.full_like(x, 5.0), passes)


# Where (3, 20, 12) lies, the dim, a plan that would serve others.
PLACES = [
    (Place((240, 12, 1), 1), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, PREDICATED), "allow vectors of 1"),
    (Place((280, 14, 1), 0), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, PREDICATED), "allow vectors of 2"),
    (Place((280, 14, 1), 0), 1, (COLUMNS, 3, 1, 128, 4, 1, 0, SLAB), "these columns are no slab"),
    (Place((242, 12, 1), 0), 1, (COLUMNS, 3, 1, 128, 4, 1, 0, SLAB_ALIGNED), "these slabs are no whole vectors"),
    (Place((500, 25, 2), 0), 1, (COLUMNS, 4, 8, 4, 1, 1, 0, PREDICATED), "access strided is for strides"),
    (Place((500, 25, 2), 0), 1, (COLUMNS, 4, 8, 16, 4, 1, 0, STRIDED), "allow vectors of 1"),
    (Place((240, 12, 1), 0), 2, (COLUMNS, 4, 8, 16, 4, 1, 0, PREDICATED), "rows that are not one piece of memory each"),
]


@pytest.mark.parametrize(("place", "dim", "plan", "words"), PLACES, ids=str)
def test_a_plan_for_other_places_is_rejected(place, dim, plan, words):
    x = operand(torch.randn(COLUMN_SHAPE, device="cuda"), place, F32)
    memory, out = amid(7.0, x.shape, place, F32, "cuda")
    check(x, dim, plan, words, out)
    assert (memory == 7).all()


def test_plans_of_vectors_that_rows_or_columns_do_not_have():
    x = operand(torch.randn(3, 20, 10, device="cuda"), Place((240, 12, 1), 0), F32)
    whole = (COLUMNS, 4, 8, 16, 4, 1, 0, ALIGNED)
    check(
        x,
        1,
        whole,
        "access aligned: the columns are no whole vectors",
        operand(torch.zeros_like(x), Place((240, 12, 1), 0), F32),
    )
    odd = torch.randn(4, 126, device="cuda")
    for plan, words in [
        ((BLOCK, 32, 1, 4, 4, 1, 0, PREDICATED), "rows of up to 128 elements, got 129"),
        ((BLOCK, 64, 1, 4, 4, 1, 0, ALIGNED), "rows of whole vectors of 4 elements"),
    ]:
        check(odd, 1, plan, words, torch.zeros_like(odd), FORWARD)
    shifted = torch.zeros(4 * 126 + 1, device="cuda")[1:].view(4, 126)
    check(odd, 1, (BLOCK, 64, 1, 4, 4, 1, 0, PREDICATED), "of this call allow 1", shifted, FORWARD)
