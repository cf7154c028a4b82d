"""Rows of a results file as a table: one line a case and dtype, one column a provider. Plain Python, plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from onepass.tools.bench.cases import ITEMSIZE, SHORT
from onepass.tools.bench.results import Row
from onepass.tools.bench.stats import geomean

OURS, BASELINE = "onepass", "torch"
SOON = 64_000_000  # bytes


@dataclass
class Line:
    """One case at one dtype: the rows of its providers by name."""

    case: str
    shape: str
    dtype: str
    rows: dict[str, Row] = field(default_factory=dict)

    def best(self) -> str | None:
        """The fastest that is right and was not disturbed, the copy aside."""
        right = {
            n: r.median_us for n, r in self.rows.items() if r.ok and not r.disturbed and n != "copy" and r.median_us
        }
        return min(right, key=lambda n: right[n]) if right else None

    def faster(self, other: str = BASELINE, us: str = OURS, of: str = "median_us") -> float | None:
        """How many times faster `us` is than `other`, where both were timed."""
        a, b = self.rows.get(us), self.rows.get(other)
        if a and b and a.ok and b.ok and getattr(a, of) and getattr(b, of):
            return float(getattr(b, of) / getattr(a, of))
        return None


def lines(rows: Sequence[Row]) -> list[Line]:
    """In the order of the rows. Function and direction are named where they are not the plain softmax."""
    made: dict[tuple[str, ...], Line] = {}
    for row in rows:
        if row.key() not in made:
            name = row.case
            if row.function != "softmax" or row.direction != "forward":
                name += "" if row.function in name else f", {row.function}"
                name += " backward" if row.direction == "backward" and "backward" not in name else ""
            made[row.key()] = Line(name, shape_text(row), dtype_text(row))
        made[row.key()].rows[row.provider] = row
    return list(made.values())


def providers(rows: Sequence[Row]) -> list[str]:
    """The columns: the copy, then the providers in their order."""
    names = list(dict.fromkeys(row.provider for row in rows))
    return sorted(names, key=lambda name: name != "copy")


def shape_text(row: Row) -> str:
    dims = row.dim if isinstance(row.dim, list) else [row.dim]
    last = [d % len(row.shape) for d in dims] == [len(row.shape) - 1]
    return "x".join(map(str, row.shape)) + ("" if last else f" dim {','.join(map(str, dims))}")


def dtype_text(row: Row) -> str:
    short = SHORT.get(row.dtype, row.dtype)
    return short if row.out_dtype == row.dtype else f"{short}>{SHORT.get(row.out_dtype, row.out_dtype)}"


def us_text(us: float) -> str:
    """Three digits, and whole microseconds from 100 on: a longer number is a slower call.

    >>> us_text(1.234), us_text(12.34), us_text(1234.5)
    ('1.23', '12.3', '1234')
    """
    return f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def cell(row: Row | None) -> tuple[str, str]:
    """(time, fraction of a copy); for the copy itself (time, GB/s); for what was not timed (why, "").

    The time of a disturbed row has a `?`.
    """
    if row is None:
        return ("", "")
    if not row.ok:
        word = (row.error or "error").partition(":")[0]
        return ({"wrong": "WRONG", "raised": "ERROR", "skipped": "skipped", "unsupported": "-"}.get(word, "ERROR"), "")
    assert row.median_us is not None
    time = us_text(row.median_us) + "?" * bool(row.disturbed)
    if row.provider == "copy":
        return (time, f"{row.gbps:.0f} GB/s" if row.gbps else "")
    return (time, f"{row.copy_fraction:.2f}" if row.copy_fraction is not None else "")


def has_graph(rows: Sequence[Row]) -> bool:
    """Whether the rows are of a run that asked for the time in a CUDA graph."""
    return any(row.graph_us is not None or row.graph_error for row in rows)


def graph_cell(row: Row | None) -> str:
    """The time of a launch in a CUDA graph; "-" for what could not be captured, nothing for what was not tried."""
    if row is None or not row.ok:
        return ""
    return us_text(row.graph_us) if row.graph_us is not None else "-"


def times_cell(line: Line, us: str = OURS) -> str:
    """How many times faster `us` is than torch, with a `?` where one of the two was disturbed."""
    times = line.faster(us=us)
    return "" if times is None else f"{times:.2f}" + "?" * any(line.rows[n].disturbed for n in (us, BASELINE))


def ratios(rows: Sequence[Row], other: str, us: str = OURS, of: str = "median_us") -> list[float]:
    """How many times faster `us` is than `other`, case by case, where both were timed."""
    return [times for line in lines(rows) if (times := line.faster(other, us, of)) is not None]


def summary(rows: Sequence[Row]) -> list[str]:
    """What the table says, in a few sentences. What was disturbed is counted, and left out of all others."""
    marked, rows = [r for r in rows if r.disturbed], [r for r in rows if not r.disturbed]
    said = _faster(rows, "median_us", f"{OURS} is")
    fractions = []
    for name in providers(rows):
        of = [r.copy_fraction for r in rows if r.provider == name and r.ok and r.copy_fraction]
        if of and name != "copy":
            fractions.append(f"{name} {geomean(of):.2f}")
    if fractions:
        said.append(f"of a copy's speed: {', '.join(fractions)} (geometric means)")
    said += _over_the_copy(rows) + _graphs(rows) + _of_the_input(rows)
    said += _faster([r for r in rows if r.threads], "call_us", f"with results newly allocated {OURS} is")
    calls = []
    for name in providers(rows):
        least = [r.call_us for r in rows if r.provider == name and r.call_us and not r.threads]
        if least:
            calls.append(f"{name} {us_text(min(least))}")
    if calls:
        said.append(f"a call with its host time, at its least: {', '.join(calls)} us")
    return said + _disturbed(marked)


def _disturbed(marked: Sequence[Row]) -> list[str]:
    if not marked:
        return []
    first, cases = marked[0], len({row.key() for row in marked})
    of = f"{cases} case{'s' if cases > 1 else ''}"
    why = f"{first.provider} on {first.case}, {dtype_text(first)}: {first.disturbed}"
    return [f"disturbed (?), and left out of the means: {len(marked)} of the times, of {of}; {why}"]


def _faster(rows: Sequence[Row], of: str, begin: str) -> list[str]:
    """How many times faster onepass is than each other, by the time that `of` names."""
    said = []
    for other in providers(rows):
        values = [] if other in (OURS, "copy") else ratios(rows, other, of=of)
        if values:
            span = f", {min(values):.2f}x to {max(values):.2f}x" if len(values) > 1 else ""
            said.append(f"{begin} {geomean(values):.2f}x as fast as {other} (geometric mean of {len(values)}{span})")
    return said


def _over_the_copy(rows: Sequence[Row]) -> list[str]:
    """On a GPU, of inputs that are soon copied: the microseconds that a call takes longer say more than a fraction."""
    copies = {row.key(): row.median_us for row in rows if row.provider == "copy" and row.ok}
    over: dict[str, list[float]] = {}
    for row in rows:
        copy, small = copies.get(row.key()), prod(row.shape) * ITEMSIZE.get(row.dtype, 0) < SOON
        if row.provider != "copy" and row.threads is None and row.ok and row.median_us and copy and small:
            over.setdefault(row.provider, []).append(row.median_us - copy)
    means = [f"{name} {sum(of) / len(of):.1f} (at most {max(of):.1f})" for name, of in over.items()]
    return [f"inputs under 64 MB, us over the copy: {', '.join(means)}"] if means else []


def _graphs(rows: Sequence[Row]) -> list[str]:
    """The fractions of a copy's speed once more, by the time in a graph of both."""
    copies = {row.key(): row.graph_us for row in rows if row.provider == "copy"}
    fractions: dict[str, list[float]] = {}
    for row in rows:
        copy = copies.get(row.key())
        if row.provider != "copy" and row.ok and row.graph_us and copy:
            fractions.setdefault(row.provider, []).append(copy / row.graph_us)
    means = [f"{name} {geomean(of):.2f}" for name, of in fractions.items()]
    return [f"in a CUDA graph, of a copy's speed: {', '.join(means)} (geometric means)"] if means else []


def input_share(row: Row) -> float | None:
    """A logsumexp's time over that of a copy of its input: 0.5 is reading at the speed at which a copy goes."""
    if not row.ok or not row.median_us or not row.input_copy_us:
        return None
    return row.median_us / row.input_copy_us


def _of_the_input(rows: Sequence[Row]) -> list[str]:
    shares: dict[str, list[float]] = {}
    for row in rows:
        share = input_share(row)
        if share and row.provider != "copy":
            shares.setdefault(row.provider, []).append(share)
    means = [f"{name} {geomean(of):.2f} (at most {max(of):.2f})" for name, of in shares.items()]
    return [f"logsumexp, the time over that of a copy of the input: {', '.join(means)}"] if means else []


def troubles(rows: Sequence[Row]) -> list[str]:
    """Why cells hold no time: each reason once, with the number of cases that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.graph_error:
            text = f"{row.case}, {dtype_text(row)}: no time in a graph: {row.graph_error}"
            reasons.setdefault((row.provider, f"graph: {row.graph_error}"), []).append(text)
        if not row.ok and row.provider != "copy":
            # the numbers of a wrong result differ from case to case, so that only its first case is told in full
            kind = "wrong" if (row.error or "").startswith("wrong") else row.error or "error"
            reasons.setdefault((row.provider, kind), []).append(f"{row.case}, {dtype_text(row)}: {row.error}")
    told = []
    for (name, kind), at in reasons.items():
        more = f" (and {len(at) - 1} more)" if len(at) > 1 else ""
        told.append(f"{name}: {kind} ({len(at)} cases)" if kind.startswith("unsupported") else f"{name}: {at[0]}{more}")
    return told


def plain(rows: Sequence[Row]) -> str:
    """The table in ASCII, as wide as it needs to be; `*` is the best of a line."""
    names, graph = providers(rows), has_graph(rows)
    against = OURS in names and BASELINE in names
    head = ["case", "shape", "dtype"]
    for name in names:
        head += [f"{name} us", "" if name == "copy" else "of copy", *["graph us"] * graph]
    head += [f"times {BASELINE}"] * against
    body = []
    for line in lines(rows):
        cells = [line.case, line.shape, line.dtype]
        for name in names:
            time, share = cell(line.rows.get(name))
            cells += [time, share + ("*" if name == line.best() else "")]
            cells += [graph_cell(line.rows.get(name))] * graph
        cells += [times_cell(line)] * against
        body.append(cells)
    widths = [max(len(r[i]) for r in [head, *body]) for i in range(len(head))]
    text = []
    for cells in [head, ["-" * w for w in widths], *body]:
        joined = (c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        text.append("  ".join(joined).rstrip())
    return "\n".join(text)
