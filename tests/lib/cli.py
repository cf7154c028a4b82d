"""What the tests of the command line share."""

import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onepass.tools.bench.cases import Case, Suite
from onepass.tools.bench.suites import SUITES
from onepass.tools.cli import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def command(*arguments: str, python: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *python, "-m", "onepass", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, **options)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that takes no time, on a machine that is never disturbed."""
    monkeypatch.setattr("onepass.tools.bench.run.spread", lambda stats: None)
    monkeypatch.setattr("onepass.tools.bench.run.slow_copies", lambda rows: {})
    monkeypatch.setattr("onepass.tools.bench.run.mark", lambda rows: None)
    cases = (Case("tiny", "small", (4, 33), quick=("cpu",)), Case("tiny", "maps", (1, 5, 4, 4), dim=1))
    monkeypatch.setitem(SUITES, "tiny", Suite("tiny", "two small cases", cases))
