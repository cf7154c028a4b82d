"""`onepass tune`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli.shared import Command, Names, answer, dtype_of, flat, ints, json_option, writable

if TYPE_CHECKING:
    from rich.progress import Progress

    from onepass.tables import GpuModel, Tables
    from onepass.tools.tune.measure import Point


@click.command(cls=Command, short_help="Measure which plan is the fastest for each row length on this GPU.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cuda or cuda:N; with --show also a GPU that `onepass explain` knows, as h100.  [default: the current one; "
    "with --show and none here, h200]",
)
@click.option("--mib", type=click.IntRange(1), default=256, show_default=True, help="Size of an input, in MiB.")
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
    type=Names(dtype_of),
    metavar="DTYPE[,...]",
    help="f32, and bf16 or f16.  [default: f32,bf16]",
)
@click.option(
    "--functions",
    multiple=True,
    type=Names(),
    metavar="NAME[,...]",
    help="softmax, for all that write rows, logsumexp, for those that do not, columns, for calls over other dims, and "
    "column_gradients.  [default: all]",
)
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="In place of the file that is then used.")
@click.option("--fresh", is_flag=True, help="Do not go on with a sweep that was broken off.")
@click.option("--show", is_flag=True, help="Show the tables in use, and measure nothing: no GPU is needed.")
@json_option("the tables of --show")
def tune(
    device: str | None,
    mib: int,
    repeats: int,
    lengths: str | None,
    dtypes: Sequence[Sequence[str]],
    functions: Sequence[Sequence[str]],
    out: str | None,
    fresh: bool,
    show: bool,
    json_file: str | None,
) -> None:
    """Measure which plan serves each row length fastest on this GPU, and have the CUDA engine use it from then on.

    A sweep that was broken off goes on where it stopped.

    For example: onepass tune --dtypes bf16 --lengths 32000,50257,128256
    """
    if json_file and not show:
        raise click.UsageError("--json goes with --show; a sweep writes its file of tables, which --out names")
    given: dict[str, Any] = {"mib": mib, "repeats": repeats}
    if lengths is not None:
        given["lengths"] = ints(lengths, "--lengths")
    if dtypes:
        given["dtypes"] = flat(dtypes)
    if functions:
        given["functions"] = flat(functions)
    writable(out)
    from onepass import tables as store
    from onepass.tools.tune.run import Options, cuda_index, tune

    try:
        options = Options(**given)
        if show:
            _show(_kind(device), json_file)
            return
        index = cuda_index(device)
        with _watcher() as watcher:
            stored = tune(f"cuda:{index}", options, Path(out) if out else None, fresh, watcher)
    except (ValueError, RuntimeError, OSError) as error:
        raise click.UsageError(re.sub(r"^onepass: ", "", str(error))) from error
    count = sum(len(table) for table in stored.tables.values())
    click.echo(f"{stored.path}: {count} entries, from {len(options.points)} measurements on {stored.gpu}")
    used = store.default_path(stored.gpu)
    if store.is_off():
        click.echo("not used while ONEPASS_TABLES=off")
    elif used.absolute() != stored.path:
        click.echo(f"used where ONEPASS_TABLES={stored.path}")


def _kind(device: str | None) -> GpuModel:
    """The GPU whose tables are shown: one that is here, or one that is known by its name; where none is here and none
    is named, that of the built-in tables. Its file of tables, where there is one, is loaded."""
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
    kind = GpuModel(entry.title, entry.compute, entry.multiprocessors)
    load(kind)
    return kind


def _show(kind: GpuModel, json_file: str | None) -> None:
    from onepass import native
    from onepass.tables import note

    used = native.tables(kind.name)

    def show() -> None:
        click.echo(f"{kind.name}, compute {kind.compute}, {kind.multiprocessors} multiprocessors")
        click.echo(note(used["origin"], kind.name))
        print_tables(used["tables"])

    of = {"gpu": kind.name, "compute": kind.compute, "multiprocessors": kind.multiprocessors}
    answer(json_file, lambda: {**of, **used}, show)


def rows_of(tables: Tables) -> list[tuple[str, ...]]:
    """The entries as cells: table, row lengths, tier, lanes, values, split, shelf; empty for what a tier lacks."""
    from onepass.tables import ANY
    from onepass.tools.tune.candidates import TIERS

    rows = []
    for name, table in tables.items():
        first = 1
        for limit, tier, *numbers in table:
            lengths = f"{first} and more" if limit == ANY else f"{first} to {limit}"
            tier_name = "as others" if tier < 0 else TIERS[tier]
            cells = [str(number) if number else "" for number in numbers] if tier >= 0 else [""] * 4
            rows.append((name, lengths, tier_name, *cells))
            first = limit + 1
    return rows


def print_tables(tables: Tables) -> None:
    """A table on the terminal; without rich, its cells with tabs between."""
    headings = ("table", "row length", "tier", "lanes", "values", "split", "shelf")
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for cells in (headings, *rows_of(tables)):
            click.echo("\t".join(cells))
        return
    shown = Table(box=box.SIMPLE, padding=0)  # or 80 characters would not do
    for at, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if at < 3 else "right", no_wrap=True)
    rows = rows_of(tables)
    for at, cells in enumerate(rows):
        shown.add_row(*cells, end_section=at + 1 < len(rows) and rows[at + 1][0] != cells[0])
    Console(highlight=False).print(shown)


class _Lines:
    """A line a length, and a bar where there is one."""

    def __init__(self, bar: Progress | None):
        self.bar = bar
        self.done = self.total = 0
        self.tasks = {name: bar.add_task(name, total=None) for name in ("kernels", "measurements")} if bar else {}

    def compiled(self, done: int, total: int) -> None:
        if self.bar:
            self.bar.update(self.tasks["kernels"], completed=done, total=total)
        elif not done:
            self.say(f"{total} kernels are compiled first")

    def measured(self, point: Point | None, done: int, total: int) -> None:
        self.done, self.total = done, total
        if point is not None:
            self.say(line_of(point))
        elif done:
            self.say(f"going on: {done} of {total} measurements are there")
        if self.bar:
            self.bar.update(self.tasks["measurements"], completed=done, total=total)

    def say(self, line: str) -> None:
        if self.bar:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            click.echo(line)


def line_of(point: Point) -> str:
    """What was measured for a length, in a line: the fastest choice, and as a fraction of a copy it and what is in use.

    Of a copy's speed; of its time where nothing is written but a number a row.
    """
    from onepass.tools.tune.candidates import TIERS

    choice = min(point.times, key=lambda c: (point.times[c], c))
    plain = {"tier": choice.tier, "split": 1}
    numbers = [f"{key} {value}" for key, value in choice._asdict().items() if value and value != plain.get(key)]
    what = " ".join([TIERS[choice.tier], *numbers])
    reduces = point.function == "logsumexp"
    best, auto = (us / point.copy_us if reduces else point.copy_us / us for us in (point.best, point.auto_us))
    of = "of a copy's time" if reduces else "of an addition" if point.function == "column_gradients" else "of a copy"
    return f"{point.function} {point.dtype} {point.rows}x{point.n}: {what}, {best:.3f} {of}, in use {auto:.3f}"


@contextmanager
def _watcher() -> Iterator[_Lines]:
    """Says what is kept where the sweep is broken off."""
    bar = _bar() if sys.stderr.isatty() else None
    lines = _Lines(bar)
    try:
        with bar or nullcontext():
            yield lines
    except KeyboardInterrupt:
        if lines.done:
            click.echo(f"{lines.done} of {lines.total} measurements are kept; the same command goes on there", err=True)
        raise


def _bar() -> Progress | None:
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    time = progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn()
    columns = progress.MofNCompleteColumn(), progress.TextColumn("{task.description}"), progress.BarColumn(), *time
    return progress.Progress(*columns, console=Console(stderr=True))
