"""`onepass compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from onepass.tools.bench import compare as comparing
from onepass.tools.bench import results
from onepass.tools.bench.compare import Change, Comparison
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.stats import geomean
from onepass.tools.bench.table import cell, dtype_text, shape_text, us_text
from onepass.tools.cli.shared import Names, answer, flat, json_option, terminal

_HEAD = ("case", "shape", "dtype", "provider", "before us", "after us", "change", "noise", "")
_LEFT = 4  # columns of text before those of numbers
_STYLE = {"regression": "red", "gain": "green", "unchanged": ""}


@click.command(short_help="Show what became slower or faster between two results files.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--least",
    type=click.FloatRange(0),
    default=comparing.LEAST,
    show_default=True,
    metavar="PERCENT",
    help="A smaller difference is no change: a run differs from the next by more than its own quantiles show.",
)
@click.option("--only", multiple=True, type=Names(), help="Judge these providers alone (a name, or several, commas).")
@click.option("--skip", multiple=True, type=Names(), help="Judge all but these providers.")
@click.option(
    "--of",
    type=click.Choice(list(comparing.TIMES)),
    default="median",
    show_default=True,
    help="The time to compare. graph and call have no quantiles, so that --least alone decides.",
)
@click.option("--all", "every", is_flag=True, help="Show the rows that did not change too.")
@click.option("--any-device", is_flag=True, help="Compare files of two devices.")
@json_option("the comparison, every row in it,")
def compare(before: str, after: str, of: str, every: bool, json_file: str | None, **options: Any) -> int:
    """Show what became slower, faster or wrong from results file BEFORE to results file AFTER.

    A change counts where the ranges p20 to p80 of the two do not overlap and the medians differ by more than --least.
    The exit status is 1 where there is a regression, 0 where there is none, 2 for files that cannot be compared.
    """
    for name in ("only", "skip"):
        options[name] = flat(options[name])
    try:
        files = (results.load(before), results.load(after))
        found = comparing.compare(*files, of=comparing.TIMES[of], names=(before, after), **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    ends = found, files, (before, after)
    answer(json_file, lambda: _data(*ends), lambda: _show(*ends, every))
    return 1 if found.count("regression") else 0


def _data(found: Comparison, files: tuple[Results, Results], names: tuple[str, str]) -> dict[str, Any]:
    """What `--json` prints."""
    of = ("device", "onepass", "torch", "commit", "date")
    ends = zip(("before", "after"), names, files, strict=True)
    return {**{end: {"file": n, **{k: f.environment[k] for k in of}} for end, n, f in ends}, **found.as_dict()}


def _show(found: Comparison, files: tuple[Results, Results], names: tuple[str, str], every: bool) -> None:
    console = terminal()

    def say(text: str, style: str = "") -> None:
        if console is None:
            click.echo(text)
        else:
            console.print(text, style=style, markup=False, soft_wrap=True)

    for text, style in _first(found, files, names):
        say(text, style)
    shown = [c for c in found.changes if every or c.verdict != "unchanged"]
    if shown:
        cells = _cells(shown)
        say("")
        if console is None:
            say(_plain(cells))
        else:
            console.print(_table(cells, shown, console))
        say("")
    for text, style in [*_notes(found, names), *_summary(found)]:
        say(text, style)


# The lines above and below the table, each with its style -------------------------------------------------------


def _first(found: Comparison, files: tuple[Results, Results], names: tuple[str, str]) -> list[tuple[str, str]]:
    """What was compared, and whether the machines were alike."""
    e = [file.environment for file in files]
    if found.copy is None:
        copy = ("copy: not timed in both files, so that nothing says whether the machines were alike", "yellow")
    else:
        copy = (f"copy: {_percent(found.copy)} (geometric mean of {_many(found.copies, 'row')})", "")
    said = [copy]
    if found.copy_differs():
        said.append(
            (f"the copy changed by more than {comparing.COPY_LEAST:g}%: the machines or their clocks differ", "yellow")
        )
    if e[0]["device"] != e[1]["device"]:
        said.append((f"the devices differ: {e[0]['device']} before, {e[1]['device']} after", "yellow"))
    for end, name, of in zip(("before:", "after: "), names, e, strict=True):
        said.append((f"{end} {name}, onepass {of['onepass']}, commit {of['commit'] or 'unknown'}, {of['date']}", ""))
    return said


def _notes(found: Comparison, names: tuple[str, str]) -> list[tuple[str, str]]:
    """Errors of what became wrong, and what was not judged."""
    errors: dict[tuple[str, str], list[Row]] = {}
    for change in found.changes:
        if change.error:
            errors.setdefault((change.after.provider, change.error), []).append(change.after)
    said = []
    for (provider, error), rows in errors.items():
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        said.append((f"{provider} on {_case(rows[0])}, {dtype_text(rows[0])}: {error}{more}", "red"))
    for name, rows in zip(names, (found.only_before, found.only_after), strict=True):
        if rows:
            bad = sum(not row.ok for row in rows)
            text = f"only in {name}: {_many(len(rows), 'row')} ({_by_provider(rows)})"
            said.append((text + (f", {bad} of them wrong or raised" if bad else ""), "yellow"))
    untold = (found.wrong_in_both, "wrong or raised in both"), (found.untimed, f"without {found.of}")
    for rows, what in (*untold, (found.disturbed, "disturbed in one of the two, and not judged")):
        if rows:
            said.append((f"{what}: {_many(len(rows), 'row')} ({_by_provider(rows)})", "yellow"))
    return said


def _summary(found: Comparison) -> list[tuple[str, str]]:
    said = []
    for name in found.providers():
        ratios = found.ratios(name)
        mean = f"{_percent(geomean(ratios))} (geometric mean of {_many(len(ratios), 'row')}), " if ratios else ""
        said.append((f"{name}: {mean}{_counts(found, name)}", ""))
    worse = found.count("regression")
    return [*said, (_counts(found), "bold red" if worse else "bold green" if found.count("gain") else "bold")]


def _counts(found: Comparison, provider: str | None = None) -> str:
    regressions, gains = (_many(found.count(verdict, provider), verdict) for verdict in ("regression", "gain"))
    return f"{regressions}, {gains}, {found.count('unchanged', provider)} unchanged"


def _case(row: Row) -> str:
    """Function and direction are named where they are not the plain softmax."""
    if row.function == "softmax" and row.direction == "forward":
        return row.case
    return f"{row.case}, {row.function}" + (" backward" if row.direction == "backward" else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _by_provider(rows: Sequence[Row]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(row.provider for row in rows).items())


def _percent(ratio: float) -> str:
    """What a ratio of times is in percent of the time before: -50.0% is half the time."""
    return f"{100 * (ratio - 1):+.1f}%".replace("-0.0%", "+0.0%")


# The table ------------------------------------------------------------------------------------------------------


def _cells(changes: Sequence[Change]) -> list[list[str]]:
    """The lines of the table. Suite, threads and processes are named where the lines differ in them."""
    rows = [change.after for change in changes]
    suites, threads, worlds = (len({getattr(r, n) for r in rows}) > 1 for n in ("suite", "threads", "world_size"))
    made = []
    for change in changes:
        row = change.after
        name = f"{row.suite}: {_case(row)}" if suites else _case(row)
        name += f", {_many(row.threads, 'thread')}" if threads and row.threads else ""
        name += f", world size {row.world_size}" if worlds else ""
        times = [
            us_text(us) if us is not None else "" if side.ok else cell(side)[0]
            for side, us in ((change.before, change.before_us), (change.after, change.after_us))
        ]
        change_text = "" if change.ratio is None else _percent(change.ratio)
        noise = "" if change.noise is None else f"{100 * change.noise:.1f}%"
        shape = shape_text(row) if row.shape else "()"
        made.append([name, shape, dtype_text(row), row.provider, *times, change_text, noise, change.verdict])
    return made


def _plain(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [_HEAD, *cells]) for i in range(len(_HEAD))]
    text = []
    for line in [_HEAD, ["-" * width for width in widths], *cells]:
        left = [i < _LEFT or i == len(_HEAD) - 1 for i in range(len(_HEAD))]
        joined = (c.ljust(w) if at else c.rjust(w) for c, w, at in zip(line, widths, left, strict=True))
        text.append("  ".join(joined).rstrip())
    return "\n".join(text)


def _table(cells: Sequence[Sequence[str]], changes: Sequence[Change], console: Any) -> Any:
    """For a terminal, with colours; too narrow a one loses the shapes, then the verdicts, then folds the cases."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    every = list(range(len(_HEAD)))
    for columns in (every, [0, *every[2:]], [0, *every[2:-1]]):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i in columns:
            right = _LEFT <= i < len(_HEAD) - 1
            table.add_column(_HEAD[i], justify="right" if right else "left", no_wrap=i > 0, overflow="fold")
        for line, change in zip(cells, changes, strict=True):
            table.add_row(*(Text(line[i], style=_STYLE[change.verdict] if i >= _LEFT else "") for i in columns))
        if console.measure(table, options=console.options.update_width(10_000)).maximum <= console.width:
            break
    return table
