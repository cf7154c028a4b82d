"""What a run shows while it goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from onepass.tools.bench.cases import SHORT, Case
from onepass.tools.bench.results import Row
from onepass.tools.bench.table import (
    BASELINE,
    OURS,
    cell,
    dtype_text,
    graph_cell,
    has_graph,
    input_share,
    lines,
    plain,
    providers,
    shape_text,
    summary,
    times_cell,
    troubles,
    us_text,
)

SMALL = 8 << 20  # bytes below which the call time, host included, is worth a table of its own


class Plain:
    """A block of lines a case, in ASCII."""

    def __init__(self, total: int, file: TextIO | None = None):
        self.total, self.done, self.file = total, 0, file or sys.stdout

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def case(self, case: Case, dtype: str) -> None:
        self.done += 1

    def again(self, count: int) -> None:
        self.total += count
        self.say(f"{count} of them timed again: disturbed")

    def status(self, text: str) -> None:
        pass

    def rows(self, rows: Sequence[Row]) -> None:
        first = rows[0]
        shape = "" if shape_text(first) in first.case else f", {shape_text(first)}"
        head = f"[{self.done}/{self.total}] {first.case}{shape}, {dtype_text(first)}"
        if first.function != "softmax" or first.direction != "forward":
            head += f", {first.function} {first.direction}"
        self.say(head)
        for row in rows:
            self.say(f"    {row.provider:<17} {self._line(row)}")

    def _line(self, row: Row) -> str:
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
        if row.disturbed:
            text += f"  ? {row.disturbed}"
        return text

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def finish(self, rows: Sequence[Row]) -> None:
        self.say("\n" + plain(rows) + "\n")
        for text in [*troubles(rows), *summary(rows)]:
            self.say(text)


class LiveTable:
    """The table as it fills, over a progress bar. Drawn between measurements only: a thread that redraws beside them
    would take a core from a kernel that uses them all."""

    def __init__(self, total: int, title: str):
        from rich import progress
        from rich.console import Console
        from rich.live import Live

        self.console = Console(highlight=False)
        self.title = title
        self.seen: list[Row] = []
        self.progress = progress.Progress(
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("cases"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=self.console,
            auto_refresh=False,
        )
        self.task = self.progress.add_task("", total=total)
        self.name, self.tables = "", 1
        self.stacked = False
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.__exit__(*exception)

    def case(self, case: Case, dtype: str) -> None:
        self.name = f"{case.name}, {SHORT.get(dtype, dtype)}"
        self.status("")

    def again(self, count: int) -> None:
        self.progress.update(self.task, total=(self.progress.tasks[0].total or 0) + count)
        self.say(f"{count} of them timed again: disturbed")

    def status(self, text: str) -> None:
        self.progress.update(self.task, description=f"[bold]{self.name}[/]  {text}")
        self._draw()

    def rows(self, rows: Sequence[Row]) -> None:
        self.seen.extend(rows)
        self.progress.advance(self.task)
        self._draw()

    def say(self, text: str) -> None:
        self.console.print(f"[yellow]{_escape(text)}[/]")

    def finish(self, rows: Sequence[Row]) -> None:
        self.console.print(self.table(rows))
        small = [r for r in rows if r.bytes < SMALL]
        if any(r.call_us for r in small):
            self.console.print(self.table(small, calls=True))
        for text in troubles(rows):
            self.console.print(f"[yellow]{_escape(text)}[/]")
        for i, text in enumerate(summary(rows)):
            self.console.print(_escape(text), style="bold" if i == 0 else "")

    def _draw(self) -> None:
        from rich.console import Group

        room = max(3, self.console.height - 8)  # title, head, rule, bar and the prompt's line
        room = max(1, (room // self.tables - 5 * (self.tables > 1)) // (2 if self.stacked else 1))
        rows = [r for line in lines(self.seen)[-room:] for r in line.rows.values()]
        body = [self.table(rows, columns=providers(self.seen))] if rows else []
        self.live.update(Group(*body, self.progress), refresh=True)

    def table(self, rows: Sequence[Row], calls: bool = False, columns: Sequence[str] = ()) -> Any:
        """One line a case. Too narrow a terminal loses the shapes, then has a cell's numbers one over the other, then
        has several tables, each with some of the providers."""
        from rich.console import Group

        names = list(columns) or providers(rows)
        for self.tables in range(1, len(names) + 1):
            size = -(-len(names) // self.tables)
            parts = [names[i : i + size] for i in range(0, len(names), size)]
            for shapes, self.stacked in ((True, False), (False, False), (False, True)):
                made = [self._table(rows, calls, part, shapes, self.stacked) for part in parts]
                for other in made[1:]:
                    other.title = None
                if all(self._fits(table) for table in made):
                    return Group(*made)
        return Group(*made)

    def _fits(self, table: Any) -> bool:
        unbounded = self.console.options.update_width(10_000)
        return self.console.measure(table, options=unbounded).maximum <= self.console.width

    def _table(self, rows: Sequence[Row], calls: bool, names: Sequence[str], shapes: bool, stacked: bool) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = "call time: microseconds of a call, the host included" if calls else self.title
        made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        made.pad_edge, made.collapse_padding = False, stacked
        made.add_column("case", no_wrap=not stacked, overflow="fold")
        if shapes:
            made.add_column("shape", no_wrap=True, style="dim")
        made.add_column("dtype", no_wrap=True)
        graph = not calls and has_graph(rows)
        for name in names:
            note = "us" if calls else "us, GB/s" if name == "copy" else "us, of copy"
            note += ", graph us" if graph else ""
            head = f"{name}\n[dim]{note}[/]"
            if stacked:
                head = head.replace(", ", "\n").replace("-", "-\n")
            made.add_column(head, justify="right", no_wrap=True)
        against = not calls and OURS in names and BASELINE in names
        if against:
            made.add_column(f"times\n{BASELINE}", justify="right", no_wrap=True)
        for line in lines(rows):
            cells: list[Any] = [line.case, *([line.shape] if shapes else []), line.dtype]
            best = None if calls else line.best()
            for name in names:
                row = line.rows.get(name)
                if calls:
                    cells.append(us_text(row.call_us) if row and row.call_us else "")
                    continue
                time, share = cell(row)
                share = share.removesuffix(" GB/s")
                style = "bold green" if name == best else "dim" if name == "copy" else ""
                odd = time == "skipped" or time.endswith("?")
                bad = "bold red" if time in ("WRONG", "ERROR") else "yellow" if odd else style
                between = "" if not share else "\n" if stacked else " " * max(1, 6 - len(share))
                third = graph_cell(row) if graph else ""
                before = "" if not third else "\n" if stacked else " " * max(1, 7 - len(third))
                cells.append(Text(time + between + share + before + third, style=bad))
            cells += [times_cell(line)] * against
            made.add_row(*cells)
        return made


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def reporter(total: int, title: str) -> Plain | LiveTable:
    """The live table on a terminal that has rich, plain lines elsewhere."""
    if sys.stdout.isatty():
        try:
            return LiveTable(total, title)
        except ImportError:
            pass
    return Plain(total)
