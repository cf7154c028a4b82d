"""`onepass tune`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli import params
from onepass.tools.terminal import console, progress_bar
from onepass.tools.tune.sizes import FUNCTIONS

if TYPE_CHECKING:
    from onepass.tables import GpuModel, Tables
    from onepass.tools.tune.timing import Measurement

_HEAD = ("table", "row length", "tier", "threads", "items", "blocks", "smem")


@click.command(cls=params.Command, short_help="Measure which plan is the fastest for each row length on this GPU.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cuda or cuda:N; with --show also a GPU that `onepass explain` knows, as h100.  [default: the current one; "
    "with --show and none here, h200]",
)
@click.option("--size-mib", type=click.IntRange(1), default=256, show_default=True, help="Size of an input, in MiB.")
@click.option(
    "--repeats", type=click.IntRange(1), default=15, show_default=True, help="Calls of which the median counts."
)
@click.option(
    "--lengths",
    metavar="N[,...]",
    help="Of rows and columns, in elements.  [default: about 110 from 2 to 1048576, of columns 25 from 8 to 32768]",
)
@click.option(
    "--dtypes",
    multiple=True,
    type=params.Names(params.parse_dtype),
    metavar="DTYPE[,...]",
    default=["f32,bf16"],
    show_default="f32,bf16",
    help="f32, and bf16 or f16.",
)
@click.option(
    "--functions",
    multiple=True,
    type=params.Names(),
    metavar="NAME[,...]",
    default=FUNCTIONS,
    show_default="all",
    help="softmax, for all that write rows, logsumexp, for those that do not, columns, for calls over other dims, and "
    "columns_backward.",
)
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write this file, not the one in use.")
@click.option("--show", is_flag=True, help="Show the tables in use, and measure nothing: no GPU is needed.")
@params.json_option("the tables of --show")
def tune(device: str | None, out: str | None, show: bool, json_file: str | None, **given: Any) -> None:
    """Measure which plan serves each row length fastest on this GPU, and have the CUDA engine use it from then on.

    For example: onepass tune --dtypes bf16 --lengths 32000,50257,128256
    """
    if json_file and not show:
        raise click.UsageError("--json goes with --show; a sweep writes its file of tables, which --out names")
    lengths = given.pop("lengths")
    given |= {name: params.flat(given[name]) for name in ("dtypes", "functions")}
    params.check_writable(out)
    from onepass import tables as store
    from onepass.tools.tune.run import Options, cuda_index, tune

    with params.usage_errors(ValueError, RuntimeError, OSError):
        options = Options(lengths=None if lengths is None else params.parse_ints(lengths, "--lengths"), **given)
        if show:
            _show(_gpu(device), json_file)
            return
        index = cuda_index(device)
        with progress_bar(console(sys.stderr)) as bar:
            tasks = [bar.add_task(name, total=None) for name in ("kernels", "measurements")]
            say = click.echo if bar.disable else bar.console.print

            def on_compiled(done: int, total: int) -> None:
                bar.update(tasks[0], completed=done, total=total)
                if bar.disable and not done:
                    say(f"{total} kernels are compiled first")

            def on_measured(measurement: Measurement, done: int, total: int) -> None:
                say(format_measurement(measurement))
                bar.update(tasks[1], completed=done, total=total)

            stored = tune(index, options, Path(out) if out else None, on_compiled, on_measured)
    count = sum(len(table) for table in stored.tables.values())
    click.echo(f"{stored.path}: {count} entries, from {len(options.points)} measurements on {stored.gpu}")
    used = store.default_path(stored.gpu)
    if store.is_off():
        click.echo("not used while ONEPASS_TABLES=off")
    elif used.absolute() != stored.path:
        click.echo(f"used with ONEPASS_TABLES={stored.path}")


def _gpu(device: str | None) -> GpuModel:
    """The GPU whose tables are shown: one that is here, or a known one; if none is here and none is named, that of the
    built-in tables. Its file of tables is loaded, if there is one."""
    import torch

    from onepass._engines import resolve
    from onepass.devices import KNOWN, known
    from onepass.tables import GpuModel, gpu_model, load
    from onepass.tools.tune.run import cuda_index

    entry = known(device) if device else None if torch.cuda.is_available() else KNOWN["h200"]
    if entry is None:
        index = cuda_index(device)
        resolve("cuda", torch.device("cuda", index))
        return gpu_model(index)
    if entry.compute is None:
        raise click.UsageError(f"{entry.title} has no tables: the Triton engine serves it, by plans that are not tuned")
    gpu = GpuModel(entry.title, entry.compute, entry.multiprocessors)
    load(gpu)
    return gpu


def _show(gpu: GpuModel, json_file: str | None) -> None:
    from onepass import native
    from onepass.tables import note
    from onepass.tools.terminal import table

    used = native.tables(gpu.name)

    def show() -> None:
        click.echo(f"{gpu.name}, compute {gpu.compute}, {gpu.multiprocessors} multiprocessors")
        click.echo(note(used["origin"], gpu.name))
        console().print(table(_HEAD, table_cells(used["tables"]), {0, 1, 2}))

    of = {"gpu": gpu.name, "compute": gpu.compute, "multiprocessors": gpu.multiprocessors}
    params.answer(json_file, lambda: {**of, **used}, show)


def table_cells(tables: Tables) -> list[tuple[str, ...]]:
    """The entries as cells: table, row lengths, tier, and its numbers, which are empty if the tier has none."""
    from onepass.native import TIERS
    from onepass.tables import ANY

    rows = []
    for name, table in tables.items():
        first = 1
        for limit, tier, *numbers in table:
            lengths = f"{first} and more" if limit == ANY else f"{first} to {limit}"
            tier_name = "as others" if tier < 0 else TIERS[tier]
            cells = [str(number) if number and tier >= 0 else "" for number in numbers]
            rows.append((name, lengths, tier_name, *cells))
            first = limit + 1
    return rows


def format_measurement(measurement: Measurement) -> str:
    """One line: the fastest choice, its speed as a fraction of a copy's speed, and the speed of the plan in use.

    For a function that writes one number per row, it is the time as a fraction of a copy's time.
    """
    from onepass.native import TIERS

    m = measurement
    choice = min(m.times, key=lambda c: (m.times[c], c))
    numbers = [
        f"{key} {value}" for key, value in choice._asdict().items() if value and (key, value) != ("blocks_per_row", 1)
    ]
    plan = " ".join([TIERS[choice.tier], *numbers[choice.tier > 0 :]])  # the first is the tier, if it is not 0
    reduces = m.function == "logsumexp"
    best, auto = (us / m.copy_us if reduces else m.copy_us / us for us in (m.best, m.auto_us))
    of = "of a copy's time" if reduces else "of an addition" if m.function == "columns_backward" else "of a copy"
    return f"{m.function} {m.dtype} {m.rows}x{m.n}: {plan}, {best:.3f} {of}, in use {auto:.3f}"
