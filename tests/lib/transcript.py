"""Commands and the lines that they print, for tests that compare whole outputs."""

import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from onepass.tools.cli import cli


def transcript(*commands: str, hide: str = r"(?!)") -> str:
    """Each command with its lines on stdout, its lines on stderr after "! ", and its exit status if that is not 0.

    What the regular expression `hide` matches is printed as "...".
    """
    lines = []
    for command in commands:
        result = CliRunner().invoke(cli, shlex.split(command))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        lines += [f"$ onepass {command}", *result.stdout.splitlines(), *(f"! {x}" for x in result.stderr.splitlines())]
        if result.exit_code:
            lines.append(f"exit status {result.exit_code}")
    return wrap([re.sub(hide, "...", line) for line in lines])


def errors(*commands: str) -> str:
    """Each command with its error, which is one line on stderr; stdout is empty and the exit status 2."""
    lines = []
    for command in commands:
        result = CliRunner().invoke(cli, shlex.split(command))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (command, result.output)
        assert result.stderr.startswith("onepass: ")
        lines += [command, f"  {result.stderr.removeprefix('onepass: ').rstrip()}"]
    return wrap(lines)


def wrap(lines: list[str]) -> str:
    """The lines as one text; long ones go on in the next line after four spaces."""
    options: dict[str, Any] = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return "".join(f"{part.rstrip()}\n" for line in lines for part in textwrap.wrap(line, 116, **options) or [""])


@pytest.fixture
def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """`fake_terminal(module, width)` makes the commands of a module print to a terminal, and returns its screen."""

    def install(module: str, width: int, colours: str | None = None) -> io.StringIO:
        screen = io.StringIO()
        console = Console(file=screen, width=width, force_terminal=True, color_system=colours, highlight=False)
        monkeypatch.setattr(sys.modules[module], "terminal", lambda: console)  # the package has a command of that name
        return screen

    return install
