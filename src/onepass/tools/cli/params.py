"""What several commands share: loading the library, `--json`, lists of names, dtypes, whole numbers, writable files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from onepass.tools.bench.cases import dtype_name
from onepass.tools.bench.results import STDOUT


class Command(click.Command):
    """A command that needs the library, which is loaded after the arguments are parsed: `--help` needs no torch."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from onepass import softmax  # noqa: F401, the use of any name loads all of them
        except ImportError as error:
            raise click.ClickException(str(error).removeprefix("onepass: ")) from error
        return super().invoke(ctx)


def _json_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """In `explain --json 8 8` the option takes an 8 that was meant as a size, so a file needs a dot or a slash."""
    if value and value != STDOUT and "." not in value and "/" not in value:
        raise click.BadParameter(
            f"--json takes a FILE with a dot or a slash in its name, got {value!r}; without a FILE write it last"
        )
    check_writable(None if value == STDOUT else value)
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
        help=f"Print {what} as JSON and nothing else; with FILE, write it there beside the usual output.",
    )


def answer(file: str | None, data: Callable[[], Any], show: Callable[[], None]) -> None:
    """Ends a command: calls `show()` unless the JSON goes to stdout, and writes the JSON if it was requested."""
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


class Names(click.ParamType):
    """One or several names separated by commas: `--only a,b` is `--only a --only b`."""

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


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """What the library raises of these kinds is an error of the user: its message, without the library's name."""
    try:
        yield
    except kinds as error:
        raise click.UsageError(re.sub(r"^onepass(\.\w+\(\))?: ", "", str(error))) from error


def parse_dtype(text: str) -> str:
    with usage_errors(ValueError):
        return dtype_name(text)


def parse_ints(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{what} takes whole numbers, got {text!r}") from None


def check_writable(file: str | None) -> None:
    """Raises before a minute of measuring, not after."""
    if not file:
        return
    folder = os.path.dirname(os.path.abspath(file))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise click.UsageError(f"{file}: cannot be written")


def check_finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"takes a finite number, got {value}")
    return value
