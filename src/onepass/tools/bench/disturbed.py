"""Which rows were timed while something else had the machine, judged by the times alone.

A row is disturbed where its 80th percentile is more than twice its 20th. A case is disturbed, with all its rows, where
its copy is, or where the copy takes far longer than those of the run's other cases say. It is judged by its time, not
its GB/s: caches and launches make the small copies of an honest run differ tenfold in GB/s, but a copy takes no longer
than one of more bytes. (In the results files of this repository, of CPUs and an H200, it takes up to 2.6 times as
long.)
"""

from __future__ import annotations

from collections.abc import Sequence

from onepass.tools.bench.results import Row
from onepass.tools.bench.stats import Stats

__all__ = ["mark", "slow_copies", "spread"]

_Key = tuple[str, ...]

SPREAD = 2.0
SLOW = 4.0
NEAR = 8  # times fewer bytes that a copy may have to be a bound for another
CACHE = 4.0  # times as fast as memory that a cache is, which may have held the one and not the other
SAMPLES = 5  # of fewer, the two percentiles are single samples


def spread(stats: Stats) -> str | None:
    """Why a row with these times is disturbed, or None.

    >>> spread(Stats(20.0, 10.0, 26.0, 100)), spread(Stats(20.0, 19.0, 26.0, 100))
    ('p80 is 2.6 times p20', None)
    """
    if stats.samples < SAMPLES or stats.p80 <= SPREAD * stats.p20:
        return None
    return f"p80 is {stats.p80 / stats.p20:.1f} times p20"


def slow_copies(rows: Sequence[Row]) -> dict[_Key, str]:
    """The cases, by `Row.key`, whose copy takes more than SLOW times as long as the others allow, each with a sentence.

    The bound is the time of the fastest copy of at least as many bytes. A looser one, without which the longest copy
    would have none, is from the slowest copy of fewer bytes, down to an eighth.
    """
    copies = [row for row in rows if row.provider == "copy" and row.ok and row.median_us]
    found: dict[_Key, str] = {}
    for row in copies:
        others = [(other.bytes, other.median_us or 0.0) for other in copies if other is not row]
        bounds = [us for size, us in others if size >= row.bytes]
        smaller = [us * row.bytes / size for size, us in others if row.bytes <= NEAR * size < NEAR * row.bytes]
        bounds += [CACHE * max(smaller)] if smaller else []
        took = row.median_us or 0.0
        if bounds and took > SLOW * min(bounds):
            found[row.key()] = f"its copy takes {took / min(bounds):.1f} times as long as other copies of the run allow"
    return found


def mark(rows: Sequence[Row]) -> None:
    """Sets `disturbed` of all rows of a case whose copy is disturbed. (Of the others `spread` has set it.)"""
    reasons = slow_copies(rows)
    for row in rows:
        if row.provider == "copy" and row.disturbed:
            reasons.setdefault(row.key(), f"of its copy {row.disturbed}")
    for row in rows:
        if row.ok and not row.disturbed:
            row.disturbed = reasons.get(row.key())
