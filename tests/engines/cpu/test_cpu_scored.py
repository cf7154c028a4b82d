"""Scores on the CPU engine: random calls, forward and backward, against the arithmetic in doubles; special values;
long and odd rows; threads and instruction sets."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onepass
from lib.support import DTYPES, maker, same, thin_product
from onepass.scored import (
    _KERNELS,
    _NUMBERS_OF,
    _kernel_tensors,
    backward_arithmetic,
    forward_arithmetic,
    logsumexp_backward_arithmetic,
)
from onepass.scores import Scores, SideTensors
from onepass.validation import Spec

F32, F64, F16, BF16 = DTYPES
EXTENDED = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps / 100
FUNCTIONS = ["softmax", "log_softmax", "logsumexp"]
# Inputs as (shape, dims): rows of every route, columns, several dims, tiny and odd ones.
SHAPES: list[tuple[tuple[int, ...], list[int]]] = [
    ((rows, n), [1]) for rows in (1, 3, 37) for n in (1, 2, 3, 7, 17, 33)
]
SHAPES += [((5, 100), [1]), ((3, 1000), [1]), ((2, 3, 5, 64), [3]), ((2, 3, 33, 17), [3]), ((2, 4099), [1])]
SHAPES += [((n, 40), [0]) for n in (1, 2, 7, 33, 1000)] + [((9, 300), [0]), ((2, 31, 18), [1]), ((2, 5, 3), [1])]
SHAPES += [((n, width), [0]) for n in (101, 1003) for width in (3, 17)] + [((2, 301, 7), [1])]  # steps together
SHAPES += [((70, 3, 5), [1]), ((300, 9, 2), [1]), ((3, 40, 7, 3), [2]), ((33, 2, 5, 3), [1, 3])]  # which are gathered
SHAPES += [((2, 7, 17), [1, 2]), ((3, 4, 5, 6), [0, 2]), ((4, 3, 50), [0, 1]), ((2, 3, 4), [0, 1, 2])]


def forward(
    x: Tensor, side: SideTensors, spec: Spec, scores: Scores, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(result with its reduced dims, logsumexp) of the kernel."""
    to = spec.dtype or x.dtype
    rows = [1 if d in spec.dims else size for d, size in enumerate(x.shape)]
    y = torch.empty(rows, dtype=to) if spec.function == "logsumexp" else torch.empty_like(x, dtype=to)
    y = y if out is None else out
    wide = F64 if to is F64 else F32
    lse = torch.empty(rows, dtype=wide)
    assert _KERNELS[0](x, *_kernel_tensors(x, side, wide), y, lse, _NUMBERS_OF[spec.function], spec.dims, *scores)
    return y, lse


def backward(
    g: Tensor,
    y: Tensor,
    x: Tensor | None,
    side: SideTensors,
    spec: Spec,
    scores: Scores,
    to: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of softmax or log_softmax; x goes with a softcap."""
    dx = torch.empty_like(y, dtype=to) if out is None else out
    scale, _, _, _, mask = _kernel_tensors(y, side, F64 if y.dtype is F64 else F32)
    assert _KERNELS[1](g, y, x, None, scale, None, mask, dx, _NUMBERS_OF[spec.function], spec.dims, *scores)
    return dx


def logsumexp_backward(
    g: Tensor, lse: Tensor, of_scores: bool, x: Tensor, side: SideTensors, spec: Spec, scores: Scores, to: torch.dtype
) -> Tensor:
    dx = torch.empty_like(x, dtype=to)
    scale, bias, alibi, _, mask = _kernel_tensors(x, side, lse.dtype)
    rows = g.expand(x.shape), x, lse.expand(x.shape)
    numbers = _NUMBERS_OF[spec.function], spec.dims, *scores
    assert _KERNELS[2](*rows, scale, bias, alibi, mask, dx, of_scores, *numbers)
    return dx


def doubles(side: SideTensors) -> SideTensors:
    return SideTensors(*(t if t is None else t.double() for t in side[:-1]), side.mask)


def assert_close(got: Tensor, want: Tensor, error: float, note: Any) -> None:
    """`error`: that of the computation, relative, and absolute for numbers up to 1."""
    finfo = torch.finfo(got.dtype)
    rtol = error + (0.52 * finfo.eps if got.dtype in (F16, BF16) else 0)
    want = want.to(F64)
    is_near = (got.double() - want).abs() <= rtol * want.abs() + error + finfo.smallest_normal * finfo.eps
    infinite = want.abs() > finfo.max * (1 - finfo.eps / 2)
    is_near |= infinite & (got == want.to(got.dtype)) | want.isnan() & got.isnan()
    assert is_near.all(), (note, got[~is_near][:4], want[~is_near][:4])


def lying(x: Tensor, how: str) -> Tensor:
    """The same values, or some of them, lying in another way."""
    if how == "turned":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if how == "gaps":
        return torch.stack([x, x], -1)[..., 1]
    if how == "sliced":
        return torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]]
    return x[:1].expand(x.shape) if how == "expanded" else x


def random_side(r: random.Random, x: Tensor, dims: list[int], scores: Scores) -> tuple[SideTensors, Scores]:
    def broadcast(shape: list[int], keep: float = 0.6) -> list[int]:
        return [size if r.random() < keep else 1 for size in shape]

    wide = F64 if x.dtype is F64 else F32
    rows = [1 if d in dims else size for d, size in enumerate(x.shape)]
    side: dict[str, Tensor] = {}
    if r.random() < 0.3:
        side["scale"] = torch.randn(broadcast(rows), dtype=wide)
    elif r.random() < 0.5:
        scores = scores._replace(factor=r.choice([0.125, -1.0, 2.5]))
    if r.random() < 0.4:
        side["bias"] = lying(torch.randn(broadcast(list(x.shape)), dtype=r.choice(DTYPES)), r.choice(["", "turned"]))
    if r.random() < 0.4:
        side["mask"] = lying(
            torch.rand(broadcast(list(x.shape))) < r.choice([0.1, 0.8]), r.choice(["", "turned", "gaps"])
        )
    if r.random() < 0.3:
        side["alibi"] = torch.rand(broadcast(list(x.shape[:-2])), dtype=wide)
    if r.random() < 0.3:
        side["sink"] = torch.randn(broadcast(rows), dtype=wide)
    elif r.random() < 0.3:
        scores = scores._replace(sink=0.5)
    if r.random() < 0.4:
        left, right = r.choice([(None, 0), (3, 0), (0, 2), (2, None), (None, 40)])
        scores = scores._replace(left=left, right=right, offset=r.choice([None, None, 0, 2, -3]))
    return SideTensors(**side), scores


def check(seed: int, function: str, dtype: torch.dtype) -> None:
    r = random.Random(f"{seed} {function} {dtype}")
    torch.manual_seed(seed)
    shape, dims = r.choice(SHAPES)
    x = lying((2 * torch.randn(shape)).to(dtype), r.choice(["", "", "turned", "gaps", "sliced", "expanded"]))
    to = r.choice([None, None, None, *DTYPES])
    spec = Spec(function, dims, to, True)
    scores = Scores(softcap=r.choice([0.0, 0.0, 0.0, 3.0]), empty_is_zero=r.random() < 0.5)
    side, scores = random_side(r, x, dims, scores)
    note = seed, shape, dims, x.stride(), to, scores, {k: v.shape for k, v in side._asdict().items() if v is not None}
    y, lse = forward(x, side, spec, scores)
    wide = lse.dtype
    rounded, large = x.to(y.dtype), 100 * max(shape[-2:]) if side.alibi is not None else 100
    want, want_lse = forward_arithmetic(rounded.double(), doubles(side), spec._replace(dtype=None), scores)
    error = torch.finfo(wide).eps * large * (1 if function == "softmax" else 2)
    assert_close(y, want, error, note)
    assert_close(lse, want_lse, error, note)
    check_gradient(r, x, y, lse, side, spec, scores, note)


def check_gradient(
    r: random.Random, x: Tensor, y: Tensor, lse: Tensor, side: SideTensors, spec: Spec, scores: Scores, note: Any
) -> None:
    wide, to = lse.dtype, spec._replace(dtype=F64)
    if spec.function == "logsumexp":
        if not (y.dtype is F32 and x.dtype in (F16, BF16)):
            x = x.to(y.dtype)  # as the function has rounded it
        g, of_scores = torch.randn(lse.shape).to(wide), r.random() < 0.5
        dx = logsumexp_backward(g, lse, of_scores, x, side, spec, scores, r.choice([x.dtype, wide]))
        exact = forward_arithmetic(x.double(), doubles(side), spec._replace(dtype=None), scores)[1]
        want = logsumexp_backward_arithmetic(g.double(), exact, of_scores, x.double(), doubles(side), to, scores)
        size = 64 * max(x.shape[-2:]) if side.alibi is not None else 64  # the scores, which a logsumexp rounds as well
        error = torch.finfo(wide).eps * size * max(1.0, 2 * abs(scores.factor))
    else:
        y = lying(y, r.choice(["", "turned"]))
        g = lying(torch.randn(y.shape).to(y.dtype), r.choice(["", "", "turned", "expanded"]))
        dtype = r.choice([y.dtype, x.dtype])
        of_cap = x.to(dtype) if scores.softcap else None
        dx = backward(g, y, of_cap, side, spec, scores, dtype)
        exact = None if of_cap is None else (of_cap.to(y.dtype) if y.dtype in (F16, BF16) else of_cap).double()
        want = backward_arithmetic(g.double(), y.double(), exact, doubles(side), to, scores)
        eps = torch.finfo(F64 if y.dtype is F64 and dx.dtype is F64 else F32).eps
        error = eps * 16 * (1 if spec.function == "softmax" else math.prod(y.shape) ** 0.5)
    assert_close(dx, want, error, note)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_random_calls(function: str, dtype: torch.dtype) -> None:
    for seed in range(45):
        check(seed, function, dtype)


def laid_out(t: Tensor, layout: str) -> Tensor:
    """Rows as the dim 1 of a tensor, or as the dim 0 of columns."""
    if layout == "columns":
        return t.t().contiguous()
    return t[..., None].repeat(1, 1, 2) if layout == "gathered" else t


def as_rows(t: Tensor, layout: str) -> Tensor:
    return t.t() if layout == "columns" else t[..., 1] if layout == "gathered" else t


@pytest.mark.parametrize("layout", ["rows", "short", "columns", "gathered"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values(function: str, dtype: torch.dtype, layout: str) -> None:
    n = 7 if layout == "short" else 61
    x = torch.randn(40, n).to(dtype)
    mask = torch.ones(40, n, dtype=torch.bool)
    mask[1], mask[3, 2], mask[5, 2], mask[8, 3:] = False, False, False, False
    x[2, 3], x[3, 2], x[4, 1], x[5, 2], x[6], x[7, :2] = math.nan, math.nan, math.inf, math.inf, -math.inf, -math.inf
    x[9, 1], x[9, 4], x[10] = math.inf, math.nan, torch.finfo(dtype).max / 2
    sinks = torch.full((40, 1), -math.inf, dtype=F64 if dtype is F64 else F32)
    sinks[10:20], sinks[11], sinks[12], sinks[13] = 0, math.nan, math.inf, 90
    for sink in (None, sinks):
        for zero in (False, True):
            side, scores, spec = (
                SideTensors(mask=mask, sink=sink),
                Scores(empty_is_zero=zero),
                Spec(function, [1], None, True),
            )
            want, want_lse = forward_arithmetic(x.double(), doubles(side), spec, scores)
            placed = SideTensors(mask=laid_out(mask, layout), sink=None if sink is None else laid_out(sink, layout))
            given = laid_out(x, layout), placed, spec._replace(dims=[0 if layout == "columns" else 1]), scores
            y, lse = (as_rows(t, layout) for t in forward(*given))
            error = 4 * torch.finfo(lse.dtype).eps * (1 if function == "softmax" else 8)
            assert_close(y, want, error, (sink is None, zero))
            assert_close(lse, want_lse, error, (sink is None, zero))


@pytest.mark.parametrize("layout", ["rows", "short", "columns", "gathered"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values_of_gradients(function: str, dtype: torch.dtype, layout: str) -> None:
    """A gradient is 0 where an element takes no part, whatever the others are; in rows beside them nothing changes."""
    n = {"rows": 301, "short": 7}.get(layout, 61)
    x, g = torch.randn(40, n).to(dtype), torch.randn(40, n).to(dtype)
    mask = torch.ones(40, n, dtype=torch.bool)
    mask[1], mask[2:9, 2], mask[13, 2], mask[20:, 4:] = False, False, False, False
    g[2, 2], g[3, 2], g[4, 3], g[5, 3], g[6], g[7, 2], g[30, 3] = (
        math.inf,
        math.nan,
        math.inf,
        math.nan,
        0,
        1e4,
        math.inf,
    )
    x[8, 1], x[9], x[10, :2], x[11, 1], x[12] = math.nan, -math.inf, -math.inf, math.inf, torch.finfo(dtype).max / 2
    x[13, 2] = math.nan
    wide = F64 if dtype is F64 else F32
    for zero, cap, right in (
        (False, 0.0, None),
        (True, 0.0, None),
        (True, 3.0, None),
        (False, 0.0, 20),
        (False, 0.0, 0),
    ):
        right = None if layout in ("columns", "gathered") else right
        side, scores = SideTensors(mask=laid_out(mask, layout)), Scores(0.5, cap, right=right, empty_is_zero=zero)
        spec = Spec(function, [0 if layout == "columns" else 1], dtype, True)
        given, dy = laid_out(x, layout), laid_out(g, layout)
        y, lse = forward(given, side, spec, scores)
        if function == "logsumexp":
            dy = laid_out(g[:, :1], layout).to(wide).contiguous()
            got = logsumexp_backward(dy, lse, False, given, side, spec, scores, dtype)
            want = logsumexp_backward_arithmetic(dy, lse, False, given, side, spec, scores)
        else:
            of_cap = given if cap else None
            got = backward(dy, y, of_cap, side, spec, scores, dtype)
            want = backward_arithmetic(dy, y, of_cap, side, spec, scores)
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, z=(zero, cap, right): f"{z}: {m}")


@pytest.mark.parametrize("shape", [(3, 33), (40, 12), (4, 517), (2, 150_001), (20_000, 33)], ids=str)
def test_a_common_offset_costs_no_precision(shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * 256).round() / 256
    for dim in (0, 1):
        bias = torch.full((1, 1), 1e4)
        for function, bound in (("softmax", 4e-7), ("log_softmax", 2.5e-6)):
            y, _ = forward(x, SideTensors(bias=bias), Spec(function, [dim]), Scores())
            want = getattr(torch, function)(x.double(), dim)
            assert ((y - want).abs() <= bound * (want.abs() if function == "softmax" else 1)).all(), (function, dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_bits_depend_neither_on_threads_nor_on_where_the_result_goes(dim: int) -> None:
    for shape in ((700, 130), (2000, 17), (9, 9000), (2, 140_000)):
        x, mask, g = torch.randn(shape).bfloat16(), torch.rand(shape) < 0.7, torch.randn(shape).bfloat16()
        side, spec, scores = SideTensors(mask=mask), Spec("softmax", [dim]), Scores(0.3, right=shape[1] // 2)
        results, before = [], torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                y, lse = forward(x, side, spec, scores)
                dx = backward(g, y, None, side, spec, scores, F32)
                dx_of_lse = logsumexp_backward(
                    lse, lse, False, x, side, spec._replace(function="logsumexp"), scores, BF16
                )
                results.append([y, lse, dx, dx_of_lse])
        finally:
            torch.set_num_threads(before)
        for each in results[1:]:
            assert all(same(a, b) for a, b in zip(results[0], each, strict=True))
        own = x.clone()
        forward(own, side, spec, scores, out=own)
        assert same(own, results[0][0])
        for given in (scores, scores._replace(right=None)):
            own, want = g.clone(), backward(g, y, None, side, spec, given, g.dtype)
            assert same(backward(own, y, None, side, spec, given, g.dtype, out=own), want)
            own = y.clone()
            assert same(backward(g, own, None, side, spec, given, g.dtype, out=own), want)


def test_zeros_of_a_gradient_do_not_depend_on_columns_beside_them() -> None:
    """Where y is 0 inside the window a gradient is a zero with one sign, whatever the sum of the column beside it."""
    x = torch.randn(4, 200)
    x[1] = -1e4
    g = torch.randn(4, 200)

    def gradient(g: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(onepass.softmax(leaf, 0, window=(None, 300)), leaf, g)[0]

    alone = gradient(g)
    beside = gradient(torch.where(torch.arange(200) == 7, torch.inf, g))
    others = torch.arange(200) != 7
    assert same_bits(alone[:, others], beside[:, others])
    assert not alone[1].signbit().any()


def test_bits_of_a_gradient_do_not_depend_on_other_rows() -> None:
    """To the sign of zero, where some rows have nothing and others go with them."""
    x, g = torch.randn(1023, 127), torch.randn(1023, 127)
    spec, scores = Spec("softmax", [1]), Scores(-2.5, left=0, right=0)
    y, _ = forward(x, SideTensors(), spec, scores)
    assert y[:896].isnan().all()
    whole = backward(g, y, None, SideTensors(), spec, scores, F32)
    for first in (895, 897, 900):
        part = scores._replace(offset=first - 896)  # of the first row's key
        assert same_bits(backward(g[first:], y[first:], None, SideTensors(), spec, part, F32), whole[first:])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return same(a, b) and bool(((a.signbit() == b.signbit()) | a.isnan()).all())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_many_chunks(function: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 150_001).to(dtype)
    mask = torch.rand(4, 150_001) < 0.7
    mask[1] = False
    mask[2, 100], x[2, 100], x[3, 140_000] = False, math.nan, math.nan
    wide = F64 if dtype is F64 else F32
    for zero in (False, True):
        scores, spec = Scores(0.5, right=130_000, empty_is_zero=zero), Spec(function, [1], None, True)
        for sink in (None, torch.tensor([[0.5], [-math.inf], [8.0], [0.0]], dtype=wide)):
            side = SideTensors(mask=mask, sink=sink, scale=torch.tensor([[1.0], [2.0], [-1.0], [3.0]], dtype=wide))
            y, lse = forward(x, side, spec, scores)
            want, want_lse = forward_arithmetic(x.double(), doubles(side), spec, scores)
            error = torch.finfo(wide).eps * 30
            assert_close(y, want, error, function)
            assert_close(lse, want_lse, error, function)
        g, to = torch.randn(4, 150_001).to(dtype), spec._replace(dtype=F64)
        if function == "logsumexp":
            of_rows = torch.randn(4, 1).to(wide)
            dx = logsumexp_backward(of_rows, lse, False, x, side, spec, scores, dtype)
            want = logsumexp_backward_arithmetic(
                of_rows.double(), want_lse, False, x.double(), doubles(side), to, scores
            )
        else:
            dx = backward(g, y, None, side, spec, scores, dtype)
            want = backward_arithmetic(g.double(), y.double(), None, doubles(side), to, scores)
        assert_close(dx, want, torch.finfo(wide).eps * 400, function)


@pytest.mark.parametrize("columns", [5, 17])
def test_columns_of_two_dims_that_the_scratch_memory_does_not_hold(columns: int) -> None:
    x = torch.randn(90, 2, 300, columns)
    side = SideTensors(
        scale=torch.rand(1, 2, 1, columns), bias=torch.randn(90, 1, 300, 1), mask=torch.rand(90, 1, 300, columns) < 0.7
    )
    for function in FUNCTIONS:
        spec, scores = Spec(function, [0, 2], None, True), Scores()
        y, lse = forward(x, side, spec, scores)
        want, want_lse = forward_arithmetic(x.double(), doubles(side), spec, scores)
        assert_close(y, want, 32 * torch.finfo(F32).eps, function)
        assert_close(lse, want_lse, 32 * torch.finfo(F32).eps, function)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_short_columns_with_sinks(function: str, dtype: torch.dtype) -> None:
    for n in range(2, 10):
        x, of_rows = torch.randn(30, n, 19).to(dtype), torch.randn(30, 1, 19)
        x[3] = -math.inf
        of_rows[4], of_rows[5], of_rows[6] = -math.inf, math.inf, 90
        for sink in (of_rows, 0.5):
            y = getattr(onepass, function)(x, 1, sink=sink)
            side = SideTensors(sink=sink.double()) if isinstance(sink, Tensor) else SideTensors()
            scores = Scores() if isinstance(sink, Tensor) else Scores(sink=sink)
            want, _ = forward_arithmetic(x.double(), side, Spec(function, [1]), scores)
            assert_close(y, want, 32 * torch.finfo(F64 if dtype is F64 else F32).eps, (n, scores))


def test_what_is_outside_the_window_is_not_read() -> None:
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    x = torch.randn(64, 64).masked_fill(above, math.nan)
    y, _ = forward(x, SideTensors(), Spec("softmax", [1]), Scores(right=0))
    torch.testing.assert_close(y, x.masked_fill(above, -math.inf).softmax(1))


def softcap_errors(x: Tensor) -> tuple[float, float]:
    """The relative errors of a softcap of 1 and of its derivative, in units of the dtype's eps: the logsumexp of one
    element is its score. The signs of results have to be those of x."""
    x = x[:, None].requires_grad_()
    y = onepass.logsumexp(x, 1, softcap=1.0)
    (slope,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach()[:, 0].numpy().astype(np.longdouble)
    slopes = np.cosh(np.minimum(np.abs(exact), 11_000)) ** -2
    least = torch.finfo(x.dtype).smallest_normal * 2**16  # a slope that is less may be 0
    errors = []
    for got, want in ((y.detach(), np.tanh(exact)), (slope[:, 0], slopes)):
        error, size = np.abs(got.numpy().astype(np.longdouble) - want), np.abs(want)
        far = size < least
        assert (error[far] <= least).all()
        errors.append(float((error[~far] / size[~far]).max()) / torch.finfo(x.dtype).eps)
    assert ((y < 0) == (x[:, 0] < 0)).all()
    assert (slope >= 0).all()
    return errors[0], errors[1]


def check_softcaps() -> None:
    for dtype in (F32, F64):
        finfo = torch.finfo(dtype)
        some = torch.logspace(math.log2(finfo.smallest_normal), math.log2(finfo.max) - 1, 20_001, base=2, dtype=F64)
        near = torch.linspace(0, 40, 100_003, dtype=F64)
        for x in (some, near):
            of_cap, of_slope = softcap_errors(torch.cat([x, -x]).to(dtype))
            assert of_cap < 1.5, dtype
            assert of_slope < 4.5, dtype
        tiny = finfo.smallest_normal * finfo.eps
        x = torch.tensor(
            [[math.inf, -math.inf, math.nan, 0.0, tiny, -3 * tiny, finfo.max, -finfo.max]], dtype=dtype
        ).t()
        x.requires_grad_()
        y = onepass.logsumexp(x, 1, softcap=1.0)
        assert same(y.detach(), torch.tanh(x.detach()[:, 0]))
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert same(slope[:, 0], torch.tensor([0, 0, math.nan, 1, 1, 1, 0, 0], dtype=dtype))


@pytest.mark.skipif(not EXTENDED, reason="long double is no more than double here")
def test_a_softcap_is_good_to_a_few_roundings() -> None:
    check_softcaps()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_slope_of_a_softcap_is_good_to_a_quarter_of_the_rounding_of_half_types(dtype: torch.dtype) -> None:
    x = torch.linspace(-9, 9, 40_001).to(dtype)[:, None].requires_grad_()
    (slope,) = torch.autograd.grad(onepass.logsumexp(x, 1, softcap=1.0).sum(), x)
    want = x.detach().double().cosh() ** -2
    finfo = torch.finfo(dtype)
    error = (slope.double() - want).abs()
    assert (error <= 0.625 * (finfo.eps * want + finfo.smallest_normal * finfo.eps)).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_a_softcap_of_an_element_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    near = torch.linspace(-0.9, 0.9, 320)
    both = [torch.cat([near, torch.full((n,), 7.0)]).to(dtype)[:, None].requires_grad_() for n in (0, 1, 29)]
    both.append(torch.stack([near, torch.full((320,), 7.0)], 1).reshape(-1, 1).to(dtype).requires_grad_())
    y = [onepass.logsumexp(x, 1, softcap=1.0) for x in both]
    slopes = [torch.autograd.grad(each.sum(), x)[0][:, 0] for x, each in zip(both, y, strict=True)]
    for results in (y, slopes):
        *others, mixed = results
        for other in (*others, mixed[::2]):
            assert torch.equal(other[:320], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 300), (3, 2048), (40, 165)])
def test_a_gradient_ends_where_the_window_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The operands behind the window are not looked at, and the gradient there is 0."""
    call = SideTensors(), Spec("softmax", [1]), Scores(left=20, right=3, offset=11)
    x = torch.randn(shape).to(dtype)
    y, _ = forward(x, *call)
    key, query = torch.arange(shape[1]), torch.arange(shape[0])[:, None]
    out = (key < query + 11 - 20) | (key > query + 11 + 3)
    g = torch.randn(shape).to(dtype)
    want = backward(g, y, None, *call, dtype)
    assert (want[out] == 0).all()
    assert same(backward(g.masked_fill(out, math.nan), y.masked_fill(out, math.inf), None, *call, dtype), want)
    exact = backward_arithmetic(g.double(), y.double(), None, call[0], call[1]._replace(dtype=F64), call[2])
    assert_close(want, exact, 1e-4 if dtype in (F16, BF16) else 1e-5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_gradients_of_wide_columns(function: str, dtype: torch.dtype) -> None:
    """Tiles have as many columns as a page, or fewer where there are threads for them; with other bits for none."""
    for shape, softcap in (((19, 5000), 0.0), ((19, 5000), 2.0), ((3, 9, 700), 2.0), ((6, 7, 90), 2.0)):
        dim = len(shape) - 2
        columns = [*shape[:dim], 1, shape[-1]]
        side = SideTensors(scale=torch.rand(columns) + 0.5, mask=torch.rand(shape) < 0.8)
        scores, spec = Scores(softcap=softcap), Spec(function, [dim])
        x, g = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        y, _ = forward(x, side, spec, scores)
        results, before = [], torch.get_num_threads()
        try:
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                results.append(backward(g, y, x if softcap else None, side, spec, scores, dtype))
        finally:
            torch.set_num_threads(before)
        assert all(same(dx, results[0]) for dx in results)
        of_cap = x.double() if softcap else None
        want = backward_arithmetic(g.double(), y.double(), of_cap, doubles(side), spec._replace(dtype=F64), scores)
        assert_close(results[0], want, 1e-4 if dtype in (F16, BF16) else 1e-5, (shape, softcap))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(40, 17), (3, 7, 97), (33, 600), (3, 70_000)])
def test_gradients_of_rows_with_a_scale_each(shape: tuple[int, ...], function: str, dtype: torch.dtype) -> None:
    side, spec = SideTensors(scale=torch.rand(*shape[:-1], 1) + 0.5), Spec(function, [len(shape) - 1])
    y, _ = forward(torch.randn(shape).to(dtype), side, spec, Scores())
    g = torch.randn(shape).to(dtype)
    dx = backward(g, y, None, side, spec, Scores(), dtype)
    want = backward_arithmetic(g.double(), y.double(), None, doubles(side), spec._replace(dtype=F64), Scores())
    assert_close(dx, want, 1e-4 if dtype in (F16, BF16) else 1e-5, shape)


def test_a_softcap_has_its_slope_at_the_rounded_input() -> None:
    x = (3 * torch.randn(40, 60)).requires_grad_()
    rounded = x.detach().bfloat16().float().requires_grad_()
    g = torch.randn(40, 60).bfloat16()
    dx, want = (torch.autograd.grad(onepass.softmax(t, -1, dtype=BF16, softcap=2.0), t, g)[0] for t in (x, rounded))
    assert same(dx, want)


def check_all() -> None:  # by another instruction set
    if EXTENDED:
        check_softcaps()
    for function in FUNCTIONS:
        for dtype in DTYPES:
            for seed in range(20):
                check(seed, function, dtype)


# Of more than 8 MB in any type: streaming stores write whole lines.
LARGE = [((16, 512, 512), 1), ((9000, 500), 0), ((2, 3, 700, 1504), 2), ((70, 70_001), 1), ((300_000, 17), 1)]
LARGE += [((4000, 1100), 1), ((1700, 3, 900), 0)]


@thin_product(16, place=LARGE, dtype=(BF16, F32, F64), at=(0, 1, 32))
def test_large_results_begin_anywhere(place, dtype, at):
    shape, dim = place
    x, error = maker(dtype)(*shape), 64 * torch.finfo(dtype).eps
    out = torch.empty(x.numel() + at, dtype=dtype)[at:].view(shape)
    onepass.softmax(x, dim, scale=0.5, out=out)
    torch.testing.assert_close(out.double(), torch.softmax(x.double() * 0.5, dim), rtol=error, atol=error * 1e-6)
    g, mask = maker(dtype, seed=1)(*shape), torch.arange(shape[dim]) % 7 > 0
    mask = mask.view([-1 if d == dim else 1 for d in range(x.dim())])
    y = onepass.softmax(x.requires_grad_(), dim, scale=0.5, mask=mask)
    (dx,) = torch.autograd.grad(y, x, g)
    y, g = y.detach().double(), g.double()
    want = 0.5 * y * (g - (y * g).sum(dim, keepdim=True))
    torch.testing.assert_close(dx.double(), want, rtol=error, atol=error * float(y.amax() * g.abs().amax()))
