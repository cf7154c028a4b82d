"""The CUDA kernels of losses and of divergences in the emulator, by the plans that an H200 has for them: each way to
take rows, against the arithmetic in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import missing
from lib.plan_tables import BF16, F16, F32, F64
from lib.support import maker, slow
from onepass import loss_arithmetic as arithmetic
from onepass.loss_arithmetic import DivergenceSpec, LossSpec

LARGE, SMALL = 0, 3  # devices: on the second, few rows are many
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOLERANCE = {F32: 2e-5, BF16: 2e-2, F16: 2e-3, F64: 1e-12}
SHAPES = {  # and the dim of the classes
    "many rows": (BF16, (500, 101), 1),
    "many columns": (F16, (2, 11, 2064), 1),
    "aligned rows": (F32, (5, 64), 1),
    "columns": (BF16, (2, 21, 16), 1),
    "rows in parts": (F32, (2, 5001), 1),
    "rows that begin anywhere": (BF16, (4, 301), 1),
    "staged rows": (F16, (70, 13), 1),
    "staged vectors": (BF16, (300, 48), 1),
    "staged short vectors": (BF16, (70, 20), 1),
    "odd columns": (F32, (3, 10, 7), 1),
    "columns in parts": (F16, (1, 700, 8), 1),
    "stepped rows": (F64, (3, 4, 90), 2),
    "one row": (F64, (1, 9), 1),
    "stepped rows of 3": (F16, (9, 4, 10), 2),
}


def cases(quick: int) -> list[Any]:
    """Each shape with each value. Of the first `quick` shapes one case, in turn with each value, is not slow."""
    each = [(k < quick and value == (k % 2 > 0), shape, value) for k, shape in enumerate(SHAPES) for value in (0, 1)]
    return [(shape, bool(value)) if is_quick else slow(shape, bool(value)) for is_quick, shape, value in each]


def device_of(name: str) -> int:
    return SMALL if name.startswith("many") else LARGE


def inputs(name: str, seed: int = 0) -> tuple[Tensor, int]:
    """Without a seed half of the classes of the first row are masked out by a number near the least."""
    dtype, shape, dim = SHAPES[name]
    x = maker(dtype, seed=seed)(*shape)
    if not seed:
        x.movedim(dim, -1)[(0,) * (x.dim() - 1)][: shape[dim] // 2] = torch.finfo(dtype).min / 4
    return (x[:, ::2, :-7] if name.startswith("stepped") else x), dim


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    eps = TOLERANCE[dtype]
    size = max(0.1, float(want.masked_fill(want.abs() > 1e4, 0).abs().amax()))
    torch.testing.assert_close(got.double(), want.double(), rtol=eps, atol=eps * size, equal_nan=True)


@pytest.mark.parametrize(("shape", "is_cross"), cases(4))
def test_losses(emulator, shape, is_cross):
    x, dim = inputs(shape)
    n, rows, wide = x.shape[dim], x.numel() // x.shape[dim], F64 if x.dtype is F64 else F32
    make = maker(wide, seed=3)
    index = torch.randint(0, n, (rows,) if is_cross else (rows, 2), generator=torch.Generator().manual_seed(1))
    if is_cross:
        softcap = 3.0 if x.dtype is BF16 else 0.0  # without one, what is masked out has no weight
        spec = LossSpec(dim, softcap=softcap, spread=True, is_cross=True, smoothing=0.2, z_loss=0.1, wide=True)
        spec = spec._replace(ignore_index=int(index[0]) if rows > 1 else -1)
        weight, scale = make(n).abs(), None
        weight[: 0 if softcap else n // 2] = 0
        want, planes, total = arithmetic.cross_arithmetic(x.double(), index, weight.double(), "mean", spec)
    else:
        spec = LossSpec(dim, factor=0.7, entropy=True)
        weight, scale = None, make(rows).abs() + 0.5
        planes = arithmetic.terms_arithmetic(x.double(), index, None, scale.double(), spec)
    flags = [spec.spread, spec.entropy, is_cross, not is_cross, True]
    numbers = spec.factor, spec.softcap, spec.smoothing, spec.z_loss
    terms = torch.empty(planes.shape, dtype=wide)
    given: dict[str, Any] = {"x": x, "index": index, "weight": weight, "scale": scale, "terms": terms}
    given["weight_sum"] = weight.sum() if is_cross else None
    sums = {"loss": torch.empty((), dtype=wide), "weights": torch.empty((), dtype=wide)} if is_cross else {}
    emulator.loss({**given, **sums}, dim, numbers, flags, spec.ignore_index, device_of(shape))
    assert_close(terms[:2] if is_cross else terms, planes[:2] if is_cross else planes, wide)
    if is_cross:
        assert_close(sums["loss"], want, wide)
        assert_close(sums["weights"], total, wide)
        grads, given["total"] = torch.tensor(1.5, dtype=wide), sums["weights"]
        expected = arithmetic.cross_backward_arithmetic(
            grads.double(), None, total, x.double(), index, weight.double(), "mean", spec
        )
    else:
        grads = make(*planes.shape)
        expected = arithmetic.terms_backward_arithmetic(grads.double(), x.double(), index, None, scale.double(), spec)
    dx = torch.empty_like(x)
    emulator.loss({**given, "grads": grads, "dx": dx}, dim, numbers, flags, spec.ignore_index, device_of(shape))
    assert_close(dx, expected, x.dtype)


@pytest.mark.parametrize(("shape", "is_kl"), cases(2))
def test_divergences(emulator, shape, is_kl):
    x, dim = inputs(shape)
    y = inputs(shape, seed=7)[0].clone()
    n, wide = x.shape[dim], F64 if x.dtype is F64 else F32
    make = maker(wide, seed=3)
    spec = DivergenceSpec(dim, True, 0.7) if is_kl else DivergenceSpec(dim, False, 0.7, 3.0, 0.2)
    weight = None if is_kl else make(n).abs()
    in_doubles = x.double(), y.double(), None if is_kl else weight.double(), spec
    planes = arithmetic.divergence_arithmetic(*in_doubles)
    terms = torch.empty(planes.shape, dtype=wide)
    given = {"x": x, "y": y, "weight": weight, "terms": terms}
    numbers = spec.factor, spec.softcap, spec.smoothing
    kind = "kl" if is_kl else "cross_entropy"
    emulator.divergence(given, dim, kind, numbers, device_of(shape))
    assert_close(terms, planes, wide)
    grads, made = make(*planes.shape), {"dx": torch.empty_like(x), "dy": torch.empty_like(y)}
    emulator.divergence({**given, "grads": grads, **made}, dim, kind, numbers, device_of(shape))
    for got, want in zip(
        made.values(), arithmetic.divergence_backward_arithmetic(grads.double(), *in_doubles), strict=True
    ):
        assert_close(got, want, x.dtype)


@pytest.mark.parametrize(("shape", "_"), cases(1))
def test_products(emulator, shape, _):
    x, dim = inputs(shape, seed=5)
    y = inputs(shape, seed=7)[0].clone()
    wide = F64 if x.dtype is F64 else F32
    terms, dx = torch.empty(x.numel() // x.shape[dim], dtype=wide), torch.empty_like(x)
    emulator.divergence({"x": x, "y": y, "terms": terms}, dim, "product", device=device_of(shape))
    sums = (x.double() * y.double()).sum(dim, keepdim=True)
    assert_close(terms, sums.flatten(), wide)
    emulator.divergence({"x": x, "y": y, "terms": terms, "dx": dx}, dim, "product", device=device_of(shape))
    assert_close(dx, x.double() * (y.double() - terms.double().reshape(sums.shape)), x.dtype)


# What the state operators give the gradient of a cross-entropy for (state_ops.py).
@pytest.mark.parametrize(("shape", "_"), cases(1))
def test_gradients_of_one_tensor(emulator, shape, _):
    x, dim = inputs(shape, seed=5)
    y, wide, rows = inputs(shape, seed=7)[0].clone(), F64 if x.dtype is F64 else F32, x.numel() // x.shape[dim]
    terms, grads = maker(wide, seed=3)(4, rows), torch.stack((*maker(wide, seed=4)(2, rows), torch.full((rows,), -1.0)))
    terms[0] = x.amax(dim).flatten()
    given = {"x": x, "y": y, "terms": terms, "grads": grads.to(wide)}
    shape_of_rows = list(x.shape)
    shape_of_rows[dim] = 1
    m, log_l, _, third = terms.double().reshape(4, *shape_of_rows)
    log_p = (x.double() - m) - log_l
    dy = torch.empty_like(y)
    emulator.divergence({**given, "dy": dy, "dx": None}, dim, "cross_entropy", device=device_of(shape))
    assert_close(dy, log_p, x.dtype)
    dx = torch.empty_like(x)
    emulator.divergence({**given, "dx": dx}, dim, "cross_entropy", device=device_of(shape))
    of_lse = grads[1].double().reshape(shape_of_rows)
    assert_close(dx, log_p.exp() * (of_lse - third) + y.double(), x.dtype)
