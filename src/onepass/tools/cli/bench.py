"""`onepass bench`, `plot`, `report`, `compare`, `profile` and `info`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from onepass.tools.bench.cases import FUNCTIONS, SUITES
from onepass.tools.bench.random_cases import ABOUT
from onepass.tools.cli.params import (
    Command,
    Names,
    answer,
    check_finite,
    check_writable,
    flat,
    json_option,
    parse_dtype,
    parse_ints,
    usage_errors,
)


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
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    metavar="S",
    help="How long to time each provider, case and clock.  [default: 0.5; quick: 0.12]",
)
@click.option("--threads", type=click.IntRange(1), help="Threads on the CPU.  [default: torch's]")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Seed of the data, the checks and the shapes of random, scores and segments.",
)
@click.option("--count", type=click.IntRange(1), default=20, show_default=True, help="Shapes per random class.")
@click.option(
    "--classes",
    multiple=True,
    type=Names(),
    help="The classes of random, scores, segments and sharded, or the series of slide.  [default: all]",
)
@click.option(
    "--mb",
    type=click.FloatRange(1, 1_000_000),
    nargs=2,
    metavar="LEAST MOST",
    help="The MB that each random shape moves. One of slide moves MOST, or 256 if that is less."
    "  [default: 8 640; scores and segments: 16 320, on a CPU 2 32]",
)
@click.option(
    "--compile",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Time torch.compile too on N of the shapes of random and segments; of scores on N instead of all.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    metavar="N",
    help="The GPUs, or processes of a CPU, of sharded.  [default: all GPUs; on a CPU 2]",
)
@json_option("the results")
@click.option("--plot", metavar="DIR", help="Draw the results into this folder.")
def bench(show: bool, json_file: str | None, **options: Any) -> int:
    """Check every provider against the definition, then time it.

    SUITES are models (the default), {suites}.
    """
    for name in ("only", "skip", "dtypes", "functions", "classes"):
        options[name] = flat(options[name])
    for name in options["functions"]:
        if name not in FUNCTIONS:
            raise click.UsageError(f"unknown function {name!r}: there are {', '.join(FUNCTIONS)}")
    options["suites"] = options["suites"] or ("models",)
    check_writable(options["plot"])
    from onepass.tools.bench import cli_run

    with usage_errors(ValueError):
        if show:
            data = cli_run.list_data(cli_run.parse_device(options["device"]))
            answer(json_file, lambda: data, lambda: click.echo(cli_run.list_text(data)))
            return 0
        return cli_run.bench(cli_run.Options(**options, json=json_file))


bench.help = (bench.help or "").replace("{suites}", ", ".join(name for name in [*SUITES, *ABOUT] if name != "models"))


@click.command(short_help="Draw results files as PNG and SVG.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", "folder", default=".", show_default=True, metavar="DIR", help="Where the plots go.")
def plot(files: Sequence[str], folder: str) -> None:
    """Draw results files as PNG and SVG: GB/s over N for sweeps, the fraction of a copy's speed for named shapes.

    Nothing is timed.
    """
    from onepass.tools.bench import results

    with usage_errors(results.ResultsError):
        loaded = [results.load(file) for file in files]
    if not any(row.ok for file in loaded for row in file.rows):
        raise click.UsageError(f"nothing to draw: no timed row in {', '.join(files)}")
    check_writable(os.path.join(folder, "x"))
    try:
        from onepass.tools.bench.plots import draw
    except ImportError as error:
        raise click.UsageError(f"plotting needs {error.name}, which is not installed") from error
    for path in draw(loaded, folder):
        click.echo(path)


@click.command(short_help="Make a page with interactive charts of results files.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help="Where the page goes.")
def report(files: Sequence[str], output: str) -> None:
    """Make one HTML page of results files: charts, a map over shapes, a table and the environment.

    The page loads nothing, so that it works without a network. Nothing is timed.
    """
    from onepass.tools.bench import html_report, results

    names = html_report.unique_names(files)
    with usage_errors(results.ResultsError):
        loaded = {name: results.load(file) for name, file in zip(names, dict.fromkeys(files), strict=True)}
    for name, file in loaded.items():
        if not any(row.ok for row in file.rows):
            raise click.UsageError(f"nothing to show: no timed row in {name}")
    check_writable(output)
    try:
        text = html_report.page(loaded)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        text = f"the page needs {package}, which is not installed: pip install 'onepass[report]'"
        raise click.UsageError(text) from error
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(path)


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
    with usage_errors(ValueError):
        files = (results.load(before), results.load(after))
        found = comparing.compare(*files, metric=f"{metric}_us", names=names, **options)

    def data() -> dict[str, Any]:
        keys = ("device", "onepass", "torch", "commit", "date")
        ends = zip(("before", "after"), names, files, strict=True)
        return {**{end: {"file": n, **{k: f.environment[k] for k in keys}} for end, n, f in ends}, **found.as_dict()}

    answer(json_file, data, lambda: comparing.show(found, files, names, console(), every))
    return 1 if found.count("regression") else 0


_HOST_KEYS = ("self_cpu_time_total", "cpu_time_total", "cpu_time", "count")
_DEVICE_KEYS = ("self_cuda_time_total", "cuda_time_total", "cuda_time")
_DTYPES = ("float32", "bfloat16", "float16")


@click.command(cls=Command, short_help="Show torch.profiler's tables of torch and onepass, side by side.")
@click.argument("sizes", nargs=-1, metavar="[M N]")
@click.option(
    "--include",
    "names",
    multiple=True,
    type=Names(),
    metavar="NAME[,NAME...]",
    help="Variants of the gallery to profile too; all takes those that run here and support the shape.",
)
@click.option("--dtype", default="f32", show_default=True, help="f32, bf16 or f16.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option("--calls", type=click.IntRange(1), default=1, show_default=True, help="Calls in each profile.")
@click.option(
    "--rows", "limit", type=click.IntRange(1), default=10, show_default=True, help="Rows of each of torch's tables."
)
@click.option(
    "--sort",
    type=click.Choice([*_HOST_KEYS, *_DEVICE_KEYS]),
    metavar="KEY",
    help=f"Sort torch's tables by {', '.join([*_HOST_KEYS, *_DEVICE_KEYS])}.  [default: the self time]",
)
@click.option("--no-warmup", is_flag=True, help="Profile the first call, with everything that it loads and compiles.")
@json_option("the side-by-side table")
@click.option("--trace", metavar="FILE", help="Write a Chrome trace of all contestants; compressed if it ends in .gz.")
def profile(
    sizes: Sequence[str], dtype: str, device: str | None, trace: str | None, json_file: str | None, **options: Any
) -> int:
    """Show torch.profiler's table of torch's softmax beside ours, on a matrix of M rows of N (4096 and 4096).

    For example: onepass profile 4096 4096 --include naive,triton-row --trace trace.json
    """
    shape = tuple(size for text in sizes for size in parse_ints(text, "M N")) if sizes else (4096, 4096)
    if len(shape) != 2 or min(shape) < 1:
        raise click.UsageError(f"M N takes two whole numbers of at least 1, got {' '.join(sizes)!r}")
    dtype_name = parse_dtype(dtype)
    if dtype_name not in _DTYPES:
        raise click.UsageError(f"--dtype takes {', '.join(_DTYPES)}, got {dtype!r}")
    # The profiler renames its file to this name, which would replace a device by a file.
    if trace and os.path.exists(trace) and not (os.path.isfile(trace) and os.access(trace, os.W_OK)):
        raise click.UsageError(f"{trace}: cannot be written")
    check_writable(trace)
    from onepass.tools.bench.cli_run import messages_on_stderr, parse_device
    from onepass.tools.bench.profile import Options, run
    from onepass.tools.terminal import console

    with usage_errors(ValueError):
        at = parse_device(device)
        if options["sort"] in _DEVICE_KEYS and at.type == "cpu":
            raise click.UsageError(f"--sort {options['sort']} needs a GPU, and this runs on {at}")
        options |= {"names": flat(options["names"]), "warmup": not options.pop("no_warmup")}
        chosen = Options(*shape, at, dtype_name, trace=trace, **options)
        with messages_on_stderr(json_file):
            status, lines = run(chosen, console())
    about = {"rows": shape[0], "n": shape[1], "dtype": dtype_name, "device": str(at), "calls": chosen.calls}
    answer(json_file, lambda: {**about, "lines": [asdict(line) for line in lines]}, lambda: None)
    return status


@click.command(cls=Command, short_help="Show the environment and the engines.")
@json_option("the environment")
def info(json_file: str | None) -> None:
    """Show the environment, and which engines are available here or why they are not."""
    from onepass.tools.bench import collect_env

    answer(json_file, collect_env.info, lambda: click.echo(collect_env.info_text()))
