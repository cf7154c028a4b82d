"""`onepass compare`."""

from __future__ import annotations

from typing import Any

import click

from onepass.tools.cli.params import Names, answer, check_finite, flat, json_option


@click.command(short_help="Show what became slower or faster between two results files.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    default=2.0,
    callback=check_finite,
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
    type=click.Choice(["median", "graph", "call"]),
    default="median",
    show_default=True,
    help="The time to compare. graph and call have no quantiles, so that only --threshold decides.",
)
@click.option("--all", "every", is_flag=True, help="Show the rows that did not change too.")
@click.option("--any-device", is_flag=True, help="Compare files of two devices.")
@json_option("the comparison, with every row,")
def compare(before: str, after: str, metric: str, every: bool, json_file: str | None, **options: Any) -> int:
    """Show what became slower, faster or wrong from results file BEFORE to results file AFTER.

    A change counts if the ranges p20 to p80 of the two do not overlap and the medians differ by more than --threshold.
    The exit status is 1 if there is a regression, 0 if there is none, 2 for files that cannot be compared.
    """
    from onepass.tools.bench import compare as comparing
    from onepass.tools.bench import results
    from onepass.tools.terminal import console

    options |= {name: flat(options[name]) for name in ("only", "skip")}
    names = (before, after)
    try:
        files = (results.load(before), results.load(after))
        found = comparing.compare(*files, metric=f"{metric}_us", names=names, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error

    def data() -> dict[str, Any]:
        keys = ("device", "onepass", "torch", "commit", "date")
        ends = zip(("before", "after"), names, files, strict=True)
        return {**{end: {"file": n, **{k: f.environment[k] for k in keys}} for end, n, f in ends}, **found.as_dict()}

    answer(json_file, data, lambda: comparing.show(found, files, names, console(), every))
    return 1 if found.count("regression") else 0
