"""The report of a run: a table with a line per case and a column per provider, and sentences that summarise it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import fmean
from statistics import geometric_mean as geomean

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from onepass.tools.bench.cases import ITEMSIZE, SHORT
from onepass.tools.bench.results import Row
from onepass.tools.terminal import fits, table

OURS, BASELINE = "onepass", "torch"
# Bytes of an input, or moved by a drawn shape. For fewer bytes the microseconds over the copy say more than the
# fraction of its speed.
SMALL = 64_000_000
SMALL_CASE = 8 << 20  # bytes; smaller cases get a second table, of the call time that includes the host
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
        usable = {n: r.median_us for n, r in self.rows.items() if r.ok and not r.disturbed and n != "copy"}
        return min(usable, key=lambda n: usable[n] or 0, default=None)

    def speedup(self, over: str = BASELINE, of: str = OURS, metric: str = "median_us") -> float | None:
        """How many times as fast as `over` the provider `of` is, if both were timed."""
        a, b = self.rows.get(of), self.rows.get(over)
        us, other = (getattr(row, metric) if row and row.ok else None for row in (a, b))
        return float(other / us) if us and other else None

    def fraction(self, of: str = OURS) -> float | None:
        """The time of the limit over that of the provider, if neither was disturbed. On a CPU it is the smallest time:
        a shared machine disturbs medians."""
        if any(self.rows[n].disturbed for n in (of, "copy") if n in self.rows):
            return None
        return self.speedup("copy", of, "min_us" if self.first().threads else "median_us")

    def first(self) -> Row:
        return next(iter(self.rows.values()))

    def speedup_text(self, of: str = OURS) -> str:
        """How many times as fast as torch the provider is, with a `?` if one of the two times was disturbed."""
        speedup = self.speedup(of=of)
        return "" if speedup is None else f"{speedup:.2f}" + "?" * any(self.rows[n].disturbed for n in (of, BASELINE))


def lines(rows: Sequence[Row]) -> list[Line]:
    """The lines in the order of the rows."""
    found: dict[tuple[str, ...], Line] = {}
    for row in rows:
        line = found.setdefault(row.key(), Line(case_text(row), shape_text(row), dtype_text(row)))
        line.rows[row.provider] = row
    return list(found.values())


def providers(rows: Sequence[Row]) -> list[str]:
    """The columns: the copy first, then the providers in their order."""
    return sorted(dict.fromkeys(row.provider for row in rows), key=lambda name: name != "copy")


# Cells


def case_text(row: Row) -> str:
    """The case, with function and direction unless it is the forward of softmax or its name says so."""
    name = row.case
    if row.function != "softmax" or row.direction != "forward":
        name += "" if row.function in name else f", {row.function}"
        name += " backward" if row.direction == "backward" and "backward" not in name else ""
    return name


def shape_text(row: Row) -> str:
    dims = row.dim if isinstance(row.dim, list) else [row.dim]
    last = [d % max(len(row.shape), 1) for d in dims] == [max(len(row.shape) - 1, 0)]
    return ("x".join(map(str, row.shape)) or "()") + ("" if last else f" dim {','.join(map(str, dims))}")


def dtype_text(row: Row) -> str:
    short = SHORT.get(row.dtype, row.dtype)
    return short if row.out_dtype == row.dtype else f"{short}>{SHORT.get(row.out_dtype, row.out_dtype)}"


def us_text(us: float | None) -> str:
    """Three digits, or whole microseconds from 100 on, so that a longer number is a slower call.

    >>> us_text(1.234), us_text(12.34), us_text(1234.5)
    ('1.23', '12.3', '1234')
    """
    return "" if us is None else f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def time_text(row: Row) -> str:
    """The time, with a `?` if it was disturbed, or a word that says why there is none."""
    if not row.ok or row.median_us is None:
        return _WORDS.get((row.error or "error").partition(":")[0], "ERROR")
    return us_text(row.median_us) + "?" * bool(row.disturbed)


def graph_text(row: Row) -> str:
    """The time of a launch in a CUDA graph, or "-" if the call could not be captured."""
    return "" if not row.ok else "-" if row.graph_us is None else us_text(row.graph_us)


def input_share(row: Row) -> float | None:
    """A logsumexp's time over that of a copy of its input. Reading at the speed of a copy is 0.5."""
    return row.median_us / row.input_copy_us if row.ok and row.median_us and row.input_copy_us else None


def _cell(line: Line, name: str, graph: bool) -> Text:
    """The time, the fraction of a copy's speed (of the copy its GB/s) and the time in a graph."""
    row = line.rows.get(name)
    if row is None:
        return Text()
    time, share = time_text(row), row.gbps if name == "copy" else row.copy_fraction
    if not row.ok:
        return Text(time, style="bold red" if time in ("WRONG", "ERROR") else "yellow" * (time == "skipped"))
    best = name == line.fastest()
    shown = "" if share is None else f"{share:.0f}" if name == "copy" else f"{share:.2f}"
    text = "*" * best + f"{time} {shown:>4}" + (f" {graph_text(row):>5}" if graph else "")
    return Text(text, style="bold green" if best else "yellow" if row.disturbed else "dim" * (name == "copy"))


# The table


def show_table(rows: Sequence[Row], on: Console, calls: bool = False, columns: Sequence[str] = ()) -> Group:
    """One line per case; `*` marks the fastest. `calls` shows the call times instead.

    On a narrow terminal the table loses the shapes and the column of dtypes, then its cases fold, then it becomes
    several tables with some of the providers each.
    """
    names = list(columns) or providers(rows)
    for count in range(1, len(names) + 1):
        size = -(-len(names) // count)
        for shapes, fold in ((True, False), (False, False), (False, True))[count > 1 :]:
            made = [_table(rows, names[i : i + size], calls, shapes) for i in range(0, len(names), size)]
            whole = Group(*(part for each in made for part in (each, "")))
            if all(fits(on, each, fold) for each in made):
                return whole
    return whole


def _table(rows: Sequence[Row], names: Sequence[str], calls: bool, shapes: bool) -> Table:
    graph = not calls and any(row.graph_us is not None or row.graph_error for row in rows)
    against = not calls and OURS in names and BASELINE in names
    head = ["case", *["shape", "dtype"] * shapes]
    for name in names:
        unit = "us" if calls else ("us GB/s" if name == "copy" else "us of copy") + " graph" * graph
        head.append(f"{name}\n{unit}")
    body = []
    for line in lines(rows):
        cells: list[str | Text] = [line.case, line.shape, line.dtype] if shapes else [f"{line.case}, {line.dtype}"]
        for name in names:
            row = line.rows.get(name)
            cells.append(us_text(row.call_us if row else None) if calls else _cell(line, name, graph))
        body.append([*cells, *[line.speedup_text()] * against])
    return table([*head, *[f"times\n{BASELINE}"] * against], body, left=set(range(3 if shapes else 1)))


# Sentences


def summary(rows: Sequence[Row]) -> list[str]:
    """What the table says, in a few sentences. Disturbed times are counted and left out of all means."""
    disturbed, rows = [r for r in rows if r.disturbed], [r for r in rows if not r.disturbed]
    copies = {row.key(): row for row in rows if row.provider == "copy" and row.ok}

    def over_copy(row: Row) -> float | None:
        """On a GPU the microseconds that a small input takes longer than its copy."""
        copy, size = copies.get(row.key()), prod(row.shape) * ITEMSIZE.get(row.dtype, 0)
        if row.threads is None and row.median_us and copy and copy.median_us and size < SMALL:
            return row.median_us - copy.median_us
        return None

    def graph_fraction(row: Row) -> float | None:
        copy = copies.get(row.key())
        return copy.graph_us / row.graph_us if copy and copy.graph_us and row.graph_us else None

    def mean(of: list[float]) -> str:
        return f"{geomean(of):.2f}"

    def mean_and_most(of: list[float]) -> str:
        return f"{geomean(of):.2f} (at most {max(of):.2f})"

    def microseconds(of: list[float]) -> str:
        return f"{fmean(of):.1f} (at most {max(of):.1f})"

    def shortest(of: list[float]) -> str:
        return us_text(min(of))

    numbers: tuple[tuple[str, Callable[[Row], float | None], Callable[[list[float]], str], str], ...] = (
        ("of a copy's speed", lambda row: row.copy_fraction, mean, " (geometric means)"),
        ("inputs under 64 MB, us more than the copy", over_copy, microseconds, ""),
        ("in a CUDA graph, of a copy's speed", graph_fraction, mean, " (geometric means)"),
        ("logsumexp, time relative to a copy of the input", input_share, mean_and_most, ""),
        ("shortest call, host included", lambda row: None if row.threads else row.call_us, shortest, " us"),
    )
    text = _speedups(rows, "median_us", f"{OURS} is")
    for begin, value, show, end in numbers:
        found: dict[str, list[float]] = {}
        for row in rows:
            if row.provider != "copy" and row.ok and (of := value(row)) is not None:
                found.setdefault(row.provider, []).append(of)
        text += [f"{begin}: {', '.join(f'{name} {show(of)}' for name, of in found.items())}{end}"] if found else []
    text += _speedups([r for r in rows if r.threads], "call_us", f"with newly allocated results {OURS} is")
    if disturbed:
        first, cases = disturbed[0], len({row.key() for row in disturbed})
        where = f"{len(disturbed)} times in {cases} case{'s' if cases > 1 else ''}"
        why = f"{first.provider} on {first.case}, {dtype_text(first)}: {first.disturbed}"
        text.append(f"disturbed (?) and left out of the means: {where}; {why}")
    return text


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


def problems(rows: Sequence[Row]) -> list[str]:
    """Why cells have no time: each reason once, with the number of its cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        where = f"{row.case}, {dtype_text(row)}"
        if row.graph_error:
            text = f"no time in a graph: {row.graph_error}"
            reasons.setdefault((row.provider, text), []).append(f"{where}: {text}")
        if not row.ok and row.provider != "copy":
            # the numbers of a wrong result differ from case to case; the first case stands for all
            kind = "wrong" if (row.error or "").startswith("wrong") else row.error or "error"
            reasons.setdefault((row.provider, kind), []).append(f"{where}: {row.error}")
    sentences = []
    for (name, kind), (first, *others) in reasons.items():
        text = first + f" (and {len(others)} more)" * bool(others)
        text = f"{kind} ({len(others) + 1} cases)" if kind.startswith("unsupported") else text
        sentences.append(f"{name}: {text}")
    return sentences
