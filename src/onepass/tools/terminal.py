"""How the commands print: with colours and tables of rich on a terminal, in plain ASCII elsewhere.

rich is imported when a terminal needs it, so that a pipe does not wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

Body = Sequence[Sequence[str]]


def terminal(stream: TextIO | None = None) -> Console | None:
    """A console if stdout, or the given stream, is a terminal; else None."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False)


def plain_table(head: Sequence[str], body: Body, left: Container[int]) -> str:
    """An ASCII table as wide as its cells. The columns in `left` are aligned to the left, the others to the right.

    >>> print(plain_table(["case", "us"], [["a", "1.5"], ["bcdef", "20"]], left={0}))
    case    us
    -----  ---
    a      1.5
    bcdef   20
    """
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [head, ["-" * width for width in widths], *body]
    aligned = (
        [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def rich_table(head: Sequence[str], body: Sequence[Sequence[Any]], left: Container[int], **options: Any) -> Table:
    """The same table for a console. The first column folds if the terminal is too narrow; cells are plain or `Text`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold", **options)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i in left else "right", no_wrap=i > 0, overflow="fold")
    for cells in body:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def fits(console: Console, table: Table) -> bool:
    """Whether the table is shown on this console without folding a cell."""
    unbounded = console.options.update_width(10_000)
    return console.measure(table, options=unbounded).maximum <= console.width


def progress_bar(console: Console, **options: Any) -> Progress:
    """A bar with the count, the description, and the times that have passed and remain."""
    from rich import progress

    return progress.Progress(
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
        **options,
    )
