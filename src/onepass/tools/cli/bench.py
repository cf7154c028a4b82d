"""`onepass bench`, `plot` and `info`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from onepass.tools.bench.cases import FUNCTIONS
from onepass.tools.bench.suites import SUITES
from onepass.tools.cli.params import (
    Command,
    Names,
    answer,
    check_finite,
    check_writable,
    flat,
    json_option,
    parse_dtype,
)

_DEVICE = "cpu, cuda or cuda:N.  [default: cuda if there is one]"


@click.command(cls=Command, short_help="Check every provider, then time it.")
@click.argument("suites", nargs=-1)
@click.option("--quick", is_flag=True, help="A minute or so: fewer cases, fewer samples, no torch.compile.")
@click.option("--list", "show", is_flag=True, help="List the providers and the suites; run nothing.")
@click.option("--only", multiple=True, type=Names(), help="Run only these providers (a name, or several with commas).")
@click.option("--skip", multiple=True, type=Names(), help="Do not run these providers.")
@click.option("--gallery", is_flag=True, help="Run the variants of the gallery too.")
@click.option("--graph", is_flag=True, help="Measure the time in a CUDA graph too, which excludes the host.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=Names(parse_dtype),
    help="f32, bf16, f16 or f64, instead of the suite's dtypes.",
)
@click.option(
    "--function",
    "functions",
    multiple=True,
    type=Names(),
    help=f"{', '.join(FUNCTIONS)}, instead of the suite's functions.",
)
@click.option("--direction", type=click.Choice(["forward", "backward"]), help="Replaces the suite's direction.")
@click.option("--filter", "pattern", default="", metavar="TEXT", help="Run only the cases with TEXT in their name.")
@click.option("--device", metavar="DEVICE", help=_DEVICE)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    metavar="S",
    help="How long to time each provider, case and clock.  [default: 0.5; quick: 0.12]",
)
@click.option("--threads", type=click.IntRange(1), help="Threads on the CPU.  [default: torch's]")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the data and the checks."
)
@json_option("the results")
@click.option("--plot", metavar="DIR", help="Draw the results into this folder.")
def bench(show: bool, json_file: str | None, **options: Any) -> int:
    """Check every provider against the definition, then time it.

    SUITES are models (the default), {suites}.
    """
    for name in ("only", "skip", "dtypes", "functions"):
        options[name] = flat(options[name])
    for name in options["functions"]:
        if name not in FUNCTIONS:
            raise click.UsageError(f"unknown function {name!r}: there are {', '.join(FUNCTIONS)}")
    options["suites"] = options["suites"] or ("models",)
    check_writable(options["plot"])
    from onepass.tools.bench import cli_run

    try:
        if show:
            at = cli_run.parse_device(options["device"])
            data = cli_run.list_data(at)
            answer(json_file, lambda: data, lambda: click.echo(cli_run.list_text(data)))
            return 0
        return cli_run.bench(cli_run.Options(**options, json=json_file))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


bench.help = (bench.help or "").replace("{suites}", ", ".join(name for name in SUITES if name != "models"))


@click.command(short_help="Draw results files as PNG and SVG.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", "folder", default=".", show_default=True, metavar="DIR", help="Where the plots go.")
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
    check_writable(os.path.join(folder, "x"))
    try:
        from onepass.tools.bench.plots import draw
    except ImportError as error:
        raise click.UsageError(f"plotting needs {error.name}, which is not installed") from error
    for path in draw(loaded, folder):
        click.echo(path)


@click.command(cls=Command, short_help="Show the environment and the engines.")
@json_option("the environment")
def info(json_file: str | None) -> None:
    """Show the environment, and which engines are available here or why they are not."""
    from onepass.tools.bench import collect_env

    answer(json_file, collect_env.info, lambda: click.echo(collect_env.info_text()))
