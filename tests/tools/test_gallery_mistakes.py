"""The mistakes of the published sources: each put into a rung, on an input that the mistaken form gets wrong and the
rung gets right. The rungs run in a copy of the package, in a process of their own, as some mistakes end it.
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

from lib.gallery import PACKAGE, run_copy

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

START = """
import sys, torch
from onepass.tools.gallery import rung
from onepass.tools.gallery.cuda import blocks_for
device = {device!r}
def right(y, x):
    want = torch.softmax(x.double(), 1)
    sys.exit(0 if torch.allclose(y.double(), want, rtol=2e-3, atol=1e-7) else 3)
"""
RIGHT, WRONG = 0, 3

# Inputs ---------------------------------------------------------------------------------------------------------

NEGATIVE = "x = torch.randn(5, 300, device=device) - 200; right(rung(name)(x), x)"
ODD = "x = torch.randn(5, 300, device=device); right(rung(name)(x), x)"
FEW = "x = torch.randn(3, 300, device=device); right(rung(name)(x, out=torch.full_like(x, -1)), x)"
# Rows 2**30 + 8 elements apart: the third begins behind the 2**31st element. Only the rows' own pages are touched.
FAR = """
store = torch.empty(4 * (2**30 + 8) + 600, dtype=torch.float16, device=device)
x, y = (store.as_strided((5, 300), (2**30 + 8, 1), offset) for offset in (0, 300))
x.copy_(torch.randn(5, 300, device=device)); y.fill_(-1)
right(rung(name)(x, out=y), x)
"""


class Mistake(NamedTuple):
    rung: str
    file: str
    right: str
    mistaken: str
    script: str


LEAST = "__int_as_float(0x00800000)"  # FLT_MIN, the least positive normal float
CUDA = {
    "cuda-warp, FLT_MIN": Mistake("cuda-warp", "cuda_warp.cu", "__int_as_float(0xff800000)", LEAST, NEGATIVE),
    "cuda-block, FLT_MIN": Mistake("cuda-block", "cuda_warp.cu", "__int_as_float(0xff800000)", LEAST, NEGATIVE),
    "cuda-online, FLT_MIN": Mistake("cuda-online", "cuda_warp.cu", "__int_as_float(0xff800000)", LEAST, NEGATIVE),
    "cuda-auto, FLT_MIN": Mistake("cuda-auto", "cuda_warp.cu", "__int_as_float(0xff800000)", LEAST, NEGATIVE),
    "cuda-warp, empty grid": Mistake(
        "cuda-warp", "cuda.py", "-(-rows // rows_per_block)", "rows // rows_per_block", FEW
    ),
    "cuda-auto, empty grid": Mistake(
        "cuda-auto", "cuda.py", "-(-rows // rows_per_block)", "rows // rows_per_block", FEW
    ),
    **{
        f"cuda-{name}, 32-bit offsets": Mistake(
            f"cuda-{name}", f"cuda_{name}.cu", "x + row * x_stride", "x + int(row) * int(x_stride)", FAR
        )
        for name in ("warp", "block", "online")
    },
}
TRITON = {
    **{
        f"triton-{name}, +inf padding": Mistake(
            f"triton-{name}", f"triton_{name}.py", 'other=-float("inf")', 'other=float("inf")', ODD
        )
        for name in ("row", "persistent", "online")
    },
    **{
        f"triton-{name}, 32-bit offsets": Mistake(f"triton-{name}", f"triton_{name}.py", "tl.int64", "tl.int32", FAR)
        for name in ("row", "persistent", "online")
    },
}
CPU = {
    f"cpu-{name}, {what}": Mistake(f"cpu-{name}", *change, script)
    for name in ("threepass", "online")
    for what, change, script in (
        (
            "FLT_MIN",
            (
                f"cpu_{name}.cpp",
                "maximum = -std::numeric_limits<float>::infinity()" if name == "threepass" else "maximum = -infinity",
                "maximum = std::numeric_limits<float>::min()",
            ),
            NEGATIVE,
        ),
        ("32-bit offsets", ("cpu.h", "in + row * x_stride", "in + int(row) * int(x_stride)"), FAR),
    )
}


def verdict(tmp_path: Path, mistake: Mistake, device: str, mistaken: bool, **environment: str) -> int:
    change = (f"tools/gallery/{mistake.file}", mistake.right, mistake.mistaken) if mistaken else None
    script = START.format(device=device) + f"name = {mistake.rung!r}\n" + mistake.script
    done = run_copy(tmp_path / ("mistaken" if mistaken else "right"), script, change, **environment)
    if not mistaken and done.returncode != RIGHT:
        raise AssertionError(done.stderr[-3000:] or done.returncode)
    return done.returncode


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", {**CUDA, **TRITON}.values(), ids={**CUDA, **TRITON}.keys())
def test_on_a_gpu(mistake, tmp_path):
    assert verdict(tmp_path, mistake, "cuda", mistaken=False) == RIGHT
    assert verdict(tmp_path, mistake, "cuda", mistaken=True) != RIGHT


@needs_triton
@pytest.mark.parametrize("mistake", TRITON.values(), ids=TRITON.keys())
def test_triton_s_interpreter(mistake, tmp_path):
    assert verdict(tmp_path, mistake, "cpu", mistaken=False, TRITON_INTERPRET="1") == RIGHT
    assert verdict(tmp_path, mistake, "cpu", mistaken=True, TRITON_INTERPRET="1") != RIGHT


# The native library, but for what the library of a rung has.
LOOPS = """
import ctypes, onepass.native as native
class Loops:
    whole, own = native._library, ctypes.CDLL({library!r})
    def __getattr__(self, name):
        return getattr(self.own if hasattr(self.own, name) else self.whole, name)
native._library = Loops()
"""


@pytest.mark.parametrize("mistake", CPU.values(), ids=CPU.keys())
def test_cpp(mistake, tmp_path):
    """The loops are compiled anew, as they are and with the mistake, and called through ctypes."""
    for mistaken in (False, True):
        library = compiled(tmp_path, mistake, mistaken)
        script = START.format(device="cpu") + f"name = {mistake.rung!r}\n"
        script += LOOPS.format(library=str(library))
        done = run_copy(tmp_path / f"copy {mistaken}", script + mistake.script)
        assert (done.returncode == RIGHT) is not mistaken, done.stderr[-3000:]


def compiled(folder: Path, mistake: Mistake, mistaken: bool) -> Path:
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
    name = mistake.rung.replace("-", "_") + ".cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", *includes, str(source / name), "-o", str(library)],
        check=True,
    )
    assert ctypes.CDLL(str(library))
    return library


def test_the_grid_is_never_empty_and_covers_every_row():
    from onepass.tools.gallery.cuda import blocks_for

    for rows in range(1, 40):
        for rows_per_block in (1, 2, 8, 32):
            blocks = blocks_for(rows, rows_per_block)
            assert blocks * rows_per_block >= rows > (blocks - 1) * rows_per_block


@pytest.mark.gpu
def test_a_long_grid_is_cut_and_its_rows_are_taken_by_the_loops():
    """More rows than blocks: the loops over rows, which a launch of one block a row never enters twice."""
    from onepass.tools.gallery import rung

    x = torch.randn(1000, 77, device="cuda")
    for name in ("cuda-warp", "cuda-block", "cuda-online", "cuda-auto"):
        for blocks in (1, 7):
            torch.testing.assert_close(rung(name)(x, blocks=blocks), torch.softmax(x, 1))


RACE = """
import torch
from onepass.tools.gallery import rung
x = torch.randn(6, 500, device="cuda")
y = rung({name!r})(x, blocks=2)
torch.cuda.synchronize()
assert torch.allclose(y, torch.softmax(x, 1))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="compute-sanitizer is not here")
@pytest.mark.parametrize("name", ["cuda-warp", "cuda-block", "cuda-online"])
def test_no_race_on_shared_memory(name, tmp_path):
    """racecheck is silent; with one array for both reductions, as published, it is not."""
    prefix = f"{SANITIZER} --tool racecheck --error-exitcode 9"
    done = run_copy(tmp_path / "right", RACE.format(name=name), PREFIX=prefix)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "RACECHECK SUMMARY: 0 hazards" in done.stdout
    if name != "cuda-warp":
        change = (f"tools/gallery/{name.replace('-', '_')}.cu", "partials.sum", "partials.maximum")
        done = run_copy(tmp_path / "mistaken", RACE.format(name=name), change, PREFIX=prefix)
        assert done.returncode == 9, done.stdout[-3000:]
        assert "hazard" in done.stdout
