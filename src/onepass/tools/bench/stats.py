"""What samples and rows of times mean: median, p20 and p80, and which were disturbed. Nothing here imports torch.

A row is disturbed, by something else that used the machine, if its 80th percentile is more than twice its 20th. A case
is disturbed, with all its rows, if its copy is, or if the copy takes far longer than the copies of the run's other
cases allow. The time is compared, not GB/s: caches and launches make the GB/s of small copies differ tenfold in an
honest run, but a copy takes no longer than one of more bytes. (In the results files of this repository, of CPUs and an
H200, it takes up to 2.6 times as long.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean as geomean
from statistics import median, quantiles

from onepass.tools.bench.results import Row

__all__ = ["Stats", "geomean", "mark_disturbed", "slow_copies", "spread_reason", "summarise"]

MAX_SPREAD = 2.0
MAX_SLOWDOWN = 4.0
SIZE_RANGE = 8  # a smaller copy bounds the time of one of up to 8 times as many bytes
CACHE_SPEEDUP = 4.0  # how much faster than memory a cache is, which may have held the smaller copy only
MIN_SAMPLES = 5  # with fewer samples the two percentiles are single samples


@dataclass(frozen=True)
class Stats:
    """Microseconds."""

    median: float
    p20: float
    p80: float
    samples: int


def summarise(samples: Sequence[float]) -> Stats:
    """The quantiles are interpolated linearly, as torch and NumPy do. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    fifths = quantiles(samples if len(samples) > 1 else [*samples, *samples], n=5, method="inclusive")
    return Stats(median(samples), fifths[0], fifths[3], len(samples))


def spread_reason(stats: Stats) -> str | None:
    """Why a row with these times is disturbed, or None.

    >>> spread_reason(Stats(20.0, 10.0, 26.0, 100)), spread_reason(Stats(20.0, 19.0, 26.0, 100))
    ('p80 is 2.6 times p20', None)
    """
    if stats.samples < MIN_SAMPLES or stats.p80 <= MAX_SPREAD * stats.p20:
        return None
    return f"p80 is {stats.p80 / stats.p20:.1f} times p20"


def slow_copies(rows: Sequence[Row]) -> dict[tuple[str, ...], str]:
    """The cases, by `Row.key`, whose copy takes more than MAX_SLOWDOWN times as long as the others allow, with reasons.

    The bound is the time of the fastest copy of at least as many bytes. A second, looser bound follows from the slowest
    copy of fewer bytes, down to an eighth; without it nothing would bound the largest copy.
    """
    copies = [(row, row.bytes, row.median_us) for row in rows if row.provider == "copy" and row.ok and row.median_us]
    found: dict[tuple[str, ...], str] = {}
    for row, size, took in copies:
        others = [(bytes_, us) for other, bytes_, us in copies if other is not row]
        bounds = [us for bytes_, us in others if bytes_ >= size]
        smaller = [us * size / bytes_ for bytes_, us in others if size <= SIZE_RANGE * bytes_ < SIZE_RANGE * size]
        bounds += [CACHE_SPEEDUP * max(smaller)] if smaller else []
        if bounds and took > MAX_SLOWDOWN * min(bounds):
            found[row.key()] = f"its copy takes {took / min(bounds):.1f} times as long as other copies of the run allow"
    return found


def mark_disturbed(rows: Sequence[Row]) -> None:
    """Sets `disturbed` on every row of a case whose copy is disturbed."""
    reasons: dict[tuple[str, ...], str] = {
        row.key(): f"of its copy {row.disturbed}" for row in rows if row.provider == "copy" and row.disturbed
    } | slow_copies(rows)
    for row in rows:
        if row.ok and not row.disturbed:
            row.disturbed = reasons.get(row.key())
