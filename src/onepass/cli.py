"""The command line: `onepass bench`, `plot`, `info`, `explain`.

torch is imported within the commands, so that `--help` answers at once. What a user gets wrong is told in one line,
with exit status 2.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click


class Commands(click.Group):
    """Errors in one line: click's own take three, with the usage first."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        options["standalone_mode"] = False
        try:
            status = super().main(*args, **options)
            sys.stdout.flush()
        except click.ClickException as error:
            click.echo(f"onepass: {' '.join(error.format_message().split())}", err=True)
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo("onepass: stopped", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `onepass info | head -1`: the reader has what it wanted
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


class Names(click.ParamType):
    """One or several names with commas between: `--only a,b` is `--only a --only b`."""

    name = "name"

    def __init__(self, of: Callable[[str], str] = str):
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.of(part.strip()) for part in value.split(",") if part.strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _flat(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in values for name in names))


def _dtype(text: str) -> str:
    from onepass.bench.cases import dtype_name

    return dtype_name(text)


def _ints(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{what} takes whole numbers, got {text!r}") from None


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def cli(context: click.Context, version: bool) -> None:
    """The softmax family for PyTorch at the speed of memory."""
    if version:
        from importlib import metadata

        click.echo(f"onepass {metadata.version('onepass')}")
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())
    if version:
        context.exit()


@cli.command()
@click.argument("suites", nargs=-1)
@click.option("--quick", is_flag=True, help="A minute or so: the cases marked for it, fewer samples, no torch.compile.")
@click.option(
    "--list", "show", is_flag=True, help="List the providers, why any cannot run here, and the suites; run nothing."
)
@click.option("--only", multiple=True, type=Names(), help="Run these providers alone (a name, or several with commas).")
@click.option("--skip", multiple=True, type=Names(), help="Run without these providers.")
@click.option(
    "--dtype", "dtypes", multiple=True, type=Names(_dtype), help="In place of the suite's dtypes: f32, bf16, f16, f64."
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
@click.option("--threads", type=click.IntRange(1), help="Threads on the CPU.  [default: torch's]")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the data and the checked rows."
)
@click.option("--json", metavar="FILE", help="Write the results file.")
@click.option("--plot", metavar="DIR", help="Draw the results into this folder.")
def bench(show: bool, **options: Any) -> int:
    """Check every provider against the definition, then race them. SUITES: models (the default), seeds, powers."""
    from onepass.bench.cases import FUNCTIONS

    for name in ("only", "skip", "dtypes", "functions"):
        options[name] = _flat(options[name])
    for name in options["functions"]:
        if name not in FUNCTIONS:
            raise click.UsageError(f"unknown function {name!r}: there are {', '.join(FUNCTIONS)}")
    options["suites"] = options["suites"] or ("models",)
    for file in (options["json"], options["plot"]):
        _writable(file)
    from onepass.bench import command

    try:
        if show:
            click.echo(command.listing(command.device_of(options["device"])))
            return 0
        return command.bench(command.Choices(**options))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", "folder", default=".", show_default=True, metavar="DIR", help="Where the pictures go.")
def plot(files: Sequence[str], folder: str) -> None:
    """Draw results files as PNG and SVG: GB/s over N for sweeps, the fraction of a copy's speed for named shapes.

    Nothing is timed.
    """
    from onepass.bench import results

    try:
        loaded = [results.load(file) for file in files]
    except results.ResultsError as error:
        raise click.UsageError(str(error)) from error
    if not any(row.ok for file in loaded for row in file.rows):
        raise click.UsageError(f"nothing to draw: no timed row in {', '.join(files)}")
    _writable(os.path.join(folder, "x"))
    try:
        from onepass.bench.plot import draw
    except ImportError as error:
        raise click.UsageError(f"plotting needs {error.name}, which is not installed") from error
    for path in draw(loaded, folder):
        click.echo(path)


@cli.command()
def info() -> None:
    """Show the environment, and what each engine can do here or why it cannot."""
    from onepass.bench import info as about

    click.echo(about.text())


@cli.command()
@click.argument("sizes", nargs=-1, required=True, metavar="SIZES...")
@click.option("--dtype", default="float32", show_default=True, help="Of the input: f32, bf16, f16, f64.")
@click.option("--out-dtype", help="Of the result, where it differs.")
@click.option(
    "--dim", default="-1", show_default=True, metavar="DIM[,DIM...]", help="The dim, or several, of the softmax."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N, or the name of a known GPU: h200.")
@click.option("--function", default="softmax", show_default=True, help="softmax, log_softmax, softmin or logsumexp.")
@click.option("--engine", default="auto", show_default=True, help="auto, cpu, cuda or triton.")
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="Of a copy on that device, read and write.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def explain(sizes: Sequence[str], dtype: str, out_dtype: str | None, dim: str, as_json: bool, **options: Any) -> None:
    """Show how a call on a tensor of SIZES would run: engine, tier, launch, bytes, and the time of a copy.

    For example: onepass explain 8192 151936 --dtype bf16 --device h200
    """
    shape = tuple(size for text in sizes for size in _ints(text, "SIZES"))
    dims = _ints(dim, "--dim")
    if not dims:
        raise click.BadParameter(f"--dim takes whole numbers, got {dim!r}")
    import torch

    import onepass

    try:
        explanation = onepass.explain(
            shape,
            dims[0] if len(dims) == 1 else dims,
            dtype=getattr(torch, _dtype(dtype)),
            out_dtype=getattr(torch, _dtype(out_dtype)) if out_dtype else None,
            **options,
        )
    except (ValueError, TypeError, IndexError, RuntimeError) as error:  # as torch tells a wrong dim, dtype, engine
        raise click.UsageError(re.sub(r"^onepass(\.\w+\(\))?: ", "", str(error))) from error
    click.echo(json.dumps(explanation.as_dict(), indent=2) if as_json else str(explanation))


def _writable(file: str | None) -> None:
    """Found out before a minute of measuring, not after."""
    if not file:
        return
    folder = os.path.dirname(os.path.abspath(file))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise click.UsageError(f"{file}: cannot be written")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    cli.main(args=None if arguments is None else list(arguments), prog_name="onepass")


if __name__ == "__main__":
    main()
