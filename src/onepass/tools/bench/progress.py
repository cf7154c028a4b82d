"""What a run shows while it goes: a live table on a terminal, plain lines elsewhere, nothing by default."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from onepass.tools.bench.cases import SHORT, Case
from onepass.tools.bench.results import Row
from onepass.tools.bench.text_table import (
    BASELINE,
    OURS,
    Line,
    cell,
    dtype_text,
    graph_cell,
    has_graph,
    input_share,
    lines,
    problems,
    providers,
    results_table,
    shape_text,
    speedup_cell,
    summary,
    us_text,
)
from onepass.tools.terminal import fits, progress_bar, rich_table, terminal

if TYPE_CHECKING:
    from rich.console import Console

SMALL = 8 << 20  # bytes; smaller cases get a second table, of the call time that includes the host


class NullProgress:
    """The interface of a progress display. This one shows nothing."""

    def __enter__(self) -> NullProgress:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def start_case(self, case: Case, dtype: str) -> None:
        """A case begins."""

    def retry(self, count: int) -> None:
        """`count` cases begin again because they were disturbed."""

    def status(self, text: str) -> None:
        """What happens to the current case."""

    def finish_case(self, rows: Sequence[Row]) -> None:
        """The rows of the current case are complete."""

    def say(self, text: str) -> None:
        """A message, such as a skipped case or a wrong provider."""

    def finish(self, rows: Sequence[Row]) -> None:
        """The run is over."""


class PlainProgress(NullProgress):
    """A block of ASCII lines per case."""

    def __init__(self, total: int, file: TextIO | None = None):
        self.total, self.done, self.file = total, 0, file or sys.stdout

    def start_case(self, case: Case, dtype: str) -> None:
        self.done += 1

    def retry(self, count: int) -> None:
        self.total += count
        self.say(f"{count} of them are timed again because they were disturbed")

    def finish_case(self, rows: Sequence[Row]) -> None:
        first = rows[0]
        shape = "" if shape_text(first) in first.case else f", {shape_text(first)}"
        head = f"[{self.done}/{self.total}] {first.case}{shape}, {dtype_text(first)}"
        if first.function != "softmax" or first.direction != "forward":
            head += f", {first.function} {first.direction}"
        self.say(head)
        for row in rows:
            self.say(f"    {row.provider:<17} {_row_text(row)}".rstrip())

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def finish(self, rows: Sequence[Row]) -> None:
        self.say("\n" + results_table(rows) + "\n")
        for text in [*problems(rows), *summary(rows)]:
            self.say(text)


def _row_text(row: Row) -> str:
    if not row.ok or row.median_us is None:
        return row.error or "not timed"
    text = f"{us_text(row.median_us):>9} us"
    if row.p20_us is not None and row.p80_us is not None:
        text += f"  ({us_text(row.p20_us)} to {us_text(row.p80_us)})".ljust(22)
    if row.gbps is not None and row.copy_fraction is not None:
        text += f" {row.gbps:>7.1f} GB/s  {row.copy_fraction:.2f} of a copy"
    share = input_share(row)
    if share is not None and row.provider != "copy":
        text += f"  {share:.2f} of the time of a copy of the input"
    if row.graph_us is not None or row.graph_error:
        text += f"  graph {graph_cell(row)}" + (" us" if row.graph_us is not None else "")
    if row.call_us is not None:
        text += f"  call {us_text(row.call_us)} us"
    return text + (f"  ? {row.disturbed}" if row.disturbed else "")


class LiveProgress(NullProgress):
    """The table as it fills, above a progress bar.

    It is drawn between measurements only: a thread that redraws would take a core from a kernel that uses them all.
    """

    def __init__(self, total: int, title: str, console: Console):
        from rich.live import Live

        self.console, self.title = console, title
        self.seen: list[Row] = []
        self.bar = progress_bar(console, auto_refresh=False)
        self.task = self.bar.add_task("", total=total)
        self.name = ""
        self.tables, self.stacked = 1, False  # the form of the last table that `table` made
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveProgress:
        self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.__exit__(*exception)

    def start_case(self, case: Case, dtype: str) -> None:
        self.name = f"{case.name}, {SHORT.get(dtype, dtype)}"
        self.status("")

    def retry(self, count: int) -> None:
        self.bar.update(self.task, total=(self.bar.tasks[0].total or 0) + count)
        self.say(f"{count} of them are timed again because they were disturbed")

    def status(self, text: str) -> None:
        self.bar.update(self.task, description=f"cases  [bold]{self.name}[/]  {text}")
        self._draw()

    def finish_case(self, rows: Sequence[Row]) -> None:
        self.seen.extend(rows)
        self.bar.advance(self.task)
        self._draw()

    def say(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False)

    def finish(self, rows: Sequence[Row]) -> None:
        self.console.print(self.table(rows))
        small = [r for r in rows if r.bytes < SMALL]
        if any(r.call_us for r in small):
            self.console.print(self.table(small, calls=True))
        for text in problems(rows):
            self.say(text)
        for i, text in enumerate(summary(rows)):
            self.console.print(text, style="bold" if i == 0 else "", markup=False)

    def _draw(self) -> None:
        from rich.console import Group

        room = max(3, self.console.height - 8)  # title, head, rule, bar and the line of the prompt
        room = max(1, (room // self.tables - 5 * (self.tables > 1)) // (2 if self.stacked else 1))
        rows = [r for line in lines(self.seen)[-room:] for r in line.rows.values()]
        body = [self.table(rows, columns=providers(self.seen))] if rows else []
        self.live.update(Group(*body, self.bar), refresh=True)

    def table(self, rows: Sequence[Row], calls: bool = False, columns: Sequence[str] = ()) -> Any:
        """One line per case. On a narrow terminal the table loses the shapes; if that is not enough, it stacks the
        numbers of a cell; then it splits into several tables with some of the providers each."""
        from rich.console import Group

        names = list(columns) or providers(rows)
        for self.tables in range(1, len(names) + 1):
            size = -(-len(names) // self.tables)
            parts = [names[i : i + size] for i in range(0, len(names), size)]
            for shapes, self.stacked in ((True, False), (False, False), (False, True)):
                tables = [self._table(rows, calls, part, shapes, i == 0) for i, part in enumerate(parts)]
                if all(fits(self.console, table) for table in tables):
                    return Group(*tables)
        return Group(*tables)

    def _table(self, rows: Sequence[Row], calls: bool, names: Sequence[str], shapes: bool, titled: bool) -> Any:
        from rich.text import Text

        graph = not calls and has_graph(rows)
        against = not calls and OURS in names and BASELINE in names
        head = ["case", *["shape"] * shapes, "dtype"]
        for name in names:
            unit = ("us" if calls else "us, GB/s" if name == "copy" else "us, of copy") + ", graph us" * graph
            title = f"{name}\n[dim]{unit}[/]"
            head.append(title.replace(", ", "\n").replace("-", "-\n") if self.stacked else title)
        body = []
        for line in lines(rows):
            cells: list[Any] = [line.case, *[Text(line.shape, style="dim")] * shapes, line.dtype]
            for name in names:
                row = line.rows.get(name)
                cells.append(self._call(row) if calls else self._cell(line, name, graph))
            body.append([*cells, *[speedup_cell(line)] * against])
        title = "call time: microseconds per call, including the host" if calls else self.title
        head += [f"times\n{BASELINE}"] * against
        left = set(range(2 + shapes))
        return rich_table(head, body, left, title=title if titled else None, collapse_padding=self.stacked)

    def _call(self, row: Row | None) -> str:
        return us_text(row.call_us) if row and row.call_us else ""

    def _cell(self, line: Line, name: str, graph: bool) -> Any:
        """The time, the fraction of a copy's speed and the time in a graph, side by side or stacked."""
        from rich.text import Text

        row = line.rows.get(name)
        time, share = cell(row)
        parts = [time, f" {share.removesuffix(' GB/s'):>5}", *[f" {graph_cell(row):>6}"] * graph]
        style = "bold green" if name == line.fastest() else "dim" if name == "copy" else ""
        style = "bold red" if time in ("WRONG", "ERROR") else "yellow" if time.endswith(("skipped", "?")) else style
        parts = [part for part in parts if part.strip()]
        return Text("\n".join(p.strip() for p in parts) if self.stacked else "".join(parts), style=style)


def make_progress(total: int, title: str) -> NullProgress:
    """The live table on a terminal, plain lines elsewhere."""
    console = terminal()
    return LiveProgress(total, title, console) if console else PlainProgress(total)
