"""What several commands need: names with commas, dtypes, whole numbers, a file that can be written."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console


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
    from onepass.bench.cases import dtype_name

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
