"""How the commands print: with colours and tables of rich on a terminal, in plain ASCII elsewhere.

rich is imported when a terminal needs it, so that a pipe does not wait for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def terminal(stream: TextIO | None = None) -> Console | None:
    """A console if stdout, or the given stream, is a terminal; else None."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False)


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
