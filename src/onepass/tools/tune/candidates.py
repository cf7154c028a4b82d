"""The table entries that may be the fastest for rows of a length, with the plans that the engine makes of them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from onepass import native
from onepass.native import Plan
from onepass.tables import ANY
from onepass.tools.tune.sizes import is_odd, up

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS, COLUMNS, COLUMNS_GRID = range(8)  # the last two: columns.py
SMEM_VECS = (0, 4, 8, 12, 16)
LEAST_THREADS = (0, 128, 160, 192, 256, 320)  # of a block that keeps vectors in shared memory: 0, as few as needed
STREAMING = 1024  # threads per multiprocessor that stream the rows of a reduction, at least


class Choice(NamedTuple):
    """A table entry without its limit; `tier` is its place in native.TIERS, or -1 for "as the table of rows"."""

    tier: int
    threads: int  # warp, staged: per row; else per block: block, cluster: at least
    items_per_thread: int  # block, cluster, grid: in registers at most; twopass: in flight; warp, staged: 0
    blocks_per_row: int  # columns: vectors of a tile side by side
    smem_vecs: int  # block, cluster: vectors that a thread keeps in shared memory at most


class Candidate(NamedTuple):
    choice: Choice
    plan: Plan


Kernel = tuple[str, str, Plan]  # function, dtype, a plan that asks for it


@dataclass(frozen=True)
class Gpu:
    """What decides which plans a GPU takes. `shared`: bytes of shared memory that a block may have; `cooperative`:
    whether it takes cooperative launches."""

    name: str
    compute: int  # 90 for compute capability 9.0
    multiprocessors: int
    shared: int
    cooperative: bool = True


@functools.cache
def plan_of(choice: Choice, sizes: tuple[int, int, int], size: int, gpu: Gpu, which: str = "forward") -> Plan | None:
    """The plan by an entry alone of contiguous tensors of elements of `size` bytes over the middle dim, which is the
    engine's; None where it does not hold them.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> tuple(plan_of(Choice(WARP, 32, 0, 1, 0), (4096, 1000, 1), 4, gpu))
    (0, 32, 4, 32, 4, 1, 0, 2)
    """
    of = gpu.compute, gpu.multiprocessors, gpu.shared, gpu.cooperative, which
    return native.plan_from_entry(choice, sizes, torch.float32 if size == 4 else torch.bfloat16, *of)


def longest(n: int, unit: int, plan: Callable[[int], object]) -> int:
    """The longest length from `n` on, a multiple of `unit`, up to which `plan` is what it is for the first of these.

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


def holds(choice: Choice, n: int, size: int, gpu: Gpu) -> int:
    """The longest row that the entry serves by as many threads per block as one of n, wherever it begins. With more of
    them a multiprocessor may hold a block fewer, which a measurement at n does not tell: 6400 float32 in 416 threads of
    16 elements run at 0.77 of a copy, 6144 in 384 at 0.97.

    >>> holds(Choice(BLOCK, 0, 16, 1, 0), 6000, 4, Gpu("an H200", 90, 132, 227 * 1024))
    6141
    """
    if choice.tier in (GRID, TWOPASS) or choice.tier < 0:
        return ANY

    def threads(n: int) -> int | None:
        plan = plan_rows(choice, n, size, 1, gpu)
        return plan and plan.threads_per_row

    return longest(n, 16 // size, threads) - (16 // size - 1)


def plan_rows(choice: Choice, n: int, size: int, rows: int, gpu: Gpu) -> Plan | None:
    """`plan_of` for rows of n elements; None too where a thread keeps more elements than was ever the fastest."""
    plan = plan_of(choice, (rows, n, 1), size, gpu)
    if plan is None or plan.tier not in (WARP, STAGED):
        return plan
    most = 48 if plan.tier == STAGED else min(64, 160 // size)
    one_more = plan.vec_size if plan.tier == WARP and n % plan.vec_size else 0  # for a row that begins within a vector
    fits = plan.items_per_thread <= most + one_more and n <= plan.threads_per_row * most
    return plan if fits else None


def _choices(n: int, size: int, rows: int, reduces: bool) -> Iterator[Choice]:
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


def candidates(n: int, size: int, rows: int, gpu: Gpu, reduces: bool = False) -> list[Candidate]:
    """All that may be the fastest for `rows` contiguous rows of n elements of `size` bytes (4, or 2).

    Where the function `reduces`, its result has no rows, and the tier twopass reads each element once. Several may come
    to one plan: a thread keeps no more vectors than a row needs.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> [c.choice.threads for c in candidates(8, 4, 2**20, gpu)]
    [1, 2, 4]
    """
    found: dict[Choice, Candidate] = {}
    few: list[Candidate] = []
    least = 32 if n < 2048 else 64
    for choice in _choices(n, size, rows, reduces):
        plan = plan_rows(choice, n, size, rows, gpu)
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


def kernels(todo: Sequence[Kernel]) -> list[Kernel]:
    """One (function, dtype, plan) for each kernel: most take any number of threads and of blocks.

    >>> plan = Plan(BLOCK, 128, 1, 32, 4, 1, 0)
    >>> plans = [plan, plan._replace(threads_per_row=256), plan._replace(items_per_thread=16)]
    >>> len(kernels([("softmax", "float32", plan) for plan in plans]))
    2
    """
    found: dict[tuple[str, str, Plan], Kernel] = {}
    for function, dtype, plan in todo:
        columns, few_threads = plan.tier > TWOPASS, plan.tier in (WARP, STAGED)
        most_threads = max(128, 1 << (plan.threads_per_row * plan.rows_per_block - 1).bit_length())
        (plan.blocks_per_row if plan.tier in (CLUSTER, COLUMNS) else min(plan.blocks_per_row, 2) if columns else 0)
        kind = plan._replace(
            threads_per_row=plan.threads_per_row if few_threads else most_threads if columns else 0,
            rows_per_block=0 if columns else plan.rows_per_block,
            blocks_per_row=plan.blocks_per_row
            if plan.tier in (CLUSTER, COLUMNS)
            else columns and plan.blocks_per_row > 1,
            smem_vecs=0 if few_threads else min(plan.smem_vecs, 2 if columns else 1),
        )
        found[function, dtype, kind] = (function, dtype, plan)
    return list(found.values())
