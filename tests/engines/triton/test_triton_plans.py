"""The Triton engine: its plans, where it is available, and its kernels compiled for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import onepass
import onepass.triton as engine
from lib.triton import BF16, F16, F32, F64, TIERS, name_of, needs_triton, process, unavailable
from lib.triton_compile import POINTERS, TARGETS, Properties, assert_no_spills, compiled
from onepass.triton import plan

pytestmark = needs_triton


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton compiles."""
    yield from process("0")


# ------------------------------------------------------------------------------------- plans and availability


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "tier", "tile"),
    [
        (1 << 20, 16, F32, "row", (128, 16)),
        (5, 16, F32, "row", (128, 16)),
        (4096, 781, F32, "row", (1, 1024)),
        (4096, 32768, BF16, "row", (1, 32768)),
        (4096, 32769, BF16, "online", (1, 8192)),
        (64, 8193, F64, "online", (1, 512)),
        (1, 1, F64, "row", (1024, 1)),
    ],
)
def test_plan(rows, n, dtype, tier, tile):
    got = plan("softmax", rows, n, dtype, dtype, None)
    assert (got.tier, (got.rows, got.block)) == (tier, tile)
    assert got.grid == -(-rows // tile[0])
    got.check(n)
    assert set(got.as_dict()) == {"tier", "block", "rows", "depth", "num_warps", "num_stages", "grid"}


def test_plan_keeps_a_launch_below_two_to_the_32_threads():
    got = plan("logsumexp", 2**33, 4096, F32, F32)
    assert got.grid < 2**32 / (got.num_warps * 32) <= got.grid + 1


def test_plan_counts_threads_in_the_warps_of_the_device():
    class Wide:
        warp_size = 64

    for n in (16, 1000, 30000, 100000):
        narrow, wide = plan("softmax", 64, n, F32, F32), plan("softmax", 64, n, F32, F32, Wide)
        assert wide.num_warps == max(1, narrow.num_warps // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 32}, "needs block >= n = 37"),
        ({"block": 48}, "power of two, got 48"),
        ({"depth": 2}, "depth 1"),
        ({"tier": "column"}, "'row' or 'online', got 'column'"),
        ({"tier": "online", "rows": 2}, "one row a program"),
        ({"grid": 0}, "at least 1, got 0"),
    ],
)
def test_plan_that_cannot_serve_is_refused(change, message):
    forced = dataclasses.replace(TIERS["row"], **change)
    x = torch.zeros(2, 37)
    with pytest.raises(ValueError, match=message):
        engine.forward("softmax", x, torch.empty_like(x), (1,), plan=forced)


def test_unknown_function_is_refused():
    with pytest.raises(ValueError, match="unknown function 'softplus'"):
        plan("softplus", 1, 1, F32, F32)


def test_unavailable_gives_the_reason(compiling):
    assert "TRITON_INTERPRET=1" in compiling(unavailable, "cpu")
    assert "got device type 'meta'" in engine.unavailable(torch.device("meta"))
    if not torch.cuda.is_available():
        assert re.search("sees no cuda device|no backend", compiling(unavailable, "cuda"))


def test_importing_and_asking_about_a_cpu_imports_no_triton():
    code = (
        "import sys, types, torch\n"
        "sys.modules['onepass'] = package = types.ModuleType('onepass')\n"  # the engine alone
        f"package.__path__ = {list(onepass.__path__)!r}\n"
        "import onepass.triton as engine\n"
        "assert engine.unavailable(torch.device('cpu'))\n"
        "engine.plan('softmax', 1, 10, torch.float32, torch.float32)\n"
        "assert 'triton' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# -------------------------------------------------------------------------- compiled for GPUs that are not here


def _compile(
    function: str, n: int, dtype: torch.dtype, out_dtype: torch.dtype, backend: str, arch: Any, aligned: bool
) -> dict[str, Any]:
    """The kernel that ``forward`` would launch for many rows of n: its assembly and its resources, per thread."""
    from onepass.triton.launch import kernels

    chosen = plan(function, 1 << 20, n, dtype, out_dtype, Properties(backend))
    kernel = kernels()[chosen.tier]
    first = "ROWS" if chosen.tier == "row" else "DEPTH"
    second = "BLOCK" if chosen.tier == "row" else "LANES"
    constants: dict[str, Any] = {
        "FUNCTION": function,
        first: max(chosen.rows, chosen.depth),
        second: chosen.block,
        "x_stride": 1,
    }
    if function != "state":  # there it is how far the sums are from the maxima
        constants["out_stride"] = 1
    types = {"x_ptr": POINTERS[dtype], "out_ptr": POINTERS[out_dtype]}
    multiples = ["x_ptr", "out_ptr", *(["n", "x_row_stride", "out_row_stride"] if aligned else [])]
    return compiled(kernel, types, constants, multiples, chosen, backend, arch)


CASES = [
    ("softmax", 16, F32, F32, True),
    ("softmax", 781, F32, F32, False),
    ("log_softmax", 4096, BF16, F32, True),
    ("softmax", 32768, BF16, BF16, True),
    ("softmax", 50257, BF16, BF16, False),
    ("softmin", 65536, F32, F32, True),
    ("logsumexp", 131072, F16, F16, True),
    ("state", 781, F16, F32, False),
    ("state", 65536, F32, F32, True),
    ("log_softmax", 1000, F64, F64, True),
]


@pytest.mark.parametrize(("function", "n", "dtype", "out_dtype", "aligned"), CASES, ids=name_of)
@pytest.mark.parametrize(("backend", "arch"), TARGETS, ids=name_of)
def test_compiles_without_spills(compiling, backend, arch, function, n, dtype, out_dtype, aligned):
    found = compiling(_compile, function, n, dtype, out_dtype, backend, arch, aligned)
    assert found["tier"] == ("row" if n <= 32768 else "online")
    assert found["wide"] > 0 or not aligned, "aligned rows are read 16 bytes at a time"
    assert_no_spills(found, backend)


def test_row_tier_takes_one_exponential_an_element(compiling):
    elements = 4096 // 128  # a thread's share of the row
    found = compiling(_compile, "softmax", 4096, BF16, BF16, "cuda", 90, True)
    assert found["exponentials"] == elements


def test_online_tier_takes_one_exponential_an_element_in_each_pass(compiling):
    found = compiling(_compile, "softmax", 65536, F32, F32, "cuda", 90, True)
    elements, lanes = 16, 4  # a thread's share of a chunk, and its pairs: one rescale each, and one in the fold
    assert found["exponentials"] == 2 * elements + 2 * lanes
