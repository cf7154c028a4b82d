"""`onepass warmup`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from onepass.tools.cli.params import Command, Names, answer, flat, json_option, parse_dtype, parse_ints, usage_errors
from onepass.tools.terminal import console, progress_bar


def _dtype_pair(text: str) -> str:
    """`bf16`, or `bf16:f32` for a bfloat16 input and a float32 result."""
    parts = [parse_dtype(part) for part in text.split(":")]
    if len(parts) > 2:
        raise ValueError(f"a dtype, or two with a colon between (input:result), got {text!r}")
    return ":".join(parts)


@click.command(cls=Command, short_help="Compile the CUDA kernels before the first call.")
@click.option("--device", metavar="DEVICE", help="cuda or cuda:N.  [default: the current one]")
@click.option(
    "--dtypes",
    multiple=True,
    type=Names(_dtype_pair),
    metavar="DTYPE[,...]",
    help="f32, f16, bf16, f64, or input:result, as bf16:f32.  [default: f32,f16,bf16]",
)
@click.option(
    "--functions",
    multiple=True,
    type=Names(),
    metavar="NAME[,...]",
    help="As softmax or cross_entropy.  [default: softmax and its kin]",
)
@click.option("--lengths", metavar="N[,...]", help="Lengths of the rows, in elements.  [default: any]")
@click.option("--backward", is_flag=True, help="Compile the kernels of the gradients too.")
@click.option("--all-dims", is_flag=True, help="Compile the kernels of calls over other dims than the last too.")
@click.option("--options", multiple=True, type=Names(), metavar="NAME[,...]", help="What calls are given, as softcap.")
@click.option("--arch", type=int, metavar="CC", help="Fill the disk cache for GPUs that are elsewhere: 90 for 9.0.")
@json_option("the counts")
def warmup(
    device: str | None,
    dtypes: Sequence[Sequence[str]],
    functions: Sequence[Sequence[str]],
    lengths: str | None,
    options: Sequence[Sequence[str]],
    json_file: str | None,
    **rest: Any,
) -> None:
    """Compile every CUDA kernel that contiguous rows may ask for into the disk cache, so that no call waits for one.

    For example: onepass warmup --arch 90 --dtypes bf16,bf16:f32 --functions softmax
    """
    given = parse_ints(lengths, "--lengths") if lengths is not None else None
    import torch

    import onepass
    from onepass import native
    from onepass._warmup import DTYPES

    pairs = [tuple(getattr(torch, part) for part in text.split(":")) for text in flat(dtypes)]
    asked: list[Any] = [pair if len(pair) == 2 else pair[0] for pair in pairs]
    arch = rest["arch"]
    with usage_errors(ValueError, TypeError, RuntimeError), progress_bar(console(sys.stderr), transient=True) as bar:
        task = bar.add_task("kernels", total=None)

        def report(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        named = asked or DTYPES, flat(functions) or native.FUNCTIONS
        count = onepass.warmup(device, *named, given, options=flat(options), progress=report, **rest)
    compiled = int(bar.tasks[task].total or 0) - (count if arch is None else 0)
    where = f"for compute capability {arch / 10:.1f}" if arch is not None else "loaded"
    answer(
        json_file,
        lambda: {"kernels": count, "compiled": compiled, "arch": arch},
        lambda: click.echo(f"{count} kernels {where}, {compiled} of them compiled now"),
    )
