"""The table entries that may be the fastest for rows or columns of a length, and the engine's plans for them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from onepass import native
from onepass._kernel_compiler import Kernel
from onepass.native import Plan
from onepass.tables import ANY
from onepass.tools.tune.sizes import KERNELS, SIDE, is_columns, is_odd, up

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS, COLUMNS, COLUMNS_GRID = range(8)
SMEM_VECS = (0, 4, 8, 12, 16)
# The fewest threads of a block that keeps vectors in shared memory. 0: as few as needed.
LEAST_THREADS = (0, 128, 160, 192, 256, 320)
PREFETCH = 1  # `smem_vecs` of an entry of columns that loads the next tile into shared memory ahead
# For columns, by whether it is the gradient: (vectors in registers, vectors in shared memory), 16 or 32 together.
COLUMN_VECS = {
    False: ((8, 4), (8, 8), (10, 8), (12, 4), (12, 20), (16, 16), (18, 8), (20, 12), (24, 8)),
    True: ((4, 4), (8, 8), (12, 4)),
}
MANY_TENSORS = 1 << 16  # more tiles than any GPU has room for
STREAMING = 1024  # threads per multiprocessor that stream the rows of a reduction, at least


class Choice(NamedTuple):
    """A table entry without its limit. `tier` is the index in native.TIERS, or -1 for "as the table of rows"."""

    tier: int
    threads: int  # warp, staged: per row; else per block: block, cluster: at least
    items_per_thread: int  # in registers at most, of columns in vectors; twopass: in flight; warp, staged: 0
    blocks_per_row: int  # columns: vectors of a tile side by side
    smem_vecs: int  # vectors that a thread keeps in shared memory at most


class Candidate(NamedTuple):
    choice: Choice
    plan: Plan


@dataclass(frozen=True)
class Gpu:
    """The properties that decide which plans a GPU supports. `shared`: bytes of shared memory that a block may have.
    `cooperative`: whether it supports cooperative launches."""

    name: str
    compute: int  # 90 for compute capability 9.0
    multiprocessors: int
    shared: int
    cooperative: bool = True


@functools.cache
def plan_of(
    choice: Choice, sizes: tuple[int, int, int], size: int, gpu: Gpu, which: str = "forward", reduces: bool = False
) -> Plan | None:
    """The engine's plan of an entry for contiguous tensors, with elements of `size` bytes, over the middle dim. None if
    the entry does not hold rows or columns of that length. `reduces`: True for logsumexp, False for softmax.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> tuple(plan_of(Choice(WARP, 32, 0, 1, 0), (4096, 1000, 1), 4, gpu))
    (0, 32, 4, 32, 4, 1, 0, 2)
    """
    dtype = torch.float32 if size == 4 else torch.bfloat16
    return native.plan_from_entry(
        choice, sizes, dtype, gpu.compute, gpu.multiprocessors, gpu.shared, gpu.cooperative, which, reduces
    )


def longest(n: int, unit: int, plan: Callable[[int], object]) -> int:
    """The longest multiple of `unit`, from `n` on, up to which `plan` returns the same as for the first multiple.

    >>> longest(5, 4, lambda n: n < 30)
    28
    """
    low = up(n, unit)
    first, high = plan(low * unit), 2 * low
    while plan(high * unit) == first:
        if high * unit > ANY // 4:
            return ANY
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle * unit) == first else (low, middle)
    return low * unit


def holds(function: str, size: int, gpu: Gpu, choice: Choice, n: int) -> int:
    """The longest row, of any alignment, that the entry serves with as many threads per block as a row of n elements.
    With more threads a multiprocessor may hold one block less, which a measurement at n does not show: 6400 float32 in
    416 threads of 16 elements run at 0.77 of a copy, 6144 in 384 at 0.97. For columns, the longest that fits a cluster.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> holds("softmax", 4, gpu, Choice(BLOCK, 0, 16, 1, 0), 6000)
    6141
    >>> holds("columns", 4, gpu, Choice(COLUMNS, 256, 16, 8, 16), 1000)
    16384
    """
    if choice.tier in (GRID, TWOPASS, COLUMNS_GRID) or choice.tier < 0:
        return ANY
    if is_columns(function):
        which = KERNELS[function][1]
        return longest(n, 1, lambda n: plan_of(choice, (MANY_TENSORS, n, SIDE), size, gpu, which) is not None)

    def threads(n: int) -> int | None:
        plan = plan_rows(choice, n, size, 1, gpu, function == "logsumexp")
        return plan and plan.threads_per_row

    return longest(n, 16 // size, threads) - (16 // size - 1)


def plan_rows(choice: Choice, n: int, size: int, rows: int, gpu: Gpu, reduces: bool) -> Plan | None:
    """`plan_of` for rows of n elements. Also None if a thread keeps more elements than was ever the fastest."""
    plan = plan_of(choice, (rows, n, 1), size, gpu, reduces=reduces)
    if plan is None or plan.tier not in (WARP, STAGED):
        return plan
    most = 48 if plan.tier == STAGED else min(64, 160 // size)
    one_more = plan.vec_size if plan.tier == WARP and n % plan.vec_size else 0  # for a row that begins within a vector
    threads = min(plan.threads_per_row, choice.threads)  # the planner may choose another number than the entry has
    fits = plan.items_per_thread <= most + one_more and n <= threads * most
    return plan if fits else None


def _row_choices(n: int, size: int, rows: int, reduces: bool) -> Iterator[Choice]:
    """All that might be the fastest, whether it fits or not."""
    widest, most = 16 // size, 128 // size
    for lanes in (1, 2, 4, 8, 16, 32):
        if n <= 2048:
            yield Choice(WARP, lanes, 0, 1, 0)
        if is_odd(n, size) and not reduces and (lanes == 1 or up(n, lanes) > 8):
            yield Choice(STAGED, lanes, 0, 1, 0)
    fewer = range(most * 3 // 8, most // 2, most // 8) if reduces else ()
    kept = (most // 4, *fewer, *range(most // 2, most + 1, most // 8))
    for split, values, smem_vecs in product((1, 2, 4, 8, 16), kept, SMEM_VECS):
        small = n < 512 or (split > 1 and n < 8192) or (smem_vecs > 0 and n < 14000)
        if not small and (smem_vecs == 0 or values >= most // 2):
            for lanes in LEAST_THREADS if smem_vecs else (0,):
                yield Choice(BLOCK if split == 1 else CLUSTER, lanes, values, split, smem_vecs)
    if n >= 131072 and rows > 1:
        yield Choice(GRID, 480, 4 * widest, 1, 0)
    if reduces:  # nothing is written, so that a row is read once here too
        for threads, values in product((64, 128, 256, 512, 1024), (most // 4, most // 2, most * 3 // 4)):
            if threads * widest <= n and threads * (values - most // 4) < n:
                yield Choice(TWOPASS, threads, values, 1, 0)
    elif n >= 12288:
        for threads in (512, 1024):
            yield Choice(TWOPASS, threads, 16, 1, 0)


def _column_choices(n: int, backward: bool) -> Iterator[Choice]:
    """All that might be the fastest, whether it fits or not."""
    sides = (32, 64, 128) if n <= 24 else (8, 16, 32, 64) if n <= 64 else (8, 16, 32) if n < 512 else (4, 8, 16)
    slots = ((8, 16, 24) if n <= 64 else (8, 12, 16)) if not backward else (4, 6, 8) if n <= 512 else (4, 8, 16)
    for side in sides:
        for threads in (64, 128, 256, 512):
            if side > threads or (threads == 64 and n > 64) or (threads == 512 and 64 < n <= 1024):
                continue
            for most in slots:
                yield Choice(COLUMNS, threads, most, side, 0)
                if 64 < n <= 512:
                    yield Choice(COLUMNS, threads, most, side, PREFETCH)
            if n > 64 and side in (8, 16):
                yield from (Choice(COLUMNS, threads, most, side, rest) for most, rest in COLUMN_VECS[backward])
    if n >= 512:
        for side in (4, 8, 16):
            yield Choice(COLUMNS_GRID, 0, 0, side, 0)


def candidates(function: str, n: int, shape: tuple[int, int], size: int, gpu: Gpu) -> list[Candidate]:
    """All candidates that may be the fastest for contiguous rows or columns of n elements of `size` bytes (4, or 2).
    `shape` is as in `sizes.shapes`. Several may have the same plan, as a thread keeps no more vectors than a row needs.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> [c.choice.threads for c in candidates("softmax", 8, (2**20, 1), 4, gpu)]
    [1, 2, 4]
    >>> sorted({c.plan.threads_per_row for c in candidates("columns", 21, (16, 4096), 4, gpu)})
    [32, 64, 128]
    """
    if not is_columns(function):
        return _row_candidates(n, size, shape[0], gpu, function == "logsumexp")
    which = KERNELS[function][1]
    tried = (
        (c, plan_of(c, (shape[0], n, shape[1]), size, gpu, which)) for c in _column_choices(n, which == "backward")
    )
    return [Candidate(choice, plan) for choice, plan in tried if plan is not None]


def _row_candidates(n: int, size: int, rows: int, gpu: Gpu, reduces: bool) -> list[Candidate]:
    """The candidates for rows. If the function `reduces`, no rows are written, and the tier twopass reads each element
    once."""
    found: dict[Choice, Candidate] = {}
    few: list[Candidate] = []
    least = 32 if n < 2048 else 64
    for choice in _row_choices(n, size, rows, reduces):
        plan = plan_rows(choice, n, size, rows, gpu, reduces)
        if plan is None:
            continue
        vecs = up(n + plan.vec_size - 1 if n % plan.vec_size else n, plan.vec_size)
        if plan.tier == WARP and plan.threads_per_row > max(1, 2 * vecs):
            continue
        if plan.tier in (BLOCK, CLUSTER):
            most = 512 if plan.smem_vecs else 1024 if plan.blocks_per_row == 1 else 512
            if not least <= plan.threads_per_row <= most:
                continue
        if reduces and plan.tier == TWOPASS and rows < gpu.multiprocessors * STREAMING // plan.threads_per_row:
            few.append(Candidate(choice, plan))  # the engine then serves them as softmax
            continue
        found[choice] = Candidate(choice, plan)
    return list(found.values()) or few


def kernels(todo: Sequence[tuple[str, str, Plan]]) -> list[Kernel]:
    """The kernels for these (function, dtype, plan), each once: most kernels take any number of threads and blocks.

    >>> plan = Plan(BLOCK, 128, 1, 32, 4, 1, 0)
    >>> plans = [plan, plan._replace(threads_per_row=256), plan._replace(items_per_thread=16)]
    >>> len(kernels([("softmax", "float32", plan) for plan in plans]))
    2
    """
    found: dict[tuple[str, str, Plan], Kernel] = {}
    for function, dtype, plan in todo:
        columns, few_threads = plan.tier > TWOPASS, plan.tier in (WARP, STAGED)
        most_threads = max(128, 1 << (plan.threads_per_row * plan.rows_per_block - 1).bit_length())
        kind = plan._replace(
            threads_per_row=plan.threads_per_row if few_threads else most_threads if columns else 0,
            rows_per_block=0 if columns else plan.rows_per_block,
            blocks_per_row=plan.blocks_per_row
            if plan.tier in (CLUSTER, COLUMNS)
            else columns and plan.blocks_per_row > 1,
            smem_vecs=0 if few_threads else min(plan.smem_vecs, 2 if columns else 1),
        )
        type_, (name, which) = getattr(torch, dtype), KERNELS[function]
        found[function, dtype, kind] = Kernel(name, type_, type_, which, tuple(plan))
    return list(found.values())
