"""Rows of a results file as text: one line per case and dtype, one column per provider, and sentences that sum up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from onepass.tools.bench.cases import ITEMSIZE, SHORT
from onepass.tools.bench.results import Row
from onepass.tools.bench.stats import geomean
from onepass.tools.terminal import plain_table

OURS, BASELINE = "onepass", "torch"
SMALL_INPUT = 64_000_000  # bytes; below it the microseconds over the copy say more than the fraction of its speed
_WORDS = {"wrong": "WRONG", "raised": "ERROR", "skipped": "skipped", "unsupported": "-"}


@dataclass
class Line:
    """One case at one dtype: the rows of its providers by name."""

    case: str
    shape: str
    dtype: str
    rows: dict[str, Row] = field(default_factory=dict)

    def fastest(self) -> str | None:
        """The fastest provider, without the copy and without wrong or disturbed times."""
        usable = {n: r.median_us for n, r in self.rows.items() if r.ok and not r.disturbed and r.median_us}
        usable.pop("copy", None)
        return min(usable, key=lambda n: usable[n]) if usable else None

    def speedup(self, over: str = BASELINE, of: str = OURS, metric: str = "median_us") -> float | None:
        """How many times as fast as `over` the provider `of` is, if both were timed."""
        a, b = self.rows.get(of), self.rows.get(over)
        if a and b and a.ok and b.ok and getattr(a, metric) and getattr(b, metric):
            return float(getattr(b, metric) / getattr(a, metric))
        return None


def lines(rows: Sequence[Row]) -> list[Line]:
    """The lines in the order of the rows. A line names function and direction unless it is the forward of softmax."""
    found: dict[tuple[str, ...], Line] = {}
    for row in rows:
        if row.key() not in found:
            name = row.case
            if row.function != "softmax" or row.direction != "forward":
                name += "" if row.function in name else f", {row.function}"
                name += " backward" if row.direction == "backward" and "backward" not in name else ""
            found[row.key()] = Line(name, shape_text(row), dtype_text(row))
        found[row.key()].rows[row.provider] = row
    return list(found.values())


def providers(rows: Sequence[Row]) -> list[str]:
    """The columns: the copy first, then the providers in their order."""
    return sorted(dict.fromkeys(row.provider for row in rows), key=lambda name: name != "copy")


# Cells


def shape_text(row: Row) -> str:
    dims = row.dim if isinstance(row.dim, list) else [row.dim]
    last = [d % len(row.shape) for d in dims] == [len(row.shape) - 1]
    return "x".join(map(str, row.shape)) + ("" if last else f" dim {','.join(map(str, dims))}")


def dtype_text(row: Row) -> str:
    short = SHORT.get(row.dtype, row.dtype)
    return short if row.out_dtype == row.dtype else f"{short}>{SHORT.get(row.out_dtype, row.out_dtype)}"


def us_text(us: float) -> str:
    """Three digits, or whole microseconds from 100 on, so that a longer number is a slower call.

    >>> us_text(1.234), us_text(12.34), us_text(1234.5)
    ('1.23', '12.3', '1234')
    """
    return f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def cell(row: Row | None) -> tuple[str, str]:
    """(time, fraction of a copy's speed); for the copy (time, GB/s); for a row without a time (a word, "").

    A disturbed time is followed by `?`.
    """
    if row is None:
        return ("", "")
    if not row.ok or row.median_us is None:
        return (_WORDS.get((row.error or "error").partition(":")[0], "ERROR"), "")
    time = us_text(row.median_us) + "?" * bool(row.disturbed)
    if row.provider == "copy":
        return (time, f"{row.gbps:.0f} GB/s" if row.gbps else "")
    return (time, f"{row.copy_fraction:.2f}" if row.copy_fraction is not None else "")


def has_graph(rows: Sequence[Row]) -> bool:
    """Whether the run was asked for times in a CUDA graph."""
    return any(row.graph_us is not None or row.graph_error for row in rows)


def graph_cell(row: Row | None) -> str:
    """The time of a launch in a CUDA graph, or "-" if the call could not be captured."""
    if row is None or not row.ok:
        return ""
    return us_text(row.graph_us) if row.graph_us is not None else "-"


def speedup_cell(line: Line, of: str = OURS) -> str:
    """How many times as fast as torch the provider is, with a `?` if one of the two times was disturbed."""
    speedup = line.speedup(of=of)
    return "" if speedup is None else f"{speedup:.2f}" + "?" * any(line.rows[n].disturbed for n in (of, BASELINE))


def input_share(row: Row) -> float | None:
    """A logsumexp's time over that of a copy of its input. Reading at the speed of a copy is 0.5."""
    return row.median_us / row.input_copy_us if row.ok and row.median_us and row.input_copy_us else None


def results_table(rows: Sequence[Row]) -> str:
    """The whole table in ASCII; `*` marks the fastest of a line."""
    names, graph = providers(rows), has_graph(rows)
    against = OURS in names and BASELINE in names
    head = ["case", "shape", "dtype"]
    for name in names:
        head += [f"{name} us", "" if name == "copy" else "of copy", *["graph us"] * graph]
    body = []
    for line in lines(rows):
        cells = [line.case, line.shape, line.dtype]
        for name in names:
            time, share = cell(line.rows.get(name))
            cells += [time, share + "*" * (name == line.fastest()), *[graph_cell(line.rows.get(name))] * graph]
        body.append([*cells, *[speedup_cell(line)] * against])
    return plain_table([*head, *[f"times {BASELINE}"] * against], body, left={0, 1, 2})


# Sentences


def summary(rows: Sequence[Row]) -> list[str]:
    """What the table says, in a few sentences. Disturbed times are counted and left out of all means."""
    disturbed, rows = [r for r in rows if r.disturbed], [r for r in rows if not r.disturbed]
    copies = {row.key(): row for row in rows if row.provider == "copy" and row.ok}

    def over_copy(row: Row) -> float | None:
        """On a GPU the microseconds that a small input takes longer than its copy."""
        copy, size = copies.get(row.key()), prod(row.shape) * ITEMSIZE.get(row.dtype, 0)
        if row.threads is None and row.median_us and copy and copy.median_us and size < SMALL_INPUT:
            return row.median_us - copy.median_us
        return None

    def graph_fraction(row: Row) -> float | None:
        copy = copies.get(row.key())
        return copy.graph_us / row.graph_us if copy and copy.graph_us and row.graph_us else None

    def mean(of: list[float]) -> str:
        return f"{geomean(of):.2f}"

    def share(of: list[float]) -> str:
        return f"{geomean(of):.2f} (at most {max(of):.2f})"

    def microseconds(of: list[float]) -> str:
        return f"{sum(of) / len(of):.1f} (at most {max(of):.1f})"

    def shortest(of: list[float]) -> str:
        return us_text(min(of))

    on_cpu, on_gpu = [r for r in rows if r.threads], [r for r in rows if not r.threads]
    return [
        *_speedups(rows, "median_us", f"{OURS} is"),
        *_each(rows, "of a copy's speed", lambda row: row.copy_fraction, mean, " (geometric means)"),
        *_each(rows, "inputs under 64 MB, us more than the copy", over_copy, microseconds),
        *_each(rows, "in a CUDA graph, of a copy's speed", graph_fraction, mean, " (geometric means)"),
        *_each(rows, "logsumexp, time relative to a copy of the input", input_share, share),
        *_speedups(on_cpu, "call_us", f"with newly allocated results {OURS} is"),
        *_each(on_gpu, "shortest call, host included", lambda row: row.call_us, shortest, " us"),
        *_disturbed(disturbed),
    ]


def _each(
    rows: Sequence[Row],
    begin: str,
    value: Callable[[Row], float | None],
    show: Callable[[list[float]], str],
    end: str = "",
) -> list[str]:
    """A sentence with a number for each provider that has values; no sentence if none has."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.provider != "copy" and row.ok and (of := value(row)) is not None:
            found.setdefault(row.provider, []).append(of)
    return [f"{begin}: {', '.join(f'{name} {show(of)}' for name, of in found.items())}{end}"] if found else []


def _speedups(rows: Sequence[Row], metric: str, begin: str) -> list[str]:
    """How many times as fast as each other provider onepass is."""
    sentences = []
    for other in providers(rows):
        ratios = [r for line in lines(rows) if (r := line.speedup(other, metric=metric)) is not None]
        if ratios and other not in (OURS, "copy"):
            span = f", {min(ratios):.2f}x to {max(ratios):.2f}x" if len(ratios) > 1 else ""
            mean = f"geometric mean of {len(ratios)}{span}"
            sentences.append(f"{begin} {geomean(ratios):.2f}x as fast as {other} ({mean})")
    return sentences


def _disturbed(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    first, cases = rows[0], len({row.key() for row in rows})
    where = f"{len(rows)} times in {cases} case{'s' if cases > 1 else ''}"
    return [
        f"disturbed (?) and left out of the means: {where}; "
        f"{first.provider} on {first.case}, {dtype_text(first)}: {first.disturbed}"
    ]


def problems(rows: Sequence[Row]) -> list[str]:
    """Why cells have no time: each reason once, with the number of its cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.graph_error:
            text = f"{row.case}, {dtype_text(row)}: no time in a graph: {row.graph_error}"
            reasons.setdefault((row.provider, f"graph: {row.graph_error}"), []).append(text)
        if not row.ok and row.provider != "copy":
            # the numbers of a wrong result differ from case to case; the first case stands for all
            kind = "wrong" if (row.error or "").startswith("wrong") else row.error or "error"
            reasons.setdefault((row.provider, kind), []).append(f"{row.case}, {dtype_text(row)}: {row.error}")
    sentences = []
    for (name, kind), found in reasons.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        count = f"{kind} ({len(found)} cases)" if kind.startswith("unsupported") else f"{found[0]}{more}"
        sentences.append(f"{name}: {count}")
    return sentences
