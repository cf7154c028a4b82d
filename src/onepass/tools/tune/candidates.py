"""What may be the fastest for rows of a length: pure functions, which make of a table entry what plan/rows.h does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from onepass.native import Plan
from onepass.tools.tune.sizes import is_odd, up

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS, COLUMNS, COLUMNS_GRID = range(8)  # the last two: columns.py
WHOLE = 2  # of `edges`, as plan.h counts them
THREADS = 128  # of a block, in the tiers warp and flat
TILE = 16 * 1024 * 7 // 8  # bytes of a tile of the tier flat at least
SHELVES = (0, 4, 8, 12, 16)
LEAST_THREADS = (0, 128, 160, 192, 256, 320)  # of a block that has a shelf: 0, as few as the row needs
GRID_VECTORS = 448  # of a row that a block of the tier grid is worth being there for
MUCH_LONGER, LITTLE = 4, 16  # times what the chip holds: of such rows registers keep nothing, and shared memory little
WINDOW_HALVES = 40  # that a thread keeps of a row that is no whole number of vectors: more would spill
STREAMING = 1024  # threads a multiprocessor that stream rows of a reduction, so many at least
FULL_CLUSTERS = 132  # multiprocessors from which clusters of 16 are sure to find their place on compute 9.0


def block_of(across: int, down: int) -> int:
    """The threads that a kernel of columns is compiled for.

    >>> block_of(8, 16), block_of(9, 16)
    (128, 256)
    """
    return max(128, 1 << (across * down - 1).bit_length())


class Choice(NamedTuple):
    """A table entry without its limit; `tier` is its place in TIERS, or -1 for "as the table of rows"."""

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
    """What decides which plans a GPU takes. `shared`: bytes of shared memory that a plan may ask for;
    `cooperative`: whether it takes cooperative launches."""

    name: str
    compute: int  # 90 for compute capability 9.0
    multiprocessors: int
    shared: int
    cooperative: bool = True

    def most_threads(self, split: int) -> int:
        """The most threads of a block that shares a row, as rows_onchip.cu has it."""
        return 512 if split > 1 else 1024 if self.compute == 90 else 896

    @property
    def most_cluster(self) -> int:
        if self.compute < 90:
            return 1
        return 16 if self.compute == 90 and self.multiprocessors >= FULL_CLUSTERS else 8


def _vector(n: int, size: int) -> int:
    """The elements of a vector: 16 bytes, or as many as the row has; narrower in a row of few halves."""
    vector = 16 // size
    while vector > 1 and vector > n:
        vector //= 2
    while size == 2 and n < 128 and n % vector:
        vector //= 2
    return vector


def _vectors(n: int, vector: int) -> int:
    """Vectors of a row's aligned window at worst."""
    return up(n if n % vector == 0 else n + vector - 1, vector)


def resolve(choice: Choice, n: int, size: int, rows: int, gpu: Gpu) -> Plan | None:
    """The plan of a table entry for contiguous rows of n elements of `size` bytes; None where it cannot hold them.

    >>> gpu = Gpu("an H200", 90, 132, 211 * 1024)
    >>> tuple(resolve(Choice(WARP, 32, 0, 1, 0), 1000, 4, 4096, gpu))
    (0, 32, 4, 32, 4, 1, 0, 2)
    """
    tier, lanes, values, split, shelf = choice
    vector = _vector(n, size)
    vectors = _vectors(n, vector)
    edges = WHOLE if n % (16 // size) == 0 else 0
    if tier == WARP:
        kinds = max(vector, 4)  # values come in multiples of this
        values = up(up(vectors, lanes) * vector, kinds) * kinds
        fits = values <= most_kept(WARP, size) + (vector if n % vector else 0)  # a row within vectors takes one more
        return Plan(WARP, lanes, THREADS // lanes, values, vector, 1, 0, edges) if fits else None
    if tier == STAGED:
        held, values = THREADS // lanes, up(up(n, lanes), 2) * 2
        turns = up(TILE, n * size * held)
        turns = next(count for count in range(turns, turns + 8) if count * held % (16 // size) == 0)
        fits = values <= most_kept(STAGED, size) and held * turns * n * size + 32 <= gpu.shared
        return Plan(STAGED, lanes, held, values, 1, 1, turns) if fits else None
    if tier == TWOPASS:
        return Plan(TWOPASS, lanes, 1, max(values // vector, 1) * vector, vector, 1, 0)
    if tier == GRID:
        return _grid(vectors, vector, rows, gpu)
    if not edges and size == 2 and not shelf:
        values = min(values, WINDOW_HALVES)
    slots = max(1, values // vector)
    threads = max(lanes, up(up(vectors, (slots + shelf) * split), 32) * 32)
    if threads > gpu.most_threads(split) or split > gpu.most_cluster:
        return None
    each = up(vectors, threads * split)
    slots, shelf = min(slots, each), up(max(0, each - slots), 2) * 2  # what the row needs
    if shelf * threads * vector * size > gpu.shared:
        return None
    return Plan(tier, threads, 1, slots * vector, vector, split, shelf, 0 if shelf else edges)


def _grid(vectors: int, vector: int, rows: int, gpu: Gpu) -> Plan | None:
    def places(threads: int) -> int:
        return gpu.shared // (threads * 16) // 4 * 4

    if not gpu.cooperative:
        return None
    threads, slots, chip = 480, 16 if gpu.compute == 90 else 12, gpu.multiprocessors
    most, holds = slots, threads * (slots + places(threads))
    alone = up(vectors, holds)  # blocks that hold a row between them
    split = min(alone, chip)
    if alone < chip:
        split = min(chip // min(rows, chip // alone), max(up(vectors, GRID_VECTORS), alone))
    each = up(vectors, split)
    if each > MUCH_LONGER * holds:
        slots = 0
    for few, kept, more in ((256, 4, 0), (256, 8, 0), (256, 12, 0), (256, 16, 0), (352, 8, min(places(352), LITTLE))):
        if each <= few * (min(kept, most) + more):
            threads, slots = few, min(kept, most)
            break
    room = places(threads) if slots else min(places(threads), LITTLE)
    shelf = min(room, up(max(0, up(each, threads) - slots), 4) * 4)
    return Plan(GRID, threads, 1, slots * vector, vector, split, shelf)


def most_kept(tier: int, size: int) -> int:
    """The most elements a thread keeps in registers: beyond, none was ever the fastest."""
    return 48 if tier == STAGED else min(64, 160 // size)


def capacity(choice: Choice, size: int, gpu: Gpu) -> int:
    """The longest row of whole vectors that the entry can hold.

    >>> capacity(Choice(BLOCK, 0, 32, 1, 0), 4, Gpu("an H200", 90, 132, 211 * 1024))
    32768
    """
    tier, lanes, values, split, shelf = choice
    vector = 16 // size
    if tier == WARP:
        return lanes * most_kept(WARP, size)
    if tier == STAGED:
        return min(lanes * most_kept(STAGED, size), (gpu.shared - 32) // (THREADS // lanes * size))
    if tier in (GRID, TWOPASS) or tier < 0:
        return 2**63 - 1
    kept = values + shelf * vector
    threads = gpu.most_threads(split)
    if shelf:
        threads = min(threads, gpu.shared // (shelf * 16) // 32 * 32)
    return threads * kept * split


def steady(choice: Choice, n: int, size: int, gpu: Gpu) -> int:
    """The longest row of whole vectors that takes as many threads a block as one of n. With more of them a
    multiprocessor may hold a block fewer, which a measurement at n does not tell: 6400 floats in 416 threads of 16
    elements run at 0.77 of a copy, 6144 in 384 at 0.97.

    >>> steady(Choice(BLOCK, 0, 16, 1, 0), 6000, 4, Gpu("an H200", 90, 132, 211 * 1024))
    6144
    """
    plan = resolve(choice, n, size, 1, gpu) if choice.tier in (BLOCK, CLUSTER) else None
    if plan is None:
        return 2**63 - 1
    return (
        plan.threads_per_row
        * plan.blocks_per_row
        * (max(1, choice.items_per_thread // plan.vec_size) + choice.smem_vecs)
        * plan.vec_size
    )


def _choices(n: int, size: int, rows: int, reduces: bool) -> Iterator[Choice]:
    """All that might be the fastest, whether it fits or not."""
    widest, most = 16 // size, 128 // size
    for lanes in (1, 2, 4, 8, 16, 32):
        if n <= 2048 and lanes <= max(1, 2 * _vectors(n, _vector(n, size))):
            yield Choice(WARP, lanes, 0, 1, 0)
        if is_odd(n, size) and not reduces and (lanes == 1 or up(n, lanes) > 8):
            yield Choice(STAGED, lanes, 0, 1, 0)
    fewer = range(most * 3 // 8, most // 2, most // 8) if reduces else ()
    kept = (most // 4, *fewer, *range(most // 2, most + 1, most // 8))
    for split, values, shelf in product((1, 2, 4, 8, 16), kept, SHELVES):
        small = n < 512 or (split > 1 and n < 8192) or (shelf > 0 and n < 14000)
        if not small and (shelf == 0 or values >= most // 2):
            for lanes in LEAST_THREADS if shelf else (0,):
                yield Choice(BLOCK if split == 1 else CLUSTER, lanes, values, split, shelf)
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

    Where the function `reduces`, its result has no rows, and the tier stream reads each element once. Several may come
    to one plan: values and shelves shrink to what a row needs.

    >>> gpu = Gpu("an H200", 90, 132, 211 * 1024)
    >>> [c.choice.threads for c in candidates(8, 4, 2**20, gpu)]
    [1, 2, 4]
    """
    found: dict[Choice, Candidate] = {}
    few: list[Candidate] = []
    least = 32 if n < 2048 else 64
    for choice in _choices(n, size, rows, reduces):
        plan = resolve(choice, n, size, rows, gpu)
        if plan is None or n > capacity(choice, size, gpu):
            continue
        if plan.tier in (BLOCK, CLUSTER):
            most = 512 if plan.smem_vecs else 1024 if plan.blocks_per_row == 1 else 512
            if not least <= plan.threads_per_row <= most:
                continue
        if reduces and plan.tier == TWOPASS and rows < gpu.multiprocessors * STREAMING // plan.threads_per_row:
            few.append(Candidate(choice, plan))  # plan.h then serves them as softmax
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
    told: dict[tuple[object, ...], Kernel] = {}
    for function, dtype, p in todo:
        if p.tier > TWOPASS:  # of columns
            cluster, shelf = p.blocks_per_row if p.tier == COLUMNS else int(p.blocks_per_row > 1), min(p.smem_vecs, 2)
            block = block_of(p.threads_per_row, p.rows_per_block)
            key = (function, dtype, p.tier, block, 0, p.items_per_thread, p.vec_size, p.access, cluster, shelf)
            told[key] = (function, dtype, p)
            continue
        per_warp = p.tier in (WARP, STAGED)
        cluster, shelf = p.blocks_per_row if p.tier == CLUSTER else 0, int(p.smem_vecs > 0 and not per_warp)
        lanes = p.threads_per_row if per_warp else 0
        key = (
            function,
            dtype,
            p.tier,
            lanes,
            p.rows_per_block,
            p.items_per_thread,
            p.vec_size,
            p.access,
            cluster,
            shelf,
        )
        told[key] = (function, dtype, p)
    return list(told.values())
