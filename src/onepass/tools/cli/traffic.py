"""`onepass traffic`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from onepass.tools.cli.params import Command, Names, answer, flat, json_option, parse_dtype, parse_ints
from onepass.tools.terminal import terminal

if TYPE_CHECKING:
    from onepass.tools.gallery.traffic_table import Report, Target

_MAX_ELEMENTS = 2**60  # their bytes fit 64 bits


@click.command(cls=Command, short_help="Predict the memory traffic of every variant.")
@click.argument("sizes", nargs=-1, required=True, metavar="M N")
@click.option("--dtype", default="float32", show_default=True, help="Of the matrix and the result: f32, bf16, f16.")
@click.option("--only", multiple=True, type=Names(), help="Only these variants, or onepass; names with commas between.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda, cuda:N, or a GPU that `onepass explain` knows, as h200.  [default: cuda if there is one]",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="Bandwidth of a copy there, read and write, for the predicted time.",
)
@click.option("--no-measure", is_flag=True, help="Only predict, also if a GPU and ncu are here.")
@json_option("the table")
def traffic(
    sizes: Sequence[str],
    dtype: str,
    only: Sequence[Sequence[str]],
    device: str | None,
    bandwidth: float | None,
    no_measure: bool,
    json_file: str | None,
) -> None:
    """Predict the reads and writes of each variant of the gallery for an M x N matrix, and measure them if ncu is here.

    The measured bytes are those that reach a GPU's DRAM, by its own counters. For example: onepass traffic 4096 781
    """
    rows, n = _parse_sizes(sizes)
    import torch

    from onepass.tools.gallery.traffic import predict_all
    from onepass.tools.gallery.traffic_table import Report, format_report
    from onepass.tools.gallery.variants import DTYPES

    if bandwidth is not None and not math.isfinite(bandwidth):
        raise click.UsageError(f"--bandwidth takes GB/s, got {bandwidth}")
    names = flat(only)
    try:
        dtype = parse_dtype(dtype)
        if dtype not in DTYPES:
            raise ValueError(f"the variants take {', '.join(DTYPES)}, got {dtype}")
        target = _target(device)
        predicted = predict_all(rows, n, getattr(torch, dtype), target.name, names)
    except (ValueError, RuntimeError) as error:
        raise click.UsageError(str(error).removeprefix("onepass: ")) from error
    report = Report(target, rows, n, dtype, [(p.name, p) for p in predicted])
    report.notes = [p.note for p in predicted if p.note]
    _find_bandwidth(target, bandwidth)
    if target.device is not None and target.device.type == "cuda" and not no_measure:
        _measure(report, with_torch=not names)

    def show() -> None:
        console = terminal()
        click.echo(format_report(report, console.width if console else None, colours=console is not None))

    answer(json_file, report.as_dict, show)


def _parse_sizes(sizes: Sequence[str]) -> tuple[int, int]:
    given = tuple(size for text in sizes for size in parse_ints(text, "M N"))
    if len(given) != 2:
        raise click.UsageError(f"takes the two sizes of a matrix, M N, got {' '.join(sizes)}")
    if min(given) < 1 or given[0] * given[1] > _MAX_ELEMENTS:
        raise click.UsageError(f"M and N must be at least 1, with at most 2**60 elements; got {given[0]} x {given[1]}")
    return given[0], given[1]


def _target(name: str | None) -> Target:
    import torch

    from onepass.devices import KNOWN, known
    from onepass.tools.gallery.traffic_table import Target

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    entry = known(name)
    if entry is not None:
        return Target(name, entry.title, None)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return Target("cpu", "a CPU", torch.device("cpu"))
    if device.type != "cuda":
        raise ValueError(f"unknown device {name!r}: take cpu, cuda, cuda:N, or a known GPU: {', '.join(KNOWN)}")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        reason = f"device {name!r} is not here: there are {count} GPUs"
        raise ValueError(f"{reason}; a known one need not be here: {', '.join(KNOWN)}")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return Target(str(device), torch.cuda.get_device_name(device), device)


def _find_bandwidth(target: Target, given: float | None) -> None:
    """The bandwidth of a copy: given, or that of a known device, or measured on a GPU; a CPU's is not measured."""
    import torch

    from onepass.devices import known, measured_copy_gbs

    entry = known(target.title)
    if given is not None:
        target.gbs, target.source = given, "as given"
    elif entry is not None and entry.copy_gbs is not None:
        target.gbs, target.source = entry.copy_gbs, f"measured {entry.date}"
    elif entry is not None and target.device is None:
        target.gbs, target.source = entry.peak_gbs, "the peak of its data sheet, not measured"
    elif target.device is not None and target.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # if two buffers of 1 GiB do not fit, no time is predicted
            target.gbs, target.source = measured_copy_gbs(target.device), "measured now"
        torch.cuda.empty_cache()


def _measure(report: Report, with_torch: bool) -> None:
    """Adds ncu's counts of a copy, of the predicted variants, and on request of torch to the report."""
    from onepass.tools.gallery import ncu

    report.ncu = ncu.find_ncu()
    if report.ncu is None:
        report.error = f"no ncu (Nsight Compute) on the PATH, nor at {' or '.join(ncu.INSTALL_PATHS)}"
        return
    lines = report.lines_to_measure(with_torch)
    names = [name for name, _ in lines if name != "minimum"]
    if sys.stderr.isatty():
        click.echo(f"measuring with {report.ncu} for about a minute", err=True)
    assert report.target.device is not None
    try:
        index = report.target.device.index or 0
        report.measured = ncu.measure(report.ncu, names, report.rows, report.n, report.dtype, index)
    except ncu.NcuError as error:
        report.error = str(error)
    else:
        report.lines = lines
