"""The gallery variants that run on this machine, and copies of the package with a change."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.tools.emulator import missing
from onepass.tools.gallery import VARIANTS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_emulator = pytest.mark.skipif(bool(missing()), reason=f"the emulator finds {missing()}")
PACKAGE = Path(onepass.__file__).parent


def variants_here() -> list[Any]:
    """(variant, device) for every variant of rows that runs here, Triton's also on the CPU if its interpreter is on."""
    pairs = []
    for name, variant in VARIANTS.items():
        if variant.computes != "rows":
            continue
        if variant.unavailable(torch.device("cpu")) is None:
            pairs.append(pytest.param(variant, "cpu", id=f"{name}-cpu"))
        if torch.cuda.is_available() and variant.unavailable(torch.device("cuda", 0)) is None:
            pairs.append(pytest.param(variant, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return pairs


every_variant = pytest.mark.parametrize(("variant", "device"), variants_here())


def copy_package(folder: Path, change: tuple[str, str, str] | None = None) -> Path:
    """Copies the package to a folder. `change`, (file, old, new), replaces text in one file."""
    copy = folder / "onepass"
    shutil.copytree(PACKAGE, copy)
    if change is not None:
        file, old, new = change
        text = (copy / file).read_text()
        assert old in text, f"{file} has no {old!r}"
        (copy / file).write_text(text.replace(old, new))
    return copy


def run_copy(folder: Path, script: str, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with the copy of the package in `folder`."""
    command = [*prefix, sys.executable, "-c", script]
    variables = {**os.environ, "PYTHONPATH": str(folder), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder, timeout=600)
