"""The operators that finish rows of a known state, and the two steps of a gradient, against plain arithmetic in
float64."""

import pytest
import torch
from torch import Tensor

import onepass
from lib.support import DTYPES, maker
from onepass import state_ops
from onepass._engines import resolve

F32, F64, F16, BF16 = DTYPES
# Absolute and relative, of results between 0 and 1 and of logarithms.
TOLERANCE = {F32: 4e-6, F64: 1e-12, F16: 2e-3, BF16: 1.6e-2}
SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "rows": ((5, 77), [1]),
    "columns": ((4, 60, 37), [1]),
    "first dim": ((40, 33), [0]),
    "two dims": ((3, 4, 50), [1, 2]),
    "dims apart": ((4, 6, 5), [2, 0]),
    "middle dims": ((2, 3, 4, 5), [1, 2]),
    "a number": ((), [0]),
    "no rows": ((0, 4), [1]),
    "no elements": ((4, 0), [1]),
}


def assert_close(got: Tensor, want: Tensor, note: str) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(
        got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: note + m
    )


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", SHAPES)
def test_finish_and_gradients(shape, function, dtype, engine, device):
    sizes, dims = SHAPES[shape]
    name, wide = resolve(engine, torch.device(device)), F64 if dtype is F64 else F32
    for transposed in (False, True):
        x = maker(dtype, device)(*sizes)
        x = x.mT.contiguous().mT if transposed and x.dim() > 1 else x
        size = [1 if d in dims else n for d, n in enumerate(sizes)]
        m = x.to(wide).amax(dims, keepdim=True) if x.numel() else torch.zeros(size, dtype=wide, device=device)
        l = (x.to(wide) - m).exp().sum(dims, keepdim=True)
        y = state_ops.finish_rows(x, m, l, dims, function, None, name)
        apart = x.double() - m.double()
        p = apart.exp() / l.double()
        assert_close(y, p if function == "softmax" else apart - l.double().log(), f"{shape}: ")
        assert y.dtype is dtype
        assert y.stride() == torch.empty_like(x).stride()
        g = maker(dtype, device, seed=1)(*sizes)
        total = state_ops.gradient_sum(g, y, dims, function, name)
        of_rows = (g.double() * y.double() if function == "softmax" else g.double()).sum(dims, keepdim=True)
        assert total.dtype is wide
        torch.testing.assert_close(total.double(), of_rows, rtol=1e-4, atol=1e-4)
        dx = state_ops.gradient_finish(g, y, total, dims, function, dtype, name)
        of_sum = y.double() * (g.double() - total) if function == "softmax" else g.double() - y.double().exp() * total
        assert_close(dx, of_sum, f"gradient of {shape}: ")


def test_merged_planes(engine, device):
    """m, log l, 1 / l and l of rows, and NaN for the two in the middle where m is infinite."""
    inf = torch.inf
    m = torch.tensor([[0.0, -inf, 3.0, -inf, inf, 1.0], [2.0, 5.0, -inf, -inf, 0.0, 1.0]], device=device)
    l = torch.tensor([[2.0, 0.0, 1.0, 0.0, inf, torch.nan], [3.0, 1.5, 0.0, 0.0, 1.0, 1.0]], device=device)
    name = resolve(engine, torch.device(device))
    for dtype in (F32, F64):
        parts = torch.stack((m, l), 1).to(dtype)
        planes = state_ops.merge_states(parts, name)
        want = onepass.merge((parts[0, 0], parts[0, 1]), (parts[1, 0], parts[1, 1]))
        known = want.l.masked_fill(want.m.isinf(), torch.nan)
        expected = torch.stack((want.m, known.log(), known.reciprocal(), want.l))
        torch.testing.assert_close(planes, expected, equal_nan=True)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_rows_without_a_result(function, engine, device):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, nan, 1.0], [0.0, -inf, 1.0]], device=device)
    state = onepass.state(x, 1, keepdim=True)
    y = state_ops.finish_rows(x, *state, [1], function, None, resolve(engine, x.device))
    torch.testing.assert_close(y, getattr(torch, function)(x, 1), equal_nan=True)
