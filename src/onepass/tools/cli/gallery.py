"""`onepass gallery`."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli.params import Command, answer, json_option, parse_dtype, usage_errors
from onepass.tools.gallery.launch_params import LAUNCH_PARAMS
from onepass.tools.terminal import table, terminal

if TYPE_CHECKING:
    from onepass.tools.gallery import Variant

_LEXERS = {".py": "python", ".cpp": "cpp", ".cu": "cuda"}
_NOTES = (
    "Traffic in elements for an M x N matrix; in brackets the part from memory while the caches hold the rows.",
    "The Triton variants run on the CPU too, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.",
    "onepass gallery show NAME prints a variant; onepass gallery run NAME M N checks and times one.",
    "onepass bench --list shows which of them cannot run here, and why.",
)


@click.group(invoke_without_command=True, short_help="List, show and run the published ways to compute a softmax.")
@json_option("the list")
@click.pass_context
def gallery(context: click.Context, json_file: str | None) -> None:
    """List the gallery: every published way to compute a softmax, one short file per variant."""
    if context.invoked_subcommand is None:
        answer(json_file, _list_data, _print_list)
    elif json_file:
        raise click.UsageError(f"--json before {context.invoked_subcommand} applies to the list; write it last")


@gallery.command("list", short_help="List the variants, as `onepass gallery` does.")
@json_option("the list")
def list_(json_file: str | None) -> None:
    """List the variants, as `onepass gallery` does."""
    answer(json_file, _list_data, _print_list)


def _print_list() -> None:
    from onepass.tools.gallery import VARIANTS

    console = terminal()
    rows = [
        (f"{number:>2}", v.name, v.language, v.runs_on, *_traffic(v), _first_sentence(v.header.idea))
        for number, v in enumerate(VARIANTS.values(), 1)
    ]
    if console is None:
        for number, name, language, runs_on, reads, writes, idea in rows:
            begin = f"{number}  {name:<17}  {language:<6}  {runs_on:<10}"
            click.echo(f"{begin}  reads {reads:<12}  writes {writes:<9}  {idea}")
    else:
        head = ("", "variant\nlanguage", "runs on", "reads\nwrites", "idea")
        stacked = [
            (f" {number}", f"{name}\n{language}", runs_on, f"{reads}\n{writes}", idea)
            for number, name, language, runs_on, reads, writes, idea in rows
        ]
        console.print(table(head, stacked, {1, 2, 3, 4}, fold=4))
    for text in _NOTES:
        click.echo(text if console is None else click.style(text, dim=True))


def _list_data() -> list[dict[str, Any]]:
    """The headers for `--json`; traffic is in elements, `[a, b]` for `a * M * N + b * M`."""
    from onepass.tools.gallery import VARIANTS

    return [
        {
            "name": variant.name,
            "language": variant.language,
            "file": str(variant.path),
            "runs_on": variant.runs_on,
            "launch_parameters": variant.launch_params,
            **asdict(variant.header),
        }
        for variant in VARIANTS.values()
    ]


def _traffic(variant: Variant) -> tuple[str, str]:
    """(reads, writes) for an M x N matrix; in brackets the part that remains while a cache serves the others."""
    total = variant.header.traffic
    cached = variant.header.cached or total
    pairs = (total.reads, cached.reads), (total.writes, cached.writes)
    reads, writes = (str(a) if a == b else f"{a} ({b})" for a, b in pairs)
    return reads, writes


def _first_sentence(text: str) -> str:
    """The first sentence, without its full stop.

    >>> _first_sentence("Two passes of 1.5 rows. Then more.")
    'Two passes of 1.5 rows'
    """
    return re.split(r"\.(?=\s|$)", text, maxsplit=1)[0]


@gallery.command(short_help="Print the source of a variant.")
@click.argument("name")
@click.option("--path", is_flag=True, help="Print the path of the file instead of its text.")
def show(name: str, path: bool) -> None:
    """Print the source of the variant NAME, which begins with its header; highlighted on a terminal."""
    variant = _variant(name)
    console = None if path else terminal()
    if console is None:
        click.echo(variant.path if path else variant.source, nl=path)
        return
    from rich.syntax import Syntax

    lexer = Syntax("", _LEXERS[variant.path.suffix], theme="ansi_dark", background_color="default")
    # The terminal wraps long lines, so that a line is copied as one.
    console.print(lexer.highlight(variant.source.rstrip("\n")), soft_wrap=True)


_MEANING = {
    "max": "At the end every lane holds the largest value of all.",
    "sum": "At the end every lane holds the sum of all values.",
    "id": "Each lane reads the value of lane ^ mask: first lower and upper lanes swap, with mask 1 neighbours.",
}


def butterfly(values: Sequence[int], op: str) -> list[tuple[int, list[int]]]:
    """(mask, the value of each lane after the exchange with that mask), from the largest mask to 1.

    With mask m, a lane reads from the lane whose number differs in bit m. With `max` and `sum` it merges the value into
    its own, and after the last exchange every lane has merged the values of all. With `id` it only receives, and each
    exchange is of the values at the start. There are 2, 4, 8, 16 or 32 lanes.

    >>> butterfly([0, 1, 2, 3], "sum")
    [(2, [2, 4, 2, 4]), (1, [6, 6, 6, 6])]
    >>> butterfly([0, 1, 2, 3], "id")
    [(2, [2, 3, 0, 1]), (1, [1, 0, 3, 2])]
    """
    merge: dict[str, Any] = {"max": max, "sum": operator.add}
    current, steps = list(values), []
    for mask in (mask for mask in (16, 8, 4, 2, 1) if mask < len(values)):
        received = [(values if op == "id" else current)[lane ^ mask] for lane in range(len(values))]
        current = received if op == "id" else list(map(merge[op], current, received))
        steps.append((mask, current))
    return steps


@gallery.command(short_help="Print the butterfly exchange of a warp, lane by lane.")
@click.option("--op", type=click.Choice(list(_MEANING)), default="max", show_default=True, help="The merge; id: none.")
@click.option(
    "--lanes", type=click.Choice(["32", "16", "8", "4", "2"]), default="32", show_default=True, help="Lanes to show."
)
def shuffle(op: str, lanes: str) -> None:
    """Print the butterfly exchange of a warp lane by lane. Each lane starts with its own number.

    A row shows the values of the lanes after the exchange with that mask. With max and sum a lane merges the value that
    it receives into its own; with id it shows the value that it receives.
    """
    values = list(range(int(lanes)))
    steps = butterfly(values, op)
    width = max(len(str(value)) for _, after in steps for value in after)
    colours = terminal() is not None
    for mask, row in [(0, values), *steps]:
        cells = [f"{value:>{width}}" for value in row]
        if colours and mask:  # lanes that exchange with each other have different colours
            cells = [click.style(cell, fg="magenta" if lane & mask else "cyan") for lane, cell in enumerate(cells)]
        click.echo(f"{f'mask={mask}:' if mask else 'lane':<8} {' '.join(cells)}", color=colours)
    click.echo(f"\n{_MEANING[op]}")


def _launch_options(command: Any) -> Any:
    """Adds an option for each launch parameter."""
    for name, (about, *_) in reversed(LAUNCH_PARAMS.items()):
        about = f"{about[0].upper()}{about[1:]}."
        command = click.option(f"--{name.replace('_', '-')}", type=int, metavar="N", help=about)(command)
    return command


@gallery.command(cls=Command, short_help="Check a variant and time it beside a copy and torch.")
@click.argument("name")
@click.argument("rows", type=click.IntRange(1), metavar="M")
@click.argument("n", type=click.IntRange(1), metavar="N")
@click.option("--dtype", default="float32", show_default=True, help="f32, bf16 or f16.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the data and the checks."
)
@click.option("--no-baseline", is_flag=True, help="Do not time torch beside it.")
@json_option("the results")
@_launch_options
def run(
    name: str, rows: int, n: int, dtype: str, device: str | None, seed: int, json_file: str | None, **options: Any
) -> int:
    """Check the variant NAME on an M x N matrix against the definition, then time it beside a copy and torch.

    For example: onepass gallery run triton-row 4096 4096 --num-warps 8

    The options with a whole number N are launch parameters. They override the variant's own choice; each variant takes
    some of them.
    """
    variant = _variant(name)
    from onepass.tools.bench import cli_run
    from onepass.tools.bench.cases import Case
    from onepass.tools.bench.providers import GalleryProvider, gallery_unsupported

    dtype = parse_dtype(dtype)
    case = Case("gallery", f"{rows}x{n}", (rows, n))
    baseline = not options.pop("no_baseline")
    given = {key: value for key, value in options.items() if value is not None}
    try:
        at = cli_run.parse_device(device)
        variant.check_launch_params(given)
        if (reason := variant.unavailable(at)) is not None:
            raise ValueError(f"cannot run on {at}: {reason}")
        if (reason := gallery_unsupported(variant, case, dtype)) is not None:
            raise ValueError(reason)
    except (ValueError, TypeError, RuntimeError) as error:
        raise click.UsageError(f"{name}: {error}") from error
    return cli_run.bench_variant(GalleryProvider(variant, **given), case, dtype, at, baseline, seed, json_file)


def _variant(name: str) -> Variant:
    from onepass.tools.gallery import variant

    with usage_errors(ValueError):
        return variant(name)
