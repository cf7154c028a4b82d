"""Gradients of the Triton engine through autograd: its operator, and no other, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from lib.modes import Operators
from lib.support import FUNCTIONS, TORCH, maker, ours, slow, thin_tuples
from lib.triton import BF16, F16, F32, F64, name_of, needs_triton
from onepass import decompositions
from onepass.triton import plan as plans
from onepass.validation import Spec

pytestmark = needs_triton
operator = torch.ops.onepass.triton_backward.default


@pytest.fixture(scope="module", autouse=True)
def small_tiles(interpreting: Callable[..., Any]) -> Iterator[None]:
    """Tiles of no more than a call has: sums of float32 and float64 are interpreted at 1 ms an element."""
    interpreting(_take_small_tiles, True)
    yield
    interpreting(_take_small_tiles, False)


_planner = plans._plan


def _take_small_tiles(small: bool) -> None:
    def plan(backward: bool, rows: int, n: int, dtypes: tuple[torch.dtype, ...], warp: int) -> plans.Plan:
        return plans.Plan("row", 1 << (n - 1).bit_length(), 1 << (rows - 1).bit_length(), 1, 1, 1, 1)

    plans._plan = plan if small else _planner  # type: ignore[assignment]


def _grad(function: str, x: Tensor, dim: Any, g: Tensor | None, engine: str, **named: Any) -> tuple[Tensor, list[str]]:
    """The gradient of a call, and the operators that its backward called."""
    x = x.detach().requires_grad_()
    y = ours(function)(x, dim, engine=engine, **named)
    with Operators() as calls:
        (y.sum() if g is None else (y * g).sum()).backward()
    assert x.grad is not None
    return x.grad, calls.ours()


@pytest.mark.parametrize("dim", [slow(0), slow(1), slow(-1), (0, 2), slow((0, 1, 2))], ids=str)
def test_calls_of_the_engine_have_its_operator(interpreting, function, dim):
    x = maker(BF16)(3, 4, 5)
    g = maker(BF16, seed=5)(*ours(function)(x, dim).shape)
    for given in (g, None):
        got, called = interpreting(_grad, function, x, dim, given, "triton")
        want, called_natively = _grad(function, x, dim, given, "cpu")
        assert called == ["triton_backward"]
        assert len(called_natively) == 1
        assert "triton" not in called_natively[0]
        torch.testing.assert_close(got, want)


OPTIONS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    *(("logsumexp", F16, {"keepdim": keepdim}) for keepdim in (False, True)),
    *(("softmax", a, {"dtype": b}) for a, b in ((BF16, F32), (F32, BF16), (F64, F16), (F16, F64))),
]


@pytest.mark.parametrize(("function", "given", "named"), OPTIONS, ids=name_of)
def test_keepdim_and_dtype(interpreting, function, given, named):
    x, dtype = maker(given)(3, 4, 5), named.get("dtype", given)
    coarse = 2 * max(torch.finfo(given).eps, torch.finfo(dtype).eps)
    for dim in (1, (0, 2)):
        g = maker(dtype, seed=5)(*ours(function)(x, dim, **named).shape)
        got, called = interpreting(_grad, function, x, dim, g, "triton", **named)
        assert called == ["triton_backward"]
        assert got.dtype is given
        want = _grad(function, x, dim, g, "cpu", **named)[0]
        torch.testing.assert_close(got, want, **({"rtol": coarse, "atol": coarse} if "dtype" in named else {}))


def _widened(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    x = x.detach().requires_grad_()
    y = torch.ops.onepass.triton(x, "logsumexp", [1], F32, False)
    with Operators() as calls:
        (dx,) = torch.autograd.grad(y, x, g)
    return y.detach(), dx, calls.ours()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_logsumexp_of_half_types_in_float32(interpreting, dtype):
    x, g = maker(dtype)(3, 7), maker(F32, seed=5)(3)
    y, dx, called = interpreting(_widened, x, g)
    assert called == ["triton_backward"]
    wide = x.double().requires_grad_()
    want = torch.logsumexp(wide, 1)
    torch.testing.assert_close(y, want.float())
    torch.testing.assert_close(dx, torch.autograd.grad(want, wide, g.double())[0].to(dtype))


def _orders(function: str, dim: Any) -> None:
    def call(t: Tensor) -> Tensor:
        return ours(function)(t, dim, engine="triton")

    x = maker(F64)(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(call, (x,), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x,), fast_mode=True)


@pytest.mark.parametrize(
    ("dim", "function"), [*thin_tuples((((0, 1), f) for f in FUNCTIONS), 3), *(slow(0, f) for f in FUNCTIONS)], ids=str
)
def test_gradients_of_first_and_second_order(interpreting, function, dim):
    interpreting(_orders, function, dim)


def _transforms(function: str, x: Tensor, engine: str | None = None) -> list[Tensor]:
    """By torch's own functions without an engine."""

    def total(t: Tensor) -> Tensor:
        return (ours(function)(t, 0, engine=engine) if engine else TORCH[function](t, 0)).square().sum()

    return [torch.func.grad(total)(x[0]), torch.func.vmap(torch.func.grad(total))(x), torch.func.hessian(total)(x[0])]


def test_function_transforms(interpreting, function):
    x = maker(F64)(2, 3)
    for got, want in zip(interpreting(_transforms, function, x, "triton"), _transforms(function, x), strict=True):
        torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------------------------------ the operator


def _arguments(function: str, requires_grad: bool) -> tuple[Any, ...]:
    x, g = maker(F32)(2, 3, 4), maker(F32, seed=5)(2, 3, 4)
    lse = torch.logsumexp(x, 1) if function == "logsumexp" else None
    g = g if lse is None else g[:, 0]
    given = [t if t is None else t.detach().requires_grad_(requires_grad) for t in (g, x, lse)]
    return (*given, function, [-2], F32, False)


def _check(function: str, requires_grad: bool) -> None:
    utilities = ("test_schema", "test_faketensor", *(["test_aot_dispatch_dynamic"] if requires_grad else []))
    opcheck(operator, _arguments(function, requires_grad), test_utils=utilities)


@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
def test_opcheck(interpreting, function):
    interpreting(_check, function, False)
    interpreting(_check, function, True)


def _called(*given: Any) -> Tensor:
    return operator(*given)


def test_operator(interpreting, function):
    given = g, x, lse, _, _, dtype, keepdim = _arguments(function, False)
    saved = [x] if lse is None else [x, lse]
    want = decompositions.gradient(Spec(function, [1], None, keepdim), g, saved, dtype)
    torch.testing.assert_close(interpreting(_called, *given), want)
