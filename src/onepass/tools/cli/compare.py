"""`onepass compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.bench import compare as comparing
from onepass.tools.bench import results
from onepass.tools.cli.params import Names, answer, flat, json_option
from onepass.tools.terminal import fits, plain_table, rich_table, terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLE = {"regression": "red", "gain": "green", "unchanged": ""}


@click.command(short_help="Show what became slower or faster between two results files.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    default=comparing.THRESHOLD,
    show_default=True,
    metavar="PERCENT",
    help="A smaller difference is no change: two runs differ by more than the quantiles of each show.",
)
@click.option(
    "--only", multiple=True, type=Names(), help="Judge only these providers (a name, or several with commas)."
)
@click.option("--skip", multiple=True, type=Names(), help="Do not judge these providers.")
@click.option(
    "--metric",
    type=click.Choice(list(comparing.METRICS)),
    default="median",
    show_default=True,
    help="The time to compare. graph and call have no quantiles, so that only --threshold decides.",
)
@click.option("--all", "show_all", is_flag=True, help="Show the rows that did not change too.")
@click.option("--any-device", is_flag=True, help="Compare files of two devices.")
@json_option("the comparison, with every row,")
def compare(before: str, after: str, metric: str, show_all: bool, json_file: str | None, **options: Any) -> int:
    """Show what became slower, faster or wrong from results file BEFORE to results file AFTER.

    A change counts if the ranges p20 to p80 of the two do not overlap and the medians differ by more than --threshold.
    The exit status is 1 if there is a regression, 0 if there is none, 2 for files that cannot be compared.
    """
    for name in ("only", "skip"):
        options[name] = flat(options[name])
    names = (before, after)
    try:
        files = (results.load(before), results.load(after))
        found = comparing.compare(*files, metric=comparing.METRICS[metric], names=names, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error

    def data() -> dict[str, Any]:
        keys = ("device", "onepass", "torch", "commit", "date")
        ends = zip(("before", "after"), names, files, strict=True)
        return {**{end: {"file": n, **{k: f.environment[k] for k in keys}} for end, n, f in ends}, **found.as_dict()}

    def show() -> None:
        console = terminal()

        def say(text: str, style: str = "") -> None:
            if console is None:
                click.echo(text)
            else:
                console.print(text, style=style, markup=False, soft_wrap=True)

        for text in comparing.title(found, files, names):
            say(*text)
        changes = [c for c in found.changes if show_all or c.verdict != "unchanged"]
        if changes:
            say("")
            if console is None:
                say(plain_table(comparing.HEAD, comparing.table_cells(changes), comparing.LEFT))
            else:
                console.print(_table(changes, console))
            say("")
        for text in [*comparing.notes(found, names), *comparing.summary(found)]:
            say(*text)

    answer(json_file, data, show)
    return 1 if found.count("regression") else 0


def _table(changes: Sequence[comparing.Change], console: Console) -> Table:
    """The table in colours. On a narrow terminal it loses the shapes, then the verdicts, then it folds the cases."""
    from rich.text import Text

    every = list(range(len(comparing.HEAD)))
    cells = comparing.table_cells(changes)
    for columns in (every, [0, *every[2:]], [0, *every[2:-1]]):
        head = [comparing.HEAD[i] for i in columns]
        left = {at for at, i in enumerate(columns) if i in comparing.LEFT}
        styles = [_STYLE[change.verdict] for change in changes]
        body = [
            [Text(line[i], style=style if i > 3 else "") for i in columns]
            for line, style in zip(cells, styles, strict=True)
        ]
        table = rich_table(head, body, left)
        if fits(console, table):
            break
    return table
