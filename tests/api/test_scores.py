"""Scores: every argument alone and with others, on every function, against the definition."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib import support
from lib.scored import (
    BF16,
    CASES,
    F16,
    F32,
    F64,
    INF,
    NAN,
    SHAPE,
    Options,
    assert_scored,
    defined,
    every_case,
    half_true,
    options_of,
    positive,
    tensors_of,
)
from lib.support import DTYPES, drawn_positions, every_softmax, maker, ours, same, slow, thin
from onepass import reference


@support.thin_product(3, case=CASES, function=support.FUNCTIONS, dtype=DTYPES)
def test_values(function, case, dtype, engine, device):
    x = maker(dtype, device)(*SHAPE)
    options = options_of(case, dtype, device)
    y = ours(function)(x, -1, engine=engine, **options)
    assert y.dtype is dtype
    assert_scored(function, y, x, -1, options)


@every_case
@every_softmax
def test_dtypes_outs_and_in_place(function, case, device):
    options = options_of(case, F32, device)
    x = maker(BF16, device)(*SHAPE)
    y = ours(function)(x, -1, dtype=F32, **options)
    assert y.dtype is F32
    assert_scored(function, y, x, -1, options)
    out = torch.full(SHAPE[::-1], NAN, device=device).permute(3, 2, 1, 0)
    assert ours(function)(x, -1, dtype=F32, out=out, **options) is out
    assert_scored(function, out, x, -1, options)
    given = x.clone()
    version = given._version
    assert ours(function)(given, -1, out=given, **options) is given
    assert given._version > version
    assert_scored(function, given, x, -1, options)


@pytest.mark.parametrize("keepdim", [False, True])
@every_case
def test_logsumexps_out(case, keepdim, device):
    options, x = options_of(case, F32, device), maker(F32, device)(*SHAPE)
    out = torch.empty((2, 3, 5, 1) if keepdim else (2, 3, 5), device=device)
    assert onepass.logsumexp(x, -1, keepdim, out=out, **options) is out
    assert_scored("logsumexp", out, x, -1, options, keepdim)


def test_integers_are_taken(function, device):
    x = torch.arange(12, device=device).view(3, 4)
    named: Options = {} if function == "logsumexp" else {"dtype": F32}
    y = ours(function)(x, 1, scale=0.5, causal=True, **named)
    assert y.dtype is F32
    assert_scored(function, y, x.float(), 1, {"scale": 0.5, "causal": True})


def broadcast(pick: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    return tuple(pick.choice((1, size)) for size in shape)[pick.choice((0, 0, pick.randint(0, len(shape)))) :]


def drawn(seed: int, device: str) -> tuple[Tensor, Any, Options, dict[str, Any]]:
    """An input of any layout, dims, options, and other arguments."""
    pick, make = random.Random(seed), maker(F64, seed=seed)
    rank = pick.randint(0, 4)
    shape = tuple(
        pick.choice((0, 1, 2, 3, 5, 8, 17)) if pick.random() < 0.3 else pick.randint(1, 9) for _ in range(rank)
    )
    layout = pick.choice(("contiguous", "permuted", "stepped", "expanded"))
    order = pick.sample(range(rank), rank)
    x = make(*(shape[d] for d in order)).permute([order.index(d) for d in range(rank)])
    if layout == "contiguous":
        x = x.contiguous()
    elif layout == "stepped" and rank:
        x = torch.cat([x, x], -1)[..., ::2] if shape[-1] else x
    elif layout == "expanded" and rank and shape[0]:
        x = x[:1].expand(shape)
    dtype = pick.choice(DTYPES)
    x = x.to(dtype).to(device)
    dims = pick.sample(range(-rank, 0), pick.choice((1, 1, 1, pick.randint(1, rank)))) if rank else [0]
    reduced = {d % max(rank, 1) for d in dims}
    rows = tuple(1 if d in reduced else size for d, size in enumerate(shape))

    def has() -> bool:
        return pick.random() < 0.35

    def side(shape: tuple[int, ...]) -> Tensor:
        return make(*broadcast(pick, shape)).to(pick.choice((dtype, F32, BF16))).to(device)

    options: Options = {}
    if has():
        options["scale"] = pick.choice((pick.uniform(-1, 1), positive(side(rows)) / 3, 2))
    if has():
        options["bias"] = side(shape)
    if has():
        options["mask"] = make(*broadcast(pick, shape)).to(device) > pick.choice((-1, 0.5))
    if rank >= 2:
        options |= drawn_positions(pick, has, lambda: positive(side(shape[:-2])), 3)
    if has():
        options["softcap"] = pick.choice((0.5, 30))
    if has():
        options["sink"] = pick.choice((0.0, side(rows)))
    if pick.random() < 0.5:
        options["empty"] = "zero"
    options = options or {"empty": "nan"}
    return x, dims[0] if len(dims) == 1 else tuple(dims), options, {"keepdim": pick.random() < 0.5}


@pytest.mark.parametrize("seed", thin(range(600), 15))
def test_any_combination_and_its_gradients(seed, function, engine, device):
    x, dim, options, named = drawn(seed, device)
    if function != "logsumexp":
        named = {}
    y = ours(function)(x, dim, engine=engine, **named, **options)
    assert y.dtype is x.dtype
    assert_scored(function, y, x, dim, options, **named)
    # Gradients: of float64, by the definition's own.
    wide = {name: value.double() for name, value in tensors_of(options).items()}
    given = [t.detach().clone().requires_grad_() for t in (x.double(), *wide.values())]
    rest = options | dict(zip(wide, given[1:], strict=True))
    got = ours(function)(given[0], dim, engine=engine, **named, **rest)
    want = defined(function, given[0], dim, rest, **named)
    where = want.isfinite()
    g = maker(F64, device, seed=1)(*want.shape) * where  # that of a row without anything is measured elsewhere
    grads = [torch.autograd.grad(y, given, g, allow_unused=True) for y in (got, want)]
    rows = where if function == "logsumexp" else where.any(_tuple(dim), keepdim=True) if x.numel() else where
    for name, one, other in zip(("x", *wide), *grads, strict=True):
        if bool(rows.all()) or name == "x":
            other = torch.zeros_like(one) if other is None else other
            pick = other.isfinite()
            torch.testing.assert_close(one[pick], other[pick], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def _tuple(dim: Any) -> Any:
    return dim if isinstance(dim, tuple) else (dim,)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 4), (4, 0), (0, 0), (2, 0, 3), (1, 1)], ids=str)
def test_small_and_empty_inputs(function, shape, device):
    x = maker(F32, device)(*shape)
    every: list[Options] = [{"scale": 2.0}, {"sink": 0.0}, {"softcap": 1.0, "empty": "zero"}, {"bias": x + 1}]
    every += [{"mask": x > 0}, {"mask": torch.zeros(shape, dtype=torch.bool, device=device), "empty": "zero"}]
    if len(shape) > 1:
        every += [{"causal": True, "sink": 0.0}, {"window": (0, 0)}, {"alibi": x.new_ones(shape[:-2])}]
    for options in every:
        for dim in range(-max(x.dim(), 1), 0):
            y = ours(function)(x, dim, **options)
            assert_scored(function, y, x, dim, options)
            given = x.clone().requires_grad_()
            assert torch.autograd.grad(ours(function)(given, dim, **options).sum(), given)[0].shape == x.shape


def test_more_dims_than_the_operators_take(function):
    x = maker(F32)(*[1] * 60, 2, 3)
    assert_scored(function, ours(function)(x, -1, scale=0.5, causal=True), x, -1, {"scale": 0.5, "causal": True})


def test_softmin_negates_the_input_before_all_else(device):
    x, bias = maker(F64, device)(3, 4), maker(F64, device, 2)(3, 4)
    got = onepass.softmin(x, -1, scale=0.5, bias=bias, causal=True)
    torch.testing.assert_close(got, onepass.softmax(-x, -1, scale=0.5, bias=bias, causal=True))


def test_the_dims_of_queries_and_keys_are_the_last_two_whichever_is_reduced(function, device):
    x = maker(F64, device)(3, 4, 5)
    for dim in (0, 1, 2, (0, 2), (1, 2), (0, 1, 2)):
        for options in ({"causal": True}, {"window": (1, 0), "offset": 0}, {"alibi": positive(maker(F64, device)(3))}):
            assert_scored(function, ours(function)(x, dim, **options), x, dim, options)


@pytest.mark.parametrize("dtype", [F32, BF16, slow(F64), slow(F16)], ids=str)
def test_long_rows_and_columns(function, dtype, engine, device):
    for shape, dim in (((3, 5003), 1), ((2, 1030, 9), 1), ((4, 100, 200), -1)):
        x = maker(dtype, device)(*shape)
        options = {"scale": 0.2, "causal": True, "sink": 1.0, "alibi": positive(maker(dtype, device)(*shape[:-2])) / 64}
        assert_scored(function, ours(function)(x, dim, engine=engine, **options), x, dim, options)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_gradient_of_alibi_where_no_half_number_holds_a_distance(dtype, device):
    x, slopes = maker(dtype, device)(2, 70001, 1), positive(maker(F32, device)(2)) / 70000
    given = slopes.requires_grad_()
    y = onepass.softmax(x.requires_grad_(), -2, alibi=given)
    g = maker(dtype, device, 3)(*y.shape)
    wide = slopes.detach().double().requires_grad_()
    far = torch.arange(70000, -1, -1, device=device).double()[:, None]
    want = torch.autograd.grad((x.detach().double() - wide[:, None, None] * far).softmax(-2), wide, g.double())[0]
    (_, got) = torch.autograd.grad(y, (x, given), g)
    terms = (y.double() * g.double()).abs().sum((1, 2)) * 70000
    assert ((got.double() - want).abs() <= terms * torch.finfo(dtype).eps).all()


def test_an_empty_row_of_logsumexp_has_no_gradient_whatever_comes_in(engine, device):
    x = torch.full((3, 5), -torch.inf, device=device)
    x[1] = 1
    given = x.requires_grad_()
    y = onepass.logsumexp(given, -1, scale=2.0, empty="zero", engine=engine)
    (got,) = torch.autograd.grad(y, given, torch.tensor([torch.nan, 1.0, torch.inf], device=device))
    torch.testing.assert_close(got, torch.tensor([0.0, 0.4, 0.0], device=device)[:, None].expand(3, 5))


def test_tensors_of_any_strides(function, device):
    """Broadcast, transposed, stepped and with offsets: as views of larger ones."""
    r = maker(F32, device)
    x = r(7, 5, 3, 2).permute(3, 2, 1, 0)
    options = {
        "scale": positive(r(6, 2)[::2, :1, None]),
        "bias": r(7, 5).t(),
        "alibi": positive(r(9)[3::2]),
        "sink": r(1).expand(2, 3, 5, 1),
        "mask": half_true(r, 14, 10)[::2, 1::2].t(),
    }
    assert_scored(function, ours(function)(x, -1, **options), x, -1, options)


def test_tensors_of_another_float_dtype(function, device):
    """Their values are taken as they are, not rounded to the input's dtype."""
    x = maker(F16, device)(3, 4)
    bias = torch.full((4,), 1e5, device=device)  # no float16
    assert_scored(function, ours(function)(x, -1, bias=bias), x, -1, {"bias": bias})
    for dtype in DTYPES:
        options = {"bias": maker(dtype, device)(4), "sink": maker(dtype, device)(3, 1)}
        assert_scored(function, ours(function)(x.float(), -1, **options), x.float(), -1, options)


# Rows with special values ---------------------------------------------------------------------------------------------

MASK = torch.tensor([[True, True, False, True], [False, False, False, False], [True, False, False, False]])
every_value = pytest.mark.parametrize("value", [NAN, INF, -INF])
every_empty = pytest.mark.parametrize("empty", ["nan", "zero"])


@every_value
def test_what_is_masked_out_does_not_matter(function, value, dtype, engine, device):
    """In the input and in the bias, to values and gradients, with a softcap and a scale too."""
    clean, mask = maker(dtype, device)(3, 4), MASK.to(device)
    for options in ({}, {"softcap": 2.0}, {"scale": torch.full((3, 1), 0.5, dtype=dtype, device=device)}):
        for name in ("x", "bias"):
            results = []
            for filled in (clean, clean.masked_fill(~mask, value)):
                x, bias = (filled, clean) if name == "x" else (clean, filled)
                given = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
                more = {k: v.clone().requires_grad_() if isinstance(v, Tensor) else v for k, v in options.items()}
                call = {"bias": given[1], "mask": mask, "empty": "zero", **more}
                y = ours(function)(given[0], -1, engine=engine, **call)
                wanted = [*given, *tensors_of(more).values()]
                g = torch.autograd.grad(y.masked_fill(y.isinf(), 0).sum(), wanted)
                results.append([y.detach(), *g])
            for one, other in zip(*results, strict=True):
                assert same(one, other), (name, options, one, other)


@every_value
def test_what_is_not_masked_out_does(function, value, engine, device):
    x = maker(F32, device)(3, 4)
    x[0, 1], x[2, 0] = value, value
    for options in ({"mask": MASK.to(device)}, {"causal": True}, {"bias": x * 0 + 1}, {"scale": 2.0}, {"sink": 0.0}):
        for empty in ("nan", "zero"):
            named = options | {"empty": empty}
            assert_scored(function, ours(function)(x, -1, engine=engine, **named), x, -1, named)


@pytest.mark.parametrize("given", [{"scale": 0.5}, {"mask": MASK}], ids=["input", "mask"])
def test_rows_without_anything_have_no_gradient(function, given, device):
    """Whether the input is -inf or the mask hides all of it."""
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    x = maker(F32, device)(3, 4)
    x[1] = INF if function == "softmin" else -INF
    x.requires_grad_()
    y = ours(function)(x, -1, empty="zero", **given)
    (dx,) = torch.autograd.grad(y, x, maker(F32, device, seed=1)(*y.shape))
    assert not dx[1].any()
    assert bool(dx[0].any())


@every_empty
def test_rows_without_anything(function, empty, dtype, engine, device):
    """By a mask, by a bias, by the input, and by an offset; a sink gives a row something."""
    x = maker(dtype, device)(3, 4)
    nothing: list[tuple[Tensor, Options]] = [
        (x, {"mask": MASK.to(device)}),
        (x, {"bias": torch.zeros_like(x).masked_fill(~MASK.to(device), -INF)}),
        (x, {"causal": True, "offset": -1}),
        (x, {"window": (0, 0), "offset": 100}),
        ((-1 if function == "softmin" else 1) * x.abs().masked_fill(~MASK.to(device), -INF), {"scale": 0.5}),
    ]
    value = {"logsumexp": -INF, "log_softmax": -INF}.get(function, 0.0)
    for given, options in nothing:
        y = ours(function)(given, -1, engine=engine, empty=empty, **options)
        assert_scored(function, y, given, -1, options | {"empty": empty})
        row = y[1] if "offset" not in options else y[0]
        assert bool((row == value).all() if empty == "zero" or function == "logsumexp" else row.isnan().all())
        options["sink"] = 0.5
        y = ours(function)(given, -1, engine=engine, empty=empty, **options)
        assert_scored(function, y, given, -1, options)
        row = y[1] if "offset" not in options else y[0]
        if function != "logsumexp":
            assert bool((row == value).all())


@pytest.mark.parametrize("name", ["mask", "bias", "offset"])
def test_gradients_of_rows_without_anything_are_zero_if_so_asked(function, name, engine, device):
    """And a NaN, where an element takes part, by default, but 0 where it does not."""
    mask = MASK.to(device)
    x, bias = (maker(F64, device, seed)(3, 4) for seed in (0, 1))
    options: Options = {
        "mask": {"mask": mask},
        "bias": {},
        "offset": {"causal": True, "offset": -1},
    }[name]
    if name == "bias":
        bias = bias.masked_fill(~mask, -INF)
    for empty in ("zero", "nan"):
        given = [t.clone().requires_grad_() for t in (x, bias, torch.full((3, 1), -INF, dtype=F64, device=device))]
        if name == "bias" and empty == "nan":
            continue
        grads = []
        for call in (ours(function), getattr(reference, function)):
            y = call(given[0], -1, bias=given[1], sink=given[2], empty=empty, **options)
            grads.append(torch.autograd.grad(y[y.isfinite()].sum(), given))
        for got, want in zip(*grads, strict=True):
            assert empty == "nan" or got.isfinite().all(), got
            torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()])


def test_sinks(function, device):
    """A sink of -inf is none; one of 0 adds 1 to the sum of exponentials; its own special values are the row's."""
    x = maker(F64, device)(4, 5)
    plain = ours(function)(x, -1)
    for none in (-INF, torch.full((4, 1), -INF, device=device), None):
        torch.testing.assert_close(ours(function)(x, -1, sink=none), plain)
    if function == "softmax":
        torch.testing.assert_close(onepass.softmax(x, -1, sink=0.0), x.exp() / (1 + x.exp().sum(-1, keepdim=True)))
    sink = torch.tensor([[0.0], [INF], [NAN], [-INF]], device=device)
    y = ours(function)(x, -1, sink=sink)
    assert_scored(function, y, x, -1, {"sink": sink})
    assert y[1].isinf().all() if function == "logsumexp" else y[1].isnan().all()
    assert y[2].isnan().all()
    assert y[0].isfinite().all()
    assert y[3].isfinite().all()


def test_large_scores(function, dtype, engine, device):
    """The maximum is subtracted before any exponential is taken."""
    x = maker(dtype, device)(3, 40) * 100
    for options in ({"scale": 30.0}, {"bias": torch.full((3, 40), 3e4, dtype=F32, device=device)}, {"sink": 1e4}):
        assert_scored(function, ours(function)(x, -1, engine=engine, **options), x, -1, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_of_large_inputs(dtype, engine, device):
    """tanh is 1 there, and no exponential on the way to it is infinite."""
    x = torch.tensor([[6e4, -6e4, 0.0, 3e4], [-6e4, 1.0, 6e4, 2.0]], dtype=dtype, device=device)
    got = onepass.softmax(x, softcap=5.0, engine=engine)
    assert_scored("softmax", got, x, -1, {"softcap": 5.0})
