"""Two results files, before and after: what became slower or faster by more than the noise. Nothing is timed here.

A change counts where the ranges p20 to p80 of the two rows do not overlap and the medians differ by more than some
percent. The second is needed because a run differs from the next, by clocks, memory placement and neighbours, in ways
that the quantiles within one run do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.bench.stats import geomean

__all__ = ["COPY_LEAST", "LEAST", "TIMES", "VERDICTS", "Change", "Comparison", "compare"]

LEAST = 2.0  # percent
COPY_LEAST = 5.0  # percent by which the copy may differ between two runs of one machine
TIMES = {"median": "median_us", "graph": "graph_us", "call": "call_us"}
VERDICTS = ("regression", "unchanged", "gain")
_COPY = "copy"
_LONGEST = 1e15  # microseconds, 30 years: beyond it a file is broken, infinity included

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """One provider on one case in both files. A time is None where that side was wrong or raised, or has none.

    `noise` is the wider of the two ranges p20 to p80, as a fraction of its median; None where the times compared have
    no quantiles.
    """

    before: Row
    after: Row
    before_us: float | None
    after_us: float | None
    noise: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """The time after over the time before; None where a side has none."""
        return None if self.before_us is None or self.after_us is None else self.after_us / self.before_us

    @property
    def error(self) -> str | None:
        """Why the row after is not ok, for a row that was; else None."""
        return None if self.after.ok else _error(self.after)

    def order(self) -> tuple[int, float]:
        """Sorts the worst first: regressions, then what did not change, then gains."""
        ratio = self.ratio
        if ratio is None:
            ratio = float("-inf") if self.after.ok else float("inf")
        return (VERDICTS.index(self.verdict), -ratio)

    def as_dict(self) -> dict[str, Any]:
        """As `onepass compare --json` prints it."""
        row = self.after
        names = ("suite", "case", "function", "direction", "shape", "dim", "dtype", "out_dtype", "provider", "threads")
        return {
            **{name: getattr(row, name) for name in (*names, "world_size")},
            "before_us": self.before_us,
            "after_us": self.after_us,
            "ratio": self.ratio,
            "noise": self.noise,
            "verdict": self.verdict,
            "error": self.error,
        }


@dataclass
class Comparison:
    """What `compare` found. `changes` holds every row that was judged, the worst first.

    `copy` is the geometric mean of the copy's time after over before, in `copies` rows; None where there is none.
    The others are not judged: `only_before` and `only_after` (the other file lacks the row, or it was skipped or is
    unsupported there, or has no time of this kind), `wrong_in_both`, and `untimed`, right in both files with no time of
    this kind in either; and `disturbed`, right in both with a time that something else changed in one of them.
    """

    of: str
    least: float
    changes: list[Change] = field(default_factory=list)
    copy: float | None = None
    copies: int = 0
    only_before: list[Row] = field(default_factory=list)
    only_after: list[Row] = field(default_factory=list)
    wrong_in_both: list[Row] = field(default_factory=list)
    untimed: list[Row] = field(default_factory=list)
    disturbed: list[Row] = field(default_factory=list)

    def count(self, verdict: str, provider: str | None = None) -> int:
        """How many of the changes, of one provider or of all, are a "regression", a "gain" or "unchanged"."""
        return sum(c.verdict == verdict and provider in (None, c.after.provider) for c in self.changes)

    def providers(self) -> list[str]:
        """Those with a row that was judged, onepass first."""
        names = dict.fromkeys(c.after.provider for c in self.changes)
        return sorted(names, key=lambda name: (not name.startswith("onepass"), name))

    def ratios(self, provider: str) -> list[float]:
        """Its times after over before, of every row that both files time."""
        return [c.ratio for c in self.changes if c.after.provider == provider and c.ratio is not None]

    def copy_differs(self) -> bool:
        """Whether the copy changed by more than COPY_LEAST percent: the machines or their clocks were not alike."""
        return self.copy is not None and _differ(1.0, self.copy, COPY_LEAST)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the counts, the copy, each provider, every change."""
        each = {}
        for name in self.providers():
            ratios = self.ratios(name)
            each[name] = {"ratio": geomean(ratios) if ratios else None, "rows": len(ratios), **self._counts(name)}
        return {
            "of": self.of,
            "least_percent": self.least,
            **self._counts(),
            "only_before": len(self.only_before),
            "only_after": len(self.only_after),
            "wrong_in_both": len(self.wrong_in_both),
            "untimed": len(self.untimed),
            "disturbed": len(self.disturbed),
            "copy": {"ratio": self.copy, "rows": self.copies, "differs": self.copy_differs()},
            "providers": each,
            "changes": [change.as_dict() for change in self.changes],
        }

    def _counts(self, provider: str | None = None) -> dict[str, int]:
        words = {"regressions": "regression", "gains": "gain", "unchanged": "unchanged"}
        return {word: self.count(verdict, provider) for word, verdict in words.items()}


def compare(
    before: Results,
    after: Results,
    *,
    of: str = "median_us",
    least: float = LEAST,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    any_device: bool = False,
    names: tuple[str, str] = ("before", "after"),
) -> Comparison:
    """Judges each row of `after` by the same row of `before`.

    Args:
        before, after: as `results.load` gives them. Of several rows with one key in a file, the last counts.
        of: the time that is compared: "median_us", "graph_us" or "call_us". Only the first has quantiles.
        least: percent of the time before; a smaller difference is no change.
        only, skip: providers to judge alone, or not to judge.
        any_device: compare files of two devices.
        names: of the files, for messages.

    Raises:
        ResultsError: for a time that is none (zero, negative, not finite), naming file and row.
        ValueError: for another `of` or `least`, an unknown provider, two devices, or no row in common.
    """
    if of not in TIMES.values():
        raise ValueError(f"unknown time {of!r}: there are {', '.join(TIMES.values())}")
    if not 0 <= least < float("inf"):
        raise ValueError(f"least must be a percentage from 0 on, got {least}")
    devices = [file.environment["device"] for file in (before, after)]
    if devices[0] != devices[1] and not any_device:
        raise ValueError(
            f"{names[0]} was measured on {devices[0]}, {names[1]} on {devices[1]}: "
            "times of two devices are compared with --any-device only"
        )
    _check_providers([*before.rows, *after.rows], only, skip)
    old, new = ({_key(row): row for row in file.rows} for file in (before, after))
    found, copies = Comparison(of, least), []
    for key in dict.fromkeys([*new, *old]):
        a, b = old.get(key), new.get(key)
        row = b or a
        assert row is not None
        if row.provider == _COPY:
            if a and b and _state(a, of) == _state(b, of) == "timed" and not (a.disturbed or b.disturbed):
                copies.append(_time(b, of, names[1]) / _time(a, of, names[0]))
        elif (not only or row.provider in only) and row.provider not in skip:
            _sort_in(found, a, b, names)
    if copies:
        found.copy, found.copies = geomean(copies), len(copies)
    if not found.changes and not found.wrong_in_both and not found.disturbed:
        raise ValueError(_nothing(of, before, after, names))
    found.changes.sort(key=Change.order)
    return found


def _key(row: Row) -> _Key:
    rank = max(len(row.shape), 1)
    dims = tuple(d % rank for d in (row.dim if isinstance(row.dim, list) else [row.dim]))
    return (*row.key(), row.provider, tuple(row.shape), tuple(sorted(dims)), row.threads, row.world_size)


def _check_providers(rows: Iterable[Row], only: Sequence[str], skip: Sequence[str]) -> None:
    known = [name for name in dict.fromkeys(row.provider for row in rows) if name != _COPY]
    for name in (*only, *skip):
        if name not in known:
            what = "the copy is always told and never judged" if name == _COPY else f"unknown provider {name!r}"
            raise ValueError(f"{what}: there are {', '.join(known) or 'none'}")


def _state(row: Row | None, of: str) -> str:
    """ "timed", "untimed" (right, with no time of this kind), "bad" (wrong, raised) or "absent"."""
    if row is None:
        return "absent"
    if row.ok:
        return "untimed" if getattr(row, of) is None else "timed"
    return "absent" if (row.error or "").startswith(("skipped", "unsupported")) else "bad"


def _sort_in(found: Comparison, a: Row | None, b: Row | None, names: tuple[str, str]) -> None:
    """Puts one pair of rows where it belongs."""
    was, now = _state(a, found.of), _state(b, found.of)
    if a is None or was == "absent":
        found.only_after += [b] if b and now != "absent" else []
    elif b is None or now == "absent":
        found.only_before.append(a)
    elif was == now == "timed" and (a.disturbed or b.disturbed):
        found.disturbed.append(b)
    elif was == now == "timed":
        found.changes.append(_judge(a, b, found, names))
    elif was == now:
        (found.wrong_in_both if was == "bad" else found.untimed).append(b)
    elif "bad" in (was, now):
        before = _time(a, found.of, names[0]) if was == "timed" else None
        after = _time(b, found.of, names[1]) if now == "timed" else None
        found.changes.append(Change(a, b, before, after, None, "regression" if now == "bad" else "gain"))
    elif was == "untimed":
        found.only_after.append(b)
    else:
        found.only_before.append(a)


def _judge(a: Row, b: Row, found: Comparison, names: tuple[str, str]) -> Change:
    """Two rows that are both right and timed."""
    before, after = _time(a, found.of, names[0]), _time(b, found.of, names[1])
    ranges = [_range(a, found.of, names[0]), _range(b, found.of, names[1])]
    apart, noise = True, None
    if ranges[0] and ranges[1]:
        (low, high), (low_after, high_after) = ranges[0], ranges[1]
        apart = high < low_after or high_after < low
        noise = max((high - low) / before, (high_after - low_after) / after)
    verdict = "unchanged"
    if apart and _differ(before, after, found.least):
        verdict = "regression" if after > before else "gain"
    return Change(a, b, before, after, noise, verdict)


def _differ(before: float, after: float, percent: float) -> bool:
    """By more than that percent of `before`; the last bits of the numbers do not make the difference."""
    return abs(after - before) * 100 > percent * before * (1 + 1e-9)


def _range(row: Row, of: str, file: str) -> tuple[float, float] | None:
    if of != "median_us" or row.p20_us is None or row.p80_us is None:
        return None
    ends = (_time(row, "p20_us", file), _time(row, "p80_us", file))
    return (min(ends), max(ends))


def _time(row: Row, name: str, file: str) -> float:
    value = getattr(row, name)
    if not 0 < value < _LONGEST:
        raise ResultsError(f"{file}: {row.provider} on {row.case}, {row.dtype}: {name!r} is no time, got {value}")
    return float(value)


def _error(row: Row) -> str:
    return " ".join((row.error or "not ok, with no error told").split())


def _nothing(of: str, before: Results, after: Results, names: tuple[str, str]) -> str:
    """Why there is nothing to judge."""
    text = f"nothing to compare: no row has {of} in both {names[0]} and {names[1]}"
    threads = [sorted({r.threads for r in file.rows if r.threads is not None}) for file in (before, after)]
    if all(threads) and threads[0] != threads[1]:
        first, second = (", ".join(map(str, counts)) for counts in threads)
        text += f" (the rows have {first} threads before, {second} after)"
    return text
