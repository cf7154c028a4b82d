"""Commands and their output, recorded in files of tests/tools/snapshots. EXPECTTEST_ACCEPT=1 records the output
anew."""

import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from onepass.tools.cli import cli

SNAPSHOTS = Path(__file__).parents[1] / "tools" / "snapshots"
PROMPT = "$ onepass "
ERROR = "  # error: "
OF_THIS_MACHINE = (
    r"(?<=there are )\d+(?= GPUs)|the Triton engine serves CPU tensors.*|triton is not installed.*"
    r"|(?<=not available: needs ).*"
)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def command(*arguments: str, python: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    whole = [sys.executable, *python, "-m", "onepass", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, **options)


def replay(name: str) -> None:
    """Runs the commands of a transcript file, which must print the recorded output."""
    lines = (SNAPSHOTS / f"{name}.txt").read_text().splitlines()
    commands = [line.removeprefix(PROMPT).partition(ERROR)[0] for line in lines if line.startswith(PROMPT)]
    assert_snapshot(name, session(*commands))


def assert_snapshot(name: str, text: str) -> None:
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        file.write_text(text)
    got, want = (lines.splitlines(keepends=True) for lines in (text, file.read_text()))
    assert got == want, "".join(difflib.unified_diff(want, got, file.name, "now"))


def session(*commands: str, hide: str = OF_THIS_MACHINE) -> str:
    """Each command with its lines on stdout, its lines on stderr after "! ", and its exit status if that is not 0.

    If the only output is one line "onepass: ..." on stderr, with the exit status 2, it is on the line of its command.
    JSON is printed in lines of 160 characters. "..." stands for text that the regular expression `hide` matches.
    """
    lines = []
    for command in commands:
        result = call(*shlex.split(command))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        error = re.fullmatch("onepass: (.+)\n", result.stderr)
        if error and (result.exit_code, result.stdout) == (2, ""):
            lines.append(f"{PROMPT}{command}{ERROR}{error[1]}")
            continue
        stdout = [line.rstrip() for line in result.stdout.splitlines()]
        if result.stdout.startswith("{"):
            stdout = textwrap.wrap(json.dumps(json.loads(result.stdout)), 160)
        lines += [f"{PROMPT}{command}", *stdout]
        lines += [f"! {line}" for line in result.stderr.splitlines()]
        if result.exit_code:
            lines.append(f"exit status {result.exit_code}")
    return "".join(f"{re.sub(hide, '...', line)}\n" for line in lines)


@pytest.fixture
def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """`fake_terminal(module, width)` makes the commands of a module print to a terminal, and returns its screen."""

    def install(module: str, width: int, colours: str | None = None) -> io.StringIO:
        screen = io.StringIO()
        console = Console(file=screen, width=width, force_terminal=True, color_system=colours, highlight=False)
        for name in ("terminal", "console"):  # the package has a command of the module's name
            monkeypatch.setattr(sys.modules[module], name, lambda: console, raising=False)
        return screen

    return install
