"""The Triton engine: every tier forced on small shapes under Triton's interpreter."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import (
    DTYPES,
    FUNCTIONS,
    LAYOUTS,
    SOFTMAXES,
    assert_defined,
    maker,
    same,
    some_tuples,
)
from lib.triton import (
    BF16,
    F32,
    TIERS,
    assert_special,
    name_of,
    needs_triton,
    poisoned,
    process,
    special,
    unavailable,
)
from onepass import reference
from onepass.triton import Plan

pytestmark = needs_triton
every_tier = pytest.mark.parametrize("tier", TIERS)


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton interprets."""
    for call in process("1"):
        reason = call(unavailable, "cpu")
        if reason is not None and "NumPy" in reason:
            pytest.skip(reason)
        assert reason is None
        yield call


@pytest.fixture
def forward(interpreting: Callable[..., Any]) -> Callable[..., Tensor]:
    """engine.forward in that process: forward(function, x, out, dims, plan=None) -> out, with all of its storage."""

    def call(function: str, x: Tensor, out: Tensor, dims: Any, plan: Plan | None = None) -> Tensor:
        box = io.BytesIO()
        torch.save((x, out), box)  # keeps strides, offsets, and that two tensors share a storage
        return torch.load(io.BytesIO(interpreting(_forward, box.getvalue(), function, tuple(dims), plan)))

    return call


def _forward(data: bytes, function: str, dims: tuple[int, ...], plan: Plan | None) -> bytes:
    x, out = torch.load(io.BytesIO(data))
    engine.forward(function, x, out, dims, plan=plan)
    box = io.BytesIO()
    torch.save(out, box)
    return box.getvalue()


# ----------------------------------------------------------------------------------------- values, interpreted


@every_tier
def test_definition(forward, function, dtype, tier):
    x = maker(dtype)(6, 37)
    out = forward(function, x, poisoned(function, x, (1,)), (1,), TIERS[tier])
    assert_defined(function, out, x, 1)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_row_lengths_about_the_edges_of_a_tile(forward, function, tier, n):
    x = maker(F32)(3, n)
    assert_defined(function, forward(function, x, poisoned(function, x, (1,)), (1,), TIERS[tier]), x, 1)


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize(("dtype", "out_dtype"), [(a, b) for a in DTYPES for b in DTYPES if a is not b], ids=name_of)
def test_input_is_rounded_to_the_type_of_the_result_first(forward, function, tier, dtype, out_dtype):
    x = maker(dtype, scale=30.0)(3, 37)  # coarse enough for the rounding of the input to show in every half type
    out = forward(function, x, poisoned(function, x, (1,), out_dtype), (1,), TIERS[tier])
    assert out.dtype == out_dtype
    assert_defined(function, out, x.to(out_dtype), 1)


@pytest.mark.parametrize(
    ("function", "layout"),
    [("log_softmax", layout) for layout in LAYOUTS] + [("logsumexp", layout) for layout in [*LAYOUTS][::2]],
)
def test_layouts_and_dims(forward, function, layout):
    x = LAYOUTS[layout](maker(F32))
    for spelled in some_tuples(x):
        dims = tuple(sorted(d % max(x.ndim, 1) for d in spelled)) if x.ndim else ()
        out = forward(function, x, poisoned(function, x, dims), dims)
        assert_defined(function, out, x, dims or 0, f", layout {layout}")


@pytest.mark.parametrize("tier", [None, "row", "online"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_strided_result_is_written_where_it_lies_and_nowhere_else(forward, dtype, dim, tier):
    x = maker(F32)(4, 3, 5)
    base = torch.full((12, 5, 8), 777.0, dtype=dtype)
    out = base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5]
    assert out.shape == x.shape
    got = forward("softmax", x, out, (dim,), TIERS.get(tier))
    assert got.stride() == out.stride()
    assert_defined("softmax", got, x.to(dtype), dim)
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == x.numel()


@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@pytest.mark.parametrize(("layout", "dim"), [("contiguous", 0), ("contiguous", 1), ("transposed", 1), ("stepped", 0)])
def test_in_place(forward, layout, dim, tier):
    x = LAYOUTS[layout](maker(F32))
    assert_defined("softmax", forward("softmax", x, x, (dim,), TIERS[tier]), x, dim)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_empty_results_and_rows(forward, function):
    for shape, dims in [((0, 5), (1,)), ((0, 5), (0,)), ((5, 0, 2), (1,)), ((0,), (0,))]:
        x = torch.empty(shape)
        want = reference.logsumexp(x, dims, True) if function == "logsumexp" else x
        assert same(forward(function, x, poisoned(function, x, dims), dims), want.to(F32))


# -------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_special_values(forward, function, dtype, tier):
    x = special(dtype)
    x = -x if function == "softmin" else x
    assert_special(function, forward(function, x, poisoned(function, x, (1,)), (1,), TIERS[tier]), x)


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_no_probability_exceeds_one(forward, dtype, tier):
    steps = torch.arange(8.0)[:, None] * 17.37
    x = torch.where(torch.arange(37) == 5, steps, -steps).to(dtype)
    y = forward("softmax", x, poisoned("softmax", x, (1,)), (1,), TIERS[tier])
    assert float(y.max()) <= 1.0
    assert_defined("softmax", y, x, 1)


@every_tier
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_float32_is_as_accurate_as_torch(forward, function, tier):
    rows = [torch.randn(53) * 3, torch.randn(53) + 1000, torch.randint(-60, 60, (53,)), torch.rand(53) * 80]
    x = torch.stack([row.float() for row in rows])
    exact = getattr(reference, function)(x, 1, *([True] if function == "logsumexp" else []))
    scale = exact.abs() if function == "softmax" else exact.abs().clamp(min=1)

    def error(y: Tensor) -> float:
        return float(((y - exact).abs() / scale).max()) / torch.finfo(F32).eps

    theirs = getattr(torch, function)(x, 1, *([True] if function == "logsumexp" else []))
    ours = forward(function, x, poisoned(function, x, (1,)), (1,), TIERS[tier])
    assert error(ours) <= max(1.25 * error(theirs), 2.0)
