"""`onepass bench`, `plot` and `info`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from onepass.tools.cli.shared import Command, Names, answer, dtype_of, finite, flat, json_option, writable


@click.command(cls=Command, short_help="Check every provider, then race them.")
@click.argument("suites", nargs=-1)
@click.option("--quick", is_flag=True, help="A minute or so: the cases marked for it, fewer samples, no torch.compile.")
@click.option(
    "--list", "show", is_flag=True, help="List the providers, why any cannot run here, and the suites; run nothing."
)
@click.option("--only", multiple=True, type=Names(), help="Run these providers alone (a name, or several with commas).")
@click.option("--skip", multiple=True, type=Names(), help="Run without these providers.")
@click.option("--gallery", is_flag=True, help="Race the gallery's rungs too; with --only, its names alone run.")
@click.option("--graph", is_flag=True, help="Time each call in a CUDA graph too, without any host.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=Names(dtype_of),
    help="In place of the suite's dtypes: f32, bf16, f16, f64.",
)
@click.option(
    "--function",
    "functions",
    multiple=True,
    type=Names(),
    help="In place of the suite's: softmax, log_softmax, softmin, logsumexp.",
)
@click.option("--direction", type=click.Choice(["forward", "backward"]), help="In place of the suite's.")
@click.option("--case", "match", default="", metavar="TEXT", help="Only the cases with TEXT in their name.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    metavar="S",
    help="Of timing, for each provider, case and clock.  [default: 0.5; quick: 0.12]",
)
@click.option("--threads", type=click.IntRange(1), help="Threads on the CPU.  [default: torch's]")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the data and the checked rows."
)
@json_option("the results")
@click.option("--plot", metavar="DIR", help="Draw the results into this folder.")
def bench(show: bool, json_file: str | None, **options: Any) -> int:
    """Check every provider against the definition, then race them. SUITES: models (the default), seeds, powers,
    rows, few, backward, columns, cpu, cpu-backward."""
    from onepass.tools.bench.cases import FUNCTIONS

    for name in ("only", "skip", "dtypes", "functions"):
        options[name] = flat(options[name])
    for name in options["functions"]:
        if name not in FUNCTIONS:
            raise click.UsageError(f"unknown function {name!r}: there are {', '.join(FUNCTIONS)}")
    options["suites"] = options["suites"] or ("models",)
    writable(options["plot"])
    from onepass.tools.bench import command

    try:
        if show:
            at = command.device_of(options["device"])
            answer(json_file, lambda: command.listed(at), lambda: click.echo(command.listing(at)))
            return 0
        return command.bench(command.Choices(**options, json=json_file))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@click.command(short_help="Draw results files as PNG and SVG.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", "folder", default=".", show_default=True, metavar="DIR", help="Where the pictures go.")
def plot(files: Sequence[str], folder: str) -> None:
    """Draw results files as PNG and SVG: GB/s over N for sweeps, the fraction of a copy's speed for named shapes.

    Nothing is timed.
    """
    from onepass.tools.bench import results

    try:
        loaded = [results.load(file) for file in files]
    except results.ResultsError as error:
        raise click.UsageError(str(error)) from error
    if not any(row.ok for file in loaded for row in file.rows):
        raise click.UsageError(f"nothing to draw: no timed row in {', '.join(files)}")
    writable(os.path.join(folder, "x"))
    try:
        from onepass.tools.bench.plot import draw
    except ImportError as error:
        raise click.UsageError(f"plotting needs {error.name}, which is not installed") from error
    for path in draw(loaded, folder):
        click.echo(path)


@click.command(cls=Command, short_help="Show the environment and the engines.")
@json_option("it")
def info(json_file: str | None) -> None:
    """Show the environment, and what each engine can do here or why it cannot."""
    from onepass.tools.bench import info as about

    answer(json_file, about.data, lambda: click.echo(about.text()))
