"""Losses by the Triton engine: kernels with forced tiles on small shapes under Triton's interpreter and on a GPU, on a
GPU also by their own tiles, and compiled for GPUs that are not here."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import DTYPES, accumulator, maker, same, slow, thin, thin_product, thin_tuples
from lib.triton import (
    BF16,
    COLUMNS,
    F16,
    F32,
    F64,
    INF,
    NAN,
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
from onepass.loss_arithmetic import LossSpec
from onepass.triton.loss import Tile

pytestmark = needs_triton


class Call(NamedTuple):
    x: Tensor
    spec: LossSpec
    index: Tensor | None = None
    weight: Tensor | None = None
    scale: Tensor | None = None

    def planes(self) -> int:
        if self.spec.is_cross:
            return 3
        picks = 0 if self.index is None else self.index.size(1)
        return 2 + self.spec.spread + self.spec.entropy + picks


class Grads(NamedTuple):
    """What the gradient comes from: of a cross-entropy the first is that of the result."""

    of_terms: Tensor
    total: Tensor | None = None
    of_lse: Tensor | None = None


def forward(call: Call, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """The terms and the result of the kernel."""
    x, spec, index, weight, scale = call
    rows, wide = x.numel() // x.size(spec.dim), accumulator(x.dtype)
    terms = x.new_full((call.planes(), rows), 777.0, dtype=wide)
    result = x.new_full((rows,), 777.0)
    weight_sum = None if weight is None else weight.sum()
    given = x, index, weight, weight_sum, scale, terms, result if spec.is_cross else None
    assert engine.launch_loss_forward(*given, spec, tile=tile)
    return terms, result


def backward(call: Call, terms: Tensor, grads: Grads, dx: Tensor, tile: Tile | None = None) -> Tensor:
    x, spec, index, weight, scale = call
    weight_sum = None if weight is None else weight.sum()
    given = x, terms, index, weight, weight_sum, scale, *grads
    assert engine.launch_loss_backward(*given, dx, spec, tile=tile)
    return dx


# The definition -------------------------------------------------------------------------------------------------------


def definition(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of an input in float64: the scores, and the logsumexp and the other terms of each row."""
    spec, index = call.spec, call.index
    s = rows_of(x, spec.dim) * spec.factor
    if call.scale is not None:
        s = s * call.scale.double()[:, None]
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    lse = torch.logsumexp(s, 1)
    weight = s.new_ones(s.size(1)) if call.weight is None else call.weight.double()
    losses = lse[:, None] - s
    spread = (weight * losses).sum(1)
    entropy = (losses.neg().exp() * losses).sum(1)
    if not spec.is_cross:
        picked = [] if index is None else losses.gather(1, index).unbind(1)
        return s, lse, torch.stack([*[spread] * spec.spread, *[entropy] * spec.entropy, *picked, lse])[:-1]
    assert index is not None
    ignored = index == spec.ignore_index
    y = index.masked_fill(ignored, 0)
    loss = (1 - spec.smoothing) * weight[y] * losses.gather(1, y[:, None])[:, 0] + spec.z_loss * lse**2
    loss = loss + spec.smoothing / s.size(1) * spread
    return s, lse, torch.where(ignored, 0.0, loss)[None]


def check(
    runs: Any, call: Call, tile: Tile | None = None, grads: Grads | None = None, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs a call and its gradient, compares them with the definition, and gives the terms and the gradient."""
    spec, note = call.spec, (call.x.shape, call.x.stride(), call.x.dtype, call.spec, tile)
    terms, result = runs.run(forward, call, tile)
    x = call.x.double().detach().requires_grad_()
    s, lse, want = definition(call, x)
    eps = torch.finfo(terms.dtype).eps
    roundings = 24 + 4 * s.detach().abs().amax(1) + s.size(1) ** 0.5
    weights = s.size(1) if call.weight is None else float(call.weight.sum())
    size = 1 + (1 + spec.z_loss) * lse.detach().abs() + weights * (spec.spread or spec.smoothing / s.size(1))
    error = eps * roundings * size
    if call.weight is not None:
        error = error * (1 + float(call.weight.max()))
    assert_close(terms[0], s.detach().amax(1), error, note)
    assert_close(terms[0].double() + terms[1].double(), lse.detach(), error, note)
    assert_close(terms[2:], want.detach(), error, note)
    if spec.is_cross:
        assert_close(result, want[0].detach(), error, note)

    make = maker(call.x.dtype, call.x.device.type, seed=5)
    if grads is None:
        rows = terms.size(1)
        grads = Grads(make(rows)) if spec.is_cross else Grads(make(*terms.shape).to(terms.dtype))
    if spec.is_cross:
        total = 1.0 if grads.total is None else grads.total.double()
        of_terms = (grads.of_terms.double() / total).expand(1, terms.size(1))
        of_lse = torch.zeros_like(lse) if grads.of_lse is None else grads.of_lse.double()
        of_lse = torch.where(call.index == spec.ignore_index, 0.0, of_lse)
    else:
        of_lse, of_terms = grads.of_terms[1].double(), grads.of_terms[2:].double()
    sum_of = (of_lse * lse).sum() + (of_terms * want).sum()
    (exact,) = torch.autograd.grad(sum_of, x)
    dx = torch.full_like(call.x, 777.0) if dx is None else dx
    made = runs.run(backward, call, terms, grads, dx, tile)
    slope = abs(spec.factor) * (1 if call.scale is None else call.scale.double().abs())
    error = eps * roundings * slope * (of_lse.abs() + of_terms.abs().sum(0) * size)
    if call.weight is not None:
        error = error * (1 + float(call.weight.max()))
    assert_close(rows_of(made, spec.dim), rows_of(exact, spec.dim), error[:, None], note)
    return terms, made


# Calls ----------------------------------------------------------------------------------------------------------------

GENERAL = ("spread", "entropy", "weight", "scale", "softcap", "picks")
CROSS = ("smoothing", "z_loss", "weight", "scale", "softcap", "ignored")
EVERY = {False: dict.fromkeys(GENERAL, True), True: dict.fromkeys(CROSS, True)}


def made(x: Tensor, is_cross: bool = False, dim: int = 1, **parts: Any) -> Call:
    """A call with these parts."""
    there = {name for name, is_there in parts.items() if is_there}
    generator = torch.Generator().manual_seed(3)
    n, make = x.size(dim), maker(accumulator(x.dtype), x.device.type, seed=3, scale=1.0)
    rows = x.numel() // n

    spec = LossSpec(dim, factor=-0.7 if "scale" in there else 1.0, softcap=2.5 if "softcap" in there else 0.0)
    weight = make(n).abs() + 0.1 if "weight" in there else None
    scale = make(rows).abs() + 0.3 if "scale" in there else None
    if not is_cross:
        spec = spec._replace(spread="spread" in there, entropy="entropy" in there)
        picks = 3 * int(parts.get("picks", False))
        index = torch.randint(n, (rows, picks), generator=generator)
        index[:, 1:2] = index[:, :1]  # twice the same class
        return Call(x, spec, index.to(x.device) if picks else None, weight, scale)
    numbers = {name: value for name, value in (("smoothing", 0.2), ("z_loss", 0.1)) if name in there}
    index = torch.randint(n, (rows,), generator=generator)
    ignore_index = -100
    if "ignored" in there:
        ignore_index = -1 if rows % 2 else 0
        index[::3] = ignore_index
    spec = spec._replace(is_cross=True, ignore_index=ignore_index, **numbers)
    return Call(x, spec, index.to(x.device), weight, scale)


def combinations(names: tuple[str, ...]) -> list[dict[str, bool]]:
    return [dict(zip(names, on, strict=True)) for on in itertools.product((False, True), repeat=len(names))]


PARTS = [(False, parts) for parts in combinations(GENERAL)] + [(True, parts) for parts in combinations(CROSS)]


@pytest.mark.parametrize(
    ("is_cross", "parts", "k"),
    thin_tuples(((*each, k) for k, each in enumerate(PARTS)), 17),
    ids=lambda value: "+".join(name for name, on in value.items() if on) if isinstance(value, dict) else str(value),
)
def test_parts_together(runs, is_cross, parts, k):
    check(runs, made(maker(F32, runs.device)(3, 19), is_cross, **parts), (ROWS, COLUMNS)[k % 2])


@thin_product(3, dtype=DTYPES, tile=(ROWS, COLUMNS), is_cross=(False, True))
def test_types(runs, dtype, tile, is_cross):
    check(runs, made(maker(dtype, runs.device)(3, 21), is_cross, **EVERY[is_cross]), tile)


@pytest.mark.parametrize("shape", thin(SHAPES, 2))
def test_shapes(runs, shape):
    """By the tiles of the engine; the gradient is of the shape alone, and lies in another order."""
    make, dim = SHAPES[shape]
    x = make(maker(BF16, runs.device))
    turned = tuple(range(x.ndim))[::-1]
    dx = torch.full(x.permute(turned).shape, 777.0, dtype=x.dtype, device=x.device).permute(turned)
    call = made(x, dim=dim, spread=True, picks=True)
    check(runs, call, dx=dx)
    check(runs, made(x, True, dim, smoothing=True, ignored=True))


@TILES
def test_gradients_of_a_mean_and_of_lse(runs, tile):
    """One gradient for all rows, divided by a number on the device; and a gradient of lse beside it."""
    make = maker(F16, runs.device, seed=7)
    call = made(make(5, 19), True, z_loss=True, ignored=True)
    of_lse, total = make(5).float(), torch.tensor([3.0], device=runs.device)
    for grads in (Grads(make(1), total), Grads(make(1), None, of_lse), Grads(make(5), total, of_lse)):
        _, dx = check(runs, call, tile, grads)
        assert not bool(dx[call.index == call.spec.ignore_index].any())
    assert bool(dx.any())


@TILES
@pytest.mark.parametrize("is_cross", [False, True], ids=["terms", "cross-entropy"])
def test_in_place(runs, tile, is_cross):
    call = made(maker(F32, runs.device)(3, 19), is_cross, **EVERY[is_cross])
    terms, dx = check(runs, call, tile)
    grads = Grads(torch.ones_like(terms[0] if is_cross else terms))
    want = runs.run(backward, call, terms, grads, torch.empty_like(dx), tile)
    assert same(runs.run(_in_place, call, terms, grads, tile), want)


def _in_place(call: Call, terms: Tensor, grads: Grads, tile: Tile) -> Tensor:
    return backward(call, terms, grads, call.x, tile)


@pytest.mark.parametrize("is_cross", [False, True], ids=["terms", "cross-entropy"])
def test_strided_gradient_is_written_where_it_lies_and_nowhere_else(runs, is_cross):
    call = made(maker(F32, runs.device)(3, 4, 5), is_cross, softcap=True)
    base = torch.full((12, 5, 8), 777.0, device=runs.device)
    dx = base[1::2, ::1, ::2].permute(2, 1, 0)[:3, 1:5, :5]
    _, got = check(runs, call, dx=dx)
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == got.numel()


@TILES
@pytest.mark.parametrize("dtype", [F32, slow(BF16)], ids=name_of)
def test_what_is_minus_infinity_is_not_there(runs, dtype, tile):
    """Terms are those of the other classes, but for the spread, and gradients are 0."""
    x = maker(dtype, runs.device)(4, 19)
    mask = torch.zeros(4, 19, dtype=torch.bool, device=runs.device)
    mask[0, :10], mask[1, 7:], mask[2, ::2], mask[3, 1:] = True, True, True, True
    index = (~mask).int().argmax(1)[:, None]
    call = Call(x.masked_fill(mask, -INF), LossSpec(1, entropy=True), index)
    terms, _ = runs.run(forward, call, tile)
    grads = Grads(torch.ones_like(terms))
    dx = runs.run(backward, call, terms, grads, torch.full_like(x, 777.0), tile)
    assert not bool(dx[mask].any())
    for row in range(4):
        part = Call(x[row : row + 1, ~mask[row]], call.spec, torch.zeros_like(index[:1]))
        alone, dx_alone = check(runs, part, tile, Grads(grads.of_terms[:, :1]))
        torch.testing.assert_close(terms[:, row], alone[:, 0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dx[row][~mask[row]], dx_alone[0], rtol=0.0, atol=4 * torch.finfo(dtype).eps)
    terms, _ = runs.run(forward, call._replace(spec=LossSpec(1, spread=True)), tile)
    assert bool((terms[2] == INF).all())
    terms, result = runs.run(
        forward, call._replace(spec=LossSpec(1, is_cross=True), index=index[:, 0].contiguous()), tile
    )
    assert bool(result.isfinite().all())


@TILES
def test_special_rows(runs, tile):
    """NaN where torch has it, in these rows alone."""
    x = maker(F32, runs.device)(7, 19)
    x[0], x[1, 4], x[2, 0], x[3, 18], x[4, ::3] = -INF, NAN, NAN, INF, INF
    index = torch.tensor([1, 2, 3, 18, 3, 5, 6], device=runs.device)
    call = Call(x, LossSpec(1, spread=True, entropy=True), index[:, None])
    terms, _ = runs.run(forward, call, tile)
    assert bool(terms[1:, :5].isnan().all())
    assert bool(terms[:, 5:].isfinite().all())
    dx = runs.run(backward, call, terms, Grads(torch.ones_like(terms)), torch.full_like(x, 777.0), tile)
    assert bool(dx[:5].isnan().any(1).all() and dx[5:].isfinite().all())

    for smoothing in (0.0, 0.1):
        call = Call(x, LossSpec(1, is_cross=True, smoothing=smoothing), index)
        terms, result = runs.run(forward, call, tile)
        theirs = torch.nn.functional.cross_entropy(x, index, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(result, theirs, equal_nan=True)
        dx = runs.run(backward, call, terms, Grads(torch.ones_like(result)), torch.full_like(x, 777.0), tile)
        assert bool(dx[:3].isnan().all() and dx[5:].isfinite().all())
        ignored = call._replace(index=torch.full_like(index, -100))
        terms, result = runs.run(forward, ignored, tile)
        dx = runs.run(backward, ignored, terms, Grads(torch.ones_like(result)), torch.full_like(x, 777.0), tile)
        assert not bool(result.any() or dx.any())


@TILES
def test_huge_scores(runs, tile):
    for dtype, size in ((F32, 1e4), (BF16, 1e30), (F64, 1e300)):
        x = maker(dtype, runs.device)(3, 19) * size
        terms, dx = check(runs, made(x, entropy=True, picks=True), tile)
        assert bool(terms.isfinite().all() and dx.isfinite().all())
    check(runs, made(maker(F32, runs.device)(3, 19) + 1e4, True, smoothing=True), tile)
    check(runs, made(maker(F32, runs.device)(3, 19) * 1e4, softcap=True, entropy=True), tile)


@TILES
def test_classes_that_are_not_there(runs, tile):
    """Their loss is NaN, nothing is read there, and no class gets their gradient."""
    x = maker(F32, runs.device)(3, 19)
    index = torch.tensor([[2, 19, 2], [-1, 3, 4], [2**40, 3, 4]], device=runs.device)
    call = Call(x, LossSpec(1), index)
    terms, _ = runs.run(forward, call, tile)
    wrong = (index < 0) | (index > 18)
    assert same(terms[2:].t().isnan(), wrong)
    grads = Grads(torch.ones_like(terms))
    dx = runs.run(backward, call, terms, grads, torch.full_like(x, 777.0), tile)
    want = 4 * x.softmax(1)
    want.scatter_add_(1, index.masked_fill(wrong, 0), torch.where(wrong, 0.0, -1.0))
    torch.testing.assert_close(dx, want, rtol=1e-5, atol=1e-5)
    terms, result = runs.run(forward, Call(x, LossSpec(1, is_cross=True), index[:, 0].contiguous()), tile)
    assert same(result.isnan(), wrong[:, 0])


@TILES
def test_losses_as_torch_has_them(runs, tile):
    x, y = maker(F32, runs.device)(4, 19), torch.tensor([3, 18, -100, 0], device=runs.device)
    weight = torch.linspace(0, 2, 19, device=runs.device)
    for smoothing in (0.0, 0.3):
        call = Call(x, LossSpec(1, is_cross=True, smoothing=smoothing), y, weight)
        _, result = runs.run(forward, call, tile)
        want = torch.nn.functional.cross_entropy(x, y, weight, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(result, want)


def test_without_elements_there_is_no_kernel():
    for shape in ((0, 5), (5, 0)):
        x, none = torch.zeros(shape), torch.zeros(0)
        assert not engine.launch_loss_forward(x, None, None, None, None, none, None, LossSpec(1))
        assert not engine.launch_loss_backward(x, none, None, None, None, None, none, None, None, x, LossSpec(1))


@pytest.mark.parametrize("seed", thin(range(60), 10))
def test_random_calls(runs, seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    sizes = [pick(1, 2, 3) for _ in range(pick(1, 2, 3))]
    dim = pick(*range(len(sizes)))
    sizes[dim] = pick(1, 3, 16, 23)
    x = maker(pick(*DTYPES), runs.device, seed=seed, scale=pick(1.0, 8.0))(*[size + 1 for size in sizes])
    x = x[tuple(slice(pick(0, 1), None) for _ in sizes)] if pick(True, False) else x
    is_cross = pick(True, False)
    parts = {name: pick(True, False) for name in (CROSS if is_cross else GENERAL)}
    check(runs, made(x, is_cross, dim, **parts), pick(ROWS, COLUMNS, None, None))


# On a GPU, by the engine's own tiles ----------------------------------------------------------------------------------

LENGTHS = [1, 3, 16, 200, 256, 781, 1024, 2048, 4096, 8192, 16385, 32768, 50257, 131072, 300001]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("is_cross", [False, True], ids=["terms", "cross-entropy"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", LENGTHS)
def test_row_lengths(gpu, n, dim, is_cross, dtype):
    rows = max(3, min(300, 1 << 18) // n + 1)
    x = maker(dtype, gpu.device)(*((rows, n) if dim else (n, rows)))
    check(gpu, made(x, is_cross, dim, **EVERY[is_cross]))


@pytest.mark.gpu
def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 4096, 50257):
        call = made(maker(F32, gpu.device)(300, n), picks=True, entropy=True)
        terms, _ = forward(call)
        assert same(terms, forward(call)[0])
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            part, _ = forward(call._replace(x=call.x[rows], index=call.index[rows].contiguous()))
            assert same(terms[:, rows], part)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 64 + 5, 64), (3, 2**30 + 16)])
def test_more_than_2_to_the_31_elements(gpu, room, shape):
    x = torch.zeros(shape, dtype=F16, device=gpu.device)
    x[-1, -1] = 5.0
    index = torch.full((shape[0],), shape[1] - 1, device=gpu.device)
    call = Call(x, LossSpec(1, is_cross=True), index)
    terms, result = forward(call)
    want = torch.logsumexp(x[-1].float(), 0)
    torch.testing.assert_close((terms[0] + terms[1])[-1], want)
    torch.testing.assert_close(terms[2, -1], want - 5)
    dx = backward(call, terms, Grads(torch.ones_like(result)), x)
    assert float(dx[0, -1]) == pytest.approx(-1, abs=0.02)
    assert float(dx[-1, -1]) == pytest.approx(float((5 - want).exp() - 1), abs=1e-3)


# Compiled for GPUs that are not here ----------------------------------------------------------------------------------


def _compile(
    of_gradient: bool, n: int, dtype: torch.dtype, dim: int, is_cross: bool, parts: str, backend: str, arch: Any
) -> dict[str, Any]:
    """The resources, per thread, of the kernel that a call with these parts, or its gradient, would launch for many
    rows of n."""
    x = torch.empty((64, n) if dim else (n, 64), dtype=dtype)
    call = made(x, is_cross, dim, **(EVERY[is_cross] if parts == "all" else dict.fromkeys(parts.split(), True)))

    def launches() -> None:
        if of_gradient:
            terms = torch.empty(call.planes(), 64, dtype=accumulator(dtype))
            backward(call, terms, Grads(x[:, 0].clone()[:64] if is_cross else terms), x)
        else:
            forward(call)

    return launched_resources(launches, backend, arch, engine.loss)


COMPILED = [
    (False, 16, F32, 1, True, "ignored"),
    (False, 1000, BF16, 1, True, "all"),
    (False, 131072, BF16, 1, True, "ignored"),
    (False, 131072, BF16, 1, True, "all"),
    (False, 131072, BF16, 1, False, "all"),
    (False, 65536, F32, 1, False, "all"),
    (False, 4096, F64, 1, False, "all"),
    (False, 64, BF16, 0, True, "all"),
    (False, 65536, F32, 0, False, "all"),
    (True, 16, F32, 1, True, "ignored"),
    (True, 131072, BF16, 1, True, "all"),
    (True, 131072, BF16, 1, False, "all"),
    (True, 65536, F32, 1, False, "all"),
    (True, 4096, F64, 1, False, "all"),
    (True, 64, BF16, 0, True, "all"),
    (True, 65536, F32, 0, False, "all"),
]


@every_target("of_gradient n dtype dim is_cross parts", COMPILED, 3)
def test_compiles_without_spills(compiling, backend, arch, of_gradient, n, dtype, dim, is_cross, parts):
    found = compiling(_compile, of_gradient, n, dtype, dim, is_cross, parts, backend, arch)
    assert found["wide"] > 0 or n % 16, "aligned rows and columns are read 16 bytes at a time"
    assert_no_spills(found, backend)
