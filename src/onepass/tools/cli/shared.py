"""What several commands need: the library, `--json`, names with commas, dtypes, whole numbers, a writable file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onepass.tools.bench.results import STDOUT

if TYPE_CHECKING:
    from rich.console import Console


class Command(click.Command):
    """A command that needs the library. It is loaded once the arguments are right: `--help` does without torch."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from onepass import softmax  # noqa: F401, the use of any name loads all of them
        except ImportError as error:
            raise click.ClickException(str(error).removeprefix("onepass: ")) from error
        return super().invoke(ctx)


# JSON ------------------------------------------------------------------------------------------------------------


def _json_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """`explain --json 8 8` gives the option an 8 that was meant as a size: a file is known by a dot or a slash."""
    if value and value != STDOUT and "." not in value and "/" not in value:
        raise click.BadParameter(
            f"--json takes a FILE with a dot or a slash in its name, got {value!r}; without a FILE write it last"
        )
    writable(None if value == STDOUT else value)
    return value


def json_option(what: str) -> Callable[[Any], Any]:
    """`--json` alone prints `what` as JSON and nothing else; `--json FILE` writes it beside the usual output."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=STDOUT,
        callback=_json_file,
        metavar="[FILE]",
        help=f"Print {what} as JSON and nothing else; with FILE write it there, and print what is printed without.",
    )


def answer(file: str | None, data: Callable[[], Any], show: Callable[[], None]) -> None:
    """What a command ends with: `show()` unless the JSON goes to stdout, and the JSON where it was asked for."""
    if file != STDOUT:
        show()
    if file is None:
        return
    text = json.dumps(data(), indent=2)
    if file == STDOUT:
        click.echo(text)
        return
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


# Arguments -------------------------------------------------------------------------------------------------------


class Names(click.ParamType):
    """One or several names with commas between: `--only a,b` is `--only a --only b`."""

    name = "name"

    def __init__(self, of: Callable[[str], str] = str):
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.of(part.strip()) for part in value.split(",") if part.strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)


def flat(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in values for name in names))


def dtype_of(text: str) -> str:
    from onepass.tools.bench.cases import dtype_name

    return dtype_name(text)


def ints(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{what} takes whole numbers, got {text!r}") from None


def writable(file: str | None) -> None:
    """Found out before a minute of measuring, not after."""
    if not file:
        return
    folder = os.path.dirname(os.path.abspath(file))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise click.UsageError(f"{file}: cannot be written")


def finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"takes a finite number, got {value}")
    return value


def terminal() -> Console | None:
    """Where a terminal shows colours; None on a pipe, and without rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)
