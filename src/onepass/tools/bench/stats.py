"""Median, p20 and p80 of a list of samples, without torch, so that plots and comparisons start fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True)
class Stats:
    """Microseconds."""

    median: float
    p20: float
    p80: float
    samples: int


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted samples, interpolated linearly (as `torch.quantile` and NumPy do).

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(samples: Sequence[float]) -> Stats:
    """Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    return Stats(quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered))


def geomean(values: Sequence[float]) -> float:
    """
    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    return exp(sum(log(v) for v in values) / len(values))
