"""`onepass traffic`: predicted traffic, and beside it the traffic that ncu counted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli import params

if TYPE_CHECKING:
    import torch

    from onepass import Explanation
    from onepass.tools.gallery.ncu import Counts
    from onepass.tools.gallery.traffic import Prediction

_MAX_ELEMENTS = 2**60  # their bytes fit 64 bits
_COUNTED = (
    "MB: 1e6 bytes between the GPU and its DRAM, counted by ncu. It empties the caches before each kernel, so that "
    "a variant of several kernels reads everything anew. Data that is still in the L2 when a kernel ends is not "
    "counted as written. The copy, y = x * 1, checks the counters"
)


@click.command(cls=params.Command, short_help="Predict the memory traffic of every variant.")
@click.argument("sizes", nargs=-1, required=True, metavar="M N")
@click.option("--dtype", default="float32", show_default=True, help="Of the matrix and the result: f32, bf16, f16.")
@click.option(
    "--only", multiple=True, type=params.Names(), help="Only these variants, or onepass; names with commas between."
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda, cuda:N, or a GPU that `onepass explain` knows, as h200.  [default: cuda if there is one]",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    callback=params.check_finite,
    metavar="GB/S",
    help="Bandwidth of a copy there, read and write, for the predicted time.",
)
@click.option("--no-measure", is_flag=True, help="Only predict, also if a GPU and ncu are here.")
@params.json_option("the table")
def traffic(sizes: Sequence[str], dtype: str, device: str | None, bandwidth: float | None, **options: Any) -> None:
    """Predict the reads and writes of each variant of the gallery for an M x N matrix, and measure them if ncu is here.

    The measured bytes are those that reach a GPU's DRAM, by its own counters. For example: onepass traffic 4096 781
    """
    shape = tuple(size for text in sizes for size in params.parse_ints(text, "M N"))
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > _MAX_ELEMENTS:
        raise click.UsageError(
            f"takes two sizes of at least 1, M N, of a matrix of at most 2**60 elements; got {' '.join(sizes)}"
        )
    import torch

    import onepass
    from onepass.devices import known
    from onepass.tools.bench.cli_run import parse_device
    from onepass.tools.gallery.traffic import predict_all
    from onepass.tools.gallery.variants import DTYPES

    names = params.flat(options["only"])
    dtype = params.parse_dtype(dtype)
    if dtype not in DTYPES:
        raise click.UsageError(f"the variants take {', '.join(DTYPES)}, got {dtype}")
    with params.usage_errors(ValueError, RuntimeError):
        here = None if device and known(device) else parse_device(device)
        at: Any = {"dtype": getattr(torch, dtype), "device": here or device}
        untimed = bandwidth is None and here == torch.device("cpu")  # a CPU's bandwidth is not measured
        plan = onepass.explain(shape, bandwidth=1.0 if untimed else bandwidth, **at)
        gbs = None if untimed else plan.bandwidth_gbs
        report = Report(plan, predict_all(plan, names, gbs), gbs)
    if here is not None and here.type == "cuda" and not options["no_measure"]:
        report.measure(here, with_torch=not names)
    params.answer(options["json_file"], report.as_dict, report.show)


@dataclass
class Report:
    """The result for an M x N matrix, from the plan of onepass for it.

    predicted: the contestants, "minimum" first; torch has None, since its kernels are not known. gbs: the bandwidth of
    a copy, if it is known. ncu: path of ncu, if it was found. measured: its counts. left_out: why others have none.
    error: why there are none at all.
    """

    plan: Explanation
    predicted: Mapping[str, Prediction | None]
    gbs: float | None
    ncu: str | None = None
    measured: Mapping[str, Counts] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    def measure(self, device: torch.device, with_torch: bool) -> None:
        """Adds ncu's counts of a copy, which checks the counters, of the contestants, and on request of torch."""
        from onepass.tools.gallery import ncu

        self.ncu = ncu.find_ncu()
        if self.ncu is None:
            self.error = f"no ncu (Nsight Compute) on the PATH, nor in {' or '.join(ncu.INSTALL_FOLDERS)}"
            return
        names = ["copy", *(name for name in self.predicted if name != "minimum")]
        if with_torch:
            names.insert(-1, "torch")
        if sys.stderr.isatty():
            click.echo(f"measuring with {self.ncu} for about a minute", err=True)
        rows, n = self.plan.shape
        try:
            found = ncu.measure(self.ncu, names, rows, n, self.plan.dtype, device.index or 0)
        except ncu.NcuError as error:
            self.error = str(error)
            return
        self.measured, self.left_out = found.counts, found.left_out
        known = {**self.predicted, "copy": self.predicted["minimum"]}
        self.predicted = {name: known.get(name) for name in ("minimum", *names)}

    def as_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        lines = []
        for name, predicted in self.predicted.items():
            line = {"name": name, "predicted": predicted and asdict(predicted), "measured": None}
            if counts := self.measured.get(name):
                line["measured"] = {
                    "read_bytes": counts.read,
                    "written_bytes": counts.written,
                    "ratio": counts.ratio(self.plan.bytes),
                    "kernels": [asdict(kernel) for kernel in counts.kernels],
                }
            lines.append(line)
        return {
            "rows": self.plan.shape[0],
            "n": self.plan.shape[1],
            "dtype": self.plan.dtype,
            "device": self.plan.device,
            "bandwidth_gbs": self.gbs,
            "minimum_bytes": self.plan.bytes,
            "lines": lines,
            "ncu": self.ncu,
            "not_measured": self.error,
            "left_out": self.left_out,
        }

    def show(self) -> None:
        """The table; on a terminal that is too narrow for it the measured columns are in a table of their own, and at
        last the numbers of reads and writes are left out."""
        from onepass.tools.terminal import console, fits, table

        on = console()
        every = [self.cells(name) for name in self.predicted]
        heads = list(dict.fromkeys(head for cells in every for head in cells))
        predicted = [head for head in heads if not head.startswith(("MB", "measured"))]
        measured = ["variant", *(head for head in heads if head not in predicted)]
        apart = [predicted, measured] if len(measured) > 1 else [predicted]
        for hidden, groups in ((0, [heads]), (0, apart), (1, apart)):
            bodies = ([[_stack(cells, head, hidden) for head in group] for cells in every] for group in groups)
            tables = [table(group, body, {0}) for group, body in zip(groups, bodies, strict=True)]
            if all(fits(on, made) for made in tables):
                break
        title = f"{self.plan.shape[0]} x {self.plan.shape[1]} {self.plan.dtype} on {self.plan.device}"
        on.print(f"{title}, where a copy reaches {self.gbs:,.4g} GB/s" if self.gbs else title, style="bold")
        for made in tables:
            on.print("", made)
        on.print("", *self.notes(), sep="\n")

    def cells(self, name: str) -> dict[str, list[str]]:
        """The cells of a line by the heads of their columns: a number, and below it a formula, or in brackets its part
        that reaches memory while the caches help."""
        p, counts = self.predicted[name], self.measured.get(name)
        cells = {"variant": [name]}
        if p is not None:
            cells["reads"] = [f"{p.reads:,}", p.reads_formula]
            cells["writes"] = [f"{p.writes:,}", p.writes_formula]
            cells["bytes"] = [f"{p.bytes:,}"]
            parts = [(p.ratio, p.us, "{}")] + ([(p.cached_ratio, p.cached_us, "({})")] if p.cached_ratio else [])
            cells["ratio"] = [form.format(f"{ratio:.2f}") for ratio, _, form in parts]
            cells["of a\ncopy"] = [form.format(f"{1 / ratio:.2f}") for ratio, _, form in parts]
            if p.us is not None:
                cells["us"] = [form.format(_format_us(us)) for _, us, form in parts if us is not None]
        if counts is not None:
            ratio = counts.ratio(self.plan.bytes)
            for head, value in (("MB\nread", counts.read), ("MB\nwritten", counts.written)):
                cells[head] = ["n/a" if value is None else f"{value / 1e6:,.2f}"]
            cells["measured\nratio"] = [] if ratio is None else [f"{ratio:.2f}"]
        return cells

    def notes(self) -> list[str]:
        """The sentences below the table."""
        from onepass.tools.gallery.traffic import FLOAT32

        found = ["reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's"]
        found.append("of a copy: the highest speed that it can reach, in units of a copy's")
        if any(p and p.cached_ratio for p in self.predicted.values()):
            found.append("in brackets: from memory, while the rows in flight stay in the caches")
        if self.gbs:
            found.append("us: at a copy's bandwidth; empty for a variant that does not run on this kind of device")
        if wide := [name for name in FLOAT32 if name in self.predicted and self.plan.dtype != "float32"]:
            found.append(f"{', '.join(wide)}: all steps between the matrix and the result are float32")
        if "onepass" in self.predicted:
            found += [f"onepass: {self.plan.engine} engine, tier {self.plan.tier}", *self.plan.notes[:-1]]
        if self.gbs:
            found.append(self.plan.notes[-1])  # where the bandwidth is from
        if self.error:
            found.append(f"not measured: {self.error}")
        found += [f"not measured: {name}: {reason}" for name, reason in self.left_out.items()]
        if unseen := [name for name, counts in self.measured.items() if not counts.kernels]:
            found.append(f"n/a: ncu saw no kernel of {', '.join(unseen)}")
        return [*found, _COUNTED] if self.measured else found


def _stack(cells: dict[str, list[str]], head: str, hidden: int) -> str:
    """The parts of a cell below each other; of reads and writes the formula alone if numbers are `hidden`."""
    return "\n".join(cells.get(head, [])[hidden if head in ("reads", "writes") else 0 :])


def _format_us(us: float) -> str:
    return f"{us:,.0f}" if us >= 99.95 else f"{us:.1f}" if us >= 0.995 else f"{us:.3f}"
