"""Two results files, before and after: what became slower or faster by more than the noise. Nothing is timed here.

A change counts if the ranges p20 to p80 of the two rows do not overlap and the medians differ by more than a threshold
in percent. The threshold is needed because two runs differ, by clocks, memory placement and neighbours, in ways that
the quantiles within one run do not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean as geomean
from typing import Any

from rich.console import Console
from rich.text import Text

from onepass.tools.bench.report import case_text, dtype_text, shape_text, time_text, us_text
from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.terminal import fits, table

__all__ = ["Change", "Comparison", "compare", "show"]

COPY_THRESHOLD = 5.0  # percent by which the copy may differ between two runs on one machine
VERDICTS = {"regression": "red", "unchanged": "", "gain": "green"}  # in the order of the table, with their colours
# Why rows are not judged: the other file lacks the row, or skipped it, or does not support it, or has no such time;
# it is right in both files, without such a time in either; it is right in both, with a disturbed time in one.
UNJUDGED = {
    "only_before": "only in {before}",
    "only_after": "only in {after}",
    "wrong_in_both": "wrong or raised in both",
    "untimed": "without {metric}",
    "disturbed": "disturbed in one of the two, and not judged",
}
_STATES = ("absent", "untimed", "timed", "wrong")  # of a row, in the order of how much the file says about it
_MAX_US = 1e15  # 30 years: a longer time, such as infinity, means a broken file

Names = tuple[str, str]  # of the two files, for messages


@dataclass(frozen=True)
class Change:
    """One provider on one case in both files. A time is None if that side was wrong, raised, or has no such time.

    `noise` is the wider of the two ranges p20 to p80, as a fraction of its median; None without quantiles.
    """

    before: Row
    after: Row
    before_us: float | None
    after_us: float | None
    noise: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """The time after over the time before; None if a side has none."""
        return None if self.before_us is None or self.after_us is None else self.after_us / self.before_us

    @property
    def error(self) -> str | None:
        """Why the row after, unlike the row before, is not ok."""
        return None if self.after.ok else " ".join((self.after.error or "not ok, without an error message").split())

    def order(self) -> tuple[int, float]:
        """Sorts the worst first: regressions, then what did not change, then gains."""
        without = float("-inf") if self.after.ok else float("inf")
        return list(VERDICTS).index(self.verdict), -(without if self.ratio is None else self.ratio)

    def as_dict(self) -> dict[str, Any]:
        row = ("suite", "case", "function", "direction", "shape", "dim", "dtype", "out_dtype", "provider", "threads")
        own = ("before_us", "after_us", "ratio", "noise", "verdict", "error")
        return {name: getattr(self.after, name) for name in (*row, "world_size")} | {n: getattr(self, n) for n in own}


@dataclass
class Comparison:
    """The result of `compare`. `changes` has every row that was judged, the worst first, `unjudged` the others.

    `copies` are the copy's times after over before.
    """

    metric: str
    threshold: float
    changes: list[Change] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    unjudged: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in UNJUDGED})

    @property
    def copy(self) -> float | None:
        return geomean(self.copies) if self.copies else None

    def copy_differs(self) -> bool:
        """Whether the copy changed by more than COPY_THRESHOLD: the machines or their clocks were not alike."""
        return self.copy is not None and _differ(1.0, self.copy, COPY_THRESHOLD)

    def count(self, verdict: str, provider: str | None = None) -> int:
        """The number of changes with this verdict, of one provider or of all."""
        return sum(c.verdict == verdict and provider in (None, c.after.provider) for c in self.changes)

    def providers(self) -> dict[str, list[float]]:
        """The times after over before of each provider with a judged row, onepass first."""
        names = dict.fromkeys(c.after.provider for c in self.changes)
        return {
            name: [c.ratio for c in self.changes if c.after.provider == name and c.ratio is not None]
            for name in sorted(names, key=lambda name: (not name.startswith("onepass"), name))
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`: the counts, the copy, each provider, every change."""

        def counts(provider: str | None = None) -> dict[str, int]:
            words = {"regressions": "regression", "gains": "gain", "unchanged": "unchanged"}
            return {word: self.count(verdict, provider) for word, verdict in words.items()}

        return {
            "metric": self.metric,
            "threshold_percent": self.threshold,
            **counts(),
            **{name: len(rows) for name, rows in self.unjudged.items()},
            "copy": {"ratio": self.copy, "rows": len(self.copies), "differs": self.copy_differs()},
            "providers": {
                name: {"ratio": geomean(of) if of else None, "rows": len(of), **counts(name)}
                for name, of in self.providers().items()
            },
            "changes": [change.as_dict() for change in self.changes],
        }


def compare(
    before: Results,
    after: Results,
    *,
    metric: str = "median_us",
    threshold: float = 2.0,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    any_device: bool = False,
    names: Names = ("before", "after"),
) -> Comparison:
    """Judges each row of `after` by the same row of `before`. Of several rows with one key in a file, the last counts.

    `metric` is "median_us", "graph_us" or "call_us"; only the first has quantiles. A difference below `threshold`
    percent of the time before is no change. `names` are those of the files, for messages.

    Raises ResultsError for an impossible time (zero, negative, not finite), with file and row, and ValueError for an
    unknown provider, two devices, or no row in common.
    """
    devices = [file.environment["device"] for file in (before, after)]
    if devices[0] != devices[1] and not any_device:
        where = f"{names[0]} was measured on {devices[0]}, {names[1]} on {devices[1]}"
        raise ValueError(f"{where}: --any-device compares times of two devices")
    known = [name for name in dict.fromkeys(row.provider for row in [*before.rows, *after.rows]) if name != "copy"]
    for name in (*only, *skip):
        if name not in known:
            what = "the copy is shown always and never judged" if name == "copy" else f"unknown provider {name!r}"
            raise ValueError(f"{what}: there are {', '.join(known) or 'none'}")
    old, new = ({_key(row): row for row in file.rows} for file in (before, after))
    found = Comparison(metric, threshold)
    for key in dict.fromkeys([*new, *old]):
        a, b, provider = old.get(key), new.get(key), key[-1]
        if provider == "copy":
            if a and b and _state(a, metric) == _state(b, metric) == "timed" and not (a.disturbed or b.disturbed):
                found.copies.append(_time(b, metric, names[1]) / _time(a, metric, names[0]))
        elif (not only or provider in only) and provider not in skip:
            _judge(found, a, b, names)
    if not found.changes and not found.unjudged["wrong_in_both"] and not found.unjudged["disturbed"]:
        text = f"nothing to compare: no row has {metric} in both {names[0]} and {names[1]}"
        threads = [sorted({r.threads for r in file.rows if r.threads is not None}) for file in (before, after)]
        if all(threads) and threads[0] != threads[1]:
            first, second = (", ".join(map(str, counts)) for counts in threads)
            text += f" (the rows have {first} threads before, {second} after)"
        raise ValueError(text)
    found.changes.sort(key=Change.order)
    return found


def _key(row: Row) -> tuple[Any, ...]:
    rank = max(len(row.shape), 1)
    dims = tuple(sorted(d % rank for d in (row.dim if isinstance(row.dim, list) else [row.dim])))
    return (*row.key(), tuple(row.shape), dims, row.threads, row.world_size, row.provider)


def _state(row: Row | None, metric: str) -> str:
    """One of _STATES: "untimed" is right without a time of this metric, "wrong" has raised or a wrong result."""
    if row is None or (not row.ok and (row.error or "").startswith(("skipped", "unsupported"))):
        return "absent"
    return "wrong" if not row.ok else "untimed" if getattr(row, metric) is None else "timed"


def _judge(found: Comparison, a: Row | None, b: Row | None, names: Names) -> None:
    """Adds one pair of rows to the list that it belongs to."""
    was, now = states = _state(a, found.metric), _state(b, found.metric)
    if was != now and ("absent" in states or "wrong" not in states):
        row, where = (b, "only_after") if _STATES.index(now) > _STATES.index(was) else (a, "only_before")
        found.unjudged[where] += [row] if row else []
    elif a is None or b is None or was == "absent":
        return
    elif was == now != "timed":
        found.unjudged["wrong_in_both" if was == "wrong" else "untimed"].append(b)
    elif was == now and (a.disturbed or b.disturbed):
        found.unjudged["disturbed"].append(b)
    else:
        before = _time(a, found.metric, names[0]) if was == "timed" else None
        after = _time(b, found.metric, names[1]) if now == "timed" else None
        verdict, noise = "regression" if now == "wrong" else "gain", None
        if before is not None and after is not None:
            overlap, noise = _overlap(found.metric, (a, before, names[0]), (b, after, names[1]))
            changed = not overlap and _differ(before, after, found.threshold)
            verdict = "unchanged" if not changed else "regression" if after > before else "gain"
        found.changes.append(Change(a, b, before, after, noise, verdict))


def _overlap(metric: str, *sides: tuple[Row, float, str]) -> tuple[bool, float | None]:
    """Whether the ranges p20 to p80 of the two sides overlap, and the wider of the two relative to its median."""
    if metric != "median_us" or any(row.p20_us is None or row.p80_us is None for row, _, _ in sides):
        return False, None
    ends = [sorted(_time(row, name, file) for name in ("p20_us", "p80_us")) for row, _, file in sides]
    (low, high), (low_after, high_after) = ends
    noise = max((end[1] - end[0]) / us for end, (_, us, _) in zip(ends, sides, strict=True))
    return high >= low_after and high_after >= low, noise


def _differ(before: float, after: float, percent: float) -> bool:
    """Whether they differ by more than that percentage of `before`, ignoring rounding errors."""
    return abs(after - before) * 100 > percent * before * (1 + 1e-9)


def _time(row: Row, name: str, file: str) -> float:
    value = getattr(row, name)
    if not 0 < value < _MAX_US:
        raise ResultsError(f"{file}: {row.provider} on {row.case}, {row.dtype}: {name!r} is not a time, got {value}")
    return float(value)


# Text


def show(found: Comparison, files: Sequence[Results], names: Names, on: Console, every: bool = False) -> None:
    """What was compared, the table of the changes or of `every` row, the errors, what was not judged, the sums."""
    before, after = (file.environment for file in files)
    warnings = []
    if found.copies:
        on.print(f"copy: {_mean(found.copies)}")
    else:
        warnings.append("copy: not timed in both files, so that nothing shows whether the machines were alike")
    if found.copy_differs():
        warnings.append(f"the copy changed by more than {COPY_THRESHOLD:g}%: the machines or their clocks differ")
    if before["device"] != after["device"]:
        warnings.append(f"the devices differ: {before['device']} before, {after['device']} after")
    for text in warnings:
        on.print(text, style="yellow")
    for end, name, e in zip(("before:", "after: "), names, (before, after), strict=True):
        on.print(f"{end} {name}, onepass {e['onepass']}, commit {e['commit'] or 'unknown'}, {e['date']}")
    on.print()
    changes = [c for c in found.changes if every or c.verdict != "unchanged"]
    if changes:
        _show_table(changes, on)
    errors: dict[tuple[str, str], list[Row]] = {}
    for change in found.changes:
        if change.error:
            errors.setdefault((change.after.provider, change.error), []).append(change.after)
    for (provider, error), rows in errors.items():
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        on.print(f"{provider} on {case_text(rows[0])}, {dtype_text(rows[0])}: {error}{more}", style="red")
    for key, rows in found.unjudged.items():
        what = UNJUDGED[key].format(before=names[0], after=names[1], metric=found.metric)
        counts = ", ".join(f"{name} {count}" for name, count in Counter(row.provider for row in rows).items())
        bad = sum(not row.ok for row in rows) if key.startswith("only") else 0
        end = f", {bad} of them wrong or raised" if bad else ""
        if rows:
            on.print(f"{what}: {_plural(len(rows), 'row')} ({counts}){end}", style="yellow")
    for name, ratios in found.providers().items():
        on.print(f"{name}: {_mean(ratios) + ', ' if ratios else ''}{_counts(found, name)}")
    style = "red" if found.count("regression") else "green" if found.count("gain") else ""
    on.print(_counts(found), style=f"bold {style}")


def _show_table(changes: Sequence[Change], on: Console) -> None:
    """On a narrow terminal the table loses the shapes, then the verdicts, then it folds the cases.

    Suite, threads and processes are shown if the lines differ in them.
    """
    rows = [change.after for change in changes]
    suites, threads, worlds = (len({getattr(r, n) for r in rows}) > 1 for n in ("suite", "threads", "world_size"))
    body: list[list[str | Text]] = []
    for change in changes:
        row = change.after
        name = f"{row.suite}: " * suites + case_text(row)
        name += f", {_plural(row.threads, 'thread')}" if threads and row.threads else ""
        name += f", world size {row.world_size}" * worlds
        sides = ((change.before, change.before_us), (change.after, change.after_us))
        cells = [us_text(us) if us is not None or side.ok else time_text(side) for side, us in sides]
        cells.append("" if change.ratio is None else _percent(change.ratio))
        cells += ["" if change.noise is None else f"{100 * change.noise:.1f}%", change.verdict]
        coloured = [Text(cell, style=VERDICTS[change.verdict]) for cell in cells]
        body.append([name, dtype_text(row), row.provider, *coloured, shape_text(row)])
    head = ("case", "dtype", "provider", "before us", "after us", "change", "noise", "verdict", "shape")
    for count in (9, 8, 7):
        made = table(head[:count], [line[:count] for line in body], left={0, 1, 2, 7, 8})
        if fits(on, made):
            break
    on.print(made, "")


def _counts(found: Comparison, provider: str | None = None) -> str:
    regressions, gains = (_plural(found.count(verdict, provider), verdict) for verdict in ("regression", "gain"))
    return f"{regressions}, {gains}, {found.count('unchanged', provider)} unchanged"


def _mean(ratios: Sequence[float]) -> str:
    return f"{_percent(geomean(ratios))} (geometric mean of {_plural(len(ratios), 'row')})"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _percent(ratio: float) -> str:
    """A ratio of times as a change in percent: -50.0% is half the time."""
    return f"{100 * (ratio - 1):+.1f}%".replace("-0.0%", "+0.0%")
