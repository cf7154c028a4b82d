"""`onepass profile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from onepass.tools.cli.params import (
    Command,
    Names,
    answer,
    check_writable,
    flat,
    json_option,
    parse_dtype,
    parse_ints,
)

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

    try:
        at = parse_device(device)
        if sort in _DEVICE_KEYS and at.type == "cpu":
            raise click.UsageError(f"--sort {sort} needs a GPU, and this runs on {at}")
        chosen = Options(*shape, at, dtype_name, flat(names), sort=sort, warmup=not no_warmup, trace=trace, **options)
        with messages_on_stderr(json_file):
            status, lines = run(chosen, console())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    about = {"rows": shape[0], "n": shape[1], "dtype": dtype_name, "device": str(at), "calls": chosen.calls}
    answer(json_file, lambda: {**about, "lines": [asdict(line) for line in lines]}, lambda: None)
    return status
