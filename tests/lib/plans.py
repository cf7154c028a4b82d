"""Forced plans: tables of them for every tier, what runs them (the CUDA engine, or its emulator), and calls and
gradients by them, on tensors amid poison, compared with their definitions."""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

import onepass
from emulator import Emulator
from lib.gradients import gradient
from lib.support import assert_defined
from onepass import native, reference
from onepass.native import Plan
from onepass.validation import reduces_to

Tier = IntEnum("Tier", [name.upper().replace("-", "_") for name in native.TIERS], start=0)
Access = IntEnum("Access", "PREDICATED SCALAR ALIGNED SLAB SLAB_ALIGNED STRIDED SHIFTED", start=0)
SLABS = (Access.SLAB, Access.SLAB_ALIGNED)
PREFETCH = 1  # of a column plan's smem_vecs: room for the next tile
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
TOLERANCE = {F64: 1e-12, F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}
Types = tuple[torch.dtype, torch.dtype]
PAIRS = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
TYPES = {
    "logsumexp": [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)],
    "state": [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)],
}


def names(value: object) -> str | None:
    """The ids of parameters that are dtypes, plans, tiers, accesses, or pairs of those."""
    if isinstance(value, Plan):
        return "-".join(str(int(number)) for number in value)
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple) and all(isinstance(v, torch.dtype | IntEnum) for v in value):
        return "-".join(map(str, map(names, value)))
    return str(value)[6:] if isinstance(value, torch.dtype) else None


# What runs plans ------------------------------------------------------------------------------------------------------


class Engine:
    """The native engine of a device. Only that of a GPU takes plans."""

    def __init__(self, device: str) -> None:
        self.device, self.most_cluster = device, 1
        if device == "cuda":
            about = torch.cuda.get_device_properties(0)
            arch = 10 * about.major + about.minor
            self.most_cluster = 1 if arch < 90 else 16 if arch == 90 and about.multi_processor_count >= 132 else 8

    def call(self, function: str, x: Tensor, dims: Sequence[int], y: Tensor, plan: Plan | None = None) -> None:
        ops = torch.ops.onepass
        if plan is not None:
            ops._softmax_with_plan(x, native.FUNCTIONS.index(function), dims, False, plan, y)
        elif function == "logsumexp":
            ops.logsumexp.out(x, dims, dtype=y.dtype, out=y)
        else:
            getattr(onepass, function)(x, tuple(dims), out=y, engine=self.device, dtype=y.dtype)

    def gradient(
        self,
        function: str,
        g: Tensor,
        saved: Tensor,
        lse: Tensor | None,
        dims: Sequence[int],
        dx: Tensor,
        plan: Plan | None = None,
    ) -> None:
        ops, number = torch.ops.onepass, native.FUNCTIONS.index(function)
        if plan is not None:
            ops._softmax_backward_with_plan(g, saved, lse, number, dims, plan, dx)
        elif lse is not None:
            ops._logsumexp_backward.out(g, saved, lse, dims, False, dx)
        else:
            ops._softmax_backward.out(g, saved, number, dims, dx)


Runner = Engine | Emulator  # serves calls and gradients into given results, by a plan or (None) by its own


# Tables of plans ------------------------------------------------------------------------------------------------------

# Of rows, and lengths to run each on: one element, odd, one short, full, one over.
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
    (Plan(Tier.TWOPASS, 64, 1, 4, 1, 1, 0, Access.PREDICATED), [1, 63, 257, 5000]),
    (Plan(Tier.TWOPASS, 512, 1, 16, 4, 1, 0, Access.PREDICATED), [4, 8188, 8192, 8193, 20001]),
]

# In all tables below, items are vectors: `widen` makes a plan of one. Of gradients of rows:
ROW_GRADIENT_PLANS = {
    "warp": Plan(Tier.WARP, 32, 4, 7, 1, 1, 0),
    "lanes": Plan(Tier.WARP, 8, 16, 8, 1, 1, 0),
    "block": Plan(Tier.BLOCK, 256, 1, 4, 1, 1, 0),
    "cluster": Plan(Tier.CLUSTER, 64, 1, 4, 1, 4, 0),
    "cluster16": Plan(Tier.CLUSTER, 64, 1, 2, 1, 16, 0),
    "grid": Plan(Tier.GRID, 64, 1, 4, 1, 3, 4),
    "grid, nothing in registers": Plan(Tier.GRID, 64, 1, 0, 1, 2, 0),
    "twopass": Plan(Tier.TWOPASS, 64, 1, 2, 1, 1, 0),
}
LOGSUMEXP_GRADIENT_PLANS = [
    Plan(Tier.WARP, 32, 4, 4, 1, 1, 0),
    Plan(Tier.WARP, 4, 32, 4, 1, 1, 0),
    Plan(Tier.TWOPASS, 64, 1, 4, 1, 1, 0),
    Plan(Tier.TWOPASS, 512, 1, 4, 1, 1, 0),
]

# Of columns: threads side by side (of slabs: about as many), threads down a column, vectors a thread, blocks that share
# columns, vectors in shared memory, by tier; the access is set below.
_TILES = {
    Tier.COLUMNS: [
        *((8, 1, 9, 1, 0), (4, 16, 4, 1, 0), (4, 8, 3, 4, 0), (4, 16, 2, 16, 0)),
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
_IN_SHARED_MEMORY = {  # which takes whole vectors
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
# Threads side by side and down a column, elements of a thread, groups in shared memory, slices of a group.
COLUMN_PLANS[Tier.COLUMNS_STAGED, Access.ALIGNED] = [
    Plan(Tier.COLUMNS_STAGED, x, y, items, 1, stages, slices, Access.ALIGNED)
    for x, y, items, stages, slices in ((40, 1, 16, 2, 2), (9, 4, 8, 2, 1), (33, 3, 12, 1, 4), (7, 16, 3, 2, 2))
]
# With a part in shared memory: a few threads have many vectors each, so that elements come in many turns.
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
    """Of a tier's plans all, or the one whose turn it is: each kernel takes a third of a second to compile."""
    able = [plan for plan in plans if plan.tier != Tier.COLUMNS or plan.blocks_per_row <= most_cluster]
    return able if every else [able[turn % len(able)]]


def slab_lines(plan: Plan, vector: int, inner: int) -> int:
    """Threads that take a whole number of lines of a slab."""
    turn = inner // math.gcd(inner, vector)
    return turn * max(1, plan.threads_per_row // turn)


def widen(plan: Plan, vector: int, inner: int = 1) -> Plan:
    """A plan of a table, for vectors of so many elements and so many columns side by side."""
    if plan.tier == Tier.COLUMNS_STAGED:
        return plan
    plan = plan._replace(items_per_thread=plan.items_per_thread * vector, vec_size=vector)
    return plan._replace(threads_per_row=slab_lines(plan, vector, inner)) if plan.access in SLABS else plan


def column_lengths(plan: Plan, vector: int, inner: int) -> list[int]:
    """Short columns, and the longest that the plan serves; of the tier that stores nothing on chip, long ones."""
    in_smem = plan.smem_vecs if plan.smem_vecs != PREFETCH and plan.tier != Tier.COLUMNS_STAGED else 0
    vectors = (plan.items_per_thread + in_smem) * (1 if plan.tier == Tier.COLUMNS_STAGED else plan.blocks_per_row)
    if plan.access in SLABS:
        begins_within = vector - 1 if plan.access == Access.SLAB else 0
        most = (vectors * slab_lines(plan, vector, inner) * vector - begins_within) // inner
    else:
        most = vectors * plan.rows_per_block
    most = 3 * most + 1 if plan.tier == Tier.COLUMNS_TWOPASS else most
    unit = vector // math.gcd(inner, vector) if plan.access == Access.SLAB_ALIGNED else 1
    return sorted({n // unit * unit for n in (max(2, unit), most // 2 + unit, most) if n // unit * unit >= 2})


# Tensors --------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a tensor lies in memory."""

    strides: tuple[int, ...]
    offset: int


def place_of(access: int, n: int, inner: int, vector: int) -> Place:
    """Of (outer, n, inner), with gaps wherever this access allows them."""
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
    """Short and long columns, and how many side by side (less than a tile and more, with a part of a vector at the end
    where that may be), where they lie, and the plan for them."""
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


def amid(fill: float, shape: Sequence[int], place: Place, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Memory full of `fill`, and a tensor in it."""
    reach = sum((size - 1) * stride for size, stride in zip(shape, place.strides, strict=True) if size)
    memory = torch.full((place.offset + reach + 9,), fill, device=device, dtype=dtype)
    return memory, memory.as_strided(tuple(shape), place.strides, place.offset)


def operand(values: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """The values in memory that is NaN everywhere else."""
    return amid(math.nan, values.shape, place, dtype, values.device.type)[1].copy_(values)


def assert_untouched(memory: Tensor, result: Tensor, fill: float) -> None:
    """Beside the result, which is overwritten."""
    result.fill_(fill)
    assert (memory == fill).all(), "memory beside the result was written"


def special(outer: int, n: int, inner: int, dtype: torch.dtype, device: str, few: bool = False) -> Tensor:
    """(outer, n, inner) with columns of what is not finite and of one value, and unless `few` far from 0."""
    x = torch.randn(outer * inner, n, device=device, dtype=F64) * 3
    count = len(x)
    if count > 8 or (few and count > 6):
        x[1, : n - 1] = -torch.inf  # a long run, to the last element
        x[2, 1:] = -torch.inf
        x[3] = -torch.inf
        x[4] = x[4].abs() + 100.0 if few else x[4]  # of which exp is infinite itself
        x[4, n // 2] = torch.inf
        x[5, n // 2] = torch.nan
        x[6] = 7.0
    if count > 8 and not few:
        x[7] += 1e4
        x[8] -= 1e4
    if count > 12 and not few:
        x[9] = x[9].abs() + 100.0
        x[9, n // 3] = torch.inf
        x[10:12] *= torch.tensor([[1e7], [1e13]], device=device)
        x[12] = x[12] * 1e5 + 1e9
    if count > 15 and not few:
        lowest = torch.finfo(dtype).min
        x[13] = torch.linspace(-70, 70, n, device=device)  # its maximum grows all the way
        x[14, : n // 2], x[14, n // 2 :] = -torch.inf, lowest
        x[15, ::2], x[15, 1::2] = -lowest, lowest
    return x.view(outer, inner, n).movedim(-1, 1).to(dtype)


# Calls and gradients --------------------------------------------------------------------------------------------------


def assert_gradient(dx: Tensor, want: Tensor, scale: Tensor) -> None:
    least = 1e-7 if dx.dtype in (F16, BF16) else 0.0  # below the smallest number of float16
    error = ((dx.double() - want).abs() - least).clamp(min=0) / (scale + 1e-30)
    assert error.isfinite().all()
    assert error.max() <= TOLERANCE[dx.dtype]


def assert_close(function: str, got: Tensor, want: Tensor, few_ulp: float = 2.2e-6) -> None:
    """Probabilities: relative, down to where the numbers are no longer normal. Logarithms: relative to
    max(1, |result|). Of float32 `few_ulp`: half a unit of x - m, up to 64 in these tests, and the exponential's own."""
    rtol = {F64: 1e-13, F32: few_ulp}.get(got.dtype, TOLERANCE[got.dtype])
    least = rtol if function.startswith("log") else torch.finfo(got.dtype).smallest_normal
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=least, equal_nan=True)


def forward(
    runner: Runner,
    function: str,
    x: Tensor,
    y_type: torch.dtype,
    place: Place,
    plan: Plan | None,
    closely: bool = False,
) -> None:
    """One call of (outer, n, inner) over n into a poisoned result amid untouched memory, compared by `assert_close` or
    by `assert_defined`."""
    outer, _, inner = x.shape
    shape, there = (tuple(x.shape), place)
    if function == "logsumexp":
        shape, there = (outer, inner), Place((inner + 3, 1), 1) if inner > 1 else Place((1, 1), 0)
        if plan is not None and plan.tier == Tier.COLUMNS_STAGED:
            there = Place((inner, 1), 1)
    if function == "state":
        shape, there = (2, outer, inner), Place((outer * inner, inner, 1), 1)  # a state is contiguous
    memory, out = amid(7.0, shape, there, y_type, runner.device)
    out.fill_(torch.nan)
    runner.call(function, x, [1], out, plan)
    if function == "state":
        m, total = reference.state(x, 1)
        torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
    else:
        given = x if function == "logsumexp" else x.to(y_type)
        if closely:
            assert_close(function, out, getattr(reference, function)(given, 1))
        else:
            assert_defined(function, out, given, 1, f", plan {plan}")
    assert_untouched(memory, out, 7.0)


# What the result's gradient has one value for.
ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL, WITH_STEPS = range(5)


def backward(
    runner: Runner,
    function: str,
    shape: tuple[int, int, int],
    types: Types,
    kind: int,
    places: Place | tuple[Place, Place, Place],
    plan: Plan | None,
) -> None:
    """As `forward`, for a gradient. `places`: of what was saved, of the result's gradient, of the result."""
    outer, _, inner = shape
    saved_place, grad_place, place = (places,) * 3 if isinstance(places, Place) else places
    saved_type, other = types  # of logsumexp those of the input and of the result
    memory, dx = amid(7.0, shape, place, saved_type if function == "logsumexp" else other, runner.device)
    dx.fill_(torch.nan)
    x = 2 * torch.randn(shape, device=runner.device, dtype=F64)
    if function == "logsumexp":
        x = operand(x, saved_place, saved_type)
        there = Place((inner + 2, 1), 1) if kind == ONE_EACH else Place((2 * inner, 2), 0)
        g = operand(torch.randn(outer, inner, device=runner.device), there, other)
        lse = operand(reference.logsumexp(x, 1), there, other)
        runner.gradient(function, g, x, lse, [1], dx, plan)
        want, scale = gradient(function, g.unsqueeze(1), x, [1], lse.unsqueeze(1))
    else:
        y = operand(getattr(reference, function)(x, 1), saved_place, saved_type)
        sizes = {ONE_A_COLUMN: (outer, 1, inner), ONE_A_BLOCK: (outer, 1, 1), ONE_FOR_ALL: (1, 1, 1)}
        g = torch.randn(sizes.get(kind, shape), device=runner.device)
        g = operand(g, grad_place, saved_type).expand(shape)
        runner.gradient(function, g, y, None, [1], dx, plan)
        want, scale = gradient(function, g, y, [1])
    assert_gradient(dx, want, scale)
    assert_untouched(memory, dx, 7.0)


def check_rows(runner: Runner, function: str, types: Types, plan: Plan, lengths: Sequence[int]) -> None:
    """A plan on each length that it serves, with vectors as wide as the types allow."""
    x_type, y_type = types
    reduces = function in ("logsumexp", "state")  # which write no rows: their vectors are those of the input
    plan = plan._replace(
        vec_size=min(plan.vec_size, 16 // (x_type.itemsize if reduces else max(x_type.itemsize, y_type.itemsize)))
    )
    tier, threads, _, items, vector, blocks, smem_vecs, access = plan
    if (tier == Tier.CLUSTER and runner.most_cluster == 1) or (items // vector > 16 and tier == Tier.GRID):
        return
    if smem_vecs and tier != Tier.STAGED and vector * x_type.itemsize < 4:
        return
    on_gpu = runner.device == "cuda"
    room = (
        threads * (items + (0 if tier == Tier.STAGED else smem_vecs * vector)) * (blocks if tier == Tier.CLUSTER else 1)
    )
    for n in lengths if on_gpu else [n for n in lengths if n < 60_000]:
        span = n if n % vector == 0 or access or tier == Tier.STAGED else n + vector - 1
        if (n < vector and not access) or (tier not in (Tier.GRID, Tier.TWOPASS) and span > room):
            continue
        rows = (37 if on_gpu else 9) + (plan.rows_per_block * smem_vecs if tier == Tier.STAGED else 0)  # a whole tile
        x = special(rows, n, 1, x_type, runner.device, few=True).contiguous()
        aligned = tier in (Tier.WARP, Tier.BLOCK, Tier.CLUSTER) and not access and n % vector == 0
        for one in (access, Access.ALIGNED) if aligned else (access,):
            # Short tiles through shared memory also begin within vectors: in input and result, or in the result alone;
            # and there are gaps between the rows of the input.
            short = ((0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, min(3, n // 2)))
            for x_at, y_at, gap in short if tier == Tier.STAGED and n < 100 else short[:1]:
                there, given = operand(x, Place((n + gap, 1, 1), x_at), x_type), plan._replace(access=one)
                forward(runner, function, there, y_type, Place((n, 1, 1), y_at), given, closely=True)


def is_served(function: str, x_type: torch.dtype, y_type: torch.dtype) -> bool:
    if function == "logsumexp":
        return reduces_to(function, x_type, y_type)
    return function != "state" or (x_type, y_type) in TYPES["state"]  # of the type that it is added up in


def vector_of(function: str, types: Types, access: int) -> int:
    """Elements of 16 bytes of the wider type of what is as long as the columns."""
    widest = types[0].itemsize if function in TYPES else max(types[0].itemsize, types[1].itemsize)
    return 16 // widest if access != Access.STRIDED else 1


def check_columns(runner: Runner, function: str, types: Types, plan: Plan) -> None:
    """A plan over columns with everything that is special, short and long ones."""
    for n, inner, place, given in shapes(plan, vector_of(function, types, plan.access)):
        for outer in (1, 3):
            x = operand(special(outer, n, inner, types[0], runner.device), place, types[0])
            forward(runner, function, x, types[1], place, given)


def kinds_of(function: str, access: int, tier: int = Tier.COLUMNS) -> list[int]:
    """Of the result's gradient, of which those with one value have kernels of their own."""
    if tier == Tier.COLUMNS_STAGED:
        return [] if function == "logsumexp" else [ONE_EACH]
    if function == "logsumexp":
        return [ONE_EACH, WITH_STEPS]
    kinds = [ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL]
    return [kind for kind in kinds if kind != ONE_A_COLUMN or access not in (*SLABS, Access.SHIFTED)]  # of one line


def check_column_gradients(runner: Runner, function: str, types: Types, plan: Plan, kinds: Sequence[int]) -> None:
    for n, inner, place, given in shapes(plan, vector_of(function, types, plan.access)):
        for kind in kinds:
            backward(runner, function, (3, n, inner), types, kind, place, given)


def growing(n: int, inner: int, device: str) -> Tensor:
    """One kind of column beside another: (9, n, inner), as close as `inner` to the next kind."""
    at = torch.arange(n, device=device, dtype=F32).unsqueeze(1)
    noise = torch.randn(n, inner, device=device)
    rising = (at / n - 0.5) * 800
    spike = torch.where(at == torch.randint(n, (inner,), device=device), 300.0, -300.0)
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


def check_late_maxima(runner: Runner, function: str, plan: Plan, dtype: torch.dtype = F32) -> None:
    """softmax or softmin of columns whose maximum comes late; small results are as exact as the others."""
    inner, vector = {Access.PREDICATED: 19, Access.ALIGNED: 24}.get(plan.access, 7), 16 // dtype.itemsize
    for n in column_lengths(plan, vector, inner):
        x = growing(n, inner, runner.device)
        x = torch.cat([x, x.flip(0).roll(3, 2)])  # neighbours of all kinds
        x = torch.cat([x, torch.where(torch.arange(inner, device=x.device) % 2 == 0, x, x.flip(0))])
        x = (-x if function == "softmin" else x).to(dtype)
        pitch = -(-inner // vector) * vector if plan.access != Access.SLAB_ALIGNED else inner
        place, given = Place((n * pitch, pitch, 1), vector), widen(plan, vector, inner)
        there, out = (operand(values, place, dtype) for values in (x, torch.full_like(x, torch.nan)))
        runner.call(function, there, [1], out, given)
        assert_defined(function, out, x, 1, f", plan {given}")
        if dtype is not F32:
            continue
        want = torch.softmax(-x.double() if function == "softmin" else x.double(), 1)
        small = (want > 1e-37) & (want < 1e-20)
        if n > 40:
            assert bool(small.any())
        torch.testing.assert_close(out[small].double(), want[small], rtol=2e-5, atol=0)
