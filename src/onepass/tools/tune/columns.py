"""The table entries that may be the fastest for columns, calls over other dims than the last, as candidates.py.

A choice has the vectors of a tile side by side (`blocks_per_row`), the threads per block, and the vectors that a thread
keeps in registers (`items_per_thread`) and in shared memory (`smem_vecs`) at most.
"""

from collections.abc import Iterator

from onepass.tables import ANY
from onepass.tools.tune.candidates import COLUMNS, Candidate, Choice, Gpu, longest, plan_of
from onepass.tools.tune.candidates import COLUMNS_GRID as GRID

PREFETCH = 1  # `smem_vecs` of an entry that loads the next tile into shared memory ahead
FUNCTIONS = ("columns", "columns_backward")  # softmax, and its gradient, which keeps two operands
# fmt: off
LENGTHS = (
    8, 16, 21, 24, 32, 48, 64, 96, 128, 196, 256, 320, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 32768,
)
# fmt: on
LONGEST = 131072  # beyond, the chip has them in any case
MANY = 1 << 16  # tensors: more tiles than any GPU has room for
SIDE = 4096  # columns that lie side by side in what is measured
# Of the tier columns, by the operands that are kept: vectors in registers and in shared memory, 16 or 32 together.
SMEM_VECS = {
    1: ((8, 4), (8, 8), (10, 8), (12, 4), (12, 20), (16, 16), (18, 8), (20, 12), (24, 8)),
    2: ((4, 4), (8, 8), (12, 4)),
}


def operands(function: str) -> int:
    return 2 if function == "columns_backward" else 1


def shape_of(n: int, size: int, mib: int) -> tuple[int, int]:
    """(tensors, columns side by side) of so many columns of n elements of `size` bytes as `mib` MiB hold.

    >>> shape_of(1024, 4, 256), shape_of(131072, 2, 256), shape_of(131072, 4, 1)
    ((16, 4096), (1, 1024), (1, 64))
    """
    count = mib * 2**20 // (n * size)
    side = max(64, min(SIDE, count // 64 * 64))
    return max(1, count // side), side


def _choices(n: int, kept: int) -> Iterator[Choice]:
    """All that might be the fastest, whether it fits or not."""
    sides = (32, 64, 128) if n <= 24 else (8, 16, 32, 64) if n <= 64 else (8, 16, 32) if n < 512 else (4, 8, 16)
    slots = ((8, 16, 24) if n <= 64 else (8, 12, 16)) if kept == 1 else (4, 6, 8) if n <= 512 else (4, 8, 16)
    for side in sides:
        for threads in (64, 128, 256, 512):
            if side > threads or (threads == 64 and n > 64) or (threads == 512 and 64 < n <= 1024):
                continue
            for most in slots:
                yield Choice(COLUMNS, threads, most, side, 0)
                if 64 < n <= 512:
                    yield Choice(COLUMNS, threads, most, side, PREFETCH)
            if n > 64 and side in (8, 16):
                yield from (Choice(COLUMNS, threads, most, side, rest) for most, rest in SMEM_VECS[kept])
    if n >= 512:
        for side in (4, 8, 16):
            yield Choice(GRID, 0, 0, side, 0)


def candidates(n: int, shape: tuple[int, int], size: int, function: str, gpu: Gpu) -> list[Candidate]:
    """All that may be the fastest for columns of n elements, where several may come to one plan.

    >>> gpu = Gpu("an H200", 90, 132, 227 * 1024)
    >>> sorted({c.plan.threads_per_row for c in candidates(21, (16, 4096), 4, "columns", gpu)})
    [32, 64, 128]
    """
    sizes, which = (shape[0], n, shape[1]), kernel_of(function)[1]
    tried = ((choice, plan_of(choice, sizes, size, gpu, which)) for choice in _choices(n, operands(function)))
    return [Candidate(choice, plan) for choice, plan in tried if plan is not None]


def holds(choice: Choice, n: int, size: int, function: str, gpu: Gpu) -> int:
    """The longest column that the entry holds in a cluster, beyond which it takes the chip.

    >>> holds(Choice(COLUMNS, 256, 16, 8, 16), 1000, 4, "columns", Gpu("an H200", 90, 132, 227 * 1024))
    16384
    """
    if choice.tier == GRID:
        return ANY
    which = kernel_of(function)[1]
    return longest(n, 1, lambda n: plan_of(choice, (MANY, n, SIDE), size, gpu, which) is not None)


def kernel_of(function: str) -> tuple[str, str]:
    """(function, pass) that `native` knows a measured function's kernels by.

    >>> kernel_of("columns_backward"), kernel_of("logsumexp")
    (('softmax', 'backward'), ('logsumexp', 'forward'))
    """
    return ("softmax" if function in FUNCTIONS else function), "backward" if operands(function) > 1 else "forward"
