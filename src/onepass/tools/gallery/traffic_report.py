"""The traffic of the rungs as a table: predicted, and measured beside it where ncu has counted it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onepass.tools.gallery.ncu import Measured
from onepass.tools.gallery.traffic import Prediction, formula

__all__ = ["Place", "Report", "columns", "draw", "notes", "plain", "show", "title"]


_KIND = {"cpu": "cpu", "cuda": "gpu", "triton": "gpu"}  # what a rung runs on, by the first word of its name


@dataclass
class Place:
    """Where the matrix would be.

    name: as `onepass.explain` takes it. title: as it is told. device: None for a known GPU, which need not be here.
    gbs: bandwidth of a copy, in 1e9 bytes read and written a second, or None. source: where that number is from.
    """

    name: str
    title: str
    device: torch.device | None
    gbs: float | None = None
    source: str = ""


@dataclass
class Report:
    """What there is to tell of an M x N matrix.

    lines: contestants with their predictions, `least` first; None for torch, whose kernels say nothing of theirs.
    ncu: its path, where measuring was asked for and it is there. measured: what it counted. trouble: why it did not.
    """

    place: Place
    rows: int
    n: int
    dtype: str
    lines: list[tuple[str, Prediction | None]]
    ncu: str | None = None
    measured: Measured | None = None
    trouble: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def least(self) -> Prediction:
        """The prediction of reading once and writing once."""
        found = self.lines[0][1]
        assert found is not None
        return found

    def gbs(self, name: str) -> float | None:
        """The bandwidth that gives a contestant's time: none for a rung that runs on another kind of device."""
        kind = "cpu" if self.place.device is not None and self.place.device.type == "cpu" else "gpu"
        return self.place.gbs if _KIND.get(name.partition("-")[0], kind) == kind else None

    def with_copy(self, torch: bool) -> list[tuple[str, Prediction | None]]:
        """The lines with the copy after `least`, to check the counters by; and torch before onepass, if asked for."""
        lines = [self.lines[0], ("copy", replace(self.least, name="copy")), *self.lines[1:]]
        if torch:
            lines.insert(len(lines) - 1 if lines[-1][0] == "onepass" else len(lines), ("torch", None))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For programs: what `onepass traffic --json` prints."""
        lines = []
        for name, prediction in self.lines:
            line: dict[str, Any] = {"name": name, "predicted": None, "measured": None}
            if prediction is not None:
                line["predicted"] = prediction.as_dict(self.gbs(name))
            if self.measured is not None and name in self.measured.counted:
                counted = self.measured.counted[name]
                line["measured"] = {
                    "read_bytes": counted.read,
                    "written_bytes": counted.written,
                    "ratio": counted.ratio(self.least.bytes),
                    "kernels": [vars(kernel) for kernel in counted.kernels],
                }
            lines.append(line)
        return {
            "rows": self.rows,
            "n": self.n,
            "dtype": self.dtype,
            "device": self.place.title,
            "bandwidth_gbs": self.place.gbs,
            "least_bytes": self.least.bytes,
            "lines": lines,
            "ncu": self.ncu,
            "not_measured": self.trouble or None,
            "left_out": {} if self.measured is None else self.measured.left_out,
        }


@dataclass
class Column:
    """A head, a cell a line, and a second part of each cell: beside the first, or below it where room is short."""

    head: str
    cells: list[str]
    second: list[str] | None = None
    right: bool = True
    measured: bool = False


def columns(report: Report) -> list[Column]:
    """What the table shows: numbers predicted, then those measured, where there are any."""
    of = [prediction for _, prediction in report.lines]
    caches = any(p.cached_ratio for p in of if p)

    def counts(head: str, number: Callable[[Prediction], int], formula_of: Callable[[Prediction], str]) -> Column:
        return Column(head, [f"{number(p):,}" if p else "" for p in of], [formula_of(p) if p else "" for p in of])

    def ratios(head: str, text: Callable[[float], str], of: Sequence[Prediction | None] = of) -> Column:
        """Of what is asked of memory, and in brackets of what reaches it while the caches help."""
        brackets = [f"({text(p.cached_ratio)})" if p and p.cached_ratio else "" for p in of]
        return Column(head, [text(p.ratio) if p else "" for p in of], brackets if caches else None)

    made = [
        Column("rung", [name for name, _ in report.lines], right=False),
        counts("reads", lambda p: p.reads, lambda p: formula(p.traffic.reads)),
        counts("writes", lambda p: p.writes, lambda p: formula(p.traffic.writes)),
        Column("bytes", [f"{p.bytes:,}" if p else "" for p in of]),
        ratios("ratio", lambda ratio: f"{ratio:.2f}"),
        ratios("of a copy", lambda ratio: f"{1 / ratio:.2f}"),
    ]
    if report.place.gbs is not None:
        copy_us = report.least.bytes / report.place.gbs / 1e3
        here = [p if report.gbs(name) else None for name, p in report.lines]
        made.append(ratios("us", lambda ratio: _us(ratio * copy_us), here))
    if report.measured is not None:
        counted = [report.measured.counted.get(name) for name, _ in report.lines]
        found = [c.ratio(report.least.bytes) if c else None for c in counted]
        made.append(Column("MB read", [_mb(c.read) if c else "" for c in counted], measured=True))
        made.append(Column("MB written", [_mb(c.written) if c else "" for c in counted], measured=True))
        made.append(Column("measured ratio", ["" if r is None else f"{r:.2f}" for r in found], measured=True))
    return made


def _mb(value: int | None) -> str:
    return "n/a" if value is None else f"{value / 1e6:,.2f}"


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 99.95 else f"{us:.1f}" if us >= 0.995 else f"{us:.3f}"


def title(report: Report) -> str:
    """The line above the table."""
    said = f"{report.rows} x {report.n} {report.dtype} on {report.place.title}"
    if report.place.gbs is not None:
        said += f", where a copy reaches {report.place.gbs:,.4g} GB/s ({report.place.source})"
    return said


def notes(report: Report) -> list[str]:
    """The sentences below the table."""
    said = ["reads, writes: elements. ratio: bytes in units of the least, hence the time in units of a copy's"]
    said.append("of a copy: the speed that it can reach at most, in units of a copy's")
    if any(p.cached_ratio for _, p in report.lines if p):
        said.append("in brackets: from memory, while the rows in flight stay in the caches")
    if report.place.gbs is not None:
        said.append("us: at a copy's bandwidth; none for a rung that does not run on this kind of device")
    said += report.notes
    if report.trouble:
        said.append(f"not measured: {report.trouble}")
    if report.measured is None:
        return said
    reasons: dict[str, list[str]] = {}
    for name, reason in report.measured.left_out.items():
        reasons.setdefault(reason, []).append(name)
    said += [f"not measured: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    silent = [name for name, counted in report.measured.counted.items() if not counted.kernels]
    if silent:
        said.append(f"n/a: ncu saw no kernel of {', '.join(silent)}")
    said.append(
        "MB: 1e6 bytes between the GPU and its DRAM, counted by ncu. It empties the caches before each kernel, so that "
        "a rung of several kernels reads everything anew; what is still in the L2 when a kernel ends is not counted as "
        "written. The copy, y = x * 1, checks the counters"
    )
    return said


def plain(made: Sequence[Column]) -> str:
    """The table in ASCII, as wide as it needs to be."""
    blocks = []
    for column in made:
        block = _aligned([column.head, *column.cells], column.right)
        if column.second is not None:
            second = _aligned(["", *column.second], right=False)
            block = [f"{a} {b}" for a, b in zip(block, second, strict=True)]
        blocks.append([block[0], "-" * len(block[0]), *block[1:]])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*blocks, strict=True))


def _aligned(cells: Sequence[str], right: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


def show(report: Report) -> None:
    """Prints it: a rich table on a terminal that has rich, plain text elsewhere."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            draw(report, Console(highlight=False))
            return
    said = [line for note in notes(report) for line in textwrap.wrap(note, 110)]
    print("\n".join([title(report), "", plain(columns(report)), "", *said]))


def draw(report: Report, console: Any) -> None:
    """Prints it on a rich console, whatever its width."""
    made = columns(report)
    predicted = [column for column in made if not column.measured]
    measured = [made[0], *(column for column in made if column.measured)]
    apart = [predicted, measured] if len(measured) > 1 else [predicted]
    short = [Column(c.head, c.second or []) if c.head in ("reads", "writes") else c for c in predicted]
    # What is too wide has the second parts of its cells below the first, then the measured numbers in a table of their
    # own, then the formulas without their numbers.
    for tables, stacked in (
        ([made], False),
        ([made], True),
        (apart, False),
        (apart, True),
        ([short, *apart[1:]], True),
    ):
        drawn = [_table(table, stacked) for table in tables]
        unbounded = console.options.update_width(10_000)
        if all(console.measure(table, options=unbounded).maximum <= console.width for table in drawn):
            break
    console.print(title(report), style="bold", markup=False)
    for table in drawn:
        console.print()
        console.print(table)
    console.print("\n" + "\n".join(notes(report)), style="dim", markup=False)


def _table(made: Sequence[Column], stacked: bool) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    parts: list[list[Text]] = []
    for column in made:
        style = "cyan" if column.measured else "bold" if column.head == "ratio" else ""
        cells = [Text(cell, style=style) for cell in column.cells]
        head = "\n".join(column.head.rsplit(" ", 1)) if stacked else column.head
        table.add_column(head, justify="right" if column.right else "left", no_wrap=True, overflow="fold")
        if column.second is not None and stacked:
            both = zip(cells, column.second, strict=True)
            cells = [Text.assemble(cell, (f"\n{second}", "dim")) if second else cell for cell, second in both]
        parts.append(cells)
        if column.second is not None and not stacked:
            table.add_column("", justify="left", no_wrap=True, style="dim")
            parts.append([Text(second) for second in column.second])
    for line in zip(*parts, strict=True):
        table.add_row(*line)
    return table
