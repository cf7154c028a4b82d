"""The fused gradients of the CPU engine: against the definition in float64, by every route and instruction set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lib.support import DTYPES, TORCH, every_softmax, ours, same, with_instruction_set
from onepass import decompositions

ops = torch.ops.onepass
NUMBERS = {"softmax": 0, "log_softmax": 1, "softmin": 2}
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    *(((5, 7), (1,)), ((5, 7), (0,)), ((70, 3), (1,)), ((70, 16), (1,)), ((67, 33), (-1,)), ((130, 64), (1,))),
    *(((9, 129), (1,)), ((6, 1000), (1,)), ((2, 70001), (1,)), ((9, 66000), (1,)), ((1000, 37), (0,)), ((3, 1), (1,))),
    *(((4, 21, 50), (1,)), ((2, 2000, 70), (1,)), ((64, 256, 16), (0,)), ((5, 300, 3), (1,)), ((7, 5, 5), (1, 2))),
    *(((3, 4, 5, 6), (1, 3)), ((3, 4, 5, 6), (0, 2)), ((3,), (0,)), ((), (0,)), ((0, 3), (1,))),
)
# Of each saved dtype those of the gradient's that have code of their own, and one of those that are made element by
# element (rotating, with the shape).
F32, F64, F16, BF16 = DTYPES
OWN = {F32: (F32, F16, BF16), F64: (F64,), F16: (F16, F32), BF16: (BF16, F32)}
OTHER = {F32: (F64,), F64: (F32, F16, BF16), F16: (F64, BF16), BF16: (F16, F64)}
every_shape = pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)


def _reversed(t: Tensor) -> Tensor:
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _ends(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [1 if i in [d % max(len(shape), 1) for d in dims] else size for i, size in enumerate(shape)]


FORMS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {  # how a tensor lies
    "plain": lambda t, _: t,
    "expanded": lambda t, _: t.new_full((), 0.7).expand(t.shape),
    "one a row": lambda t, dims: t.new_full(_ends(t.shape, dims), -1.3).expand(t.shape),
    "reversed": lambda t, _: _reversed(t),
    "with gaps": lambda t, _: torch.stack([t, t], -1)[..., 0],
    "sliced": lambda t, _: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else t,
}


def _definition(function: str, g: Tensor, y: Tensor, dims: Sequence[int]) -> Tensor:
    g, y = g.double(), y.double()
    if function == "log_softmax":
        return g - y.exp() * g.sum(dims, keepdim=True)
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    return dx if function == "softmax" else -dx


def _given(function: str, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(shape, generator=made, dtype=torch.float64)
    y = x - torch.logsumexp(x, dims, keepdim=True) if x.numel() else x
    y = y if function == "log_softmax" else y.exp()
    return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype), y.to(dtype)


def _terms(g: Tensor, y: Tensor, function: str, dims: Sequence[int]) -> Tensor:
    """The size of the terms that a gradient is the difference of."""
    g, y = g.double().abs(), y.double()
    if function == "log_softmax":
        return g + y.exp() * g.sum(dims, keepdim=True)
    return g + y * (g * y).sum(dims, keepdim=True)


def _near(got: Tensor, want: Tensor, terms: Tensor, given: torch.dtype) -> bool:
    """One rounding of the result, and the roundings of its terms."""
    kind = torch.finfo(got.dtype)
    inner = 3e-16 if torch.float64 in (got.dtype, given) else 1.2e-7
    inner = max(inner, 2.0**-18) if got.element_size() == 2 else inner
    limit = kind.eps * want.abs() + 8 * inner * terms + 2 * kind.smallest_normal
    return bool(((got.double() - want).abs() <= limit).all())


def _close(got: Tensor, want: Tensor, g: Tensor, y: Tensor, function: str, dims: Sequence[int]) -> bool:
    return _near(got, want, _terms(g, y, function, dims), y.dtype)


@pytest.mark.parametrize("form", FORMS)
@every_shape
@every_softmax
def test_against_the_definition(function: str, shape: tuple[int, ...], dims: tuple[int, ...], form: str) -> None:
    large = torch.Size(shape).numel() > 5000
    if large and form not in ("plain", "expanded"):
        shape = tuple(min(size, 140) for size in shape)
    for dtype in DTYPES[:2] if large else DTYPES:
        g, y = _given(function, shape, dims, dtype)
        g = FORMS[form](g, dims)
        y = FORMS[form](y, dims) if form in ("reversed", "sliced", "with gaps") and g.numel() % 2 else y
        want, terms = _definition(function, g, y, dims), _terms(g, y, function, dims)
        other = OTHER[dtype][(len(shape) + g.numel() + len(form)) % len(OTHER[dtype])]
        for to in (dtype,) if large else (*OWN[dtype], other):
            got = ops._softmax_backward(g, y, NUMBERS[function], dims, to)
            assert got.dtype is to
            assert got.shape == y.shape
            assert _near(got, want, terms, dtype), f"{dtype} -> {to}"
        if large and form != "plain":
            continue
        out = torch.full([*shape, 2], 9.0, dtype=to)
        ops._softmax_backward.out(g, y, NUMBERS[function], dims, out=out[..., 0])
        assert _near(out[..., 0], want, terms, dtype), f"{dtype} -> {to}, out"
        assert (out[..., 1] == 9).all()


@every_shape
def test_logsumexp_against_the_definition(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for keepdim in (False, True):
            x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            x = x.to(dtype)
            lse = torch.logsumexp(x.double(), dims, keepdim=keepdim).to(dtype)
            for g in (
                torch.randn(lse.shape, dtype=torch.float64).to(dtype),
                torch.ones((), dtype=dtype).expand(lse.shape),
            ):
                got = ops._logsumexp_backward(g, x, lse, dims, keepdim)
                at = [d % max(x.dim(), 1) for d in dims] if x.dim() else []
                wide_g, wide_lse = (decompositions.unsqueeze_reduced(t, at, keepdim).double() for t in (g, lse))
                want = wide_g * (x.double() - wide_lse).exp()
                rtol = torch.finfo(dtype).eps + (
                    4e-15 if dtype is torch.float64 else 2e-6 if x.element_size() == 4 else 1e-5
                )
                torch.testing.assert_close(got.double(), want, rtol=rtol, atol=2 * torch.finfo(dtype).smallest_normal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_special_rows_have_torchs_gradients(function: str, dtype: torch.dtype) -> None:
    inf, nan = torch.inf, torch.nan
    for n in (5, 40, 300):
        rows = torch.randn(8, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rows[1, 0], rows[2, 1:], rows[3], rows[4, 2], rows[5, 3], rows[6, ::2] = -inf, -inf, -inf, inf, nan, -inf
        rows[7] *= 1e4
        x = (-rows if function == "softmin" else rows).to(dtype)
        g = torch.randn(TORCH[function](x, 1).shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        for grad in (g, torch.full_like(g, inf), torch.zeros_like(g), g.new_ones(()).expand(g.shape)):
            got, want = (_gradient(lambda t, f=f: f(t, 1), x, grad) for f in (ours(function), TORCH[function]))
            assert same(got.isnan(), want.isnan())
            wrong = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
            torch.testing.assert_close(got, want, rtol=wrong, atol=wrong, equal_nan=True)


def _gradient(f: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (made,) = torch.autograd.grad(f(x), x, g)
    return made


@every_softmax
def test_the_bits_do_not_depend_on_the_threads(function: str) -> None:
    before = torch.get_num_threads()
    try:
        rows = (((3, 80_001), 1), ((1, 100_000), 1), ((2099, 33), 1), ((20, 4097), 1))
        few_tiles = (((9, 40, 130), 1), ((40, 3001), 0), ((1, 70, 1500), 1), ((300, 9000), 0))
        for shape, dim in (*rows, *few_tiles):
            for dtype in (torch.float32, torch.bfloat16):
                g, y = _given(function, shape, (dim,), dtype)
                torch.set_num_threads(1)
                first = ops._softmax_backward(g, y, NUMBERS[function], [dim], dtype)
                for threads in (2, 3, 8):
                    torch.set_num_threads(threads)
                    assert torch.equal(first, ops._softmax_backward(g, y, NUMBERS[function], [dim], dtype))
    finally:
        torch.set_num_threads(before)


@every_softmax
def test_in_place(function: str) -> None:
    for dtype in DTYPES:
        for shape, dim in (((7, 5), 1), ((9, 33), 1), ((9, 1025), 1), ((2, 70001), 1), ((40, 37), 0)):
            g, y = _given(function, shape, (dim,), dtype)
            want = ops._softmax_backward(g, y, NUMBERS[function], [dim], dtype)
            for which in (0, 1):
                given = [g.clone(), y.clone()]
                ops._softmax_backward.out(*given, NUMBERS[function], [dim], out=given[which])
                assert torch.equal(given[which], want)


def test_large_gradients_go_past_the_cache() -> None:
    for shape, dim in (((2048, 1024), 1), ((131072, 16), 1), ((1024, 2048), 0), ((2, 1 << 20), 1)):
        g, y = _given("softmax", shape, (dim,), torch.float32)
        got = ops._softmax_backward(g, y, 0, [dim], torch.float32)
        assert _close(got, _definition("softmax", g, y, [dim]), g, y, "softmax", [dim])


CODE = """
import torch
t.test_in_place("softmin")
t.test_logsumexp_against_the_definition((9, 129), (1,))
for function in t.NUMBERS:
    for shape, dims in t.SHAPES:
        if torch.Size(shape).numel() > 5000 and shape[0] > 2:
            continue
        for dtype in t.DTYPES:
            given, y = t._given(function, shape, dims, dtype)
            for form in ("plain", "expanded"):
                g = t.FORMS[form](given, dims)
                got = t.ops._softmax_backward(g, y, t.NUMBERS[function], dims, dtype)
                assert t._close(got, t._definition(function, g, y, dims), g, y, function, dims), (function, shape)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa: str) -> None:
    with_instruction_set(isa, __file__, CODE)
