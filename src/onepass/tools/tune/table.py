"""From measured times to table entries: pure functions.

An entry is [limit, tier, threads, items_per_thread, blocks_per_row, smem_vecs] as in csrc/plan/tables.h: how rows of up
to `limit` elements are served.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from onepass.tables import ANY, NAMES, Table, Tables
from onepass.tools.tune.candidates import STAGED, Choice, Gpu, holds
from onepass.tools.tune.sizes import FEW, FEW_LENGTHS, FUNCTIONS, is_columns, is_odd, staged_pays_reduced
from onepass.tools.tune.timing import Measurement

AS_ROWS = Choice(-1, 0, 0, 1, 0)  # in the tables of odd lengths and of few rows: use the entry of the other tables
NEAR = 1.01  # times up to this multiple of the best count as equally good


def _middle(a: int, b: int) -> int:
    return max(a, min(math.isqrt(a * b), b - 1))


def entries(points: Sequence[Measurement], holds: Callable[[Choice, int], int]) -> Table:
    """The fewest entries that serve each measured length within 1% of its best, by rising length.

    Args:
        points: by rising length. The last entry's limit is the last length.
        holds: the longest row of a choice that was measured at a length. A limit between two measured lengths is their
            geometric mean, but at most this length.

    >>> warp, block = Choice(0, 32, 0, 1, 0), Choice(2, 0, 32, 1, 0)
    >>> times = {n: {warp: n / 1000, block: 2.0} for n in (1000, 1100, 4000)}
    >>> points = [Measurement("softmax", "float32", n, 1, 1, 1, us) for n, us in times.items()]
    >>> entries(points, lambda choice, n: 32768)
    [[2097, 0, 32, 0, 1, 0], [4000, 2, 0, 32, 1, 0]]
    """
    found: Table = []
    at = 0
    while at < len(points):
        end, shared = at, _near(points[at])
        while end + 1 < len(points) and (both := shared & _near(points[end + 1])):
            end, shared = end + 1, both
        group = points[at : end + 1]
        best = min(shared, key=lambda choice: (sum(math.log(p.times[choice] / p.best) for p in group), choice))
        last = points[end].n
        limit = max(last, min(_middle(last, points[end + 1].n), holds(best, last))) if end + 1 < len(points) else last
        found.append([limit, *best])
        at = end + 1
    return found


def _near(point: Measurement) -> set[Choice]:
    return {choice for choice, us in point.times.items() if us <= NEAR * point.best}


def _only(point: Measurement, flat: bool) -> Measurement | None:
    """The point with only its flat choices, or without them. None if no choice is left."""
    times = {choice: us for choice, us in point.times.items() if (choice.tier == STAGED) == flat}
    return replace(point, times=times) if times else None


def staged_pays(points: Sequence[Measurement]) -> int:
    """How many of the odd lengths, by rising length, take the tier staged: the number that costs the least time.

    >>> flat, warp = Choice(1, 4, 0, 1, 0), Choice(0, 4, 0, 1, 0)
    >>> times = {3: (1, 3), 5: (2.01, 2), 9: (1, 2), 33: (3, 2)}  # flat, warp
    >>> staged_pays([Measurement("softmax", "float32", n, 1, 1, 1, {flat: a, warp: b}) for n, (a, b) in times.items()])
    3
    """
    total, least, cut = 0.0, 0.0, 0
    for count, point in enumerate(points, 1):
        flat, other = _only(point, True), _only(point, False)
        if flat is None:
            break
        total += math.log(flat.best / other.best) if other else -math.inf
        if total < least:
            least, cut = total, count
    return cut


def spliced(base: Table, found: Table, first: int, gap: bool = True) -> Table:
    """`base` with its entries for `found`'s lengths, which begin at `first` elements, replaced by `found`.

    Without `gap`, `found` also serves shorter rows that `base` leaves to other tables.

    >>> spliced([[8, 0, 1, 0, 1, 0], [64, 0, 4, 0, 1, 0]], [[32, 0, 8, 0, 1, 0]], 17)
    [[8, 0, 1, 0, 1, 0], [16, 0, 4, 0, 1, 0], [32, 0, 8, 0, 1, 0], [64, 0, 4, 0, 1, 0]]
    """
    head = [entry for entry in base if entry[0] < first]
    if first > 1 and (not head or head[-1][0] < first - 1):
        cut = next(entry for entry in base if entry[0] >= first)
        if gap or cut[1] != AS_ROWS.tier or found[0][1] == AS_ROWS.tier:
            head.append([first - 1, *cut[1:]])
    table: Table = []
    for entry in [*head, *found, *(entry for entry in base if entry[0] > found[-1][0])]:
        if table and table[-1][1:] == entry[1:]:
            table.pop()
        table.append(list(entry))
    return table


def build(measured: Sequence[Measurement], base: Tables, gpu: Gpu) -> Tables:
    """All tables: entries for the measured lengths, and those of `base` below the shortest and above the longest.

    Odd lengths are those of rows that are no whole number of 16-byte vectors. Odd lengths for which the tier staged
    pays for softmax have a table of their own, which serves reductions too. Longer odd lengths are in the other tables.
    Measurements of few rows have their own tables, and so have columns.
    """
    tables = {name: [list(entry) for entry in base[name]] for name in NAMES}
    for size in (4, 2):
        of_size = [p for p in measured if (p.dtype == "float32") == (size == 4)]
        points = {f: sorted((p for p in of_size if p.function == f), key=lambda p: p.n) for f in FUNCTIONS}
        _build_for_size(tables, points, size, gpu)
    return tables


def _build_for_size(tables: Tables, points: dict[str, list[Measurement]], size: int, gpu: Gpu) -> None:
    """Puts the measured points of each function, by rising length, into the tables of elements of `size` bytes."""

    def find(points: Sequence[Measurement]) -> Table:
        return entries(points, partial(holds, points[0].function, size, gpu)) if points else []

    def put(kind: str, points: Sequence[Measurement], found: Table, gap: bool = True) -> None:
        if found:
            name = f"{kind}_f{8 * size}"
            tables[name] = spliced(tables[name], found, points[0].n, gap)

    few = [p for p in points["softmax"] if is_few(p)]
    put("few_rows", few, find(few))
    more = {p.n for p in points["softmax"] if not is_few(p)}
    rows = [p for p in points["softmax"] if not is_few(p) or p.n not in more]  # a single point of a length is in both
    odd = [p for p in rows if is_odd(p.n, size)]
    cut = staged_pays(odd)
    staged = find([p for point in odd[:cut] if (p := _only(point, True))])
    if cut < len(odd):
        if staged:
            last, beyond = odd[cut - 1].n, odd[cut].n
            longest = holds("softmax", size, gpu, Choice(*staged[-1][1:]), last)
            staged[-1][0] = max(staged[-1][0], min(_middle(last, beyond), longest))
        staged = [*staged, [ANY, *AS_ROWS]]
    put("unaligned", odd, staged, gap=False)
    for kind, tried in (("write", rows), ("reduce", points["logsumexp"])):
        others = [p for p in tried if not _is_staged(tables[f"unaligned_f{8 * size}"], p, size)]
        others = [p for point in others if (p := _only(point, False))]
        put(kind, others, find(others))
    for function in filter(is_columns, FUNCTIONS):
        put(function, points[function], find(points[function]))


def is_few(point: Measurement) -> bool:
    """Whether a point is for the tables of few rows.

    >>> [is_few(Measurement("softmax", "float32", 1024, rows, 1, 1, {})) for rows in (4096, 262144)]
    [True, False]
    """
    whole = not is_odd(point.n, 4 if point.dtype == "float32" else 2)
    return whole and point.rows == FEW and point.function == "softmax" and FEW_LENGTHS[0] <= point.n <= FEW_LENGTHS[1]


def _is_staged(odd_table: Table, point: Measurement, size: int) -> bool:
    if not is_odd(point.n, size) or (point.function == "logsumexp" and not staged_pays_reduced(point.n, size)):
        return False
    return next(entry for entry in odd_table if point.n <= entry[0])[1] == STAGED
