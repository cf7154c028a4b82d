"""Gradients of the Triton engine: their plans, and their kernels compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lib.triton import BF16, F16, F32, F64, name_of, needs_triton, process
from lib.triton_compile import POINTERS, TARGETS, Properties, assert_no_spills, compiled
from onepass.triton import backward_plan

pytestmark = needs_triton


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
def test_plan(n, dtype, tier, tile):
    for rows in (5, 4096):
        got = backward_plan(rows, n, (dtype, dtype, F32))
        assert (got.tier, (got.rows, got.block)) == (tier, tile)
        assert got.grid == -(-rows // tile[0])
        got.check(n)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_double_makes_a_plan_of_doubles(place):
    dtypes = [F32, F32, F32]
    dtypes[place] = F64
    assert backward_plan(64, 1024, tuple(dtypes)) == backward_plan(64, 1024, (F64, F64, F64))


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton compiles."""
    yield from process("0")


def _compile(
    function: str, n: int, dtype: torch.dtype, to: torch.dtype, aligned: bool, backend: str, arch: Any
) -> dict[str, Any]:
    """The kernel that ``backward`` would launch for many contiguous rows of n: its resources, per thread."""
    from onepass.triton.backward import kernels

    chosen = backward_plan(1 << 20, n, (dtype, dtype, to), Properties(backend))
    kernel = kernels()[chosen.tier]
    place = kernel.arg_names.index
    reduces = function == "logsumexp"
    types: dict[str, Any] = dict.fromkeys(("y_ptr", "g_ptr", "lse_ptr"), POINTERS[dtype])
    types |= {"dx_ptr": POINTERS[to], "row_sizes": (), "sizes": ()}
    types |= dict.fromkeys(("y_row", "g_row", "lse_row", "dx_row", "g_in"), ("i32",))
    constants: dict[Any, Any] = {"FUNCTION": function} if reduces else {"FUNCTION": function, "lse_ptr": None}
    for name in ("y_in", "dx_in") if reduces else ("y_in", "g_in", "dx_in"):
        types[name] = ("constexpr",)
        constants[(place(name), 0)] = 1
    tile = ("ROWS", "BLOCK") if chosen.tier == "row" else ("DEPTH", "LANES")
    constants |= {tile[0]: max(chosen.rows, chosen.depth), tile[1]: chosen.block}
    strides = [(place(name), 0) for name in ("y_row", "g_row", "dx_row")]
    multiples = ["y_ptr", "g_ptr", "dx_ptr", *(["n", *strides] if aligned else [])]
    return compiled(kernel, types, constants, multiples, chosen, backend, arch)


CASES = [
    ("softmax", 16, F32, F32, True),
    ("log_softmax", 16384, F32, F32, True),
    ("softmin", 50257, BF16, F32, False),
    ("log_softmax", 65536, F32, F32, True),
    ("logsumexp", 131072, F16, F16, True),
    ("log_softmax", 4096, F64, F64, True),
]


@pytest.mark.parametrize(("function", "n", "dtype", "to", "aligned"), CASES, ids=name_of)
@pytest.mark.parametrize(("backend", "arch"), TARGETS, ids=name_of)
def test_compiles_without_spills(compiling, backend, arch, function, n, dtype, to, aligned):
    found = compiling(_compile, function, n, dtype, to, aligned, backend, arch)
    assert found["tier"] == ("row" if n <= 16384 else "online")
    assert found["wide"] > 0 or not aligned, "aligned rows are read 16 bytes at a time"
    assert_no_spills(found, backend)


@pytest.mark.parametrize(("function", "exponentials"), [("softmax", 0), ("log_softmax", 16), ("logsumexp", 16)])
def test_one_exponential_an_element_at_most(compiling, function, exponentials):
    elements = 4096 // 256  # a thread's share of the row
    assert exponentials in (0, elements)
    found = compiling(_compile, function, 4096, F32, F32, True, "cuda", 90)
    assert found["exponentials"] == exponentials
