"""What a user is told who builds without something that the build needs, and what make and pytest say of themselves."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lib.paths import ROOT

# Runs setup.py where `{0}` was done to this Python.
RUN = """
import importlib.metadata, importlib.util, runpy, sys
{0}
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", "lib"]
runpy.run_path("setup.py", run_name="__main__")
"""
NO_TORCH = """
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
OLD = "importlib.metadata.version = lambda name: '65.5.0'"


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        (OLD, None, "onepass: needs setuptools 77 or later, got 65.5.0: run `pip install -U setuptools`"),
        (NO_TORCH, None, "onepass: needs torch 2.10 or later to be built: install it, then `pip install --no-build"),
        ("", "/nowhere", "onepass: needs a C++ compiler, found no g++: install g++, or name one in CXX"),
    ],
    ids=["old setuptools", "no torch", "no g++"],
)
def test_what_the_build_lacks_is_said_in_a_sentence(change: str, path: str | None, words: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    environment |= {"PATH": path} if path else {}
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    run = [sys.executable, "-c", RUN.format(change)]
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(words)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set")
def test_all_instruction_sets_compile(tmp_path: Path) -> None:
    """A build that stays on its machine has those of the machine alone."""
    environment = os.environ | {"ONEPASS_CPU_SETS": "all", "CXXFLAGS": "-O0"}
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, *["setup.py", "-q", "build_ext", "--build-lib", "lib"]],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    built = (tmp_path / "lib" / "onepass" / "_native.so").read_bytes()
    assert all(isa in built for isa in (b"baseline", b"avx2", b"avx512"))


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    listed = re.findall(r"^make ([\w-]+) ", done.stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert set(listed) == set(phony[1].split()) - {"help"}
