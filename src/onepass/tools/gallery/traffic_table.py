"""The table of `onepass traffic`: predicted traffic, and beside it the traffic that ncu counted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
import torch

from onepass.tools.gallery.ncu import Measurement
from onepass.tools.gallery.traffic import Prediction
from onepass.tools.gallery.variants import format_count

__all__ = ["Report", "Target", "format_report"]

_DEVICE = {"cpu": "cpu", "cuda": "gpu", "triton": "gpu"}  # where a variant runs, by the first word of its name


@dataclass
class Target:
    """The device that holds the matrix.

    name: as `onepass.explain` takes it. title: as it is printed. device: None for a known GPU, which need not be here.
    gbs: bandwidth of a copy, in 1e9 bytes read and written per second, or None. source: where that number is from.
    """

    name: str
    title: str
    device: torch.device | None
    gbs: float | None = None
    source: str = ""


@dataclass
class Report:
    """The result of `onepass traffic` for an M x N matrix.

    lines: contestants with their predictions, `minimum` first; torch has None, since its kernels are not known.
    ncu: path of ncu, if it was found. measured: its counts. error: why there are none.
    """

    target: Target
    rows: int
    n: int
    dtype: str
    lines: list[tuple[str, Prediction | None]]
    ncu: str | None = None
    measured: Measurement | None = None
    error: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def minimum(self) -> Prediction:
        found = self.lines[0][1]
        assert found is not None
        return found

    def gbs(self, name: str) -> float | None:
        """The bandwidth that gives a contestant's time; None for a variant that runs on another kind of device."""
        kind = "cpu" if self.target.device is not None and self.target.device.type == "cpu" else "gpu"
        return self.target.gbs if _DEVICE.get(name.partition("-")[0], kind) == kind else None

    def lines_to_measure(self, with_torch: bool) -> list[tuple[str, Prediction | None]]:
        """The lines with a copy after `minimum`, which checks the counters, and on request torch before onepass."""
        lines = [self.lines[0], ("copy", replace(self.minimum, name="copy")), *self.lines[1:]]
        if with_torch:
            lines.insert(len(lines) - 1 if lines[-1][0] == "onepass" else len(lines), ("torch", None))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The data of `onepass traffic --json`."""
        lines = []
        for name, prediction in self.lines:
            line: dict[str, Any] = {"name": name, "predicted": None, "measured": None}
            if prediction is not None:
                line["predicted"] = prediction.as_dict(self.gbs(name))
            if self.measured is not None and name in self.measured.counts:
                counts = self.measured.counts[name]
                line["measured"] = {
                    "read_bytes": counts.read,
                    "written_bytes": counts.written,
                    "ratio": counts.ratio(self.minimum.bytes),
                    "kernels": [vars(kernel) for kernel in counts.kernels],
                }
            lines.append(line)
        return {
            "rows": self.rows,
            "n": self.n,
            "dtype": self.dtype,
            "device": self.target.title,
            "bandwidth_gbs": self.target.gbs,
            "minimum_bytes": self.minimum.bytes,
            "lines": lines,
            "ncu": self.ncu,
            "not_measured": self.error or None,
            "left_out": {} if self.measured is None else self.measured.left_out,
        }


@dataclass
class Column:
    """`second` is a second part of each cell: beside the first, or below it if the terminal is narrow."""

    head: str
    cells: list[str]
    second: list[str] | None = None
    right: bool = True
    measured: bool = False

    def layout(self, stacked: bool, colours: bool) -> list[list[str]]:
        """The lines of the head, of the rule below it, and of each cell, all of one width."""

        def style(text: str, dim: bool = False) -> str:
            kind: dict[str, Any] = {"fg": "cyan"} if self.measured else {"bold": True} if self.head == "ratio" else {}
            kind = {"dim": True} if dim else kind
            return click.style(text, **kind) if colours and kind and text else text

        second = self.second or [""] * len(self.cells)
        pairs = list(zip(self.cells, second, strict=True))
        head = self.head.rsplit(" ", 1) if stacked else [self.head]
        width = max(map(len, [*head, *self.cells, *(second if stacked else ())]))
        beside = 0 if stacked or self.second is None else max(map(len, second)) + 1

        def pad(text: str) -> str:
            return text.rjust(width) if self.right else text.ljust(width)

        if stacked:
            cells = [[style(pad(a)), *([style(pad(b), dim=True)] if b else [])] for a, b in pairs]
        else:
            cells = [[style(pad(a)) + style(f" {b}".ljust(beside)[:beside], dim=True)] for a, b in pairs]
        return [[pad(line) + " " * beside for line in head], ["-" * (width + beside)], *cells]


def _table(columns: Sequence[Column], stacked: bool, colours: bool = False) -> list[str]:
    """The lines of a table, as wide as its cells."""
    lines = []
    blocks = [column.layout(stacked, colours) for column in columns]
    for row in zip(*blocks, strict=True):
        for at in range(max(map(len, row))):
            cells = [cell[at] if at < len(cell) else " " * len(click.unstyle(cell[0])) for cell in row]
            lines.append("  ".join(cells).rstrip())
    return lines


def _columns(report: Report) -> list[Column]:
    """The columns: predicted numbers, then measured ones."""
    predictions = [prediction for _, prediction in report.lines]
    has_cached = any(p.cached_ratio for p in predictions if p)

    def ratios(head: str, text: Callable[[float], str], of: Sequence[Prediction | None] = predictions) -> Column:
        """The traffic asked of memory, and in brackets the part that reaches it while the caches help."""
        brackets = [f"({text(p.cached_ratio)})" if p and p.cached_ratio else "" for p in of]
        return Column(head, [text(p.ratio) if p else "" for p in of], brackets if has_cached else None)

    found = [Column("variant", [name for name, _ in report.lines], right=False)]
    for head in ("reads", "writes"):
        numbers = [f"{getattr(p, head):,}" if p else "" for p in predictions]
        found.append(Column(head, numbers, [format_count(getattr(p.traffic, head)) if p else "" for p in predictions]))
    found.append(Column("bytes", [f"{p.bytes:,}" if p else "" for p in predictions]))
    found.append(ratios("ratio", lambda ratio: f"{ratio:.2f}"))
    found.append(ratios("of a copy", lambda ratio: f"{1 / ratio:.2f}"))
    if report.target.gbs is not None:
        copy_us = report.minimum.bytes / report.target.gbs / 1e3
        here = [p if report.gbs(name) else None for name, p in report.lines]
        found.append(ratios("us", lambda ratio: _format_us(ratio * copy_us), here))
    if report.measured is not None:
        counts = [report.measured.counts.get(name) for name, _ in report.lines]
        ratio = [c.ratio(report.minimum.bytes) if c else None for c in counts]
        found.append(Column("MB read", [_format_mb(c.read) if c else "" for c in counts], measured=True))
        found.append(Column("MB written", [_format_mb(c.written) if c else "" for c in counts], measured=True))
        found.append(Column("measured ratio", ["" if r is None else f"{r:.2f}" for r in ratio], measured=True))
    return found


def _format_mb(value: int | None) -> str:
    return "n/a" if value is None else f"{value / 1e6:,.2f}"


def _format_us(us: float) -> str:
    return f"{us:,.0f}" if us >= 99.95 else f"{us:.1f}" if us >= 0.995 else f"{us:.3f}"


def _notes(report: Report) -> list[str]:
    """The sentences below the table."""
    found = ["reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's"]
    found.append("of a copy: the highest speed that it can reach, in units of a copy's")
    if any(p.cached_ratio for _, p in report.lines if p):
        found.append("in brackets: from memory, while the rows in flight stay in the caches")
    if report.target.gbs is not None:
        found.append("us: at a copy's bandwidth; empty for a variant that does not run on this kind of device")
    found += report.notes
    if report.error:
        found.append(f"not measured: {report.error}")
    if report.measured is None:
        return found
    reasons: dict[str, list[str]] = {}
    for name, reason in report.measured.left_out.items():
        reasons.setdefault(reason, []).append(name)
    found += [f"not measured: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    unseen = [name for name, counts in report.measured.counts.items() if not counts.kernels]
    if unseen:
        found.append(f"n/a: ncu saw no kernel of {', '.join(unseen)}")
    found.append(
        "MB: 1e6 bytes between the GPU and its DRAM, counted by ncu. It empties the caches before each kernel, so that "
        "a variant of several kernels reads everything anew. Data that is still in the L2 when a kernel ends is not "
        "counted as written. The copy, y = x * 1, checks the counters"
    )
    return found


def format_report(report: Report, width: int | None = None, colours: bool = False) -> str:
    """The title, the table and the notes, in lines of at most `width` characters; None for any width.

    A table that is too wide gets the second parts of its cells below the first, then its measured columns in a table
    of their own; at last it has the expressions for reads and writes without their numbers.
    """
    columns = _columns(report)
    predicted = [column for column in columns if not column.measured]
    measured = [columns[0], *(column for column in columns if column.measured)]
    two = [predicted, measured] if len(measured) > 1 else [predicted]
    short = [Column(c.head, c.second or []) if c.head in ("reads", "writes") else c for c in predicted]
    layouts = [([columns], False), ([columns], True), (two, False), (two, True), ([short, *two[1:]], True)]
    for tables, stacked in layouts if width else layouts[:1]:
        if width and all(len(line) <= width for table in tables for line in _table(table, stacked)):
            break
    target = report.target
    title = f"{report.rows} x {report.n} {report.dtype} on {target.title}"
    if target.gbs is not None:
        title += f", where a copy reaches {target.gbs:,.4g} GB/s ({target.source})"
    parts = ["\n".join(_table(table, stacked, colours)) for table in tables]
    notes = [line for note in _notes(report) for line in textwrap.wrap(note, min(width or 110, 110))]
    if colours:
        title, notes = click.style(title, bold=True), [click.style(line, dim=True) for line in notes]
    return "\n\n".join([title, *parts, "\n".join(notes)])
