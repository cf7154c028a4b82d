"""`onepass gallery`."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.cli.params import Command, answer, json_option, parse_dtype, usage_errors
from onepass.tools.gallery import variants
from onepass.tools.gallery.launch_params import LAUNCH_PARAMS
from onepass.tools.terminal import table, terminal

if TYPE_CHECKING:
    import torch

    from onepass.tools.gallery import Variant
    from onepass.tools.gallery.check import Candidate

_DIRECTIONS = {"gradient": "backward"}
_LEXERS = {".py": "python", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".h": "cpp"}
_INCLUDED = ("vectors.cuh", "cpu.h")
_NOTES = (
    "Traffic in elements for an M x N matrix; in brackets the part from memory while the caches hold the rows.",
    "The Triton variants run on the CPU too, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.",
    "The CUDA variants run on the CPU too, in an emulator: onepass gallery run NAME M N --emulate.",
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
            "computes": variant.computes,
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
    """Print the source of the variant NAME, which begins with its header; highlighted on a terminal.

    NAME may be a file that variants include too: vectors.cuh, cpu.h.
    """
    file = Path(variants.__file__).with_name(name) if name in _INCLUDED else _variant(name).path
    source = file.read_text(encoding="utf-8")
    console = None if path else terminal()
    if console is None:
        click.echo(file if path else source, nl=path)
        return
    from rich.syntax import Syntax

    lexer = Syntax("", _LEXERS[file.suffix], theme="ansi_dark", background_color="default")
    # The terminal wraps long lines, so that a line is copied as one.
    console.print(lexer.highlight(source.rstrip("\n")), soft_wrap=True)


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


def reduction(threads: int, op: str) -> list[tuple[str, str]]:
    """The steps of cuda-block's reduction of a block whose threads start with their own numbers, each with its values.

    >>> for step, values in reduction(64, "sum"): print(f"{step}: {values}")
    the threads of warp 0: 0 to 31, merged by shuffles: 496
    the threads of warp 1: 32 to 63, merged by shuffles: 1520
    shared memory, one value a warp: 496 1520
    barrier: __syncthreads()
    lanes 0 to 1 of every warp read them: 496 1520, the other lanes take 0
    every thread, merged by shuffles: 2016
    """
    merge, nothing = (max, "-inf") if op == "max" else (sum, "0")
    partials = [merge(range(first, first + 32)) for first in range(0, threads, 32)]
    steps = [
        (f"the threads of warp {w}", f"{32 * w} to {32 * w + 31}, merged by shuffles: {partial}")
        for w, partial in enumerate(partials)
    ]
    listed = " ".join(map(str, partials))
    rest = f", the other lanes take {nothing}" if len(partials) < 32 else ""
    lanes = f"lanes 0 to {len(partials) - 1} of every warp read them" if len(partials) > 1 else "lane 0 of it reads it"
    return [
        *steps,
        ("shared memory, one value a warp", listed),
        ("barrier", "__syncthreads()"),
        (lanes, listed + rest),
        ("every thread, merged by shuffles", str(merge(partials))),
    ]


@gallery.command(short_help="Print the reduction of a block, step by step.")
@click.option("--threads", type=click.IntRange(32, 1024), default=64, show_default=True, help="A multiple of 32.")
@click.option("--op", type=click.Choice(["max", "sum"]), default="max", show_default=True, help="The merge.")
def reduce(threads: int, op: str) -> None:
    """Print the reduction of a block as cuda-block does it. Each thread starts with its own number.

    The lanes of a warp are merged by shuffles (onepass gallery shuffle), the warps through shared memory.
    """
    with usage_errors(ValueError):
        LAUNCH_PARAMS["threads"].check("threads", threads)
    for step, values in reduction(threads, op):
        click.echo(f"{step:<36} {values}")


@gallery.command(short_help="List the mistakes of the published code, or print a broken rung to mend.")
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="FILE", help="Write the broken rung to this file.")
@click.option("--answer", is_flag=True, help="Show the difference to the right one instead.")
def mistakes(name: str | None, output: str | None, answer: bool) -> None:
    """List the mistakes of the published code. With a NAME, print a rung of the gallery that has the mistake.

    For example: onepass gallery mistakes race -o race.cu; onepass gallery check race.cu --emulate
    """
    from onepass.tools.gallery.mistakes import MISTAKES

    if name is None:
        if output or answer:
            raise click.UsageError(f"{'--output' if output else '--answer'} takes the NAME of a mistake")
        for mistake in MISTAKES.values():
            rung = mistake.exercise.variant if mistake.exercise else "-"
            click.echo(f"{mistake.name:<21} {rung:<12} {mistake.about}")
        return
    if name not in MISTAKES:
        raise click.UsageError(f"unknown mistake {name!r}: there are {', '.join(MISTAKES)}")
    with usage_errors(ValueError, OSError):
        if answer:
            click.echo(MISTAKES[name].answer())
            return
        text = MISTAKES[name].texts()[0]
        if output:
            Path(output).write_text(text, encoding="utf-8")
    click.echo(f"{output}: mend it, and try onepass gallery check {output}" if output else text, nl=bool(output))


@gallery.command(cls=Command, short_help="Check a softmax of your own, and time it beside the gallery.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--function", metavar="NAME", help="The kernel or function.  [default: the only kernel; softmax]")
@click.option("--emulate", is_flag=True, help="Run a CUDA kernel on the CPU, without a GPU and without times.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@click.option("--like", default="", metavar="VARIANT", help="Launch a CUDA kernel like this one, which it replaces.")
@click.option("--threads", type=int, default=0, help="Threads of a block.  [default: 256, or those of --like]")
@click.option("--blocks", type=int, default=0, help="Blocks.  [default: as many as rows, or those of --like]")
@click.option("-D", "--define", "defines", multiple=True, metavar="NAME=VALUE", help="A macro of the kernel.")
@click.option("--no-time", is_flag=True, help="Only check.")
def check(
    file: Path, function: str | None, emulate: bool, device: str | None, no_time: bool, like: str, threads: int,
    blocks: int, defines: tuple[str, ...],
) -> int:  # fmt: skip
    """Check the softmax in FILE on the inputs on which softmaxes go wrong, with a hint for each failure.

    A .cu file has a kernel extern "C" __global__ void NAME(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t
    x_stride, int64_t y_stride), and may include types.cuh and the gallery's files. A .py file has a function
    softmax(x). With --like the kernel has the parameters, the macros and the launch of a CUDA variant, and computes
    what that does: --like cuda-columns the softmax of columns, --like cuda-backward the gradient. A right one is timed
    on a GPU, unless it is a gradient. The exit status is 0 if all is right, 1 if not, 2 for a wrong command.
    """
    from onepass.tools.bench import cli_run
    from onepass.tools.bench.cases import Case
    from onepass.tools.bench.gallery_providers import Learned
    from onepass.tools.gallery.check import load

    with usage_errors(ValueError, TypeError):
        for name, value in (("threads", threads), ("blocks", blocks)):
            if value:
                LAUNCH_PARAMS[name].check(name, value)
        candidate = load(file, function, like, threads=threads, blocks=blocks, defines=defines)
        at = cli_run.parse_device("cpu" if emulate and device is None else device)
    if emulate or candidate.call is None:
        _check_where(candidate, at, emulate)
        candidate = replace(candidate, emulated=emulate)
    if not _try_all(candidate, at):
        return 1
    if no_time or at.type == "cpu" or candidate.computes == "gradient":
        return 0
    case = Case("gallery", "4096x4096", (4096, 4096), 0 if candidate.computes == "columns" else -1)
    return cli_run.bench_learned(Learned(candidate), case, "float32", at)


def _check_where(candidate: Candidate, device: torch.device, emulate: bool) -> None:
    """Raises UsageError where a kernel cannot run."""
    from onepass._engines import unavailable
    from onepass.tools.emulator import missing

    if not emulate:
        reason = unavailable("cuda", device) if device.type == "cuda" else "a CUDA kernel needs a GPU"
        if reason:
            raise click.UsageError(f"{reason}; --emulate checks it without one")
    elif candidate.call is not None:
        raise click.UsageError(f"--emulate runs CUDA kernels, and {candidate.file} is Python")
    elif device.type != "cpu" or missing():
        raise click.UsageError(f"--emulate runs on the CPU; there is {missing() or device}")


def _try_all(candidate: Candidate, device: torch.device) -> bool:
    """Tries and prints every input; whether all are right."""
    from onepass.tools.gallery.check import Failure, trials, try_one

    failed = tried = 0
    for trial in trials():
        if trial.order is not None and candidate.call is not None:  # Python has no threads of a block
            continue
        found = try_one(candidate, trial, device)
        tried += not isinstance(found, str)
        text = "right" if found is None else f"not tried: {found}"
        if isinstance(found, Failure):
            failed += 1
            text = f"WRONG  {found.what}\n{'':<24} hint: {found.hint}"
        click.echo(f"{trial.name:<24} {text}")
        if isinstance(found, Failure) and found.is_last:
            click.echo("The GPU takes no more calls from this process after this: the rest was not tried.")
            break
    click.echo(f"{candidate.function} of {candidate.file.name}: {tried - failed} of {tried} inputs right")
    return not failed


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
@click.option("--emulate", is_flag=True, help="Run a CUDA variant on the CPU: without a GPU, and without a time.")
@json_option("the results")
@_launch_options
def run(
    name: str, rows: int, n: int, dtype: str, device: str | None, seed: int, emulate: bool, json_file: str | None,
    **options: Any,
) -> int:  # fmt: skip
    """Check the variant NAME on an M x N matrix against the definition, then time it beside a copy and torch.

    For example: onepass gallery run triton-row 4096 4096 --num-warps 8

    The options with a whole number N are launch parameters. They override the variant's own choice; each variant takes
    some of them.
    """
    variant = _variant(name)
    from onepass.tools.bench import cli_run
    from onepass.tools.bench.cases import Case
    from onepass.tools.bench.gallery_providers import GalleryProvider, gallery_unsupported

    dtype = parse_dtype(dtype)
    dim, direction = (0 if variant.computes == "columns" else -1), _DIRECTIONS.get(variant.computes, "forward")
    case = Case("gallery", f"{rows}x{n}", (rows, n), dim, direction=direction)
    baseline = not options.pop("no_baseline")
    given = {key: value for key, value in options.items() if value is not None}
    try:
        at = cli_run.parse_device("cpu" if emulate else device)
        variant.check_launch_params(given)
        if emulate and (device or json_file or not baseline):
            raise ValueError("--emulate takes no time, so that --device, --json and --no-baseline do not go with it")
        unavailable = variant.cannot_be_emulated if emulate else variant.unavailable
        if (reason := unavailable(at)) is not None:
            raise ValueError(f"cannot run on {at}: {reason}")
        if (reason := gallery_unsupported(variant, case, dtype)) is not None:
            raise ValueError(reason)
    except (ValueError, TypeError, RuntimeError) as error:
        raise click.UsageError(f"{name}: {error}") from error
    if emulate:
        return cli_run.emulate_variant(variant, case, dtype, seed, given)
    return cli_run.bench_variant(GalleryProvider(variant, **given), case, dtype, at, baseline, seed, json_file)


def _variant(name: str) -> Variant:
    from onepass.tools.gallery import variant

    with usage_errors(ValueError):
        return variant(name)
