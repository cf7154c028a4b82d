"""`onepass gallery`: list the rungs, show their source, run one, and print how the lanes of a warp merge."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli.params import Command, answer, json_option, parse_dtype
from onepass.tools.terminal import terminal

if TYPE_CHECKING:
    from onepass.tools.gallery import Rung

_LEXERS = {".py": "python", ".cpp": "cpp", ".cu": "cuda"}
_NOTES = (
    "Traffic in elements for an M x N matrix; in brackets what comes from memory while the rows stay in a cache.",
    "The rungs in Triton run on the CPU too, in its interpreter: with TRITON_INTERPRET=1 in the environment.",
    "onepass gallery show NAME prints a rung, onepass gallery run NAME M N checks and times one,",
    "onepass bench --list says which of them cannot run here, and why.",
)


@click.group(invoke_without_command=True, short_help="List, show and run the published ways to compute a softmax.")
@json_option("the list")
@click.pass_context
def gallery(context: click.Context, json_file: str | None) -> None:
    """List the gallery: every published way to compute a softmax, one short file per rung, in rising order."""
    if context.invoked_subcommand is None:
        answer(json_file, lambda: _data(_rungs()), _list)
    elif json_file:
        raise click.UsageError(f"--json before {context.invoked_subcommand} is of the list: write it last")


@gallery.command("list", short_help="List the rungs: what `onepass gallery` alone does.")
@json_option("the list")
def list_(json_file: str | None) -> None:
    """List the rungs: what `onepass gallery` alone does."""
    answer(json_file, lambda: _data(_rungs()), _list)


def _list() -> None:
    rungs = _rungs()
    console = terminal()
    if console is None:
        for number, rung in enumerate(rungs.values(), 1):
            click.echo(_line(number, rung))
    else:
        console.print(_table(rungs))
    for text in _NOTES:
        click.echo(text if console is None else click.style(text, dim=True))


@gallery.command(short_help="Print the source of a rung.")
@click.argument("name")
@click.option("--path", is_flag=True, help="Print where the file is, in place of its text.")
def show(name: str, path: bool) -> None:
    """Print the source of the rung NAME, its header first; highlighted on a terminal."""
    rung = _rung(name)
    console = None if path else terminal()
    if console is None:
        click.echo(rung.path if path else rung.source, nl=path)
        return
    from rich.syntax import Syntax

    lexer = Syntax("", _LEXERS[rung.path.suffix], theme="ansi_dark", background_color="default")
    # The terminal wraps what is too long for it, so that a line is copied as one.
    console.print(lexer.highlight(rung.source.rstrip("\n")), soft_wrap=True)


@gallery.command(short_help="Print the butterfly exchange of a warp, lane by lane.")
@click.option(
    "--op", type=click.Choice(["max", "sum", "id"]), default="max", show_default=True, help="The merge; id: none."
)
@click.option(
    "--lanes", type=click.Choice(["32", "16", "8", "4", "2"]), default="32", show_default=True, help="Of the group."
)
def shuffle(op: str, lanes: str) -> None:
    """Print the butterfly exchange of a warp lane by lane. Each lane starts with its own number.

    A row is what the lanes hold after the exchange with that mask: max and sum merge what a lane receives into what it
    holds, id shows what it receives.
    """
    from onepass.tools.gallery.shuffle import butterfly, sentence

    values = list(range(int(lanes)))
    steps = butterfly(values, op)
    width = max(len(str(value)) for _, held in steps for value in held)
    console = terminal()

    def line(name: str, held: list[int], mask: int = 0) -> None:
        cells = [f"{value:>{width}}" for value in held]
        if console is None:
            click.echo(f"{name:<8} {' '.join(cells)}")
            return
        from rich.text import Text

        text = Text(f"{name:<8}")
        for lane, cell in enumerate(cells):
            text.append(" ")
            text.append(cell, style="dim" if not mask else "bold magenta" if lane & mask else "bold cyan")
        console.print(text, soft_wrap=True)

    line("lane", values)
    for mask, held in steps:
        line(f"mask={mask}:", held, mask)
    click.echo()
    click.echo(sentence(values, op))


class _Launched(Command):
    """Has an option for each launch parameter."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from onepass.tools.gallery.options import ABOUT

        options = [
            click.Option(
                [f"--{name.replace('_', '-')}", name], type=int, metavar="N", help=f"{about[0].upper()}{about[1:]}."
            )
            for name, about in ABOUT.items()
        ]
        own = super().get_params(ctx)
        return [*own[:-1], *options, own[-1]]  # the last is --help


@gallery.command(cls=_Launched, short_help="Check a rung and time it beside a copy and torch.")
@click.argument("name")
@click.argument("rows", type=click.IntRange(1), metavar="M")
@click.argument("n", type=click.IntRange(1), metavar="N")
@click.option("--dtype", default="float32", show_default=True, help="f32, bf16 or f16.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the data and the checked rows."
)
@click.option("--alone", is_flag=True, help="Without torch beside it.")
@json_option("the results")
def run(
    name: str,
    rows: int,
    n: int,
    dtype: str,
    device: str | None,
    seed: int,
    alone: bool,
    json_file: str | None,
    **launch: int | None,
) -> int:
    """Check the rung NAME on an M x N matrix against the definition, then time it beside a copy and torch.

    For example: onepass gallery run triton-row 4096 4096 --num-warps 8

    The options in whole numbers N are launch parameters, in place of the rung's own choice; each rung takes some.
    """
    rung = _rung(name)
    from onepass.tools.bench import cli_run
    from onepass.tools.bench.cases import Case
    from onepass.tools.bench.providers.gallery import GalleryProvider, unsupported

    case = Case("gallery", f"{rows}x{n}", (rows, n))
    given = {key: value for key, value in launch.items() if value is not None}
    try:
        dtype = parse_dtype(dtype)
        at = cli_run.parse_device(device)
        _check_launch(rung, given)
        reason = rung.unavailable(at)
        if reason is not None:
            raise click.UsageError(f"{rung.name} cannot run on {at}: {reason}")
        reason = unsupported(rung, case, dtype)
        if reason is not None:
            raise click.UsageError(f"{rung.name}: {reason}")
    except (ValueError, TypeError, RuntimeError) as error:
        raise click.UsageError(str(error)) from error
    return cli_run.bench_variant(GalleryProvider(rung, **given), case, dtype, at, not alone, seed, json_file)


def _check_launch(rung: Rung, given: dict[str, int]) -> None:
    from onepass.tools.gallery.options import check

    for key, value in given.items():
        if key not in rung.options:
            taken = ", ".join(_flag(name) for name in rung.options) or "no launch parameters"
            raise click.UsageError(f"{rung.name}: got {_flag(key)}; it takes {taken}")
        check(f"{rung.name}: {_flag(key)}", key, value)


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"


def _rungs() -> dict[str, Rung]:
    from onepass.tools.gallery import RUNGS

    return RUNGS


def _rung(name: str) -> Rung:
    from onepass.tools.gallery import rung

    try:
        return rung(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _traffic(rung: Rung) -> tuple[str, str]:
    """(reads, writes) for an M x N matrix; in brackets what is left of them while a cache serves the rest."""
    asked, cached = rung.header.traffic, rung.header.cached
    pairs = ((asked.reads, cached and cached.reads), (asked.writes, cached and cached.writes))
    reads, writes = (_count(a) + (f" ({_count(b)})" if b and b != a else "") for a, b in pairs)
    return reads, writes


def _count(of: tuple[int, int]) -> str:
    """
    >>> _count((5, 2)), _count((1, 0))
    ('5MN + 2M', 'MN')
    """
    parts = zip(of, ("MN", "M"), strict=True)
    return " + ".join(f"{'' if count == 1 else count}{unit}" for count, unit in parts if count) or "0"


def _first(text: str) -> str:
    """The first sentence, without its full stop.

    >>> _first("Two passes of 1.5 rows. Then more.")
    'Two passes of 1.5 rows'
    """
    return re.split(r"\.(?=\s|$)", text, maxsplit=1)[0]


def _line(number: int, rung: Rung) -> str:
    reads, writes = _traffic(rung)
    said = (
        f"{number:>2}  {rung.name:<17}  {rung.language:<6}  {rung.runs_on:<10}  reads {reads:<12}  writes {writes:<9}"
    )
    return f"{said}  {_first(rung.header.idea)}"


def _table(rungs: dict[str, Rung]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, options in (("", {"justify": "right"}), ("rung", {}), ("runs on", {}), ("reads\nwrites", {})):
        table.add_column(head, no_wrap=True, **options)  # type: ignore[arg-type]
    table.add_column("idea", ratio=1)
    for number, rung in enumerate(rungs.values(), 1):
        named = Text.assemble((rung.name, "bold"), "\n", (rung.language, "dim"))
        table.add_row(str(number), named, rung.runs_on, "\n".join(_traffic(rung)), _first(rung.header.idea))
    return table


def _data(rungs: dict[str, Rung]) -> list[dict[str, Any]]:
    """What `--json` prints: a rung's header, its traffic as elements `[a, b]` of `a * M * N + b * M`."""
    return [
        {
            "name": rung.name,
            "language": rung.language,
            "file": str(rung.path),
            "runs_on": rung.runs_on,
            "launch_parameters": rung.options,
            **asdict(rung.header),
        }
        for rung in rungs.values()
    ]
