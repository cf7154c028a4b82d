"""The Triton engine: its plans, where it is available, and its kernels compiled for GPUs that are not here, forward and
backward."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import onepass
import onepass.triton as engine
from lib.support import slow
from lib.triton import (
    BF16,
    F16,
    F32,
    F64,
    TARGETS,
    TIERS,
    Properties,
    assert_no_spills,
    name_of,
    needs_triton,
    resources,
    unavailable,
)
from onepass.triton import plan_backward, plan_forward

pytestmark = needs_triton


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
    got = plan_forward(rows, n, dtype, dtype, None)
    assert (got.tier, (got.rows, got.block)) == (tier, tile)
    assert got.grid == -(-rows // tile[0])
    got.check(n)
    assert set(got.as_dict()) == {"tier", "block", "rows", "depth", "num_warps", "num_stages", "grid"}


@pytest.mark.parametrize(
    ("n", "dtype", "tier", "tile"),
    [
        (16, F32, "row", (64, 16)),
        (781, F32, "row", (1, 1024)),
        (16384, BF16, "row", (1, 16384)),
        (16385, BF16, "online", (1, 8192)),
        (4097, F64, "online", (1, 512)),
        (1, F64, "row", (512, 1)),
    ],
)
def test_plan_of_a_gradient(n, dtype, tier, tile):
    for rows in (5, 4096):
        got = plan_backward(rows, n, (dtype, dtype, F32))
        assert (got.tier, (got.rows, got.block)) == (tier, tile)
        assert got.grid == -(-rows // tile[0])
        got.check(n)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_float64_makes_a_plan_of_float64(place):
    dtypes = [F32, F32, F32]
    dtypes[place] = F64
    assert plan_backward(64, 1024, tuple(dtypes)) == plan_backward(64, 1024, (F64, F64, F64))


def test_plan_keeps_a_launch_below_two_to_the_32_threads():
    got = plan_forward(2**33, 4096, F32, F32)
    assert got.grid < 2**32 / (got.num_warps * 32) <= got.grid + 1


def test_plan_counts_threads_in_the_warps_of_the_device():
    class Wide:
        warp_size = 64

    for n in (16, 1000, 30000, 100000):
        narrow, wide = plan_forward(64, n, F32, F32), plan_forward(64, n, F32, F32, Wide)
        assert wide.num_warps == max(1, narrow.num_warps // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 32}, "needs block >= n = 37"),
        ({"block": 48}, "power of two, got 48"),
        ({"depth": 2}, "depth 1"),
        ({"tier": "column"}, "'row' or 'online', got 'column'"),
        ({"tier": "online", "rows": 2}, "one row per program"),
        ({"grid": 0}, "at least 1, got 0"),
    ],
)
def test_plan_that_cannot_serve_is_refused(change, message):
    forced = dataclasses.replace(TIERS["row"], **change)
    x = torch.zeros(2, 37)
    with pytest.raises(ValueError, match=message):
        engine.launch_forward("softmax", x, torch.empty_like(x), (1,), plan=forced)


def test_unknown_function_is_refused():
    with pytest.raises(ValueError, match="unknown function 'softplus'"):
        engine.launch_forward("softplus", torch.zeros(2), torch.zeros(2), (0,))


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
        "engine.plan_forward(1, 10, torch.float32, torch.float32)\n"
        "assert 'triton' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# -------------------------------------------------------------------------- compiled for GPUs that are not here


def _compile(
    function: str, n: int, dtype: torch.dtype, to: torch.dtype, aligned: bool, backend: str, arch: Any
) -> dict[str, Any]:
    """The kernel that `launch_forward` would launch for many rows of n: its resources, per thread."""
    chosen = plan_forward(1 << 20, n, dtype, to, Properties(backend))
    # The stride of a state's result is how far the sums are from the maxima.
    steps = ("constexpr", "i32" if function == "state" else "constexpr")
    return resources(function, chosen, (dtype, to, None, None), steps, aligned, backend, arch)


def _compile_gradient(
    function: str, n: int, dtype: torch.dtype, to: torch.dtype, aligned: bool, backend: str, arch: Any
) -> dict[str, Any]:
    """As `_compile`, for `launch_backward`."""
    chosen = plan_backward(1 << 20, n, (dtype, dtype, to), Properties(backend))
    reduces = function == "logsumexp"
    steps = ("constexpr", "constexpr", "i32" if reduces else "constexpr")
    return resources(function, chosen, (dtype, to, dtype, dtype if reduces else None), steps, aligned, backend, arch)


def name_of_case(value: Any) -> str:
    return getattr(value, "__name__", name_of(value)).removeprefix("_")


CASES = [
    (_compile, "softmax", 16, F32, F32, True),
    (_compile, "softmax", 781, F32, F32, False),
    (_compile, "log_softmax", 4096, BF16, F32, True),
    (_compile, "softmax", 32768, BF16, BF16, True),
    (_compile, "softmax", 50257, BF16, BF16, False),
    (_compile, "softmin", 65536, F32, F32, True),
    (_compile, "logsumexp", 131072, F16, F16, True),
    (_compile, "state", 781, F16, F32, False),
    (_compile, "state", 65536, F32, F32, True),
    (_compile, "log_softmax", 1000, F64, F64, True),
    (_compile_gradient, "softmax", 16, F32, F32, True),
    (_compile_gradient, "log_softmax", 16384, F32, F32, True),
    (_compile_gradient, "softmin", 50257, BF16, F32, False),
    (_compile_gradient, "log_softmax", 65536, F32, F32, True),
    (_compile_gradient, "logsumexp", 131072, F16, F16, True),
    (_compile_gradient, "log_softmax", 4096, F64, F64, True),
]


@pytest.mark.parametrize(("compile", "function", "n", "dtype", "to", "aligned"), CASES, ids=name_of_case)
@pytest.mark.parametrize(("backend", "arch"), [*TARGETS[:2], *(slow(*target) for target in TARGETS[2:])], ids=name_of)
def test_compiles_without_spills(compiling, backend, arch, compile, function, n, dtype, to, aligned):
    found = compiling(compile, function, n, dtype, to, aligned, backend, arch)
    assert found["tier"] == ("row" if n <= (32768 if compile is _compile else 16384) else "online")
    assert found["wide"] > 0 or not aligned, "aligned rows are read 16 bytes at a time"
    assert_no_spills(found, backend)


ONE_PASS = [  # exponentials of one thread
    (_compile, "softmax", 4096, BF16, 4096 // 128),  # one for each element of its share of the row
    (_compile, "softmax", 65536, F32, 2 * 16 + 2 * 4),  # in each pass 16 elements of a chunk, a rescale of each pair
    (_compile_gradient, "softmax", 4096, F32, 0),
    (_compile_gradient, "log_softmax", 4096, F32, 4096 // 256),
    (_compile_gradient, "logsumexp", 4096, F32, 4096 // 256),
]


@pytest.mark.parametrize(("compile", "function", "n", "dtype", "exponentials"), ONE_PASS, ids=name_of_case)
def test_one_exponential_an_element_in_each_pass(compiling, compile, function, n, dtype, exponentials):
    assert compiling(compile, function, n, dtype, dtype, True, "cuda", 90)["exponentials"] == exponentials
