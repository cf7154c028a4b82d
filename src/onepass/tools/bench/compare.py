"""Two results files, before and after: what became slower or faster by more than the noise. Nothing is timed here.

A change counts if the ranges p20 to p80 of the two rows do not overlap and the medians differ by more than a threshold
in percent. The threshold is needed because two runs differ, by clocks, memory placement and neighbours, in ways that
the quantiles within one run do not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.bench.stats import geomean
from onepass.tools.bench.text_table import cell, dtype_text, shape_text, us_text

__all__ = ["METRICS", "THRESHOLD", "Change", "Comparison", "compare", "notes", "summary", "table_cells", "title"]

THRESHOLD = 2.0  # percent
COPY_THRESHOLD = 5.0  # percent by which the copy may differ between two runs on one machine
METRICS = {"median": "median_us", "graph": "graph_us", "call": "call_us"}
VERDICTS = ("regression", "unchanged", "gain")
_MAX_US = 1e15  # 30 years: a longer time, such as infinity, means a broken file

Names = tuple[str, str]  # of the two files, for messages
Text = tuple[str, str]  # a line and its style


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
        ratio = self.ratio
        if ratio is None:
            ratio = float("-inf") if self.after.ok else float("inf")
        return (VERDICTS.index(self.verdict), -ratio)

    def as_dict(self) -> dict[str, Any]:
        names = ("suite", "case", "function", "direction", "shape", "dim", "dtype", "out_dtype", "provider", "threads")
        row = {name: getattr(self.after, name) for name in (*names, "world_size")}
        own = ("before_us", "after_us", "ratio", "noise", "verdict", "error")
        return row | {name: getattr(self, name) for name in own}


@dataclass
class Comparison:
    """The result of `compare`. `changes` has every row that was judged, the worst first.

    `copy` is the geometric mean of the copy's time after over before, in `copies` rows; None if there are none.
    The other rows are not judged: `only_before` and `only_after` (the other file lacks the row, or skipped it, or does
    not support it, or has no such time), `wrong_in_both`, `untimed` (right in both files, without such a time in
    either) and `disturbed` (right in both, with a disturbed time in one).
    """

    metric: str
    threshold: float
    changes: list[Change] = field(default_factory=list)
    copy: float | None = None
    copies: int = 0
    only_before: list[Row] = field(default_factory=list)
    only_after: list[Row] = field(default_factory=list)
    wrong_in_both: list[Row] = field(default_factory=list)
    untimed: list[Row] = field(default_factory=list)
    disturbed: list[Row] = field(default_factory=list)

    def count(self, verdict: str, provider: str | None = None) -> int:
        """The number of changes with this verdict, of one provider or of all."""
        return sum(c.verdict == verdict and provider in (None, c.after.provider) for c in self.changes)

    def providers(self) -> list[str]:
        """The providers with a judged row, onepass first."""
        names = dict.fromkeys(c.after.provider for c in self.changes)
        return sorted(names, key=lambda name: (not name.startswith("onepass"), name))

    def ratios(self, provider: str) -> list[float]:
        """The provider's times after over before, of every row that both files time."""
        return [c.ratio for c in self.changes if c.after.provider == provider and c.ratio is not None]

    def copy_differs(self) -> bool:
        """Whether the copy changed by more than COPY_THRESHOLD: the machines or their clocks were not alike."""
        return self.copy is not None and _differ(1.0, self.copy, COPY_THRESHOLD)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`: the counts, the copy, each provider, every change."""

        def counts(provider: str | None = None) -> dict[str, int]:
            words = {"regressions": "regression", "gains": "gain", "unchanged": "unchanged"}
            return {word: self.count(verdict, provider) for word, verdict in words.items()}

        ratios = {name: self.ratios(name) for name in self.providers()}
        return {
            "metric": self.metric,
            "threshold_percent": self.threshold,
            **counts(),
            **{
                name: len(getattr(self, name))
                for name in ("only_before", "only_after", "wrong_in_both", "untimed", "disturbed")
            },
            "copy": {"ratio": self.copy, "rows": self.copies, "differs": self.copy_differs()},
            "providers": {
                name: {"ratio": geomean(of) if of else None, "rows": len(of), **counts(name)}
                for name, of in ratios.items()
            },
            "changes": [change.as_dict() for change in self.changes],
        }


def compare(
    before: Results,
    after: Results,
    *,
    metric: str = "median_us",
    threshold: float = THRESHOLD,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    any_device: bool = False,
    names: Names = ("before", "after"),
) -> Comparison:
    """Judges each row of `after` by the same row of `before`.

    Args:
        before, after: as `results.load` returns them. Of several rows with one key in a file, the last counts.
        metric: the time to compare: "median_us", "graph_us" or "call_us". Only the first has quantiles.
        threshold: percent of the time before; a smaller difference is no change.
        only, skip: providers to judge, or not to judge.
        any_device: compare files of two devices.
        names: the names of the files, for messages.

    Raises:
        ResultsError: for an impossible time (zero, negative, not finite), with file and row.
        ValueError: for another `metric` or `threshold`, an unknown provider, two devices, or no row in common.
    """
    if metric not in METRICS.values():
        raise ValueError(f"unknown metric {metric!r}: there are {', '.join(METRICS.values())}")
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"the threshold must be a percentage of at least 0, got {threshold}")
    devices = [file.environment["device"] for file in (before, after)]
    if devices[0] != devices[1] and not any_device:
        raise ValueError(
            f"{names[0]} was measured on {devices[0]}, {names[1]} on {devices[1]}: "
            "--any-device compares times of two devices"
        )
    known = [name for name in dict.fromkeys(row.provider for row in [*before.rows, *after.rows]) if name != "copy"]
    for name in (*only, *skip):
        if name not in known:
            what = "the copy is shown always and never judged" if name == "copy" else f"unknown provider {name!r}"
            raise ValueError(f"{what}: there are {', '.join(known) or 'none'}")
    old, new = ({_key(row): row for row in file.rows} for file in (before, after))
    found, copies = Comparison(metric, threshold), []
    for key in dict.fromkeys([*new, *old]):
        a, b = old.get(key), new.get(key)
        provider = key[-1]
        if provider == "copy":
            if a and b and _state(a, metric) == _state(b, metric) == "timed" and not (a.disturbed or b.disturbed):
                copies.append(_time(b, metric, names[1]) / _time(a, metric, names[0]))
        elif (not only or provider in only) and provider not in skip:
            _judge(found, a, b, names)
    if copies:
        found.copy, found.copies = geomean(copies), len(copies)
    if not found.changes and not found.wrong_in_both and not found.disturbed:
        raise ValueError(_why_nothing_to_compare(metric, before, after, names))
    found.changes.sort(key=Change.order)
    return found


def _key(row: Row) -> tuple[Any, ...]:
    rank = max(len(row.shape), 1)
    dims = tuple(sorted(d % rank for d in (row.dim if isinstance(row.dim, list) else [row.dim])))
    return (*row.key(), tuple(row.shape), dims, row.threads, row.world_size, row.provider)


def _state(row: Row | None, metric: str) -> str:
    """ "timed", "untimed" (right, without a time of this metric), "bad" (wrong or raised) or "absent"."""
    if row is None:
        return "absent"
    if row.ok:
        return "untimed" if getattr(row, metric) is None else "timed"
    return "absent" if (row.error or "").startswith(("skipped", "unsupported")) else "bad"


def _judge(found: Comparison, a: Row | None, b: Row | None, names: Names) -> None:
    """Adds one pair of rows to the list that it belongs to."""
    was, now = _state(a, found.metric), _state(b, found.metric)
    if a is None or was == "absent":
        found.only_after += [b] if b and now != "absent" else []
    elif b is None or now == "absent":
        found.only_before.append(a)
    elif was == now == "timed":
        if a.disturbed or b.disturbed:
            found.disturbed.append(b)
        else:
            found.changes.append(_judge_times(found, a, b, names))
    elif was == now:
        (found.wrong_in_both if was == "bad" else found.untimed).append(b)
    elif "bad" in (was, now):
        before = _time(a, found.metric, names[0]) if was == "timed" else None
        after = _time(b, found.metric, names[1]) if now == "timed" else None
        found.changes.append(Change(a, b, before, after, None, "regression" if now == "bad" else "gain"))
    elif was == "untimed":
        found.only_after.append(b)
    else:
        found.only_before.append(a)


def _judge_times(found: Comparison, a: Row, b: Row, names: Names) -> Change:
    before, after = _time(a, found.metric, names[0]), _time(b, found.metric, names[1])
    ranges = [_range(a, found.metric, names[0]), _range(b, found.metric, names[1])]
    overlap, noise = False, None
    if ranges[0] and ranges[1]:
        (low, high), (low_after, high_after) = ranges[0], ranges[1]
        overlap = high >= low_after and high_after >= low
        noise = max((high - low) / before, (high_after - low_after) / after)
    verdict = "unchanged"
    if not overlap and _differ(before, after, found.threshold):
        verdict = "regression" if after > before else "gain"
    return Change(a, b, before, after, noise, verdict)


def _differ(before: float, after: float, percent: float) -> bool:
    """Whether they differ by more than that percentage of `before`, ignoring rounding errors."""
    return abs(after - before) * 100 > percent * before * (1 + 1e-9)


def _range(row: Row, metric: str, file: str) -> tuple[float, float] | None:
    if metric != "median_us" or row.p20_us is None or row.p80_us is None:
        return None
    ends = (_time(row, "p20_us", file), _time(row, "p80_us", file))
    return (min(ends), max(ends))


def _time(row: Row, name: str, file: str) -> float:
    value = getattr(row, name)
    if not 0 < value < _MAX_US:
        raise ResultsError(f"{file}: {row.provider} on {row.case}, {row.dtype}: {name!r} is not a time, got {value}")
    return float(value)


def _why_nothing_to_compare(metric: str, before: Results, after: Results, names: Names) -> str:
    text = f"nothing to compare: no row has {metric} in both {names[0]} and {names[1]}"
    threads = [sorted({r.threads for r in file.rows if r.threads is not None}) for file in (before, after)]
    if all(threads) and threads[0] != threads[1]:
        first, second = (", ".join(map(str, counts)) for counts in threads)
        text += f" (the rows have {first} threads before, {second} after)"
    return text


# Text: the lines above the table, the table, and the lines below it

HEAD = ("case", "shape", "dtype", "provider", "before us", "after us", "change", "noise", "")
LEFT = {0, 1, 2, 3, len(HEAD) - 1}


def title(found: Comparison, files: Sequence[Results], names: Names) -> list[Text]:
    """What was compared, and whether the machines were alike."""
    before, after = (file.environment for file in files)
    if found.copy is None:
        text = [("copy: not timed in both files, so that nothing shows whether the machines were alike", "yellow")]
    else:
        text = [(f"copy: {_percent(found.copy)} (geometric mean of {_plural(found.copies, 'row')})", "")]
    if found.copy_differs():
        reason = f"the copy changed by more than {COPY_THRESHOLD:g}%: the machines or their clocks differ"
        text.append((reason, "yellow"))
    if before["device"] != after["device"]:
        text.append((f"the devices differ: {before['device']} before, {after['device']} after", "yellow"))
    for end, name, e in zip(("before:", "after: "), names, (before, after), strict=True):
        text.append((f"{end} {name}, onepass {e['onepass']}, commit {e['commit'] or 'unknown'}, {e['date']}", ""))
    return text


def table_cells(changes: Sequence[Change]) -> list[list[str]]:
    """The lines of the table under HEAD. Suite, threads and processes are shown if the lines differ in them."""
    rows = [change.after for change in changes]
    suites, threads, worlds = (len({getattr(r, n) for r in rows}) > 1 for n in ("suite", "threads", "world_size"))
    body = []
    for change in changes:
        row = change.after
        name = f"{row.suite}: {_case(row)}" if suites else _case(row)
        name += f", {_plural(row.threads, 'thread')}" if threads and row.threads else ""
        name += f", world size {row.world_size}" if worlds else ""
        times = [
            us_text(us) if us is not None else "" if side.ok else cell(side)[0]
            for side, us in ((change.before, change.before_us), (change.after, change.after_us))
        ]
        difference = "" if change.ratio is None else _percent(change.ratio)
        noise = "" if change.noise is None else f"{100 * change.noise:.1f}%"
        shape = shape_text(row) if row.shape else "()"
        body.append([name, shape, dtype_text(row), row.provider, *times, difference, noise, change.verdict])
    return body


def notes(found: Comparison, names: Names) -> list[Text]:
    """The errors of what became wrong, and what was not judged."""
    errors: dict[tuple[str, str], list[Row]] = {}
    for change in found.changes:
        if change.error:
            errors.setdefault((change.after.provider, change.error), []).append(change.after)
    text = []
    for (provider, error), rows in errors.items():
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        text.append((f"{provider} on {_case(rows[0])}, {dtype_text(rows[0])}: {error}{more}", "red"))
    lists = (
        (f"only in {names[0]}", found.only_before),
        (f"only in {names[1]}", found.only_after),
        ("wrong or raised in both", found.wrong_in_both),
        (f"without {found.metric}", found.untimed),
        ("disturbed in one of the two, and not judged", found.disturbed),
    )
    for what, rows in lists:
        counts = ", ".join(f"{name} {count}" for name, count in Counter(row.provider for row in rows).items())
        bad = sum(not row.ok for row in rows) if what.startswith("only") else 0
        end = f", {bad} of them wrong or raised" if bad else ""
        text += [(f"{what}: {_plural(len(rows), 'row')} ({counts}){end}", "yellow")] if rows else []
    return text


def summary(found: Comparison) -> list[Text]:
    """A line per provider, and the total."""
    text = []
    for name in found.providers():
        ratios = found.ratios(name)
        mean = f"{_percent(geomean(ratios))} (geometric mean of {_plural(len(ratios), 'row')}), " if ratios else ""
        text.append((f"{name}: {mean}{_counts(found, name)}", ""))
    worse, better = found.count("regression"), found.count("gain")
    return [*text, (_counts(found), "bold red" if worse else "bold green" if better else "bold")]


def _counts(found: Comparison, provider: str | None = None) -> str:
    regressions, gains = (_plural(found.count(verdict, provider), verdict) for verdict in ("regression", "gain"))
    return f"{regressions}, {gains}, {found.count('unchanged', provider)} unchanged"


def _case(row: Row) -> str:
    """The case, with function and direction unless it is the forward of softmax."""
    if row.function == "softmax" and row.direction == "forward":
        return row.case
    return f"{row.case}, {row.function}" + (" backward" if row.direction == "backward" else "")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _percent(ratio: float) -> str:
    """A ratio of times as a change in percent: -50.0% is half the time."""
    return f"{100 * (ratio - 1):+.1f}%".replace("-0.0%", "+0.0%")
