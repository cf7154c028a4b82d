"""Tables of forced plans for every tier, with the lengths and memory layouts to run each on. No calls are made here."""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from onepass import native
from onepass.native import Plan

Tier = IntEnum("Tier", [name.upper().replace("-", "_") for name in native.TIERS], start=0)
Access = IntEnum("Access", "PREDICATED SCALAR ALIGNED SLAB SLAB_ALIGNED STRIDED SHIFTED", start=0)
SLABS = (Access.SLAB, Access.SLAB_ALIGNED)
PREFETCH = 1  # of a column plan's smem_vecs: room for the next tile
OF_COLUMNS = (Tier.COLUMNS, Tier.COLUMNS_GRID, Tier.COLUMNS_TWOPASS, Tier.COLUMNS_STAGED, Tier.COLUMNS_SMEM)
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
Types = tuple[torch.dtype, torch.dtype]
PAIRS = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
TYPES = {
    "logsumexp": [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)],
    "state": [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)],
}


def names(value: object) -> str | None:
    """The pytest id of a parameter that is a dtype, a plan, a tier, an access, or a pair of them."""
    if isinstance(value, Plan):
        return "-".join(str(int(number)) for number in value)
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple) and all(isinstance(v, torch.dtype | IntEnum) for v in value):
        return "-".join(map(str, map(names, value)))
    return str(value)[6:] if isinstance(value, torch.dtype) else None


# Tables of plans ------------------------------------------------------------------------------------------------------

# Plans of rows, and lengths to run each on: one element, odd, one short of full, full, one over.
#          tier, threads, rows a block, items, vector, blocks a row, smem vectors, access
ROW_PLANS = [
    (Plan(Tier.WARP, 1, 128, 4, 1, 1, 0, Access.PREDICATED), [1, 3, 4]),
    (Plan(Tier.WARP, 2, 64, 12, 4, 1, 0, Access.PREDICATED), [1, 8, 12, 21, 24]),
    (Plan(Tier.WARP, 32, 4, 8, 1, 1, 0, Access.PREDICATED), [1, 31, 33, 255, 256]),
    (Plan(Tier.WARP, 32, 4, 20, 4, 1, 0, Access.PREDICATED), [4, 500, 512, 513, 637, 640]),
    (Plan(Tier.WARP, 4, 32, 24, 8, 1, 0, Access.SCALAR), [1, 3, 65, 95, 96]),
    (Plan(Tier.WARP, 4, 32, 48, 8, 1, 0, Access.PREDICATED), [8, 152, 184, 187, 192]),
    (Plan(Tier.STAGED, 1, 128, 34, 1, 1, 1, Access.PREDICATED), [1, 3, 33, 34]),
    (Plan(Tier.STAGED, 4, 32, 10, 1, 1, 3, Access.PREDICATED), [7, 37, 40]),
    (Plan(Tier.STAGED, 32, 8, 26, 1, 1, 2, Access.PREDICATED), [1, 781, 832]),
    (Plan(Tier.BLOCK, 64, 1, 4, 1, 1, 0, Access.PREDICATED), [1, 63, 65, 255, 256]),
    (Plan(Tier.BLOCK, 32, 1, 8, 4, 1, 0, Access.PREDICATED), [5, 250, 253, 256]),
    (Plan(Tier.BLOCK, 160, 1, 24, 8, 1, 0, Access.PREDICATED), [2, 130, 1022, 1024, 3833, 3840]),
    (Plan(Tier.BLOCK, 512, 1, 8, 1, 1, 0, Access.PREDICATED), [1, 1023, 4095, 4096]),
    (Plan(Tier.BLOCK, 32, 1, 56, 8, 1, 0, Access.PREDICATED), [1016, 1528, 1537, 1544, 1784, 1792]),
    (Plan(Tier.BLOCK, 96, 1, 16, 8, 1, 0, Access.SCALAR), [1, 130, 1535, 1536]),
    (Plan(Tier.BLOCK, 64, 1, 8, 4, 1, 6, Access.PREDICATED), [1, 300, 2045, 2048]),
    (Plan(Tier.CLUSTER, 32, 1, 8, 4, 2, 0, Access.PREDICATED), [1, 3, 250, 509, 512]),
    (Plan(Tier.CLUSTER, 96, 1, 16, 4, 8, 0, Access.PREDICATED), [1, 100, 1000, 9001, 12285, 12288]),
    (Plan(Tier.CLUSTER, 64, 1, 8, 2, 16, 0, Access.PREDICATED), [1, 65, 8191, 8192]),
    (Plan(Tier.CLUSTER, 64, 1, 16, 8, 4, 4, Access.PREDICATED), [1, 777, 12281, 12288]),
    (Plan(Tier.CLUSTER, 32, 1, 8, 4, 2, 2, Access.SCALAR), [1, 3, 1023, 1024]),
    (Plan(Tier.GRID, 64, 1, 16, 4, 3, 12, Access.PREDICATED), [1, 250, 4098, 12288, 12289, 50001]),
    (Plan(Tier.GRID, 32, 1, 32, 8, 132, 12, Access.PREDICATED), [1, 9, 100_000, 1_000_001]),
    (Plan(Tier.GRID, 128, 1, 16, 2, 1, 12, Access.SCALAR), [1, 3, 2047, 5119, 9001]),
    (Plan(Tier.GRID, 96, 1, 16, 4, 5, 0, Access.PREDICATED), [1, 2, 31, 7679]),
    (Plan(Tier.GRID, 64, 1, 0, 4, 3, 8, Access.PREDICATED), [1, 250, 12289, 50001]),
    (Plan(Tier.GRID, 32, 1, 0, 8, 132, 0, Access.PREDICATED), [9, 1_000_001]),
    (Plan(Tier.GRID, 96, 1, 0, 2, 5, 16, Access.SCALAR), [1, 3, 4801, 30011]),
    (Plan(Tier.PIPELINED, 64, 1, 16, 4, 3, 16, Access.PREDICATED), [4, 250, 4098, 9001]),
    (Plan(Tier.PIPELINED, 32, 1, 16, 8, 132, 4, Access.PREDICATED), [9, 30_001]),
    (Plan(Tier.PIPELINED, 32, 1, 8, 4, 20, 10, Access.PREDICATED), [5, 7001, 15001]),  # six rows at a time
    (Plan(Tier.PIPELINED, 128, 1, 4, 2, 1, 20, Access.PREDICATED), [3, 2047, 4600]),
    (Plan(Tier.PIPELINED, 96, 1, 4, 4, 2, 3, Access.PREDICATED), [7, 767, 1535]),
    (Plan(Tier.TWOPASS, 64, 1, 4, 1, 1, 0, Access.PREDICATED), [1, 63, 257, 5000]),
    (Plan(Tier.TWOPASS, 512, 1, 16, 4, 1, 0, Access.PREDICATED), [4, 8188, 8192, 8193, 20001]),
]

# In all tables below items are counted in vectors; `widen` makes a plan of an entry. Gradients of rows:
ROW_GRADIENT_PLANS = {
    "warp": Plan(Tier.WARP, 32, 4, 7, 1, 1, 0),
    "staged": Plan(Tier.STAGED, 4, 32, 10, 1, 1, 2),
    "staged, one lane": Plan(Tier.STAGED, 1, 128, 34, 1, 1, 1),
    "lanes": Plan(Tier.WARP, 8, 16, 8, 1, 1, 0),
    "block": Plan(Tier.BLOCK, 256, 1, 4, 1, 1, 0),
    "cluster": Plan(Tier.CLUSTER, 64, 1, 4, 1, 4, 0),
    "cluster16": Plan(Tier.CLUSTER, 64, 1, 2, 1, 16, 0),
    "grid": Plan(Tier.GRID, 64, 1, 4, 1, 3, 4),
    "grid, nothing in registers": Plan(Tier.GRID, 64, 1, 0, 1, 2, 0),
    "pipelined": Plan(Tier.PIPELINED, 64, 1, 2, 1, 3, 28),
    "pipelined, four rows at a time": Plan(Tier.PIPELINED, 96, 1, 4, 1, 33, 8),
    "twopass": Plan(Tier.TWOPASS, 64, 1, 2, 1, 1, 0),
}
LOGSUMEXP_GRADIENT_PLANS = [
    Plan(Tier.WARP, 32, 4, 4, 1, 1, 0),
    Plan(Tier.WARP, 4, 32, 4, 1, 1, 0),
    Plan(Tier.TWOPASS, 64, 1, 4, 1, 1, 0),
    Plan(Tier.TWOPASS, 512, 1, 4, 1, 1, 0),
]

# Plans of columns by tier: threads across columns (for slabs about this number), threads down a column, vectors per
# thread, blocks that share columns, vectors in shared memory. The access is set below.
_TILES = {
    Tier.COLUMNS: [
        *((8, 1, 9, 1, 0), (4, 16, 4, 1, 0), (4, 8, 3, 4, 0), (4, 16, 2, 16, 0), (5, 6, 24, 1, 0)),
        *((8, 8, 4, 1, PREFETCH), (4, 8, 2, 2, PREFETCH)),
    ],
    Tier.COLUMNS_GRID: [(4, 16, 2, 3, 0), (1, 250, 2, 2, 0)],
    Tier.COLUMNS_TWOPASS: [(4, 16, 4, 1, 0), (8, 8, 3, 3, 0)],
}
_SLABS = {
    Tier.COLUMNS: [(64, 1, 4, 1, 0), (64, 1, 3, 4, 0), (200, 1, 4, 1, PREFETCH)],
    Tier.COLUMNS_GRID: [(64, 1, 4, 3, 0)],
    Tier.COLUMNS_TWOPASS: [(64, 1, 4, 1, 0), (64, 1, 3, 5, 0)],
}
_STRIDES = {
    Tier.COLUMNS: [(32, 4, 4, 1, 0), (1, 64, 3, 2, 0)],
    Tier.COLUMNS_GRID: [(32, 4, 4, 3, 0)],
    Tier.COLUMNS_TWOPASS: [(8, 16, 4, 1, 0), (1, 40, 4, 2, 0)],
}
_SHIFTED = {
    Tier.COLUMNS: [
        *((8, 8, 9, 1, 0), (4, 16, 4, 1, 0), (4, 8, 3, 4, 0), (5, 8, 4, 1, PREFETCH), (4, 8, 2, 2, PREFETCH)),
        *((4, 8, 2, 2, 4), (4, 8, 5, 1, 20), (4, 8, 12, 1, 24)),
    ],
    Tier.COLUMNS_GRID: [(4, 16, 2, 3, 0), (6, 8, 4, 5, 8)],
    Tier.COLUMNS_TWOPASS: [(4, 16, 4, 1, 0), (8, 8, 3, 3, 0)],
}
_IN_SHARED_MEMORY = {  # vectors in shared memory need whole vectors
    (Tier.COLUMNS, Access.ALIGNED): [(4, 8, 2, 2, 4), (4, 16, 5, 1, 20), (4, 8, 12, 1, 24)],
    (Tier.COLUMNS_GRID, Access.ALIGNED): [(8, 4, 4, 5, 8)],
    (Tier.COLUMNS, Access.SLAB_ALIGNED): [(64, 1, 2, 2, 4), (64, 1, 4, 2, 12)],
    (Tier.COLUMNS_GRID, Access.SLAB_ALIGNED): [(64, 1, 2, 3, 4)],
}
_BY_ACCESS = {Access.PREDICATED: _TILES, Access.ALIGNED: _TILES, Access.STRIDED: _STRIDES}
_BY_ACCESS |= {Access.SHIFTED: _SHIFTED} | dict.fromkeys(SLABS, _SLABS)


COLUMN_PLANS = {
    (tier, access): [
        Plan(tier, x, y, vectors, 1, blocks, smem_vecs, access)
        for x, y, vectors, blocks, smem_vecs in _BY_ACCESS[access][tier] + _IN_SHARED_MEMORY.get((tier, access), [])
    ]
    for access in sorted(_BY_ACCESS)
    for tier in (Tier.COLUMNS, Tier.COLUMNS_GRID, Tier.COLUMNS_TWOPASS)
}
# Threads across columns and down a column, vectors per thread, columns of a vector, groups on the chip, slices of a
# group.
COLUMN_PLANS[Tier.COLUMNS_STAGED, Access.ALIGNED] = [
    Plan(Tier.COLUMNS_STAGED, x, y, vectors * columns, columns, stages, slices, Access.ALIGNED)
    for x, y, vectors, columns, stages, slices in (
        *((40, 1, 16, 1, 2, 2), (9, 4, 8, 1, 2, 1), (33, 3, 12, 1, 1, 4), (7, 16, 3, 1, 2, 2)),
        *((20, 1, 16, 2, 2, 2), (5, 4, 8, 2, 2, 1), (17, 3, 12, 2, 1, 4), (4, 16, 3, 2, 2, 3)),
        *((10, 1, 16, 4, 2, 2), (3, 5, 4, 4, 1, 2)),
    )
]
# A thread loads four vectors at a time.
COLUMN_PLANS[Tier.COLUMNS_SMEM, Access.SHIFTED] = [
    Plan(Tier.COLUMNS_SMEM, x, y, 4, 1, blocks, 0, Access.SHIFTED)
    for x, y, blocks in ((9, 8, 1), (20, 8, 1), (5, 16, 4), (3, 8, 2), (2, 16, 16), (17, 16, 8))
]
COLUMN_PLANS[Tier.COLUMNS_SMEM, Access.SLAB] = [
    Plan(Tier.COLUMNS_SMEM, threads, 1, 4, 1, blocks, 0, Access.SLAB)
    for threads, blocks in ((64, 1), (100, 4), (64, 2))
]
# Plans with few threads, which have many vectors each, so that a thread takes its elements in many turns.
LATE_PLANS = [
    Plan(Tier.COLUMNS, 4, 4, 5, 1, 1, 16, Access.ALIGNED),
    Plan(Tier.COLUMNS, 2, 8, 4, 1, 4, 8, Access.ALIGNED),
    Plan(Tier.COLUMNS, 4, 4, 12, 1, 2, 0, Access.ALIGNED),
    Plan(Tier.COLUMNS, 4, 4, 9, 1, 2, 0, Access.PREDICATED),
    Plan(Tier.COLUMNS, 4, 8, 8, 1, 2, PREFETCH, Access.ALIGNED),
    Plan(Tier.COLUMNS, 64, 1, 4, 1, 2, 12, Access.SLAB_ALIGNED),
    Plan(Tier.COLUMNS_GRID, 2, 8, 5, 1, 2, 8, Access.ALIGNED),
]


def select(plans: Sequence[Plan], every: bool, turn: int, most_cluster: int) -> list[Plan]:
    """All plans of a tier, or only the one at index `turn`, because a kernel takes a third of a second to compile."""
    in_clusters = (Tier.COLUMNS, Tier.COLUMNS_SMEM)
    able = [plan for plan in plans if plan.tier not in in_clusters or plan.blocks_per_row <= most_cluster]
    return able if every else [able[turn % len(able)]]


def slab_lines(plan: Plan, vector: int, inner: int) -> int:
    """The number of threads that take a whole number of lines of a slab."""
    turn = inner // math.gcd(inner, vector)
    return turn * max(1, plan.threads_per_row // turn)


def widen(plan: Plan, vector: int, inner: int = 1) -> Plan:
    """A table's plan for vectors of `vector` elements and `inner` adjacent columns."""
    if plan.tier in (Tier.STAGED, Tier.COLUMNS_STAGED):
        return plan
    plan = plan._replace(items_per_thread=plan.items_per_thread * vector, vec_size=vector)
    return plan._replace(threads_per_row=slab_lines(plan, vector, inner)) if plan.access in SLABS else plan


def column_lengths(plan: Plan, vector: int, inner: int) -> list[int]:
    """Short columns, and the longest that the plan serves. For the tier that keeps nothing on the chip, long ones."""
    in_smem = plan.smem_vecs if plan.smem_vecs != PREFETCH and plan.tier != Tier.COLUMNS_STAGED else 0
    if plan.tier == Tier.COLUMNS_SMEM:  # any length; a block's part may also be empty
        return [2, 67, 150]
    if plan.tier == Tier.COLUMNS_STAGED:
        vectors = plan.items_per_thread // plan.vec_size
    else:
        vectors = (plan.items_per_thread + in_smem) * plan.blocks_per_row
    if plan.access in SLABS:
        begins_within = vector - 1 if plan.access == Access.SLAB else 0
        most = (vectors * slab_lines(plan, vector, inner) * vector - begins_within) // inner
    else:
        most = vectors * plan.rows_per_block
    most = 3 * most + 1 if plan.tier == Tier.COLUMNS_TWOPASS else most
    unit = vector // math.gcd(inner, vector) if plan.access == Access.SLAB_ALIGNED else 1
    return sorted({n // unit * unit for n in (max(2, unit), most // 2 + unit, most) if n // unit * unit >= 2})


# Places in memory -----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The strides and the offset of a tensor in memory."""

    strides: tuple[int, ...]
    offset: int


def place_of(access: int, n: int, inner: int, vector: int) -> Place:
    """The place of a tensor (outer, n, inner), with all gaps that this access allows."""
    if access in (Access.PREDICATED, Access.ALIGNED):
        pitch = -(-inner // vector) * vector + vector
        return Place((n * pitch, pitch, 1), vector)
    if access == Access.SHIFTED:
        pitch = inner + 1 + inner % 2  # odd, so that lines begin at every element of a vector
        return Place((n * pitch + 3, pitch, 1), 1)
    if access == Access.SLAB:
        return Place((n * inner + 3, inner, 1), 1)
    if access == Access.SLAB_ALIGNED:
        return Place((n * inner + vector, inner, 1), vector)
    return Place((n * (2 * inner + 1) + 2, 2 * inner + 1, 2), 1)


def shapes(plan: Plan, vector: int) -> Iterator[tuple[int, int, Place, Plan]]:
    """(n, inner, place, plan) for short and long columns. The adjacent columns, inner, are fewer and more than a tile,
    with a part of a vector at the end if the access allows it."""
    inners = {Access.PREDICATED: (vector + 1, plan.threads_per_row * vector + 3)}
    inners |= {Access.SHIFTED: inners[Access.PREDICATED]}
    if plan.tier == Tier.COLUMNS_STAGED:  # odd, even, and slices that are vectors
        for n, inner in ((column_lengths(plan, 1, 1)[-1], 7), (3, 33), (2, 16)):
            yield n, inner, Place((n * inner, inner, 1), 0 if inner == 16 else 1), plan
        return
    inners |= {Access.ALIGNED: (2 * vector, (plan.threads_per_row + 1) * vector), Access.STRIDED: (5, 37)}
    for inner in inners.get(plan.access, (7, 12)):
        for n in column_lengths(plan, vector, inner):
            yield n, inner, place_of(plan.access, n, inner, vector), widen(plan, vector, inner)
