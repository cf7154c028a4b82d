"""`onepass profile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from onepass.tools.cli.shared import Command, Names, answer, dtype_of, flat, ints, json_option, writable

_HOST = ("self_cpu_time_total", "cpu_time_total", "cpu_time", "count")
_DEVICE = ("self_cuda_time_total", "cuda_time_total", "cuda_time")
_DTYPES = ("float32", "bfloat16", "float16")


@click.command(cls=Command, short_help="Show torch.profiler's tables of torch and onepass, side by side.")
@click.argument("sizes", nargs=-1, metavar="[M N]")
@click.option(
    "--with",
    "names",
    multiple=True,
    type=Names(),
    metavar="RUNG[,RUNG...]",
    help="Rungs of the gallery besides torch and onepass, or all: those that run here and take the shape.",
)
@click.option("--dtype", default="f32", show_default=True, help="f32, bf16 or f16.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option("--calls", type=click.IntRange(1), default=1, show_default=True, help="Calls in each profile.")
@click.option(
    "--rows", "limit", type=click.IntRange(1), default=10, show_default=True, help="Rows of each of torch's tables."
)
@click.option(
    "--sort",
    type=click.Choice([*_HOST, *_DEVICE]),
    metavar="KEY",
    help=f"What these are sorted by: {', '.join([*_HOST, *_DEVICE])}.  [default: the self time, on a GPU the GPU's]",
)
@click.option("--no-warmup", is_flag=True, help="Profile the first call, with all that it loads and compiles.")
@json_option("the side-by-side table")
@click.option("--trace", metavar="FILE", help="Write a Chrome trace of all contestants; compressed if it ends in .gz.")
def profile(
    sizes: Sequence[str],
    names: Sequence[Sequence[str]],
    dtype: str,
    device: str | None,
    no_warmup: bool,
    sort: str | None,
    trace: str | None,
    json_file: str | None,
    **options: Any,
) -> int:
    """Show torch.profiler's table of torch's softmax beside ours, on a matrix of M rows of N (4096 and 4096).

    For example: onepass profile 4096 4096 --with naive,triton-row --trace trace.json
    """
    shape = tuple(size for text in sizes for size in ints(text, "M N")) if sizes else (4096, 4096)
    if len(shape) != 2 or min(shape) < 1:
        raise click.UsageError(f"M N takes two whole numbers of at least 1, got {' '.join(sizes)!r}")
    try:
        of = dtype_of(dtype)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if of not in _DTYPES:
        raise click.UsageError(f"--dtype takes {', '.join(_DTYPES)}, got {dtype!r}")
    # The profiler renames its file to that name, so that it would put a file in the place of a device.
    if trace and os.path.exists(trace) and not (os.path.isfile(trace) and os.access(trace, os.W_OK)):
        raise click.UsageError(f"{trace}: cannot be written")
    writable(trace)
    from onepass.tools.bench.command import aside, device_of
    from onepass.tools.bench.profile import Choices, run
    from onepass.tools.bench.profile_table import Line

    try:
        at = device_of(device)
        if sort in _DEVICE and at.type == "cpu":
            raise click.UsageError(f"--sort {sort} is of a GPU, and this runs on {at}")
        choices = Choices(
            *shape, device=at, dtype=of, names=flat(names), sort=sort, warmup=not no_warmup, trace=trace, **options
        )
        lines: list[Line] = []
        with aside(json_file):
            status = run(choices, click.echo, lines)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    about = {"rows": shape[0], "n": shape[1], "dtype": of, "device": str(at), "calls": choices.calls}
    answer(json_file, lambda: {**about, "lines": [asdict(line) for line in lines]}, lambda: None)
    return status
