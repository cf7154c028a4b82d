"""Plans that cannot serve a call on the CUDA engine: an error says why, and nothing is written."""

import pytest
import torch
from torch import Tensor

from lib import plans
from lib.plan_tables import F32, PREFETCH, Access, Place, Tier

pytestmark = pytest.mark.gpu
BOTH, COLUMN_SHAPE = ("forward", "backward"), (3, 20, 12)

# By passes and shape (over dim 1): plans, and what the error says.
REJECTED = {
    (("forward",), (4, 100)): [
        ((Tier.WARP, 32, 4, 2, 1, 1, 0), "rows of up to 64 elements, got 100"),
        ((Tier.WARP, 64, 2, 4, 1, 1, 0), "threads_per_row is a power of two up to 32 in the tiers warp and staged"),
        ((Tier.STAGED, 32, 4, 4, 4, 1, 1), "vectors of one element"),
        ((Tier.STAGED, 32, 4, 4, 1, 1, 0), "rows_per_thread from 1 to 1024"),
        ((Tier.BLOCK, 48, 1, 4, 1, 1, 0), "a multiple of 32"),
        ((Tier.BLOCK, 64, 2, 4, 1, 1, 0), "one row per block"),
        ((Tier.BLOCK, 64, 1, 4, 1, 2, 0), "1 in the others"),
        ((Tier.CLUSTER, 64, 1, 4, 1, 3, 0), "blocks_per_row is a power of two"),
        ((Tier.CLUSTER, 64, 1, 4, 1, 1, 0), "2 to 16 in the tier cluster"),
        ((Tier.GRID, 64, 1, 16, 4, 1000, 0), "blocks per row here"),
        ((Tier.GRID, 64, 1, 8, 4, 1, 0), "0, 4, 8, 12 or 16 vectors"),
        ((Tier.GRID, 480, 1, 16, 4, 1, 60), "bytes of shared memory"),
        ((Tier.BLOCK, 64, 1, 4, 4, 1, 3), "smem_vecs is an even number"),
        ((Tier.PIPELINED, 480, 1, 4, 4, 1, 8), "up to 448"),
        ((Tier.PIPELINED, 64, 1, 8, 4, 1, 3), "a multiple of them"),
        ((Tier.PIPELINED, 64, 1, 4, 4, 1, 1), "room for more chunks"),
        ((Tier.PIPELINED, 64, 1, 4, 4, 1, 8, Access.SCALAR), "with access 0"),
        ((Tier.TWOPASS, 64, 1, 4, 4, 1, 2), "keep no vectors in shared memory"),
        ((Tier.BLOCK, 64, 1, 4, 4, 1, 0, Access.SLAB), "access is 0"),
        ((Tier.TWOPASS, 64, 1, 4, 4, 1, 0, Access.ALIGNED), "the tiers warp, block and cluster"),
        ((Tier.BLOCK, 64, 1, 6, 4, 1, 0), "items_per_thread a multiple of it"),
        ((Tier.BLOCK, 64, 1, 68, 4, 1, 0), "up to 64"),
        ((12, 32, 4, 4, 1, 1, 0), "tier is 0"),
        ((Tier.WARP, 32, 4, 4, 1), "a plan is"),
    ],
    (("backward",), (4, 1000)): [
        ((Tier.STAGED, 4, 32, 8, 1, 1, 2), "rows of up to 32 elements"),
        ((Tier.BLOCK, 64, 1, 8, 8, 1, 0), "allow 4"),
        ((Tier.BLOCK, 32, 1, 4, 4, 1, 0), "rows of up to 128"),
        ((Tier.TWOPASS, 1024, 1, 8, 4, 1, 0), "up to 512 threads"),
        ((Tier.GRID, 64, 1, 48, 4, 2, 0), "keep up to 8 vectors"),
    ],
    (BOTH, COLUMN_SHAPE): [
        ((12, 4, 4, 16, 4, 1, 0), "tier is 0"),
        ((Tier.COLUMNS, 4, 4, 16, 4), "a plan is"),
        ((Tier.COLUMNS, 4, 4, 6, 4, 1, 0), "items_per_thread 1 to 32 times as many"),
        ((Tier.COLUMNS, 4, 4, 132, 4, 1, 0), "items_per_thread 1 to 32 times as many"),
        ((Tier.COLUMNS, 4, 4, 12, 3, 1, 0), "vec_size is a power of two up to 8"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 3, 0), "blocks_per_tile is a power of two up to 16 in the tier"),
        ((Tier.COLUMNS_GRID, 4, 4, 16, 4, 0, 0), "1 to 1024 in the other tiers"),
        ((Tier.COLUMNS, 0, 4, 16, 4, 1, 0), "have 1 to 1024 threads"),
        ((Tier.COLUMNS, 64, 32, 16, 4, 1, 0), "have 1 to 1024 threads"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 3, Access.ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 68, Access.ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
        ((Tier.COLUMNS, 4, 4, 4, 1, 1, 4, Access.ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
        ((Tier.COLUMNS_GRID, 4, 4, 16, 4, 2, PREFETCH, Access.ALIGNED), "or 1 for the next tile"),
        ((Tier.COLUMNS_TWOPASS, 4, 4, 16, 4, 1, 4, Access.ALIGNED), "smem_vecs is a multiple of 4 up to 64"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 0, 1), "access is 0"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 0, 7), "access is 0"),
        ((Tier.COLUMNS, 2, 4, 16, 4, 1, 0, Access.SHIFTED), "3 threads side by side at least"),
        ((Tier.COLUMNS_STAGED, 12, 2, 16, 8, 2, 1, Access.ALIGNED), "has vec_size 1"),
        ((Tier.COLUMNS_STAGED, 12, 2, 12, 1, 3, 1, Access.ALIGNED), "1 or 2 stages"),
        ((Tier.COLUMNS_STAGED, 12, 2, 8, 1, 2, 1, Access.ALIGNED), "of so many elements: 16"),
        ((Tier.COLUMNS_SMEM, 4, 8, 16, 4, 1, 0, Access.ALIGNED), "has access 3"),
        ((Tier.COLUMNS_SMEM, 4, 8, 32, 4, 1, 0, Access.SHIFTED), "items_per_thread 4 times vec_size"),
        ((Tier.COLUMNS_SMEM, 4, 8, 16, 4, 3, 0, Access.SHIFTED), "a power of two up to 16, no smem_vecs"),
        ((Tier.COLUMNS_SMEM, 4, 8, 16, 4, 1, 4, Access.SHIFTED), "no smem_vecs"),
        ((Tier.COLUMNS_SMEM, 32, 1, 16, 4, 1, 0, Access.SLAB), "a whole number of lines of a slab"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 4), "shared memory holds whole vectors"),
        ((Tier.COLUMNS, 4, 4, 32, 8, 1, 0), "allow vectors of 4"),
        ((Tier.COLUMNS, 4, 4, 16, 4, 1, 0), "of so many elements: 16"),
        ((Tier.COLUMNS_GRID, 4, 4, 8, 4, 2, 0), "of so many elements: 16"),
        ((Tier.COLUMNS, 32, 1, 16, 4, 1, 0, Access.SLAB), "a whole number of lines of a slab"),
        ((Tier.COLUMNS, 3, 2, 16, 4, 1, 0, Access.SLAB), "a whole number of lines of a slab"),
        ((Tier.COLUMNS_GRID, 3, 1, 16, 4, 4, 0, Access.SLAB_ALIGNED), "of so many elements: 192"),
        ((Tier.COLUMNS_GRID, 4, 4, 16, 4, 1000, 0), "blocks that share columns: up to"),
        ((Tier.COLUMNS_GRID, 32, 32, 4, 4, 1, 64, Access.ALIGNED), "bytes of shared memory"),
    ],
}


def check(x: Tensor, dim: int, plan: tuple[int, ...], words: str, out: Tensor, passes: tuple[str, ...] = BOTH) -> None:
    gpu, before = plans.Engine("cuda"), out.clone()
    plan = plan if len(plan) != 7 else (*plan, Access.PREDICATED)
    if "forward" in passes:
        with pytest.raises(RuntimeError, match=words):
            gpu.call("softmax", x, [dim], out, plan)
    if "backward" in passes:
        with pytest.raises(RuntimeError, match=words):
            gpu.gradient("softmax", x, x, None, [dim], out, plan)
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("passes", "shape", "plan", "words"), [(*key, *each) for key, many in REJECTED.items() for each in many], ids=str
)
def test_a_plan_that_cannot_serve_is_rejected(passes, shape, plan, words):
    x = torch.randn(shape, device="cuda")
    check(x, 1, plan, words, torch.full_like(x, 5.0), passes)


# Where (3, 20, 12) lies, the dim, a plan that would serve others.
PLACES = [
    (Place((240, 12, 1), 1), 1, (Tier.COLUMNS, 4, 8, 16, 4, 1, 0), "allow vectors of 1"),
    (Place((280, 14, 1), 0), 1, (Tier.COLUMNS, 4, 8, 16, 4, 1, 0), "allow vectors of 2"),
    (Place((280, 14, 1), 0), 1, (Tier.COLUMNS, 3, 1, 128, 4, 1, 0, Access.SLAB), "these columns are no slab"),
    (Place((242, 12, 1), 0), 1, (Tier.COLUMNS, 3, 1, 128, 4, 1, 0, Access.SLAB_ALIGNED), "are no whole vectors"),
    (Place((260, 13, 1), 0), 1, (Tier.COLUMNS, 5, 2, 40, 4, 1, 0, Access.SHIFTED), "are a multiple of 4"),
    (Place((260, 13, 1), 0), 1, (Tier.COLUMNS_SMEM, 5, 2, 16, 4, 1, 0, Access.SHIFTED), "are a multiple of 4"),
    (Place((1200, 12, 1), 0), 1, (Tier.COLUMNS_STAGED, 12, 4, 8, 1, 2, 1, Access.ALIGNED), "follow one another"),
    (Place((500, 25, 2), 0), 1, (Tier.COLUMNS, 4, 8, 4, 1, 1, 0), "have the access strided"),
    (Place((500, 25, 2), 0), 1, (Tier.COLUMNS, 4, 8, 16, 4, 1, 0, Access.STRIDED), "allow vectors of 1"),
    (Place((240, 12, 1), 0), 2, (Tier.COLUMNS, 4, 8, 16, 4, 1, 0), "rows that are not one piece of memory each"),
]


@pytest.mark.parametrize(("place", "dim", "plan", "words"), PLACES, ids=str)
def test_a_plan_for_other_places_is_rejected(place, dim, plan, words):
    x = plans.operand(torch.randn(COLUMN_SHAPE, device="cuda"), place, F32)
    memory, out = plans.amid(7.0, x.shape, place, F32, "cuda")
    check(x, dim, plan, words, out)
    assert (memory == 7).all()


def test_plans_of_vectors_that_rows_or_columns_do_not_have():
    x, out = (plans.operand(torch.randn(3, 20, 10, device="cuda"), Place((240, 12, 1), 0), F32) for _ in range(2))
    check(x, 1, (Tier.COLUMNS, 4, 8, 16, 4, 1, 0, Access.ALIGNED), "aligned: the columns are no whole vectors", out)
    odd, shifted = torch.randn(4, 126, device="cuda"), torch.zeros(4 * 126 + 1, device="cuda")[1:].view(4, 126)
    for plan, out, passes, words in (
        ((Tier.BLOCK, 32, 1, 4, 4, 1, 0), odd.clone(), BOTH[:1], "rows of up to 128 elements, got 129"),
        ((Tier.BLOCK, 64, 1, 4, 4, 1, 0, Access.ALIGNED), odd.clone(), BOTH[:1], "rows of whole vectors of 4 elements"),
        ((Tier.BLOCK, 64, 1, 4, 4, 1, 0), shifted, BOTH, "of this call allow 1"),
    ):
        check(odd, 1, plan, words, out, passes)
