"""The mistakes of the published sources. Each is put into a variant, and gives a wrong result for an input that the
variant gets right. The variants run in a copy of the package, in a process of their own, since some mistakes crash it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lib.gallery import PACKAGE, run_changed_copy

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

START = """
import sys, torch
from onepass.tools.gallery import variant
from onepass.tools.gallery.native_calls import blocks_for
device = {device!r}
def judge(y, x):
    want = torch.softmax(x.double(), 1)
    sys.exit(0 if torch.allclose(y.double(), want, rtol=2e-3, atol=1e-7) else 3)
"""
RIGHT = 0

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


class Mistake(NamedTuple):
    variant: str
    file: str
    right: str
    mistaken: str
    script: str


INFINITY, FLT_MIN = "__int_as_float(0xff800000)", "__int_as_float(0x00800000)"  # the least positive normal float
ROUND_UP, ROUND_DOWN = "-(-rows // rows_per_block)", "rows // rows_per_block"
CUDA = [
    *(
        Mistake(f"cuda-{name}", "cuda_warp.cu", INFINITY, FLT_MIN, NEGATIVE)
        for name in ("warp", "block", "online", "auto")
    ),
    *(
        Mistake(f"cuda-{name}", "native_calls.py", ROUND_UP, ROUND_DOWN, FEW) for name in ("warp", "auto")
    ),  # an empty grid
    *(
        Mistake(f"cuda-{name}", f"cuda_{name}.cu", "x + row * x_stride", "x + int(row) * int(x_stride)", FAR)
        for name in ("warp", "block", "online")
    ),
]
TRITON = [
    Mistake(f"triton-{name}", f"triton_{name}.py", right, mistaken, script)
    for right, mistaken, script in (('other=-float("inf")', 'other=float("inf")', ODD), ("tl.int64", "tl.int32", FAR))
    for name in ("row", "persistent", "online")
]
CPU_INFINITY = {"threepass": "maximum = -std::numeric_limits<float>::infinity()", "online": "maximum = -infinity"}
CPU_FLT_MIN = "maximum = std::numeric_limits<float>::min()"
CPU = [
    *(Mistake(f"cpu-{name}", f"cpu_{name}.cpp", right, CPU_FLT_MIN, NEGATIVE) for name, right in CPU_INFINITY.items()),
    *(
        Mistake(f"cpu-{name}", "cpu.h", "in + row * x_stride", "in + int(row) * int(x_stride)", FAR)
        for name in CPU_INFINITY
    ),
]


def every(mistakes: list[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=[f"{m.variant}, {m.mistaken}" for m in mistakes])


def exit_status(tmp_path: Path, mistake: Mistake, device: str, mistaken: bool, **environment: str) -> int:
    change = (f"tools/gallery/{mistake.file}", mistake.right, mistake.mistaken) if mistaken else None
    script = START.format(device=device) + f"name = {mistake.variant!r}\n" + mistake.script
    done = run_changed_copy(tmp_path / ("mistaken" if mistaken else "right"), script, change, **environment)
    if not mistaken and done.returncode != RIGHT:
        raise AssertionError(done.stderr[-3000:] or done.returncode)
    return done.returncode


@pytest.mark.gpu
@every([*CUDA, *TRITON])
def test_on_a_gpu(mistake, tmp_path):
    assert exit_status(tmp_path, mistake, "cuda", mistaken=False) == RIGHT
    assert exit_status(tmp_path, mistake, "cuda", mistaken=True) != RIGHT


@needs_triton
@every(TRITON)
def test_in_the_triton_interpreter(mistake, tmp_path):
    assert exit_status(tmp_path, mistake, "cpu", mistaken=False, TRITON_INTERPRET="1") == RIGHT
    assert exit_status(tmp_path, mistake, "cpu", mistaken=True, TRITON_INTERPRET="1") != RIGHT


# The native library, except for the functions of the variant's own library.
LOOPS = """
import ctypes, onepass.native as native
class Loops:
    whole, own = native._library, ctypes.CDLL({library!r})
    def __getattr__(self, name):
        return getattr(self.own if hasattr(self.own, name) else self.whole, name)
native._library = Loops()
"""


@every(CPU)
def test_cpp(mistake, tmp_path):
    """The loops are compiled as they are and with the mistake, and called through ctypes."""
    for mistaken in (False, True):
        library = build_loops(tmp_path, mistake, mistaken)
        script = START.format(device="cpu") + f"name = {mistake.variant!r}\n"
        script += LOOPS.format(library=str(library))
        done = run_changed_copy(tmp_path / f"copy {mistaken}", script + mistake.script)
        assert (done.returncode == RIGHT) is not mistaken, done.stderr[-3000:]


def build_loops(folder: Path, mistake: Mistake, mistaken: bool) -> Path:
    from torch.utils.cpp_extension import include_paths

    source = folder / f"source {mistaken}"
    shutil.copytree(PACKAGE / "tools" / "gallery", source, ignore=shutil.ignore_patterns("__pycache__"))
    if mistaken:
        file = source / mistake.file
        text = file.read_text()
        assert mistake.right in text
        file.write_text(text.replace(mistake.right, mistake.mistaken))
    library = folder / f"library-{mistaken}.so"
    includes = [word for path in include_paths() for word in ("-isystem", path)]
    compiler = os.environ.get("CXX", "g++")
    name = mistake.variant.replace("-", "_") + ".cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", *includes, str(source / name), "-o", str(library)],
        check=True,
    )
    assert ctypes.CDLL(str(library))
    return library


def test_the_grid_is_never_empty_and_covers_every_row():
    from onepass.tools.gallery.native_calls import blocks_for

    for rows in range(1, 40):
        for rows_per_block in (1, 2, 8, 32):
            blocks = blocks_for(rows, rows_per_block)
            assert blocks * rows_per_block >= rows > (blocks - 1) * rows_per_block


@pytest.mark.gpu
def test_fewer_blocks_than_rows():
    """More rows than blocks: a launch of one block per row never enters the loops over rows twice."""
    from onepass.tools.gallery import variant

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
    prefix = f"{SANITIZER} --tool racecheck --error-exitcode 9"
    done = run_changed_copy(tmp_path / "right", RACE.format(name=name), prefix=prefix)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "RACECHECK SUMMARY: 0 hazards" in done.stdout
    if name != "cuda-warp":
        change = (f"tools/gallery/{name.replace('-', '_')}.cu", "partials.sum", "partials.maximum")
        done = run_changed_copy(tmp_path / "mistaken", RACE.format(name=name), change, prefix)
        assert done.returncode == 9, done.stdout[-3000:]
        assert "hazard" in done.stdout
