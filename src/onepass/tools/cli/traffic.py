"""`onepass traffic`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from onepass.tools.cli.params import Command, Names, answer, flat, json_option, parse_dtype, parse_ints

if TYPE_CHECKING:
    from onepass.tools.gallery.traffic_report import Place, Report

_DTYPES = ("float32", "float16", "bfloat16")
_MOST = 2**60  # elements: their bytes fit 64 bits


@click.command(cls=Command, short_help="Predict the memory traffic of every rung.")
@click.argument("sizes", nargs=-1, required=True, metavar="M N")
@click.option("--dtype", default="float32", show_default=True, help="Of the matrix and the result: f32, bf16, f16.")
@click.option("--only", multiple=True, type=Names(), help="Only these rungs, or onepass (a name, or several, commas).")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda, cuda:N, or a GPU that `onepass explain` knows, as h200.  [default: cuda if there is one]",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="Of a copy there, read and write, for the predicted time.",
)
@click.option("--no-measure", is_flag=True, help="Predict alone, also where a GPU and ncu are.")
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
    """Predict what each rung of the gallery reads and writes for an M x N matrix, and measure it where ncu is.

    The measured bytes are those that reach a GPU's DRAM, by its own counters. For example: onepass traffic 4096 781
    """
    rows, n = _sizes(sizes)
    try:
        dtype = parse_dtype(dtype)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if dtype not in _DTYPES:
        raise click.UsageError(f"the rungs take {', '.join(_DTYPES)}, got {dtype}")
    if bandwidth is not None and not math.isfinite(bandwidth):
        raise click.UsageError(f"--bandwidth takes GB/s, got {bandwidth}")
    import torch

    from onepass.tools.gallery.traffic import predictions
    from onepass.tools.gallery.traffic_report import Report, show

    place = _place(device)
    names = flat(only)
    try:
        predicted = predictions(rows, n, getattr(torch, dtype), place.name, names)
    except (ValueError, RuntimeError) as error:
        raise click.UsageError(str(error).removeprefix("onepass: ")) from error
    report = Report(place, rows, n, dtype, [(p.name, p) for p in predicted])
    report.notes = [p.note for p in predicted if p.note]
    _bandwidth(place, bandwidth)
    if place.device is not None and place.device.type == "cuda" and not no_measure:
        _measure(report, everything=not names)
    answer(json_file, report.as_dict, lambda: show(report))


def _sizes(sizes: Sequence[str]) -> tuple[int, int]:
    given = tuple(size for text in sizes for size in parse_ints(text, "M N"))
    if len(given) != 2:
        raise click.UsageError(f"takes the two sizes of a matrix, M N, got {' '.join(sizes)}")
    if min(given) < 1 or given[0] * given[1] > _MOST:
        raise click.UsageError(f"M and N must be at least 1, with at most 2**60 elements; got {given[0]} x {given[1]}")
    return given[0], given[1]


def _place(name: str | None) -> Place:
    import torch

    from onepass.devices import KNOWN, known
    from onepass.tools.gallery.traffic_report import Place

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    entry = known(name)
    if entry is not None:
        return Place(name, entry.title, None)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"unknown device {name!r}: take cpu, cuda, cuda:N, or a known GPU: {', '.join(KNOWN)}")
    if device.type == "cpu":
        return Place("cpu", "a CPU", torch.device("cpu"))
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        said = f"device {name!r} is not here: there are {count} GPUs"
        raise click.UsageError(f"{said}; a known one need not be here: {', '.join(KNOWN)}")
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    return Place(str(device), torch.cuda.get_device_name(device), device)


def _bandwidth(place: Place, given: float | None) -> None:
    """Of a copy: as given, or that of a known device, or measured on a GPU that is here; a CPU's is not measured."""
    import torch

    from onepass.devices import known, measured_copy_gbs

    entry = known(place.title)
    if given is not None:
        place.gbs, place.source = given, "as given"
    elif entry is not None and entry.copy_gbs is not None:
        place.gbs, place.source = entry.copy_gbs, f"measured {entry.date}"
    elif entry is not None and place.device is None:
        place.gbs, place.source = entry.peak_gbs, "the peak of its data sheet, not measured"
    elif place.device is not None and place.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # two buffers of 1 GiB do not fit: then no time is predicted
            place.gbs, place.source = measured_copy_gbs(place.device), "measured now"
        torch.cuda.empty_cache()


def _measure(report: Report, everything: bool) -> None:
    """Adds what ncu counts to the report: of the copy, the predicted, and torch where all are asked for."""
    from onepass.tools.gallery import ncu

    report.ncu = ncu.find_ncu()
    if report.ncu is None:
        report.trouble = f"no ncu (Nsight Compute) on the PATH, nor at {' or '.join(ncu.PLACES)}"
        return
    names = [name for name, _ in report.with_copy(torch=everything) if name != "least"]
    if sys.stderr.isatty():
        click.echo(f"measuring with {report.ncu}, a minute or so", err=True)
    assert report.place.device is not None
    try:
        report.measured = ncu.measure(
            report.ncu, names, report.rows, report.n, report.dtype, report.place.device.index or 0
        )
    except ncu.NcuError as error:
        report.trouble = str(error)
    else:
        report.lines = report.with_copy(torch=everything)
