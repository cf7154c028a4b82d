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
    from rich.text import Text


def terminal() -> Console | None:
    """A console if stdout is a terminal; else None."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console(highlight=False)


def console(stream: TextIO | None = None) -> Console:
    """A console on stdout: with colours and as wide as a terminal, elsewhere plain and as wide as its lines."""
    from rich.console import Console

    made = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = 10_000
    return made


def table(head: Sequence[str], body: Sequence[Sequence[str | Text]], left: Container[int], fold: int = 0) -> Table:
    """An ASCII table. The columns in `left` are aligned to the left, the others to the right.

    On a narrow terminal the column `fold` is folded, to 20 characters at least.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.Box(str(box.SIMPLE_HEAD).replace("─", "-"), ascii=True),
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i, name in enumerate(head):
        texts = (name, *(str(cells[i]) for cells in body))
        widest = max(len(line) for text in texts for line in text.split("\n"))
        width = min(20, widest) if i == fold else widest
        justify: Any = "left" if i in left else "right"
        made.add_column(Text(name), justify=justify, min_width=width, no_wrap=i != fold, overflow="fold")
    for cells in body:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return made


def fits(on: Console, made: Table, folded: bool = False) -> bool:
    """Whether the console shows the table without cutting a cell, with one column `folded` if need be."""
    size = on.measure(made, options=on.options.update_width(10_000))
    return (size.minimum if folded else size.maximum) <= on.width


def progress_bar(console: Console, **options: Any) -> Progress:
    """A bar with the count, the description, and the times that have passed and remain; nothing without a terminal."""
    from rich import progress

    return progress.Progress(
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        **options,
    )
