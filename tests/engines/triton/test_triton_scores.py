"""Scores by the Triton engine: kernels with forced plans on small shapes under Triton's interpreter and on a GPU, on a
GPU also by their own plans, compiled for GPUs that are not here, and as public calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
import onepass.triton as engine
from lib.support import (
    DTYPES,
    FUNCTIONS,
    SOFTMAXES,
    Make,
    accumulator,
    drawn_positions,
    maker,
    ours,
    peak,
    same,
    slow,
    thin,
    thin_product,
)
from lib.triton import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    NAN,
    TIERS,
    Properties,
    assert_no_spills,
    every_target,
    launched_resources,
    name_of,
    needs_triton,
)
from onepass import reference, scored
from onepass.scores import SideTensors, check_scores
from onepass.triton import Plan, plan_scored
from onepass.validation import Spec

pytestmark = needs_triton
Options = dict[str, Any]
TWO = ("rows of 4 a program, split launch", "online")
TWO_TIERS = pytest.mark.parametrize("tier", TWO)
SHAPE = (2, 2, 3, 23)


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.5


# Each makes the options of a call on an input of SHAPE, whose last dim is reduced.
PARTS: dict[str, Callable[[Make], Options]] = {
    "scale": lambda r: {"scale": -0.3},
    "scale of rows": lambda r: {"scale": positive(r(2, 3, 1))},
    "softcap": lambda r: {"softcap": 1.5},
    "bias": lambda r: {"bias": r(*SHAPE)},
    "bias of keys": lambda r: {"bias": r(23)},
    "bias of queries": lambda r: {"bias": r(2, 1, 3, 1)},
    "bias transposed": lambda r: {"bias": r(23, 3).t()},
    "mask": lambda r: {"mask": r(*SHAPE) > 0},
    "mask of padding": lambda r: {"mask": r(2, 1, 1, 23) > 0},
    "mask of queries": lambda r: {"mask": r(3, 1) > -1, "empty": "zero"},
    "causal": lambda r: {"causal": True},
    "causal, nothing for some": lambda r: {"causal": True, "offset": -2},
    "window": lambda r: {"window": (3, 2)},
    "window to the left": lambda r: {"window": (2, None), "offset": 9},
    "window far away": lambda r: {"window": (2**40, 2), "offset": 2**29, "empty": "zero"},
    "window without bounds": lambda r: {"window": (None, None)},
    "alibi": lambda r: {"alibi": positive(r(2))},
    "alibi of each batch": lambda r: {"alibi": positive(r(2, 1)), "offset": 5},
    "sink": lambda r: {"sink": 0.5},
    "sink of rows": lambda r: {"sink": r(2, 3, 1)},
    "all": lambda r: {
        "scale": positive(r(2, 1, 1)),
        "softcap": 3.0,
        "bias": r(2, 1, 23),
        "alibi": positive(r(2, 1)),
        "mask": r(3, 23) > -1,
        "causal": True,
        "window": (7, None),
        "offset": 2,
        "sink": r(1, 2, 1, 1),
        "empty": "zero",
    },
}


def made(part: str, dtype: torch.dtype, device: str) -> Options:
    options = PARTS[part](maker(dtype, device, seed=3, scale=1.0))
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}


# Calls of the kernels, and what they are compared with ----------------------------------------------------------------


def forward(
    function: str, x: Tensor, dims: list[int], options: Options, to: torch.dtype, plan: Plan | None
) -> tuple[Tensor, Tensor]:
    """(result with its reduced dims, logsumexp of each row) of a kernel."""
    side, scores = check_scores(function, x, dims, options)
    rows = [1 if d in dims else size for d, size in enumerate(x.shape)]
    reduces = function == "logsumexp"
    out = x.new_full(rows if reduces else x.shape, 777.0, dtype=to)
    lse = x.new_full(rows, 777.0, dtype=accumulator(to))
    kernel = "softmax" if function == "softmin" else function
    assert engine.launch_scored_forward(kernel, x, out, lse, tuple(sorted(dims)), side, scores, plan=plan)
    return out, lse


def backward(
    function: str,
    g: Tensor,
    y: Tensor,
    x: Tensor,
    dims: list[int],
    options: Options,
    to: torch.dtype,
    plan: Plan | None,
) -> Tensor:
    """The gradient of x by a kernel."""
    side, scores = check_scores(function, x, dims, options)
    dx = torch.full_like(y, 777.0, dtype=to)
    kernel = "softmax" if function == "softmin" else function
    call = kernel, g, y, x if scores.softcap else None, dx, tuple(sorted(dims)), SideTensors(side.scale, mask=side.mask)
    assert engine.launch_scored_backward(*call, scores, plan=plan)
    return dx


def assert_close(got: Tensor, want: Tensor, error: Tensor | float, note: Any) -> None:
    """`error`: that of the computation, relative, and absolute for numbers up to 1."""
    finfo = torch.finfo(got.dtype)
    y, want = got.double(), want.double()
    infinite = want.abs() >= finfo.max * (1 + finfo.eps / 4)
    good = (y - want).abs() <= (error + finfo.eps) * want.abs() + error + finfo.smallest_normal * finfo.eps
    good |= (y.isnan() & want.isnan()) | (infinite & (y == want.sign() * INF))
    assert bool(good.all()), (note, int((~good).sum()), y[~good][:4], want[~good][:4])


def error_of(function: str, x: Tensor, dims: list[int], options: Options, to: torch.dtype) -> Tensor:
    """Of a few roundings of the scores, for each row."""
    numbers = {name: value for name, value in options.items() if name not in ("sink", "empty")}
    scores = reference.score(function, x.double(), **numbers)
    size = scores.nan_to_num(0, 0, 0).abs().amax(dims, keepdim=True)
    return (24 + 4 * size + x.numel() ** 0.5) * torch.finfo(accumulator(to)).eps


def check(
    runs: Any,
    function: str,
    x: Tensor,
    dims: list[int],
    options: Options,
    plan: Plan | None = None,
    to: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs a call and, but for logsumexp, its gradient, and compares them with the definition."""
    to = to or x.dtype
    y, lse = runs.run(forward, function, x, dims, options, to, plan)
    rounded, note = x.to(to).double(), (function, tuple(x.shape), x.stride(), dims, x.dtype, to, options, seed)
    keepdim = [True] if function == "logsumexp" else []
    error = error_of(function, x, dims, options, to)
    assert_close(y, getattr(reference, function)(rounded, dims, *keepdim, **options), error, note)
    want_lse = reference.logsumexp(-rounded if function == "softmin" else rounded, dims, True, **options)
    with_inf = want_lse == INF  # of a softmax such a row is NaN throughout
    assert_close(lse[~with_inf], want_lse[~with_inf], error[~with_inf], note)
    if function == "logsumexp":
        return y, lse, check_logsumexp_backward(runs, x, lse, dims, options, plan, seed)
    g = maker(y.dtype, x.device.type, seed=seed + 5)(*y.shape)
    dx = runs.run(backward, function, g, y, x, dims, options, x.dtype, plan)
    side, scores = check_scores(function, x, dims, options)
    scale = None if side.scale is None else side.scale.double()
    spec = Spec("softmax" if function == "softmin" else function, dims, F64)
    given = g.double(), y.double(), x.to(to).double(), SideTensors(scale, mask=side.mask)
    want = scored.backward_arithmetic(*given, spec, scores)
    slope = abs(scores.factor) * (1.0 if scale is None else float(scale.abs().max()))
    terms = (1 + slope) * x.numel() ** 0.5 * float(g.abs().max()) * (1 + float(y.nan_to_num(0, 0, 0).abs().max()))
    assert_close(dx, want, 16 * torch.finfo(accumulator(to)).eps * terms, note)
    return y, lse, dx


def logsumexp_backward(
    g: Tensor, lse: Tensor, x: Tensor, dims: list[int], options: Options, of_scores: bool, plan: Plan | None
) -> Tensor:
    """The gradient of x, or of its scores, by a kernel."""
    side, scores = check_scores("logsumexp", x, dims, options)
    dx = torch.full_like(x, 777.0, dtype=g.dtype if of_scores else x.dtype)
    call = g, lse, x, dx, tuple(sorted(dims)), side, scores, of_scores
    assert engine.launch_scored_logsumexp_backward(*call, plan=plan)
    return dx


def check_logsumexp_backward(
    runs: Any, x: Tensor, lse: Tensor, dims: list[int], options: Options, plan: Plan | None, seed: int
) -> Tensor:
    """Runs both gradients of a call, compares them with the definition, and gives that of the elements."""
    side, scores = check_scores("logsumexp", x, dims, options)
    g = maker(lse.dtype, x.device.type, seed=seed + 5)(*lse.shape)
    wide = SideTensors(*(None if t is None else t.double() for t in side[:-1]), mask=side.mask)
    error = error_of("logsumexp", x, dims, options, x.dtype) * (1 + float(g.abs().max()))
    slope = abs(scores.factor) * (1.0 if side.scale is None else float(side.scale.abs().max()))
    for of_scores in (True, False):
        dx = runs.run(logsumexp_backward, g, lse, x, dims, options, of_scores, plan)
        call = g.double(), lse.double(), of_scores, x.double(), wide, Spec("logsumexp", dims, F64), scores
        want = scored.logsumexp_backward_arithmetic(*call)
        note = (of_scores, tuple(x.shape), dims, x.dtype, options, seed)
        assert_close(dx, want, error if of_scores else error * (1 + slope), note)
    return dx


# Kernels --------------------------------------------------------------------------------------------------------------

EACH = list(itertools.product(FUNCTIONS, PARTS, TIERS))


@pytest.mark.parametrize(
    ("function", "part", "tier"),
    [each if k % 48 == k // 48 % 48 else slow(*each) for k, each in enumerate(EACH)],  # of each tier and each part some
)
def test_each_part(runs, function, part, tier):
    dtype = DTYPES[(len(part) + len(tier)) % 4]
    x = maker(dtype, runs.device)(*SHAPE)
    check(runs, function, x, [3], made(part, dtype, runs.device), TIERS[tier])


@pytest.mark.parametrize("part", [slow("all"), slow("bias"), "mask", slow("window to the left")])
@TWO_TIERS
def test_input_and_result_of_two_types(runs, part, tier):
    """The input is rounded to the type of the result first; other tensors are of any type."""
    for k, (dtype, to) in list(enumerate(itertools.permutations(DTYPES, 2)))[tier == "online" :: 2]:
        x = maker(dtype, runs.device, scale=2.0)(2, 2, 1, 23)
        options = made(part, DTYPES[k % 4], runs.device)
        options = {name: t[..., :1, :] if name == "mask" else t for name, t in options.items()}
        if "bias" in options:
            options["bias"] = options["bias"][..., :1, :]
        check(runs, ("softmax", "log_softmax")[k // 2 % 2], x, [3], options, TIERS[tier], to)


def lying(x: Tensor, how: str) -> Tensor:
    """The same values, or some of them, lying in another way."""
    if how == "turned":
        order = list(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if how == "gaps":
        return torch.stack([x, x], -1)[..., 1]
    return x[:1].expand(x.shape) if how == "expanded" else x


def drawn(seed: int, device: str) -> tuple[str, Tensor, list[int], Options, torch.dtype]:
    """Any call: function, input, dims, options and dtype of the result."""
    pick, make = random.Random(seed), maker(F64, seed=seed)
    rank = pick.randint(1, 4)
    shape = [pick.choice((1, 2, 2, 3)) for _ in range(rank)]
    dims = sorted(pick.sample(range(rank), pick.choice((1, 1, 1, pick.randint(1, rank)))))
    shape[dims[-1]] = pick.choice((1, 7, 16, 17) if len(dims) == 1 else (1, 2, 3))
    dtype = pick.choice(DTYPES)
    ways = ("", "", "turned", "gaps", "expanded")
    x = lying(make(*shape), pick.choice(ways)).to(dtype)
    rows = [1 if d in dims else size for d, size in enumerate(shape)]

    def side(whole: list[int], lies: str = "") -> Tensor:
        kept = [pick.choice((1, size)) for size in whole]
        return lying(make(*kept[pick.choice((0, 0, pick.randint(0, len(kept)))) :]), lies).to(pick.choice(DTYPES))

    def has() -> bool:
        return pick.random() < 0.4

    options: Options = {"empty": pick.choice(("nan", "zero"))}
    if has():
        options["scale"] = pick.choice((0.3, -1.5, positive(side(rows)) / 3))
    if has():
        options["softcap"] = pick.choice((0.7, 30.0))
    if has():
        options["bias"] = side(shape, pick.choice(("", "turned")))
    if has():
        options["mask"] = side(shape, pick.choice(("", "turned", "gaps"))) > pick.choice((-1, 0.5))
    if has():
        options["sink"] = pick.choice((0.0, side(rows)))
    if rank >= 2:
        options |= drawn_positions(pick, has, lambda: positive(side(shape[:-2])), 17)
    options = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
    return pick.choice(FUNCTIONS), x.to(device), dims, options, pick.choice((dtype, dtype, *DTYPES))


@pytest.mark.parametrize("seed", thin(range(400), 80))
def test_any_combination(runs, seed):
    """Of any parts, dims, strides and dtypes, on any tier."""
    function, x, dims, options, to = drawn(seed, runs.device)
    to = x.dtype if function == "logsumexp" else to
    check(runs, function, x, dims, options, random.Random(-seed).choice(list(TIERS.values())), to, seed)


@thin_product(13, function=FUNCTIONS, empty=("nan", "zero"), tier=TWO, dtype=DTYPES)
def test_special_values(runs, function, tier, dtype, empty):
    """In the input and the sinks, masked out or not: the definition's, in no row but theirs."""
    x, mask = maker(dtype, runs.device)(14, 23), torch.ones(14, 23, dtype=torch.bool, device=runs.device)
    mask[1], mask[3, 2], mask[5, 2], mask[8, 3:] = False, False, False, False
    x[2, 3], x[3, 2], x[4, 1], x[5, 2], x[6], x[7, :2], x[9, 1], x[9, 4] = NAN, NAN, INF, INF, -INF, -INF, INF, NAN
    x[10], x[11, 0] = torch.finfo(dtype).max / 2, -INF
    if function == "softmin":
        x = -x
    sinks = torch.full((14, 1), -INF, device=runs.device)
    sinks[10:] = torch.tensor([[0.0], [NAN], [INF], [90.0]], device=runs.device)
    options = {"mask": mask, "empty": empty}
    if (empty == "zero") ^ (tier == "online") ^ (dtype.itemsize % 4 == 0):
        options["sink"] = sinks
    y, _, dx = check(runs, function, x, [1], options, TIERS[tier])
    if dx is not None:
        assert not bool(dx[~mask].any())
        assert bool(dx[0].isfinite().all() and y[0].isfinite().all())


@thin_product(4, function=SOFTMAXES[::-1], tier=TWO)
def test_what_is_masked_out_has_no_gradient(runs, function, tier):
    """Whatever the input holds there, and whatever the gradients of the row's other results are."""
    mask = (torch.arange(23, device=runs.device) % 3 > 0).expand(6, 23)
    clean, g = maker(F32, runs.device)(6, 23), maker(F32, runs.device, seed=5)(6, 23)
    g[0, 1], g[1, 1], g[2, 1], g[3] = INF, -INF, NAN, 3e38
    g[3, mask[3]] = -3e38
    for value, options in (
        (NAN, {"mask": mask, "softcap": 2.0}),
        (INF, {"mask": mask, "scale": 0.5}),
        (-INF, {"causal": True, "softcap": 2.0}),
    ):
        seen = mask if "mask" in options else torch.ones_like(mask).tril(17)
        x = clean.masked_fill(~seen, value)
        y, _ = runs.run(forward, function, x, [1], options, F32, TIERS[tier])
        dx = runs.run(backward, function, g, y, x, [1], options, F32, TIERS[tier])
        assert not bool(dx[~seen].any())
        assert bool(dx[:3].isnan().any(1).all() if function != "log_softmax" else dx[2].isnan().any())
        assert bool(dx[4:].isfinite().all())


def _reads(x: Tensor, options: Options, plan: Plan) -> list[int]:
    """How many elements of x each load of the forward reads."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts = []
    load = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        within = (pointers.data >= x.data_ptr()) & (pointers.data < x.data_ptr() + x.nbytes)
        if within.any():
            counts.append(int((within & mask.data).sum()))
        return load(self, pointers, mask, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", counted)
        forward("softmax", x, [1], options, x.dtype, plan)
    return counts


def test_what_is_outside_the_window_is_not_read(interpreting):
    """Of vectors of 16 elements, those in which nothing takes part; and of a chunk of nothing else there is no load in
    the first pass."""
    x, causal = maker(BF16)(8, 64), {"causal": True, "offset": 28}
    vectors = [(28 + query) // 16 + 1 for query in range(8)]  # of which a query sees some
    row = Plan("row", block=64, rows=1, depth=1, num_warps=1, num_stages=1, grid=100)
    online = Plan("online", block=16, rows=1, depth=1, num_warps=1, num_stages=1, grid=100)
    assert interpreting(_reads, x, causal, row) == [16 * each for each in vectors]
    reads = interpreting(_reads, x, causal, online)
    assert sum(reads) == 2 * 16 * sum(vectors)
    assert len(reads) == sum(vectors) + 8 * 4
    reads = interpreting(_reads, x, causal | {"window": (0, 0)}, online)
    assert sum(reads) <= 2 * 8 * 2 * 16
    assert len(reads) == 8 * (1 + 4)
    assert sum(interpreting(_reads, x, causal | {"offset": -8}, online)) == 0


@thin_product(7, dim=[-2, 0, (0, 2), (1, 2), (0, 1, 2)], tier=TWO)
def test_dims_of_queries_and_heads(runs, dim, tier):
    """Positions are those of the last two dims, whichever is reduced."""
    x = maker(F32, runs.device)(2, 3, 5)
    dims = [dim % 3] if isinstance(dim, int) else list(dim)
    for k, options in enumerate(({"causal": True}, {"window": (1, 0), "offset": 0}, {"alibi": x[:, 0, 0].abs()})):
        check(runs, SOFTMAXES[k], x, dims, options, TIERS[tier])


# Public calls ---------------------------------------------------------------------------------------------------------


def _public(function: str, x: Tensor, options: Options, g: Tensor) -> list[Tensor]:
    """The result and the gradients of all tensors of a call for which there are kernels."""

    def refuse(*given: Any) -> None:
        raise AssertionError("there is a kernel for this call")

    given = {name: t for name, t in options.items() if isinstance(t, Tensor) and t.is_floating_point()}
    tensors = [t.requires_grad_() for t in (x, *given.values())]
    with pytest.MonkeyPatch.context() as patched:
        for name in ("forward_arithmetic", "backward_arithmetic", "logsumexp_backward_arithmetic"):
            patched.setattr(scored, name, refuse)
        y = ours(function)(x, -1, engine="triton", **options)
        return [y.detach(), *torch.autograd.grad(y.masked_fill(y.isinf(), 0), tensors, g)]


@thin_product(3, part=["all", "scale", "bias", "causal", "sink of rows"], function=FUNCTIONS)
def test_values_and_gradients(runs, function, part):
    """Of every tensor, by kernels and no arithmetic in their place."""
    options, x = made(part, F32, runs.device), maker(F32, runs.device)(*SHAPE)
    g = maker(F32, runs.device, seed=5)(*(SHAPE[:-1] if function == "logsumexp" else SHAPE))
    got = runs.run(_public, function, x, options, g)
    wide = {
        name: t.double().requires_grad_()
        for name, t in {"x": x, **options}.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    exact = wide.pop("x")
    y = getattr(reference, function)(exact, -1, **options | wide)
    finite = y.masked_fill(y.isinf(), 0)
    want = [y.detach(), *torch.autograd.grad(finite, [exact, *wide.values()], g.double())]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


def _outs(x: Tensor, options: Options) -> list[Tensor]:
    """Results in other places and dtypes than their own, and in the input's."""
    wide = torch.full((23, 3, 2, 2), NAN, device=x.device).permute(3, 2, 1, 0)
    call = {"engine": "triton", **options}
    onepass.softmax(x, -1, dtype=F32, out=wide, **call)
    lse = torch.full((2, 2, 3), NAN, device=x.device, dtype=x.dtype)
    onepass.logsumexp(x, -1, out=lse, **call)
    given = x.clone()
    onepass.log_softmax(given, -1, out=given, **call)
    return [wide, lse, given]


@pytest.mark.parametrize("part", ["all", "window"])
def test_outs(runs, part):
    options, x = made(part, BF16, runs.device), maker(BF16, runs.device)(*SHAPE)
    wide, lse, given = runs.run(_outs, x, options)
    for got, function, like in ((wide, "softmax", x), (lse, "logsumexp", x), (given, "log_softmax", x)):
        want = getattr(reference, function)(like, -1, **options)
        assert_close(got, want, error_of(function, like, [3], options, got.dtype).max(), function)


def _orders(function: str) -> None:
    r = maker(F64, seed=5, scale=1.0)
    scale, bias, mask = positive(r(2, 1)), r(3), torch.tensor([True, False, True])

    def call(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        options = {"scale": scale, "bias": bias, "mask": mask, "softcap": 3.0, "sink": 0.5}
        y = ours(function)(x, -1, engine="triton", **options)
        return y.masked_fill(y.isinf(), 0)

    given = tuple(t.requires_grad_() for t in (r(2, 3), scale, bias))
    assert torch.autograd.gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("function", ["log_softmax", *map(slow, ("softmax", "softmin", "logsumexp"))])
def test_gradients_of_first_and_second_order(interpreting, function):
    interpreting(_orders, function)


def _called(function: str, x: Tensor, options: Options) -> Tensor:
    return ours(function)(x, -1, engine="triton", **options)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_without_a_kernel(runs, function):
    """Distances that need more than 32 bits, and rows of nothing, are the arithmetic's."""
    x = maker(F64, runs.device)(2, 3, 5)
    for options in ({"causal": True, "offset": 2**40}, {"alibi": x[:, 0, 0].abs(), "offset": -(2**31)}):
        got = runs.run(_called, function, x, options)
        want = getattr(reference, function)(x, -1, **options)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    got = runs.run(_called, function, x[:, :, :0], {"sink": 0.5})
    assert same(got, getattr(reference, function)(x[:, :, :0], -1, sink=0.5))


# On a GPU, by the engine's own plans ----------------------------------------------------------------------------------

LENGTHS = [1, 3, 16, 200, 256, 512, 781, 1024, 2048, 4096, 8192, 16384, 16385, 32768, 50257, 131072, 300001]


def long(n: int, kind: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Options]:
    """An input with rows of n, and options: positions, or tensors."""
    r = maker(dtype, device, seed=3, scale=1.0)
    if kind == "positions":
        options = {"causal": True, "window": (n // 2, 0), "alibi": positive(r(2)) / n, "sink": r(2, 1, 1)}
    else:
        options = {"scale": positive(r(2, 3, 1)), "softcap": 3.0, "bias": r(2, 1, 3, n), "mask": r(3, n) > -1}
    return maker(dtype, device)(2, 2, 3, n), options


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("kind", ["positions", "tensors"])
@pytest.mark.parametrize("n", LENGTHS)
def test_row_lengths(gpu, n, kind, dtype):
    x, options = long(n, kind, dtype, gpu.device)
    for function in FUNCTIONS:
        check(gpu, function, x, [3], options)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_other_dims(gpu, dims):
    make = maker(BF16, gpu.device)
    x, options = make(70, 90, 40), {"causal": True, "bias": make(90, 1), "mask": make(70, 1, 40) > -1, "empty": "zero"}
    for function in FUNCTIONS:
        check(gpu, function, x, dims, options)


@pytest.mark.gpu
def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 4096, 50257):
        x, mask = maker(F32, gpu.device)(300, n), maker(F32, gpu.device, seed=1)(300, n) > 0
        whole = onepass.softmax(x, -1, engine="triton", mask=mask, scale=0.5)
        assert same(whole, onepass.softmax(x, -1, engine="triton", mask=mask, scale=0.5))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            assert same(whole[rows], onepass.softmax(x[rows], -1, engine="triton", mask=mask[rows], scale=0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 2])
def test_the_result_alone_is_allocated(gpu, dim):
    """And the gradient alone; nothing is expanded or copied."""
    make = maker(BF16, gpu.device)
    x, bias, mask = make(64, 128, 96), make(128, 96), make(64, 1, 96) > -1
    call = {"engine": "triton", "scale": 0.5, "bias": bias, "mask": mask, "causal": True, "empty": "zero"}
    onepass.softmax(x, dim, **call)  # makes it compile
    assert peak(lambda: onepass.softmax(x, dim, **call), gpu.device) == x.nbytes
    x.requires_grad_()
    y = onepass.softmax(x, dim, **call)
    g = torch.ones((), device=gpu.device, dtype=BF16).expand(y.shape)
    assert peak(lambda: torch.autograd.grad(y, x, g, retain_graph=True), gpu.device) == x.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 64 + 5, 64), (3, 2**30 + 16)])
def test_more_than_2_to_the_31_elements(gpu, room, shape):
    x = torch.zeros(shape, dtype=F16, device=gpu.device)
    mask = torch.arange(shape[1], device=gpu.device) < 4
    y = onepass.softmax(x, -1, engine="triton", mask=mask, bias=torch.zeros(4, dtype=F16, device=gpu.device).sum())
    for row in (0, shape[0] // 2, shape[0] - 1):
        assert y[row, :4].tolist() == [0.25] * 4
        assert not bool(y[row, 4:].any())


# Compiled for GPUs that are not here ----------------------------------------------------------------------------------


def _compile(
    of_gradient: bool, function: str, n: int, dtype: torch.dtype, parts: str, backend: str, arch: Any
) -> dict[str, Any]:
    """The kernel that a call with these parts, or its gradient, would launch for many rows of n: its tier and its
    resources, per thread."""
    x, wide = torch.empty(2, 4, 3, n, dtype=dtype), accumulator(dtype)
    options = {
        "scale": torch.empty(4, 1, 1, dtype=wide),
        "softcap": 30.0,
        "bias": torch.empty(4, 3, n, dtype=dtype),
        "alibi": torch.empty(4, dtype=wide),
        "mask": torch.empty(2, 1, 3, n, dtype=torch.bool),
        "causal": True,
        "sink": torch.empty(4, 1, 1, dtype=wide),
        "empty": "zero",
    }
    options = {name: value for name, value in options.items() if parts == "all" or name in parts}
    chosen = plan_scored(1 << 20, n, (dtype, dtype), Properties(backend))

    def launches() -> None:
        if of_gradient and function == "logsumexp":
            lse = torch.empty(2, 4, 3, 1, dtype=wide)
            logsumexp_backward(lse, lse, x, [3], options, n > 16384, chosen)
        elif of_gradient:
            backward(function, x, x, x, [3], options, dtype, chosen)
        else:
            forward(function, x, [3], options, dtype, chosen)

    return {"tier": chosen.tier, **launched_resources(launches, backend, arch)}


COMPILED = [
    (False, "softmax", 16, F32, "all"),
    (False, "softmax", 781, BF16, "scale mask"),
    (False, "softmax", 1024, BF16, "all"),
    (False, "softmax", 16384, BF16, "causal mask"),
    (False, "log_softmax", 4096, F32, "all"),
    (False, "logsumexp", 8192, F16, "all"),
    (False, "softmax", 65536, BF16, "all"),
    (False, "softmax", 65536, F32, "causal alibi"),
    (False, "softmax", 4096, F64, "bias causal"),
    (True, "softmax", 1024, BF16, "all"),
    (True, "log_softmax", 4096, F32, "all"),
    (True, "softmax", 16384, BF16, "causal mask"),
    (True, "softmax", 65536, BF16, "all"),
    (True, "log_softmax", 65536, F32, "mask"),
    (True, "softmax", 2048, F64, "all"),
    (True, "logsumexp", 1024, BF16, "all"),
    (True, "logsumexp", 65536, F32, "all"),  # of the scores
]


@every_target("backward function n dtype parts", COMPILED, 4)
def test_compiles_without_spills(compiling, backend, arch, backward, function, n, dtype, parts):
    found = compiling(_compile, backward, function, n, dtype, parts, backend, arch)
    assert found["tier"] == ("row" if n <= 16384 else "online")
    assert found["wide"] > 0 or n % 16, "aligned rows are read 16 bytes at a time"
    assert_no_spills(found, backend)
