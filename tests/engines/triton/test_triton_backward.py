"""Gradients of the Triton engine: every tier forced on small shapes under Triton's interpreter."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.modes import Operators
from lib.support import DTYPES, LAYOUTS, maker, same, some_tuples
from lib.triton import BF16, F16, F32, F64, INF, NAN, name_of, needs_triton, process, special, unavailable
from lib.triton_backward import TIERS, Case, assert_gradient, case, run
from onepass.triton import Plan

pytestmark = needs_triton
# Two of each tier: sums of floats and doubles are interpreted at 1 ms an element.
SOME_DTYPES = [(tier, DTYPES[(k + j) % 4]) for k, tier in enumerate(TIERS) for j in (0, 2)]
TWO_TIERS = pytest.mark.parametrize("tier", ["rows of 4 a program, split launch", "online"])


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
def backward(interpreting: Callable[..., Any]) -> Callable[..., Tensor]:
    """backward(case, plan=None) -> dx, with all of its storage, made in that process."""

    def call(given: Case, plan: Plan | None = None) -> Tensor:
        box = io.BytesIO()
        torch.save(tuple(given), box)  # keeps strides, offsets, and that two tensors share a storage
        return torch.load(io.BytesIO(interpreting(_backward, box.getvalue(), plan)))

    return call


def _backward(data: bytes, plan: Plan | None) -> bytes:
    box = io.BytesIO()
    torch.save(run(Case(*torch.load(io.BytesIO(data))), plan), box)
    return box.getvalue()


# ------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(("tier", "dtype"), SOME_DTYPES, ids=name_of)
def test_definition(backward, function, dtype, tier):
    given = case(function, maker(dtype)(5, 23), (1,))
    assert_gradient(backward(given, TIERS[tier]), given)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 31, 32])
@TWO_TIERS
def test_row_lengths_about_the_edges_of_a_tile(backward, tier, n):
    given = case("softmax", maker(BF16)(5, n), (1,))
    assert_gradient(backward(given, TIERS[tier]), given)


@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
def test_rows_longer_than_the_row_tier(backward, function):
    given = case(function, maker(BF16)(1, 16400), (1,))
    assert_gradient(backward(given), given)


@pytest.mark.parametrize(("function", "tier"), [("log_softmax", "row"), ("softmin", "online")])
@pytest.mark.parametrize(("dtype", "to"), [(a, b) for a in DTYPES for b in DTYPES if a is not b], ids=name_of)
def test_input_of_another_type_than_the_result(backward, function, tier, dtype, to):
    given = case(function, maker(dtype)(3, 23), (1,), to)
    got = backward(given, TIERS[tier])
    assert got.dtype is to
    assert_gradient(got, given)


@pytest.mark.parametrize(("dtype", "of_grad"), [(F32, F64), (BF16, F32), (F64, BF16)], ids=name_of)
def test_gradient_of_another_type_than_the_result(backward, dtype, of_grad):
    given = case("softmax", maker(dtype)(3, 23), (1,))
    given = given._replace(grad=given.grad.to(of_grad))
    assert_gradient(backward(given, TIERS["row"]), given)


@TWO_TIERS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=name_of)
def test_logsumexp_of_halves_in_float32(backward, dtype, tier):
    given = case("logsumexp", maker(dtype)(5, 23), (1,))
    lse = torch.logsumexp(given.saved[0].double(), 1, keepdim=True).float()
    given = given._replace(grad=maker(F32)(5, 1), saved=(given.saved[0], lse))
    got = backward(given, TIERS[tier])
    assert got.dtype is dtype
    assert_gradient(got, given)


# ----------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("function", "layout"),
    [("softmax", layout) for layout in LAYOUTS]
    + [("logsumexp", layout) for layout in ("0-d", "middle", "permuted and sliced", "expanded middle", "size 1 dims")],
)
def test_layouts_and_dims(backward, function, layout):
    x = LAYOUTS[layout](maker(BF16))
    for spelled in some_tuples(x):
        given = case(function, x, spelled)
        assert_gradient(backward(given), given, f", layout {layout}")


FORMS: dict[str, Callable[[Case], Tensor]] = {  # how the result's gradient lies
    "one number": lambda c: torch.tensor(0.7).expand(c.grad.shape),
    "one number a row": lambda c: maker(F32)(4, 1, 5).expand(4, 3, 5),
    "one number a column": lambda c: maker(F32)(3, 5).expand(4, 3, 5),
    "reversed": lambda c: maker(F32)(5, 3, 4).permute(2, 1, 0),
    "with gaps": lambda c: maker(F32)(4, 6, 10)[:, ::2, 1::2],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_of_any_strides(backward, dims, form):
    given = case("log_softmax", maker(BF16)(4, 3, 5), dims)
    given = given._replace(grad=FORMS[form](given))
    assert_gradient(backward(given), given, f", {form}")


@TWO_TIERS
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strided_result_is_written_where_it_lies_and_nowhere_else(backward, dim, tier):
    given = case("softmax", maker(F32)(4, 3, 5), (dim,))
    base = torch.full((12, 5, 8), 777.0)
    given = given._replace(dx=base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5])
    got = backward(given, TIERS[tier])
    assert got.stride() == given.dx.stride()
    assert_gradient(got, given)
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == got.numel()


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2)], ids=str)
def test_nothing_is_copied(monkeypatch, function, dims):
    """The kernel is given the operands' own memory, and no operator that makes anything has been called before."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: launched.append(given)

    launcher = importlib.import_module("onepass.triton.backward")  # the package has the function under that name
    monkeypatch.setattr(launcher, "kernels", lambda: {"row": Kernel()})
    given = case(function, maker(F32)(4, 3, 5).permute(2, 0, 1), dims)
    given = given._replace(grad=torch.tensor(0.7).expand(given.grad.shape))
    with Operators() as mode:
        run(given)
    lse = given.saved[1] if function == "logsumexp" else None
    (passed,) = launched
    for tensor, expected in zip(passed, (given.saved[0], given.grad, lse, given.dx), strict=False):
        assert tensor is expected
    assert all(operator.is_view for operator in mode.seen)


# -------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize(("tier", "dtype"), [("row", BF16), ("online", F32)], ids=name_of)
def test_special_values(backward, function, dtype, tier):
    x = special(dtype, n=26)
    given = case(function, -x if function == "softmin" else x, (1,))
    got = backward(given, TIERS[tier])
    assert_gradient(got, given)
    assert bool(got.isnan().any())
    assert bool(got[0].isfinite().all()), "rows do not spoil each other"


@TWO_TIERS
def test_special_values_of_the_gradient(backward, function, tier):
    given = case(function, maker(F32)(8, 31), (1,))
    if function in ("softmax", "softmin"):
        given.saved[0][1:3, :24] = 0.0  # masked: whatever is finite there gives 0
    given.grad[1] = 3e38
    given.grad[2, -1:] = INF
    given.grad[3, -1:] = -INF
    given.grad[4, 0] = NAN
    given.grad[5, 0], given.grad[5, -1] = INF, -INF
    got = backward(given, TIERS[tier])
    want = _plain(given)
    assert same(got.isnan(), want.isnan())
    assert same(got.isinf(), want.isinf())
    assert bool(got[6:].isfinite().all()), "rows do not spoil each other"
    if function in ("softmax", "softmin"):
        assert not bool(got[1, :24].any())


def _plain(given: Case) -> Tensor:
    """In float32, where a sum of 3e38 is infinite."""
    y, g = given.saved[0], given.grad
    if given.function == "logsumexp":
        return g * (y - given.saved[1]).exp()
    if given.function == "log_softmax":
        return g - y.exp() * g.sum(1, keepdim=True)
    dx = y * (g - (g * y).sum(1, keepdim=True))
    return dx if given.function == "softmax" else -dx


@pytest.mark.parametrize("shape", [(0, 5), (5, 0, 2), (0,)], ids=str)
def test_empty(backward, function, shape):
    given = case(function, torch.empty(shape), (len(shape) - 1,))
    assert same(backward(given), torch.empty(shape))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("softplus", {}, "gradients of softmax, log_softmax, softmin, logsumexp, got 'softplus'"),
        ("state", {}, "got 'state'"),
        ("logsumexp", {}, "its input and result, got 1 tensors"),
        ("softmax", {"saved": ()}, "its result, got 0 tensors"),
        ("softmax", {"grad": torch.zeros(2, 1)}, r"its gradient has shape \[2, 37\] here, got \[2, 1\]"),
        ("softmax", {"dx": torch.zeros(37, 2)}, r"the input's gradient has shape \[2, 37\] here, got \[37, 2\]"),
        ("logsumexp", {"saved": (torch.zeros(2, 37),) * 2}, r"the result has shape \[2, 1\] here, got \[2, 37\]"),
        ("softmax", {"grad": torch.zeros(2, 37, device="meta")}, "its gradient is on meta, what .* saved on cpu"),
    ],
)
def test_what_is_not_a_gradient_is_refused(function, change, message):
    given = case("softmax", torch.zeros(2, 37), (1,))._replace(function=function, **change)
    with pytest.raises(ValueError, match=message):
        run(given)


def test_plan_that_cannot_serve_is_refused():
    given = case("softmax", torch.zeros(2, 33), (1,))
    with pytest.raises(ValueError, match="needs block >= n = 33"):
        run(given, TIERS["row"])
