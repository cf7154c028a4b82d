"""What may be the fastest for columns, calls over other dims than the last: as candidates.py, of csrc/plan/columns.h.

A choice says of a tile its vectors side by side (`split`), threads a block (`lanes`), and the vectors that a thread
keeps in registers (`values`) and in shared memory (`shelf`) at most.
"""

from collections.abc import Iterator

from onepass.tools.tune.candidates import COLUMNS, WHOLE, Candidate, Choice, Gpu, Plan, block_of
from onepass.tools.tune.candidates import COLUMNS_GRID as GRID
from onepass.tools.tune.sizes import up

TWOPASS = 8  # the tier columns-stream, which no entry has, but where the chip holds too little
AHEAD = 1  # of a shelf: for the next tile
FUNCTIONS = ("columns", "columns_backward")  # softmax, and its gradient, which keeps two operands
# fmt: off
LENGTHS = (
    8, 16, 21, 24, 32, 48, 64, 96, 128, 196, 256, 320, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 32768,
)
# fmt: on
LONGEST = 131072  # beyond, the chip has them in any case
SIDE = 4096  # columns that lie side by side in what is measured
MANY = (1 << 16, SIDE)  # tensors: more tiles than any GPU has room for
MORE_SHARED = 15 * 1024  # bytes of shared memory beyond those of `Gpu.shared`: these kernels declare little
PLACES = 48  # vectors of a thread in shared memory at most, in the tier columns-grid
FEW = 12  # so many before there are more, of a gradient
RING = 8  # and at least, where there are any
KEPT = 8  # and in registers
NARROW = range(2049, 4097)  # of columns of floats whose tiles, if they are so wide
WIDE = 16  # (vectors), are half as wide where there are fewer
FEW_TILES = 3  # a multiprocessor than these
# Of the tier columns, by the operands that are kept: vectors in registers and in shared memory, 16 or 32 together.
SHELVED = {
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


def _fitting(side: int, vectors: int) -> int:
    """Threads side by side: fewer where that leaves none idle at the end of a line."""
    if vectors <= side:
        return vectors
    return next((across for across in range(side, -(-3 * side // 4) - 1, -1) if vectors % across == 0), side)


def _down(n: int, across: int, threads: int) -> int:
    """Threads down a column, of which each keeps two vectors at least."""
    return max(1, min(threads // across, up(n, 2)))


def _meeting(block: int, vector: int, pitch: int, split: int, size: int, kept: int, *, grid: bool = False) -> int:
    """Bytes of shared memory beside the shelf, at most."""
    gradient = kept > 1
    part = up(block * vector // pitch * (pitch + 8), 4) * 16
    whole = up(pitch * (1 if gradient else 3), 4) * 16
    tops = 0 if gradient else part if grid or (size == 2 and split == 1) else up(pitch, 4) * 16
    boxes = 2 * split * pitch * (4 if gradient else 8) if split > 1 and not grid else 0
    return whole + part + tops + boxes


def resolve(choice: Choice, n: int, shape: tuple[int, int], size: int, kept: int, gpu: Gpu) -> Plan | None:
    """The plan of a table entry for contiguous tensors (shape[0], n, shape[1]) of whole vectors, `kept` of them kept on
    the chip; None where no cluster holds what an entry of the tier columns is for.

    >>> gpu = Gpu("an H200", 90, 132, 211 * 1024)
    >>> tuple(resolve(Choice(COLUMNS, 128, 8, 16, 0), 64, (4096, 256), 4, 1, gpu))
    (6, 16, 8, 32, 4, 1, 0, 2)
    """
    tier, threads, slots, side, shelf = choice
    outer, inner = shape
    vector = 16 // size
    if tier == GRID:
        return _grid(_fitting(side, inner // vector), n, outer, inner, vector, kept, gpu)
    few = up(inner // vector, side) * outer < FEW_TILES * gpu.multiprocessors
    if few and side >= WIDE and kept == 1 and size == 4 and n in NARROW:
        side //= 2
    across = _fitting(min(side, threads), inner // vector)
    down = _down(n, across, threads)
    block, split = block_of(across, down), 1
    while split <= gpu.most_cluster:
        each = up(up(n, down), split)
        here = min(each, slots)
        here += here > 16 and here % 2  # kernels come in even numbers there
        waits = AHEAD if shelf == AHEAD else up(max(0, each - here), 4) * 4
        room = gpu.shared + MORE_SHARED - _meeting(block, vector, across * vector, split, size, kept)
        fits = each <= slots + (0 if shelf == AHEAD else shelf)
        if fits and (here if shelf == AHEAD else waits) * block * 16 * kept <= room:
            return Plan(COLUMNS, across, down, here * vector, vector, split, waits, WHOLE)
        split *= 2
    return None


def _grid(across: int, n: int, outer: int, inner: int, vector: int, kept: int, gpu: Gpu) -> Plan:
    slots, chip = KEPT // kept, gpu.multiprocessors
    tiles = up(inner, across * vector) * outer
    for most_places in (FEW if kept > 1 else KEPT, PLACES) if gpu.cooperative else ():
        for threads in (512, 256):
            down = _down(n, across, threads)
            block = block_of(across, down)
            room = gpu.shared + MORE_SHARED - _meeting(block, vector, across * vector, 1, 16 // vector, kept, grid=True)
            places = room // (block * 16 * kept) // 4 * 4
            every = up(n, down)
            alone = up(every, slots + min(places, most_places))  # blocks that hold a tile between them
            if alone > chip:
                continue
            blocks, useful = chip // min(tiles, chip // alone), up(every, 1024 // threads)
            if blocks > useful:
                blocks = max(useful, alone)
            each = up(every, blocks)
            here = each if each <= KEPT else slots
            shelf = up(max(0, each - here), 4) * 4
            if kept == 1 and 0 < shelf < RING:
                shelf = min(RING, places)
                here = up(each - shelf, 4) * 4
            tier = GRID if blocks > 1 else COLUMNS
            return Plan(tier, across, down, here * vector, vector, blocks, shelf, WHOLE)
    blocks = chip // min(tiles, chip) if gpu.cooperative else 1
    return Plan(TWOPASS, across, _down(n, across, 512), 8 // kept * vector, vector, blocks, 0, WHOLE)


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
                    yield Choice(COLUMNS, threads, most, side, AHEAD)
            if n > 64 and side in (8, 16):
                yield from (Choice(COLUMNS, threads, most, side, rest) for most, rest in SHELVED[kept])
    if n >= 512:
        for side in (4, 8, 16):
            yield Choice(GRID, 0, 0, side, 0)


def candidates(n: int, shape: tuple[int, int], size: int, kept: int, gpu: Gpu) -> list[Candidate]:
    """All that may be the fastest for columns of n elements, where several may come to one plan.

    >>> gpu = Gpu("an H200", 90, 132, 211 * 1024)
    >>> sorted({c.plan.threads_per_row for c in candidates(21, (16, 4096), 4, 1, gpu)})
    [32, 64, 128]
    """
    found = []
    for choice in _choices(n, kept):
        plan = resolve(choice, n, shape, size, kept, gpu)
        if plan is not None:
            found.append(Candidate(choice, plan))
    return found


def capacity(choice: Choice, size: int, kept: int, gpu: Gpu) -> int:
    """The longest column that a cluster holds with all of the entry's vectors in use; beyond, the chip has it.

    >>> capacity(Choice(COLUMNS, 256, 16, 8, 16), 4, 1, Gpu("an H200", 90, 132, 211 * 1024))
    16384
    """
    tier, threads, slots, side, shelf = choice
    if tier == GRID:
        return 2**63 - 1
    split, each = gpu.most_cluster, (slots + (0 if shelf == AHEAD else shelf)) * max(1, threads // side)
    while split and resolve(choice, split * each, MANY, size, kept, gpu) is None:
        split //= 2
    return split * each


def kernel_of(function: str) -> tuple[str, str]:
    """(function, pass) that `native` knows a measured function's kernels by.

    >>> kernel_of("columns_backward"), kernel_of("logsumexp")
    (('softmax', 'backward'), ('logsumexp', 'forward'))
    """
    return ("softmax" if function in FUNCTIONS else function), "backward" if operands(function) > 1 else "forward"
