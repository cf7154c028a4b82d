"""Python processes that tests start, and the project's scripts as modules."""

import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

from .paths import ROOT


def run_python(*arguments: Any, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """This Python with arguments (`-c`, code; a script), and more variables in its environment."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout)


def python_output(code: str, **options: Any) -> str:
    """What `code` prints, which does not fail."""
    done = run_python("-c", code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def load_script(name: str) -> ModuleType:
    """One of the project's scripts as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
