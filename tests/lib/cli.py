"""The command line in this process, in processes of their own, and compared with transcripts.

A transcript is a file in tests/tools/snapshots: commands after "$ onepass ", each followed by its lines on stdout, its
lines on stderr after "! ", and its exit status if that is not 0. EXPECTTEST_ACCEPT=1 writes what they print now.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from onepass.tools.cli import cli

SNAPSHOTS = Path(__file__).parents[1] / "tools" / "snapshots"
PROMPT = "$ onepass "
OF_THIS_MACHINE = re.compile(
    r"(?<=there are )\d+(?= GPUs)|(?<=under Triton's interpreter).*|(?<=not available: needs ).*"
)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def command(*arguments: str, python: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *python, "-m", "onepass", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, **options)


def session(*lines: str) -> str:
    """The transcript of these command lines."""
    text = ""
    for line in lines:
        result = call(*shlex.split(line))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        said = "".join(f"! {text}\n" for text in result.stderr.splitlines())
        status = f"[exit {result.exit_code}]\n" if result.exit_code else ""
        text += f"{PROMPT}{line}\n{OF_THIS_MACHINE.sub('...', result.stdout + said)}{status}"
    return text


def replay(name: str) -> None:
    """Run the commands of a transcript, which must print what it says."""
    lines = (SNAPSHOTS / f"{name}.txt").read_text().splitlines()
    assert_snapshot(name, session(*(line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))))


def assert_snapshot(name: str, text: str) -> None:
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        file.write_text(text)
    assert text == file.read_text()
