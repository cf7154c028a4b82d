"""The Triton engine: its plans, where it is available, and its kernels compiled for GPUs that are not here, forward and
backward."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import onepass.triton as engine
from lib.triton import (
    BF16,
    F16,
    F32,
    F64,
    TIERS,
    Properties,
    assert_no_spills,
    every_target,
    name_of,
    needs_triton,
    resources,
    unavailable,
)
from onepass.triton import plan_backward, plan_forward

pytestmark = needs_triton


# ------------------------------------------------------------------------------------- plans and availability


@pytest.mark.parametrize(
    ("backward", "n", "dtype", "tier", "tile"),
    [
        (False, 16, F32, "row", (128, 16)),
        (False, 781, F32, "row", (1, 1024)),
        (False, 32768, BF16, "row", (1, 32768)),
        (False, 32769, BF16, "online", (1, 8192)),
        (False, 8193, F64, "online", (1, 512)),
        (False, 1, F64, "row", (1024, 1)),
        (True, 16, F32, "row", (64, 16)),
        (True, 781, F32, "row", (1, 1024)),
        (True, 16384, BF16, "row", (1, 16384)),
        (True, 16385, BF16, "online", (1, 8192)),
        (True, 4097, F64, "online", (1, 512)),
        (True, 1, F64, "row", (512, 1)),
    ],
)
def test_plan(backward, n, dtype, tier, tile):
    for rows in (1, 5, 4096, 1 << 20):
        got = plan_backward(rows, n, (dtype, dtype, F32)) if backward else plan_forward(rows, n, dtype, dtype, None)
        assert (got.tier, (got.rows, got.block)) == (tier, tile)
        assert got.grid == -(-rows // tile[0])
        got.check(n)
        assert set(got.as_dict()) == {"tier", "block", "rows", "depth", "num_warps", "num_stages", "grid"}


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


# -------------------------------------------------------------------------- compiled for GPUs that are not here


def _compile(
    backward: bool, function: str, n: int, dtype: torch.dtype, to: torch.dtype, aligned: bool, backend: str, arch: Any
) -> dict[str, Any]:
    """The kernel that a call, or its gradient, would launch for many rows of n: its resources, per thread."""
    about, lse = Properties(backend), dtype if function == "logsumexp" else None
    if backward:
        chosen, dtypes = plan_backward(1 << 20, n, (dtype, dtype, to), about), (dtype, to, dtype, lse)
        steps = ("constexpr", "constexpr", "i32" if lse else "constexpr")
    else:
        # The stride of a state's result is how far the sums are from the maxima.
        chosen, dtypes = plan_forward(1 << 20, n, dtype, to, about), (dtype, to, None, None)
        steps = ("constexpr", "i32" if function == "state" else "constexpr")
    return resources(function, chosen, dtypes, steps, aligned, backend, arch)


CASES = [
    (False, "softmax", 16, F32, F32, True),
    (False, "softmax", 781, F32, F32, False),
    (False, "log_softmax", 4096, BF16, F32, True),
    (False, "softmax", 32768, BF16, BF16, True),
    (False, "softmax", 50257, BF16, BF16, False),
    (False, "softmin", 65536, F32, F32, True),
    (False, "logsumexp", 131072, F16, F16, True),
    (False, "state", 781, F16, F32, False),
    (False, "state", 65536, F32, F32, True),
    (False, "log_softmax", 1000, F64, F64, True),
    (False, "softmax", 1000, BF16, F64, True),
    (True, "softmax", 16, F32, F32, True),
    (True, "log_softmax", 16384, F32, F32, True),
    (True, "softmin", 50257, BF16, F32, False),
    (True, "log_softmax", 65536, F32, F32, True),
    (True, "logsumexp", 131072, F16, F16, True),
    (True, "log_softmax", 4096, F64, F64, True),
]


@every_target("backward function n dtype to aligned", CASES, 2)
def test_compiles_without_spills(compiling, backend, arch, backward, function, n, dtype, to, aligned):
    found = compiling(_compile, backward, function, n, dtype, to, aligned, backend, arch)
    assert found["tier"] == ("row" if n <= (16384 if backward else 32768) else "online")
    assert found["wide"] > 0 or not aligned, "aligned rows are read 16 bytes at a time"
    assert_no_spills(found, backend)


@pytest.mark.parametrize(("backward", "function", "n", "dtype", "to", "aligned"), CASES[3:14:5], ids=name_of)
def test_compiles_without_spills_on_mi350(compiling, backward, function, n, dtype, to, aligned):
    """A row on the chip, a long one and a gradient; the sweep above compiles the rest."""
    test_compiles_without_spills(compiling, "hip", "gfx950", backward, function, n, dtype, to, aligned)


ONE_PASS = [  # exponentials of one thread
    (False, "softmax", 4096, BF16, 4096 // 128),  # one for each element of its share of the row
    (False, "softmax", 65536, F32, 2 * 16 + 2 * 4),  # in each pass 16 elements of a chunk, a rescale of each pair
    (True, "softmax", 4096, F32, 0),
    (True, "log_softmax", 4096, F32, 4096 // 256),
    (True, "logsumexp", 4096, F32, 4096 // 256),
]


@pytest.mark.parametrize(("backward", "function", "n", "dtype", "exponentials"), ONE_PASS, ids=name_of)
def test_one_exponential_an_element_in_each_pass(compiling, backward, function, n, dtype, exponentials):
    assert compiling(_compile, backward, function, n, dtype, dtype, True, "cuda", 90)["exponentials"] == exponentials
