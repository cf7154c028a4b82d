"""The display of a run: its progress, each finished case, and at the end the results of all cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from onepass.tools.bench.cases import SHORT, Case
from onepass.tools.bench.random_report import show_classes, show_drops, show_exchanges, show_ratios
from onepass.tools.bench.report import (
    SMALL_CASE,
    dtype_text,
    graph_text,
    input_share,
    problems,
    providers,
    shape_text,
    show_table,
    summary,
    us_text,
)
from onepass.tools.bench.results import Row
from onepass.tools.terminal import progress_bar


class Progress:
    """On a terminal the table fills above a progress bar; elsewhere each case is a block of lines.

    A terminal is drawn between measurements only: a thread that redraws would take a core from a kernel that uses all.
    Without a console nothing is shown.
    """

    def __init__(self, total: int = 0, title: str = "", console: Console | None = None):
        self.console, self.title, self.total, self.done = console or Console(quiet=True), title, total, 0
        self.seen: list[Row] = []
        self.last = Group()
        self.bar = progress_bar(self.console, auto_refresh=False)
        self.task = self.bar.add_task("cases", total=total)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.stop()

    def start_case(self, case: Case, dtype: str) -> None:
        self.done, self.name = self.done + 1, f"{case.name}, {SHORT.get(dtype, dtype)}"
        self.status("")

    def retry(self, count: int) -> None:
        """`count` cases begin again because they were disturbed."""
        self.total += count
        self.say(f"{count} of them are timed again because they were disturbed")

    def status(self, text: str) -> None:
        """Shows what is done with the current case."""
        if self.console.is_terminal:
            self.current = Text(f"{self.name}  {text}", style="bold", no_wrap=True, overflow="ellipsis")
            self.bar.update(self.task, total=self.total)
            self.live.update(Group(self.last, self.current, self.bar), refresh=True)

    def finish_case(self, rows: Sequence[Row]) -> None:
        self.seen.extend(rows)
        if self.console.is_terminal:
            self.bar.advance(self.task)
            self.last = self._last_lines()
            self.status("")
            return
        about = [f"[{self.done}/{self.total}] {rows[0].case}", shape_text(rows[0]), dtype_text(rows[0])]
        plain = rows[0].function == "softmax" and rows[0].direction == "forward"
        about += [] if plain else [f"{rows[0].function} {rows[0].direction}"]
        self.console.print(", ".join(about))
        for row in rows:
            self.console.print(f"    {row.provider:<17} {_row_text(row)}")

    def say(self, text: str) -> None:
        """Shows a message, for example about a skipped case or a wrong provider."""
        self.console.print(text, style="yellow")

    def finish(self, rows: Sequence[Row]) -> None:
        """Ends the display: shows the whole table, the call times of small cases, the problems, and the summary."""
        self.console.print(f"\n{self.title}", style="bold")
        self.console.print(show_table(rows, self.console))
        small = [r for r in rows if r.bytes < SMALL_CASE and r.call_us]
        if small and self.console.is_terminal:
            self.console.print("call time: microseconds per call, including the host", style="bold")
            self.console.print(show_table(small, self.console, calls=True))
        for part in (*show_classes(rows), *show_ratios(rows), *show_exchanges(rows), *show_drops(rows)):
            self.console.print(part)
        for text in problems(rows):
            self.say(text)
        for i, text in enumerate(summary(rows)):
            self.console.print(text, style="bold" if i == 0 else "")

    def _last_lines(self) -> Group:
        """The table with as many of the last lines as the terminal has room for."""
        keys, room = list(dict.fromkeys(r.key() for r in self.seen)), max(4, self.console.height - 3)
        count, height, made = min(room, len(keys)), room + 1, Group()
        while count and height > room:
            rows = [r for r in self.seen if r.key() in keys[-count:]]
            made = show_table(rows, self.console, columns=providers(self.seen))
            height = len(self.console.render_lines(made))
            count = min(count - 1, count * room // height)
        return made


def _row_text(row: Row) -> str:
    if not row.ok or row.median_us is None:
        return row.error or "not timed"
    text = f"{us_text(row.median_us):>9} us"
    if row.p20_us is not None and row.p80_us is not None:
        text += f"  ({us_text(row.p20_us)} to {us_text(row.p80_us)})".ljust(22)
    if row.gbps is not None and row.copy_fraction is not None:
        text += f" {row.gbps:>7.1f} GB/s  {row.copy_fraction:.2f} of a copy"
    if (share := input_share(row)) is not None and row.provider != "copy":
        text += f"  {share:.2f} of the time of a copy of the input"
    text += f"  graph {graph_text(row)}" if row.graph_us is not None or row.graph_error else ""
    text += f"  call {us_text(row.call_us)} us" if row.call_us is not None else ""
    return text + (f"  ? {row.disturbed}" if row.disturbed else "")
