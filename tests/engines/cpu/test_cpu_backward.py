"""The fused gradients of the CPU engine: against the definition in float64 by every instruction set, as accurate as
torch's, and which way a gradient goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import onepass
from lib.gradients import gradient
from lib.modes import Operators
from lib.support import DTYPES, TORCH, every_softmax, ours, same, slow
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


def _given(function: str, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(shape, generator=made, dtype=torch.float64)
    y = x - torch.logsumexp(x, dims, keepdim=True) if x.numel() else x
    y = y if function == "log_softmax" else y.exp()
    return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype), y.to(dtype)


def _near(got: Tensor, want: Tensor, terms: Tensor, given: torch.dtype) -> bool:
    """One rounding of the result, and the roundings of its terms."""
    kind = torch.finfo(got.dtype)
    inner = 3e-16 if torch.float64 in (got.dtype, given) else 1.2e-7
    inner = max(inner, 2.0**-18) if got.element_size() == 2 else inner
    limit = kind.eps * want.abs() + 8 * inner * terms + 2 * kind.smallest_normal
    return bool(((got.double() - want).abs() <= limit).all())


def _is_close(got: Tensor, g: Tensor, y: Tensor, function: str, dims: Sequence[int]) -> bool:
    return _near(got, *gradient(function, g, y, dims), y.dtype)


@pytest.mark.parametrize("form", [slow(form) if form in ("with gaps", "sliced") else form for form in FORMS])
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
        want, terms = gradient(function, g, y, dims)
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
                of_all = (decompositions.unsqueeze_reduced(t, at, keepdim) for t in (g, lse))
                want = gradient("logsumexp", next(of_all), x, at, next(of_all))[0]
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


def test_large_gradients_written_by_nontemporal_stores() -> None:
    for shape, dim in (((2048, 1024), 1), ((131072, 16), 1), ((1024, 2048), 0), ((2, 1 << 20), 1)):
        g, y = _given("softmax", shape, (dim,), torch.float32)
        got = ops._softmax_backward(g, y, 0, [dim], torch.float32)
        assert _is_close(got, g, y, "softmax", [dim])


def check_all() -> None:  # by another instruction set
    test_in_place("softmin")
    test_logsumexp_against_the_definition((9, 129), (1,))
    for function in NUMBERS:
        for shape, dims in SHAPES:
            if torch.Size(shape).numel() > 5000 and shape[0] > 2:
                continue
            for dtype in DTYPES[:1] if torch.Size(shape).numel() > 5000 else DTYPES:
                given, y = _given(function, shape, dims, dtype)
                for form in ("plain", "expanded"):
                    g = FORMS[form](given, dims)
                    got = ops._softmax_backward(g, y, NUMBERS[function], dims, dtype)
                    assert _is_close(got, g, y, function, dims), (function, shape)
    test_low_columns_of_any_width()


def test_low_columns_of_any_width() -> None:
    """The last vector of a step may be full, or have any number of lanes."""
    for function in NUMBERS:
        for width in range(1, 41):
            for dtype in DTYPES:
                g, y = _given(function, (5, 9, width), (1,), dtype)
                got = ops._softmax_backward(g, y, NUMBERS[function], (1,), dtype)
                assert _is_close(got, g, y, function, (1,)), (function, width, dtype)


# As accurate as torch ------------------------------------------------------------------------------------------------
#
# The error against the definition, of the same saved result and gradient, is at most 1.25 times that of torch's fused
# operator, or 2 ulp, relative to the size of the terms that a gradient is the difference of. The largest counts.

SIZES = (
    *(((4000, 3), 1), ((3000, 16), 1), ((1500, 33), 1), ((600, 64), 1), ((150, 300), 1), ((60, 1025), 1)),
    *(((12, 5003), 1), ((2, 70_001), 1), ((33, 900), 0), ((700, 50), 0), ((8, 21, 300), 1)),
)
MAKERS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape, dim, made: torch.randn(shape, generator=made, dtype=torch.float64),
    "wide": lambda shape, dim, made: 20 * torch.randn(shape, generator=made, dtype=torch.float64),
    # one weight is nearly 1 in each row, so that two terms nearly cancel
    "one-hot": lambda shape, dim, made: torch.randn(shape, generator=made, dtype=torch.float64).scatter(
        dim, torch.zeros([1 if i == dim else size for i, size in enumerate(shape)], dtype=torch.int64), 12.0
    ),
}
GRADS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape, made: torch.randn(shape, generator=made, dtype=torch.float64),
    "nearly one": lambda shape, made: 1 + 0.01 * torch.randn(shape, generator=made, dtype=torch.float64),
}


def _worst(got: Tensor, want: Tensor, terms: Tensor) -> float:
    """The largest error in ulp of the terms; results that are subnormal have fewer digits and do not count."""
    kind = torch.finfo(got.dtype)
    error = (got.double() - want).abs() / terms / kind.eps
    return float(error[terms > 4 * kind.smallest_normal].max())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.float64], ids=str)  # the judge is float64
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_no_less_accurate_than_torch(function: str, dtype: torch.dtype, kind: str) -> None:
    made = torch.Generator().manual_seed(len(kind) + len(function))
    misses = []
    for (shape, dim), (name, grads) in ((s, g) for s in SIZES for g in GRADS.items()):
        x = MAKERS[kind](shape, dim, made)
        g = grads(shape, made).to(dtype)
        if function == "logsumexp":
            x, g = x.to(dtype), g.select(dim, 0).contiguous()
            lse = torch.logsumexp(x.double(), dim).to(dtype)
            mine = ops._logsumexp_backward(g, x, lse, [dim])
            torchs = g.unsqueeze(dim) * (x - lse.unsqueeze(dim)).exp()
            d = x.double() - lse.double().unsqueeze(dim)
            want = g.double().unsqueeze(dim) * d.exp()
            terms = want.abs() * (1 + d.abs() / 8)  # the difference is rounded
        else:
            y = x - torch.logsumexp(x, dim, keepdim=True)
            y = (y if function == "log_softmax" else y.exp()).to(dtype)
            theirs = torch._log_softmax_backward_data if function == "log_softmax" else torch._softmax_backward_data
            mine = ops._softmax_backward(g, y, int(function == "log_softmax"), [dim], dtype)
            torchs = theirs(g, y, dim, dtype)
            want, terms = gradient(function, g, y, [dim])
            if function == "log_softmax":
                terms = g.double().abs() + (terms - g.double().abs()) * (1 + y.double().abs() / 8)
        ours, limit = _worst(mine, want, terms), _worst(torchs, want, terms)
        if not ours <= max(1.25 * limit, 2):
            misses.append(f"{shape} dim {dim}, gradient {name}: {ours:.2f} ulp, torch has {limit:.2f}")
    assert not misses, "\n".join(misses)


def test_the_judge_can_fail() -> None:
    y = torch.softmax(torch.randn(50, 40, generator=torch.Generator().manual_seed(0)), -1)
    g = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    want, terms = gradient("softmax", g, y, [1])
    assert _worst(want.float(), want, terms) <= 0.5
    assert _worst((want * (1 + 1e-5)).float(), want, terms) > 2


# ----------------------------------------------------------------------------------------------------------------------


def test_a_backward_is_one_fused_operator(function: str) -> None:
    for x in (torch.randn(4, 6, requires_grad=True), torch.nn.Parameter(torch.randn(4, 6))):
        y = ours(function)(x, 1)
        assert "EagerFunction" in str(y.grad_fn), "without the context of transforms"
        with Operators() as mode:
            y.sum().backward()
        assert mode.ours() == ["logsumexp_backward" if function == "logsumexp" else "softmax_backward"]


def _flags(address: int) -> list[str]:
    """What the system has noted of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and Path("/proc/self/smaps").exists()


@pytest.mark.skipif(not HUGE_PAGES, reason="this system has no transparent huge pages")
@pytest.mark.parametrize("gradient", [False, True])
def test_large_fresh_results_ask_for_huge_pages(gradient: bool) -> None:
    def made(rows: int) -> Tensor:
        x = torch.zeros(rows, 1024)
        return ops._softmax_backward(x, x, 0, [1], x.dtype) if gradient else onepass.softmax(x)

    large = made(16384)
    assert "hg" in _flags(large.data_ptr() + large.numel() * 2)
    small = made(1024)
    assert small.shape == (1024, 1024)
    assert torch.equal(small, torch.full_like(small, 0.0 if gradient else 1 / 1024))
