"""What the gallery's tests share: the rungs that run here, and a broken copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.tools.gallery import RUNGS

PACKAGE = Path(onepass.__file__).parent
HALVES = (torch.float16, torch.bfloat16)


def rungs_at_hand() -> list[Any]:
    """(rung, device) of every rung that runs here; Triton's on the CPU too, if its interpreter is switched on."""
    pairs = []
    for name, rung in RUNGS.items():
        if rung.unavailable(torch.device("cpu")) is None:
            pairs.append(pytest.param(rung, "cpu", id=f"{name}-cpu"))
        if torch.cuda.is_available() and rung.unavailable(torch.device("cuda", 0)) is None:
            pairs.append(pytest.param(rung, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return pairs


every_rung = pytest.mark.parametrize(("rung", "device"), rungs_at_hand())


def run_copy(folder: Path, script: str, change: tuple[str, str, str] | None = None, **environment: str) -> Any:
    """Runs a script on a copy of the package, in which the text of one file may be changed: (file, old, new)."""
    copy = folder / "onepass"
    shutil.copytree(PACKAGE, copy)
    if change is not None:
        file, old, new = change
        text = (copy / file).read_text()
        assert old in text, f"{file} has no {old!r}"
        (copy / file).write_text(text.replace(old, new))
    variables = {**os.environ, "PYTHONPATH": str(folder), **environment}
    command = [sys.executable, "-c", script]
    if "PREFIX" in environment:
        command = [*environment["PREFIX"].split(), *command]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder, timeout=600)
