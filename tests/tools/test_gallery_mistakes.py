"""The mistakes of the published sources. Each is put into a variant, and gives a wrong result for an input that the
variant gets right. The variants run in a copy of the package, in a process of their own, since some mistakes crash it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from lib.gallery import copy_package, needs_triton, run_copy
from lib.scripts import Forks, forks
from lib.support import thin
from onepass.tools.gallery import variant
from onepass.tools.gallery.cuda_launches import blocks_for
from onepass.tools.gallery.mistakes import MISTAKES, Change

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

START = """
import sys, torch
from onepass.tools.gallery import variant
from onepass.tools.gallery.cuda_launches import blocks_for
device = {device!r}
def judge(y, x):
    want = torch.softmax(x.double(), 1)
    sys.exit(0 if torch.allclose(y.double(), want, rtol=2e-3, atol=1e-7) else 3)
"""
# Inputs ---------------------------------------------------------------------------------------------------------

NEGATIVE = "x = torch.randn(5, 300, device=device) - 200; judge(variant(name)(x), x)"
ODD = "x = torch.randn(5, 300, device=device); judge(variant(name)(x), x)"
FEW = "x = torch.randn(3, 300, device=device); judge(variant(name)(x, out=torch.full_like(x, -1)), x)"
# Rows 2**30 + 8 elements apart: the third begins after element 2**31. Only the pages of the rows are touched.
FAR = """
store = torch.empty(4 * (2**30 + 8) + 600, dtype=torch.float16, device=device)
x, y = (store.as_strided((5, 300), (2**30 + 8, 1), offset) for offset in (0, 300))
x.copy_(torch.randn(5, 300, device=device)); y.fill_(-1)
judge(variant(name)(x, out=y), x)
"""


SCRIPTS = {"least-maximum": NEGATIVE, "padding": ODD, "empty-grid": FEW, "offsets": FAR}
CHANGES = [(change, SCRIPTS[name]) for name in SCRIPTS for change in MISTAKES[name].changes]
CUDA, TRITON, CPU = ([c for c in CHANGES if c[0].variant.startswith(of)] for of in ("cuda", "triton", "cpu"))


def every(changes: list[tuple[Change, str]], nth: int = 1) -> pytest.MarkDecorator:
    """All of them; all but every nth are slow."""
    ids = [f"{change.variant}, {change.mistaken}" for change, _ in changes]
    return pytest.mark.parametrize("mistake", thin(changes, nth), ids=ids)


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Forks]:
    with forks("torch, triton", TRITON_INTERPRET="1") as made:
        yield made


def check(processes: Forks, mistake: tuple[Change, str], folder: Path, device: str, prepare: str = "") -> None:
    """Run the script with the variant as it is, and with the mistake, which gives a wrong result or crashes."""
    made_up, script = mistake
    script = START.format(device=device) + f"name = {made_up.variant!r}\n" + prepare + script
    change = (f"tools/gallery/{made_up.file}", made_up.right, made_up.mistaken)
    for made in (None, change):
        at = folder / str(made is None)
        path = copy_package(at, made)
        if prepare:
            includes = [word for path in include_paths() for word in ("-isystem", path)]
            compiler = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-O1", "-fPIC", "-shared"]
            source = path / "tools/gallery" / f"{made_up.variant.replace('-', '_')}.cpp"
            subprocess.run([*compiler, *includes, str(source), "-o", str(at / "loops.so")], check=True)
        (done,) = processes.run(at, script)
        assert (done.status == 0) == (made is None), done.errors[-3000:]


@pytest.mark.gpu
@every([*CUDA, *TRITON])
def test_on_a_gpu(processes, mistake, tmp_path):
    check(processes, mistake, tmp_path, "cuda")


@needs_triton
@every(TRITON, 6)
def test_in_the_triton_interpreter(interpreting, mistake, tmp_path):
    check(interpreting, mistake, tmp_path, "cpu")


# The native library, except for the functions of the variant, which is compiled for this test.
LOOPS = """
import ctypes, onepass.native as native
class Loops:
    whole, own = native._library, ctypes.CDLL("./loops.so")
    def __getattr__(self, name):
        return getattr(self.own if hasattr(self.own, name) else self.whole, name)
native._library = Loops()
"""


@every(CPU, 4)
def test_cpp(processes, mistake, tmp_path):
    check(processes, mistake, tmp_path, "cpu", LOOPS)


def test_the_grid_is_never_empty_and_covers_every_row():
    for rows in range(1, 40):
        for rows_per_block in (1, 2, 8, 32):
            blocks = blocks_for(rows, rows_per_block)
            assert blocks * rows_per_block >= rows > (blocks - 1) * rows_per_block


@pytest.mark.gpu
def test_fewer_blocks_than_rows():
    """More rows than blocks: a launch of one block per row never enters the loops over rows twice."""
    x = torch.randn(1000, 77, device="cuda")
    for name in ("cuda-warp", "cuda-block", "cuda-online", "cuda-auto"):
        for blocks in (1, 7):
            torch.testing.assert_close(variant(name)(x, blocks=blocks), torch.softmax(x, 1))


RACE = """
import torch
from onepass.tools.gallery import variant
x = torch.randn(6, 500, device="cuda")
y = variant({name!r})(x, blocks=2)
torch.cuda.synchronize()
assert torch.allclose(y, torch.softmax(x, 1))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="compute-sanitizer is not here")
@pytest.mark.parametrize("name", ["cuda-warp", "cuda-block", "cuda-online"])
def test_no_race_on_shared_memory(name, tmp_path):
    """racecheck finds nothing, but hazards with one array for both reductions, as published."""
    racecheck = SANITIZER, "--tool", "racecheck", "--error-exitcode", "9"
    copy_package(tmp_path / "right")
    done = run_copy(tmp_path / "right", RACE.format(name=name), *racecheck)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "RACECHECK SUMMARY: 0 hazards" in done.stdout
    for change in MISTAKES["race"].changes if name != "cuda-warp" else ():
        if change.variant != name:
            continue
        copy_package(tmp_path / "mistaken", (f"tools/gallery/{change.file}", change.right, change.mistaken))
        done = run_copy(tmp_path / "mistaken", RACE.format(name=name), *racecheck)
        assert done.returncode == 9, done.stdout[-3000:]
        assert "hazard" in done.stdout
