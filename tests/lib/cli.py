"""The command line in this process and in processes of their own."""

import shlex
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from onepass.tools.cli import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def command(*arguments: str, python: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *python, "-m", "onepass", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, **options)


def session(*lines: str) -> str:
    """What a user sees who enters these command lines: stdout, then stderr, then the exit status if it is not 0."""
    text = ""
    for line in lines:
        result = call(*shlex.split(line))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        status = f"[exit {result.exit_code}]\n" if result.exit_code else ""
        text += f"$ onepass {line}\n{result.stdout}{result.stderr}{status}"
    return text


def errors(*lines: str) -> str:
    """What is wrong with each of these command lines: a message of one line, exit status 2, and no output."""
    text = ""
    for line in lines:
        result = call(*shlex.split(line))
        assert isinstance(result.exception, SystemExit), result.exception
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
        assert result.stderr.startswith("onepass: ")
        text += f"{line}\n    {result.stderr.removeprefix('onepass: ')}"
    return text
