"""`onepass explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from onepass.tools.cli.params import (
    Command,
    Names,
    answer,
    check_finite,
    flat,
    json_option,
    parse_dtype,
    parse_ints,
    usage_errors,
)


@click.command(cls=Command, short_help="Show how a call would run: engine, launch, bytes, time.")
@click.argument("sizes", nargs=-1, required=True, metavar="SIZES...")
@click.option("--dtype", default="float32", show_default=True, help="Dtype of the input: f32, bf16, f16 or f64.")
@click.option("--out-dtype", help="Dtype of the result, if it differs.")
@click.option("--dim", metavar="DIM[,DIM...]", help="What the function reduces.  [default: the function's own]")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda, cuda:N, or a GPU that need not be here: a100, h100, h200, b200, l4, rtx4090, mi300x.",
)
@click.option(
    "--function", default="softmax", show_default=True, help="As softmax, logsumexp, cross_entropy or segment_softmax."
)
@click.option("--options", multiple=True, type=Names(), metavar="NAME[,...]", help="What a call is given, as softcap.")
@click.option("--segments", type=click.IntRange(0), metavar="N", help="How many segments there are.")
@click.option("--engine", default="auto", show_default=True, help="auto, cpu, cuda or triton.")
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    callback=check_finite,
    metavar="GB/S",
    help="Bandwidth of a copy on that device, read and written.",
)
@click.option("--arch", type=click.IntRange(80, 999), metavar="N", help="Compute capability of another GPU; 80 is 8.0.")
@click.option("--sm-count", type=click.IntRange(1, 4096), metavar="N", help="Multiprocessors of another GPU.")
@json_option("the plan")
def explain(
    sizes: Sequence[str],
    dtype: str,
    out_dtype: str | None,
    dim: str | None,
    options: Sequence[Sequence[str]],
    json_file: str | None,
    **rest: Any,
) -> None:
    """Show how a call on a tensor of SIZES would run: engine, tier, launch, bytes, and the time of a copy.

    For example: onepass explain 8192 151936 --dtype bf16 --device h200
    """
    shape = tuple(size for text in sizes for size in parse_ints(text, "SIZES"))
    if dim is not None:
        dims = parse_ints(dim, "--dim")
        if not dims:
            raise click.BadParameter(f"--dim takes whole numbers, got {dim!r}")
        rest["dim"] = dims[0] if len(dims) == 1 else dims
    import torch

    import onepass

    with usage_errors(ValueError, TypeError, LookupError, RuntimeError):  # a wrong dim, dtype or engine
        explanation = onepass.explain(
            shape,
            dtype=getattr(torch, parse_dtype(dtype)),
            out_dtype=getattr(torch, parse_dtype(out_dtype)) if out_dtype else None,
            options=flat(options),
            **rest,
        )
    answer(json_file, explanation.as_dict, lambda: click.echo(explanation))
