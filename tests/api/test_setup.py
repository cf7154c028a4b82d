"""What a user is told who builds without something that the build needs, and what make and pytest say of themselves."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import onepass
from lib.paths import ROOT
from onepass import native

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
    """A build that stays on its machine has two of them."""
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


NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # of manylinux_2_28


def imports() -> list[tuple[str, tuple[int, ...], str]]:
    """What the native core takes from elsewhere: the library whose version is asked for, or "", that, and the name."""
    if not shutil.which("objdump"):
        pytest.skip("no objdump here")
    table = subprocess.run(["objdump", "-T", str(native.PATH)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*UND\*\s+\w+ +(?:\((\w+?)_([\d.]+)\)|Base)? *(\S+)$", table, re.MULTILINE)
    return [(library, tuple(map(int, version.split("."))) if library else (), name) for library, version, name in found]


def test_only_c_functions_are_taken_from_torch() -> None:
    taken = [name for library, _, name in imports() if not library and not name.startswith(("_ITM_", "__gmon_"))]
    assert taken
    assert not [name for name in taken if not name.startswith(("aoti_torch_", "torch_"))]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc's first version is another")
def test_a_build_runs_with_older_libraries() -> None:
    if (max(map(int, re.findall(rb"GCC: \(.*?\) (\d+)", native.PATH.read_bytes())), default=99)) > 12:
        pytest.skip("not built by a GCC that makes releases")
    assert not [found for found in imports() if found[0] and found[1] > NEWEST[found[0]]]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_the_source_distribution_can_be_tested_and_built_from(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) - held <= {".gitignore"}
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {onepass.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    latest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest
    assert latest[1] == onepass.__version__


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    listed = re.findall(r"^make ([\w-]+) ", done.stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert set(listed) == set(phony[1].split()) - {"help"}
