"""Divergences by the Triton engine, under Triton's interpreter, on a GPU, and compiled for GPUs that are not here."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import DTYPES, accumulator, maker, same, thin, thin_product
from lib.triton import (
    BF16,
    COLUMNS,
    F32,
    ROWS,
    SHAPES,
    TILES,
    assert_close,
    assert_no_spills,
    every_target,
    launched_resources,
    name_of,
    needs_triton,
    rows_of,
)
from onepass.loss_arithmetic import DivergenceSpec, divergence_arithmetic, divergence_backward_arithmetic

pytestmark = needs_triton
KINDS = pytest.mark.parametrize("is_kl", [True, False], ids=["kl", "probabilities"])


class Call(NamedTuple):
    x: Tensor
    y: Tensor
    weight: Tensor | None
    spec: DivergenceSpec


def forward(call: Call, tile: Any = None) -> Tensor:
    x, spec = call.x, call.spec
    terms = x.new_full((5 if spec.is_kl else 4, x.numel() // x.size(spec.dim)), 777.0, dtype=accumulator(x.dtype))
    assert engine.launch_divergence_forward(*call[:3], terms, spec, tile=tile)
    return terms


def backward(call: Call, terms: Tensor, grads: Tensor, made: Any, tile: Any = None) -> Any:
    assert engine.launch_divergence_backward(*call[:3], terms, grads, *made, call.spec, tile=tile)
    return made


def made(x: Tensor, y: Tensor, is_kl: bool, parts: str = "", dim: int = 1) -> Call:
    """A call with these of the parts that its kind has."""
    spec = DivergenceSpec(dim, is_kl, -0.7 if "factor" in parts else 1.0)
    if is_kl:
        return Call(x, y, None, spec)
    weight = maker(accumulator(x.dtype), x.device.type, seed=3)(x.size(dim)).abs() + 0.1
    spec = spec._replace(softcap=2.5 * ("softcap" in parts), smoothing=0.2 * ("smoothing" in parts))
    return Call(x, y, weight if "weight" in parts else None, spec)


def check(runs: Any, call: Call, tile: Any = None, asked: str = "xy") -> tuple[Any, Any, Any]:
    """Runs a call and the gradients that are asked for, compares them with the arithmetic in float64, and gives the
    terms and the gradients. The gradient of x lies in another order."""
    x, y, weight, spec = call
    note = (x.shape, x.stride(), y.stride(), x.dtype, spec, tile)
    wide = *(None if t is None else t.double().cpu() for t in call[:3]), spec
    size, of_y = (rows_of(t, spec.dim).nan_to_num(0, 0, 0).abs() for t in wide[:2])
    terms, want = runs.run(forward, call, tile), divergence_arithmetic(*wide)
    size, shares = ((size + of_y).amax(1), 1) if spec.is_kl else (size.amax(1), 1 + of_y.sum(1))
    shares = shares * (1 if weight is None else float(weight.max()))
    roundings = 24 + 4 * size + x.size(spec.dim) ** 0.5
    error = torch.finfo(terms.dtype).eps * roundings * (1 + size + want[1].nan_to_num(0).abs()) * shares
    for plane in (0, 3) if spec.is_kl else (0,):  # m need not be NaN where log l is
        want[plane] = torch.where(want[plane].isnan(), terms[plane].cpu(), want[plane])
    assert_close(terms.cpu(), want, error, note)

    grads = maker(terms.dtype, x.device.type, seed=5)(*terms.shape)
    exact_dx, exact_dy = (rows_of(t, spec.dim) for t in divergence_backward_arithmetic(grads.double().cpu(), *wide))
    if spec.is_kl:  # where the divergence is infinite too, where the arithmetic has NaN
        exact_dx = exact_dx.masked_fill((rows_of(wide[0], spec.dim) * spec.factor).softmax(1) == 0, 0)
    dx, dy = x.new_full(x.shape[::-1], 777.0).permute(*range(x.ndim)[::-1]), x.new_full(x.shape, 777.0)
    dx, dy = runs.run(backward, call, terms, grads, (dx if "x" in asked else None, dy if "y" in asked else None), tile)
    error = (error * grads[1:3].double().cpu().abs().sum(0))[:, None]
    for got, exact in ((got, exact) for got, exact in ((dx, exact_dx), (dy, exact_dy)) if got is not None):
        assert_close(rows_of(got, spec.dim).cpu(), exact, error, note)
    return terms, dx, dy


def products(x: Tensor, y: Tensor, dim: int, tile: Any = None) -> tuple[Tensor, Tensor]:
    sums, dx = x.new_empty(x.numel() // x.size(dim), dtype=accumulator(x.dtype)), torch.empty_like(x)
    assert engine.launch_product(x, y, sums, dim, tile=tile)
    assert engine.launch_product_gradient(x, y, sums, dx, dim, tile=tile)
    return sums, dx


@thin_product(3, place=[(0, None), (1, COLUMNS), (2, ROWS)], dtype=DTYPES)
def test_products(runs, dtype, place):
    dim, tile = place
    shape = [3, 4, 5]
    shape[dim] = 70
    x, y = (maker(dtype, runs.device, seed)(*shape) for seed in (1, 2))
    sums, dx = runs.run(products, x, y.mT.contiguous().mT, dim, tile)
    x, y, sums = x.double().cpu(), y.double().cpu(), sums.double().cpu()
    want = (x * y).sum(dim, keepdim=True)
    torch.testing.assert_close(sums, want.flatten(), rtol=1e-5, atol=1e-5)
    sums = sums.reshape(want.shape)
    error = torch.finfo(dtype).eps * 4 * x.abs() * (y.abs() + sums.abs())
    assert_close(dx.cpu(), x * (y - sums), error, "dx")


@thin_product(3, dtype=DTYPES, tile=(ROWS, COLUMNS), is_kl=(True, False))
def test_types(runs, dtype, tile, is_kl):
    x, y = maker(dtype, runs.device)(2, 3, 21)
    check(runs, made(x, y, is_kl, "factor softcap smoothing weight"), tile)


@pytest.mark.parametrize("shape", thin(SHAPES, 2))
def test_shapes(runs, shape):
    """By the tiles of the engine; y lies as x or not."""
    (make, dim), random = SHAPES[shape], maker(BF16, runs.device)
    check(runs, made(make(random), make(random), True, dim=dim))
    x = make(random)
    check(runs, made(x, random(*x.shape), False, "smoothing", dim))


@pytest.mark.parametrize("seed", thin(range(100), 10))
def test_random_calls(runs, seed):
    pick = Random(seed).choice
    sizes = [pick((1, 2, 3)) for _ in range(pick((1, 2, 3)))]
    dim, is_kl = pick(range(len(sizes))), pick((True, False))
    sizes[dim] = pick((1, 3, 16, 23))
    make = maker(pick(DTYPES), runs.device, seed=seed, scale=pick((1.0, 8.0)))
    x, y = make(*[size + 1 for size in sizes]), make(*sizes[::-1]).permute(*range(len(sizes))[::-1])
    x = x[tuple(slice(k, k + size) for size, k in zip(sizes, pick(((0, 0, 0), (1, 0, 1))), strict=False))]
    if pick((True, False)):
        x = x.masked_fill(x > pick((1, 4)), -torch.inf)
        y = y.masked_fill(x == -torch.inf, pick((-torch.inf, 0.0))) if is_kl else y
    parts = " ".join(part for part in ("factor", "softcap", "smoothing", "weight") if pick((True, False)))
    check(runs, made(x, y, is_kl, parts, dim), pick((ROWS, COLUMNS, None)), pick(("xy", "x", "y")))


@TILES
def test_special_rows(runs, tile):
    """NaN and infinities where the arithmetic has them, in these rows alone."""
    x, y = maker(F32, runs.device)(2, 11, 19)
    x[0], x[1, 4], x[2, 0], x[3, 18], x[4, ::2] = -torch.inf, torch.nan, torch.nan, torch.inf, -torch.inf
    terms, _, _ = check(runs, made(x, y.abs(), False, "smoothing"), tile)
    assert bool(terms[2, :4].isnan().all() and terms[2, 4].isposinf() and terms[2, 5:].isfinite().all())
    y[4, ::2], y[5], y[6, 4], y[7, 18], y[8, 3] = -torch.inf, -torch.inf, torch.nan, torch.inf, -torch.inf
    terms, dx, _ = check(runs, made(x, y, True), tile)
    assert terms[2].isfinite().tolist() == dx.isfinite().all(1).tolist() == [k in (4, 9, 10) for k in range(11)]


@KINDS
@TILES
def test_huge_logits(runs, tile, is_kl):
    for dtype, size in ((F32, 1e32), (BF16, 1e37)):
        x, y = maker(dtype, runs.device)(2, 3, 5) * size
        x[0, :2], x[1] = -torch.inf, torch.finfo(dtype).min
        check(runs, made(x, y if is_kl else y.sign().abs(), is_kl), tile)


@TILES
def test_masked_classes_take_no_digits_from_others(runs, tile):
    x, y = maker(F32, runs.device)(2, 5, 37)
    for low in (-1e9, torch.finfo(F32).min):
        masked = x.clone()
        masked[0, 0], masked[1, ::2], masked[2, :30], masked[3, 30:] = low, low, low, low
        for call in (made(masked, y, True), made(masked, y.softmax(1).where(masked != low, 0.0), False)):
            want = divergence_arithmetic(call.x.double().cpu(), call.y.double().cpu(), None, call.spec)
            torch.testing.assert_close(runs.run(forward, call, tile).double().cpu(), want, rtol=2e-6, atol=2e-6)
    assert runs.run(forward, made(x + 1024, x, True), tile)[2].abs().max() < 1e-3  # for what 1024 rounds off


@thin_product(3, dtype=DTYPES, tile=(ROWS, COLUMNS))
def test_equal_logits_are_not_apart(runs, dtype, tile):
    x = maker(dtype, runs.device)(4, 37)
    x[1, ::3], x[2, :20] = -torch.inf, torch.finfo(dtype).min
    call = Call(x, x.t().contiguous().t(), None, DivergenceSpec(1, True, factor=0.3))
    terms = runs.run(forward, call, tile)
    dx, dy = runs.run(backward, call, terms, torch.ones_like(terms), (x + 1, x + 1), tile)
    assert not bool(terms[2].any() or dx.any() or dy.any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@KINDS
@pytest.mark.parametrize("n", [1, 16, 200, 781, 4096, 32768, 50257, 300001])
def test_row_lengths(gpu, n, is_kl, dtype):
    for dim in (0, 1):
        x, y = (t.movedim(1, dim).contiguous() for t in maker(dtype, gpu.device)(2, max(3, (1 << 18) // n), n))
        call = made(x, y, is_kl, "factor softcap smoothing weight", dim)
        terms, _, _ = check(gpu, call)
        assert not is_kl or not bool(forward(call._replace(y=x))[2].any())
    assert same(forward(call._replace(x=x[1:2], y=y[1:2])), terms[:, 1:2])


def _compile(asked: str, n: int, dtype: torch.dtype, dim: int, is_kl: bool, backend: str, arch: Any) -> dict[str, Any]:
    """The resources, per thread, of the kernel that a call or, where some are asked for, its gradients would launch."""
    x = torch.empty((64, n) if dim else (n, 64), dtype=dtype)
    call, terms = made(x, x, is_kl, "softcap smoothing weight", dim), torch.empty(5, 64, dtype=accumulator(dtype))
    to = x if "x" in asked else None, x if "y" in asked else None
    launch = (lambda: backward(call, terms, terms, to)) if asked else (lambda: forward(call))
    return launched_resources(launch, backend, arch, engine.divergence)


SIZES = [(131072, BF16, 1), (65536, F32, 1), (4096, torch.float64, 1), (64, BF16, 0)]
COMPILED = [(asked, *size, is_kl) for asked in ("", "xy", "x", "y") for size in SIZES for is_kl in (True, False)]


@every_target("asked n dtype dim is_kl", COMPILED, 9)
def test_compiles_without_spills(compiling, backend, arch, asked, n, dtype, dim, is_kl):
    found = compiling(_compile, asked, n, dtype, dim, is_kl, backend, arch)
    assert found["wide"] > 0, "aligned rows and columns are read 16 bytes at a time"
    assert_no_spills(found, backend)
