"""Scores: every argument alone and with others, on every function, against the definition; their derivatives, and the
ways of a call."""

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import onepass
from lib import support
from lib.modes import Graphs, Operators
from lib.support import DTYPES, accumulator, drawn_positions, every_softmax, maker, ours, same, slow, thin, thin_tuples
from onepass import reference

F32, F64, F16, BF16 = DTYPES
INF, NAN = torch.inf, torch.nan
Options = dict[str, Any]
FLOAT_TENSORS = ("scale", "bias", "alibi", "sink")  # that have gradients


def defined(function: str, x: Tensor, dim: Any, options: Mapping[str, Any], keepdim: bool = False) -> Tensor:
    """The definition, of an input that has been rounded to the call's dtype."""
    named: Options = {"keepdim": keepdim} if function == "logsumexp" else {}
    return getattr(reference, function)(x, dim, **named, **options)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, size: float, note: Any = "") -> None:
    """Within one rounding to `dtype` and a few of the accumulator, of numbers of the magnitude `size`."""
    want = torch.where(want.abs() > torch.finfo(dtype).max, want.sign() * INF, want)
    allowed = torch.finfo(dtype).eps + (24 + 4 * size) * torch.finfo(accumulator(dtype)).eps
    torch.testing.assert_close(
        got.double(), want, rtol=allowed, atol=allowed, equal_nan=True, msg=lambda text: f"{note}: {text}"
    )


def assert_scored(
    function: str, got: Tensor, x: Tensor, dim: Any, options: Mapping[str, Any], keepdim: bool = False
) -> None:
    want = defined(function, x, dim, options, keepdim)
    assert got.shape == want.shape
    numbers = {name: value for name, value in options.items() if name not in ("sink", "empty")}
    scores = reference.score(function, x.double(), **numbers).detach()
    size = float(scores.masked_fill(~scores.isfinite(), 0).abs().amax()) if scores.numel() else 0.0
    call = f"{function} over {dim} of {tuple(x.shape)} {x.dtype} with {sorted(options)}"
    assert_close(got.detach(), want.detach(), got.dtype, size + x.numel() ** 0.5, call)


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.5


def half_true(make: Callable[..., Tensor], *shape: int) -> Tensor:
    return make(*shape) > -1


# Each makes the options of a call on an input of the shape (2, 3, 5, 7), whose last dim is reduced.
SHAPE = (2, 3, 5, 7)
CASES: dict[str, Callable[[Callable[..., Tensor]], Options]] = {
    "scale": lambda r: {"scale": 0.3},
    "negative scale": lambda r: {"scale": -0.3},
    "no scale": lambda r: {"scale": 0.0},
    "scale of each head": lambda r: {"scale": positive(r(3, 1, 1))},
    "scale of all": lambda r: {"scale": positive(r())},
    "bias": lambda r: {"bias": r(*SHAPE)},
    "bias of each key": lambda r: {"bias": r(7)},
    "bias of each query": lambda r: {"bias": r(2, 1, 5, 1)},
    "mask": lambda r: {"mask": half_true(r, *SHAPE)},
    "mask of padding": lambda r: {"mask": (torch.arange(7) < torch.tensor([[5], [7]]))[:, None, None]},
    "causal": lambda r: {"causal": True},
    "causal with an offset": lambda r: {"causal": True, "offset": 0},
    "causal, nothing for some": lambda r: {"causal": True, "offset": -2},
    "window": lambda r: {"window": (2, 1)},
    "window to the left": lambda r: {"window": (1, None), "offset": 1},
    "window to the right": lambda r: {"window": (None, 0)},
    "window without bounds": lambda r: {"window": (None, None)},
    "causal window": lambda r: {"window": (2, 3), "causal": True},
    "alibi": lambda r: {"alibi": positive(r(3))},
    "alibi of each batch": lambda r: {"alibi": positive(r(2, 1)), "offset": 1},
    "softcap": lambda r: {"softcap": 1.5},
    "sink": lambda r: {"sink": 0.0},
    "no sink": lambda r: {"sink": -INF},
    "sink of all": lambda r: {"sink": r()},
    "empty": lambda r: (
        {"mask": half_true(r, *SHAPE) & torch.tensor([True, False, True, True, True])[:, None]} | {"empty": "zero"}
    ),
    "all": lambda r: {
        "scale": 0.4,
        "bias": r(3, 1, 7),
        "mask": half_true(r, 2, 1, 1, 7),
        "causal": True,
        "window": (3, None),
        "offset": 1,
        "alibi": positive(r(3)),
        "softcap": 2.0,
        "sink": r(1, 3, 1, 1),
        "empty": "zero",
    },
}
every_case = pytest.mark.parametrize("case", CASES)


def options_of(case: str, dtype: torch.dtype = F64, device: str = "cpu") -> Options:
    made = CASES[case](maker(F64, seed=3, scale=1.0))
    return {
        name: value.to(device=device, dtype=None if value.dtype is torch.bool else dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in made.items()
    }


def tensors_of(options: Options) -> dict[str, Tensor]:
    return {name: options[name] for name in FLOAT_TENSORS if isinstance(options.get(name), Tensor)}


# Values ---------------------------------------------------------------------------------------------------------------


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
    has = lambda: pick.random() < 0.35  # noqa: E731
    side = lambda shape: make(*broadcast(pick, shape)).to(pick.choice((dtype, F32, BF16))).to(device)  # noqa: E731
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


# Derivatives ----------------------------------------------------------------------------------------------------------

# torch.autograd's batched checks warn of operators without a batching rule.
unbatched = pytest.mark.filterwarnings("ignore::UserWarning")
DERIVED = {  # small ones, each with all of its tensors
    "scale": ((2, 3, 4), -1, lambda r: {"scale": positive(r(3, 1))}),
    "factor": ((2, 3), 0, lambda r: {"scale": -0.7}),
    "bias": ((2, 3, 4), 1, lambda r: {"bias": r(3, 1)}),
    "mask": ((2, 4), -1, lambda r: {"mask": half_true(r, 2, 4).index_fill(1, r(1).long() * 0 + 1, True)}),
    "causal": ((2, 3, 4), -1, lambda r: {"causal": True}),
    "alibi": ((2, 3, 4), -1, lambda r: {"alibi": positive(r(2)), "window": (1, 1)}),
    "softcap": ((3, 4), -1, lambda r: {"softcap": 1.2}),
    "sink": ((2, 3, 4), -1, lambda r: {"sink": r(3, 1)}),
    "two dims": ((2, 3, 2), (0, 2), lambda r: {"bias": r(2, 1, 2), "sink": r(3, 1)}),
    "0-d": ((), 0, lambda r: {"scale": positive(r()), "bias": r(), "sink": r()}),
    "empty": (
        (2, 3, 3),
        -1,
        lambda r: {"bias": r(3), "causal": True, "offset": -1, "sink": r(2, 1, 1), "empty": "zero"},
    ),
    "all": (
        (2, 2, 3),
        -1,
        lambda r: {
            "scale": positive(r(2, 1, 1)),
            "bias": r(2, 3),
            "mask": torch.tensor([True, True, False]),
            "window": (2, 1),
            "alibi": positive(r(2)),
            "softcap": 3.0,
            "sink": r(2, 1),
        },
    ),
}
# Each case with one function or two; with the others it is slow.
DERIVED_IN_TURN = thin_tuples(itertools.product(DERIVED, ("softmax", "log_softmax", "logsumexp", "softmin")), 3)


def derived(case: str, function: str, device: str, engine: str = "auto") -> tuple[Any, Any, list[Tensor]]:
    """The call and its definition as functions of x and the other tensors, and those."""
    shape, dim, make = DERIVED[case]
    r = maker(F64, device, seed=5, scale=1.0)
    x, options = r(*shape), make(r)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    names = list(tensors_of(options))

    def call(x: Tensor, *given: Tensor) -> Tensor:
        return ours(function)(x, dim, engine=engine, **options | dict(zip(names, given, strict=True)))

    def definition(x: Tensor, *given: Tensor) -> Tensor:
        return defined(function, x, dim, options | dict(zip(names, given, strict=True)))

    return call, definition, [x, *(options[name] for name in names)]


def finite(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the infinities, which have no differences."""
    return lambda *given: (lambda y: y.masked_fill(y.isinf(), 0))(f(*given))


def gradient(f: Callable[..., Tensor], tensors: int) -> Callable[..., Any]:
    """Of a number, in all of the tensors."""
    return torch.func.grad(lambda *given: finite(f)(*given).square().sum(), tuple(range(tensors)))


@unbatched
@pytest.mark.parametrize(("case", "function"), DERIVED_IN_TURN)
def test_derivatives(function, case, engine, device):
    """Backward and forward, twice, and batches of each; of each tensor alone too."""
    call, _, given = derived(case, function, device, engine)
    call = finite(call)
    every = [t.clone().requires_grad_() for t in given]
    assert gradcheck(call, every, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, every, check_batched_grad=True, gen_non_contig_grad_outputs=True)
    assert gradgradcheck(call, every, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)
    for wanted in range(len(given)) if case == "all" else ():
        one = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(given)]
        assert gradcheck(call, one, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(call, one, fast_mode=True)


@pytest.mark.parametrize(("case", "function"), DERIVED_IN_TURN)
def test_transforms(function, case, engine, device):
    """The transforms of torch.func, nested, give the definition's."""
    call, definition, given = (finite(f) if callable(f) else f for f in derived(case, function, device, engine))
    tangents = tuple(maker(F64, device, seed=9)(*t.shape) for t in given)
    every, count = tuple(range(len(given))), len(given)
    transforms: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: gradient(f, count)(*given),
        "jvp": lambda f: torch.func.jvp(f, tuple(given), tangents),
        "jacrev": lambda f: torch.func.jacrev(f, every)(*given),
        "jacfwd": lambda f: torch.func.jacfwd(f, every)(*given),
        "jvp of grad": lambda f: torch.func.jvp(gradient(f, count), tuple(given), tangents),
        "hessian": lambda f: torch.func.hessian(lambda *ts: f(*ts).square().sum(), every)(*given),
        "jvp of jvp": lambda f: torch.func.jvp(lambda *ts: torch.func.jvp(f, ts, tangents)[1], tuple(given), tangents),
    }
    for name, transform in transforms.items():
        got, want = transform(call), transform(definition)
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("case", "function"), [each for each in DERIVED_IN_TURN if "two dims" not in str(each)])
def test_batches_of_any_of_the_tensors(function, case, engine, device):
    """At any dim: one operator, and what a loop gives."""
    call, definition, given = derived(case, function, device, engine)
    for batched in list(itertools.product((False, True), repeat=len(given)))[1:]:
        for at in (0, -1):
            make = maker(F64, device, seed=3)
            full = [positive(make(5, *t.shape)) if b else t for t, b in zip(given, batched, strict=True)]
            each = [[t[i] if b else t for t, b in zip(full, batched, strict=True)] for i in range(5)]
            moved = [t.movedim(0, at) if b else t for t, b in zip(full, batched, strict=True)]
            in_dims = tuple(at if b else None for b in batched)
            with Operators() as mode:
                got = torch.func.vmap(call, in_dims)(*moved)
            assert len(mode.ours()) - mode.ours().count("scored_kernel") <= 2, mode.ours()
            torch.testing.assert_close(got, torch.stack([definition(*ts) for ts in each]))
        got = torch.func.vmap(gradient(call, len(given)), in_dims)(*moved)
        want = [torch.stack(ts) for ts in zip(*(gradient(definition, len(given))(*ts) for ts in each), strict=True)]
        torch.testing.assert_close(list(got), want)


def test_a_batch_of_masks(function, device):
    x, masks = maker(F64, device)(3, 4), half_true(maker(F64, device, 2), 5, 3, 4)
    call = lambda mask: ours(function)(x, -1, mask=mask, empty="zero")  # noqa: E731
    want = torch.stack([defined(function, x, -1, {"mask": mask, "empty": "zero"}) for mask in masks])
    torch.testing.assert_close(torch.func.vmap(call)(masks), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(call))(masks[None]), want[None])


@support.thin_product(3, case=CASES, function=support.FUNCTIONS, dtype=DTYPES)
def test_gradients_of_each_dtype(function, case, dtype, engine, device):
    """Of the tensors' own dtypes; half types compute in float32. Scores around 100 lose nothing by a rounded result."""
    options = options_of(case, dtype, device)
    x = maker(dtype, device)(*SHAPE)
    if function == "logsumexp" and "softcap" not in options:
        x = x + 100  # scores are large then, but for the case without a scale
    x.requires_grad_()
    side = {name: t.requires_grad_() for name, t in tensors_of(options).items()}
    y = ours(function)(x, -1, engine=engine, **options)
    g = maker(dtype, device, 5)(*y.shape)
    y = y.masked_fill(y.isinf(), 0)
    got = torch.autograd.grad(y, [x, *side.values()], g)
    wide = {name: t.detach().double().requires_grad_() for name, t in {"x": x, **side}.items()}
    want_y = defined(function, wide["x"], -1, options | {name: wide[name] for name in side})
    want_y = want_y.masked_fill(want_y.isinf(), 0)
    want = torch.autograd.grad(want_y, list(wide.values()), g.double())
    eps = torch.finfo(dtype).eps + 100 * torch.finfo(accumulator(dtype)).eps
    for name, t, one, other in zip(wide, (x, *side.values()), got, want, strict=True):
        assert one.dtype is t.dtype
        assert one.shape == t.shape
        good = other.isfinite()
        terms = (x.numel() / t.numel()) ** 0.5 * (float(x.detach().abs().amax()) if name == "scale" else 1)
        limit = 4 * eps * float(g.abs().amax()) * terms
        torch.testing.assert_close(
            one.double()[good], other[good], rtol=4 * eps, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


@every_softmax
def test_a_backward_keeps_the_result_and_not_the_input(function, device):
    """As torch's softmax has it; nor a bias; a mask is kept as it is given, not expanded."""
    x, bias = maker(F32, device)(4, 64).requires_grad_(), maker(F32, device)(4, 64).requires_grad_()
    mask = half_true(maker(F32, device), 64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ours(function)(x, -1, scale=0.5, bias=bias, mask=mask, causal=True)
    assert sorted(t.numel() for t in kept) == [64, 4 * 64]
    assert all(t.data_ptr() in (y.data_ptr(), mask.data_ptr()) for t in kept)
    y = ours(function)(x, -1, scale=0.5, mask=mask, causal=True)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Ways of a call -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", ["all", "mask of padding", *map(slow, ("scale", "sink of all", "scale of each head"))])
def test_in_a_graph(function, case, device):
    """One operator forward and one backward; values and gradients are the eager ones."""
    options = options_of(case, F64, device)
    names = list(tensors_of(options))
    backend = Graphs()

    def call(x: Tensor, *side: Tensor) -> Tensor:
        return ours(function)(x * 2, -1, **options | dict(zip(names, side, strict=True))) + 1

    given = [t.requires_grad_() for t in (maker(F64, device)(*SHAPE), *tensors_of(options).values())]
    y = torch.compile(call, fullgraph=True, backend=backend)(*given)
    want = call(*given)
    torch.testing.assert_close(y, want)
    g = maker(F64, device, 3)(*y.shape)
    torch.testing.assert_close(torch.autograd.grad(y, given, g), torch.autograd.grad(want, given, g))
    forward, backward = backend.operators()
    assert forward == ["scored"]
    assert set(backward) <= {"scored_logsumexp_backward" if function == "logsumexp" else "scored_backward"}


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_shapes_make_one_graph(function, device):
    graphs = Graphs()
    mask = torch.arange(40, device=device) % 3 > 0

    def call(x: Tensor, bias: Tensor) -> Tensor:
        return ours(function)(x, -1, scale=0.5, bias=bias, mask=mask[: x.size(-1)], causal=True, sink=0.0)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for shape in ((2, 5, 9), (3, 7, 12), (4, 30, 40)):
        x, bias = maker(F64, device)(*shape).requires_grad_(), maker(F64, device, 2)(*shape[1:])
        y, want = compiled(x, bias), call(x, bias)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))
    assert len(graphs.made) == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_an_offset_that_changes_makes_one_graph_more(function, device):
    """A graph of the first value, and one of any."""
    graphs = Graphs()
    compiled = torch.compile(
        lambda x, at: ours(function)(x, -1, causal=True, window=(at + 1, 0), offset=at), fullgraph=True, backend=graphs
    )
    x = maker(F64, device)(2, 3, 16).requires_grad_()
    for at in range(4, 9):
        y, want = compiled(x, at), ours(function)(x, -1, causal=True, window=(at + 1, 0), offset=at)
        torch.testing.assert_close(y, want)
        g = maker(F64, device, 3)(*y.shape)
        y, want = (t.masked_fill(t.isinf(), 0) for t in (y, want))
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, x, g))
    assert len(graphs.made) == 4


@pytest.mark.usefixtures("fresh_compiler")
def test_out_and_transforms_in_a_graph(function, device):
    x, options = maker(F32, device)(*SHAPE), options_of("all", F32, device)
    want = ours(function)(x, -1, **options)
    compiled = torch.compile(
        lambda x, out: ours(function)(x, -1, out=out, **options), fullgraph=True, backend="aot_eager"
    )
    out = torch.empty_like(want)
    assert same(compiled(x, out), want)
    assert same(out, want)
    gradient = torch.func.grad(lambda x: ours(function)(x, -1, scale=0.5, causal=True).square().sum())
    torch.testing.assert_close(torch.compile(gradient, fullgraph=True, backend="aot_eager")(x), gradient(x))


class Model(torch.nn.Module):
    """A call with a parameter among its options."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.sink = torch.nn.Parameter(torch.zeros(3, 1, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return ours(self.function)(x, -1, scale=0.5, mask=mask, window=(3, 0), sink=self.sink, softcap=20.0)


@support.thin_product(3, function=support.FUNCTIONS)
def test_export(function, tmp_path):
    model = Model(function)
    x, mask = maker(F32)(2, 3, 5, 7), torch.ones(2, 1, 1, 7, dtype=torch.bool)
    batch, keys = torch.export.Dim("batch", max=64), torch.export.Dim("keys", max=512)
    dims = {"x": {0: batch, 3: keys}, "mask": {0: batch, 3: keys}}
    program = torch.export.export(model, (x, mask), dynamic_shapes=dims)
    for graph in (program.graph, program.run_decompositions().graph):
        assert [str(n.target) for n in graph.nodes if "onepass" in str(n.target)] == ["onepass.scored.default"]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    x, mask = maker(F32)(4, 3, 5, 30), half_true(maker(F32), 4, 1, 1, 30)
    assert same(loaded(x, mask), model(x, mask))


@pytest.mark.parametrize("given", [F32, BF16], ids=str)
def test_autocast(function, given, device):
    """It asks for what it asks for without scores."""
    x, options = maker(given, device)(*SHAPE), options_of("all", given, device)
    with torch.autocast(device, dtype=BF16):
        y, plain = ours(function)(x, -1, **options), ours(function)(x, -1)
    assert y.dtype is plain.dtype
    assert_scored(function, y, x, -1, options)


def test_tensors_without_data(function):
    x, options = maker(F16)(*SHAPE), options_of("all", F16)
    y = ours(function)(x, -1, **options)
    empty = {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in options.items()}
    made = ours(function)(x.to("meta"), -1, **empty)
    assert (made.shape, made.dtype, made.stride()) == (y.shape, y.dtype, y.stride())


def test_a_call_without_scores_takes_the_operator_that_it_took(function, device):
    """And one whose scores are all the default takes that of scores, with the same result."""
    x = maker(F32, device)(3, 40)
    with Operators() as mode:
        plain = ours(function)(x, -1)
    assert mode.ours() == [function]
    with Operators() as mode:
        scored = ours(function)(x, -1, scale=None, bias=None, mask=None, causal=False, window=None, sink=None)
    assert mode.ours()[0] == "scored"
    torch.testing.assert_close(plain, scored)


def operator_arguments(function: str, case: str, device: str, grad: bool) -> tuple[Any, ...]:
    options = options_of(case, F32, device)
    x = maker(F32, device)(*SHAPE)
    side = [options.get(name) if isinstance(options.get(name), Tensor) else None for name in FLOAT_TENSORS]
    tensors = [t if t is None else t.clone().requires_grad_(grad) for t in (x, *side)]
    mask = options.get("mask")
    scale, sink = options.get("scale", 1.0), options.get("sink", -INF)
    left, right = options.get("window", (None, None))
    numbers = (
        1.0 if isinstance(scale, Tensor) else scale,
        options.get("softcap", 0.0),
        -INF if isinstance(sink, Tensor) else sink,
        left,
        0 if options.get("causal") else right,
        options.get("offset"),
        options.get("empty") == "zero",
    )
    return (*tensors, mask, function, [3], None, False, "cpu" if device == "cpu" else "cuda", *numbers)


@unbatched
@pytest.mark.parametrize(
    "case", [slow("scale of each head"), "all", slow("sink"), slow("bias"), slow("causal"), slow("alibi")]
)
@pytest.mark.parametrize("name", [slow("softmax"), slow("log_softmax"), "logsumexp"])
def test_the_operators(name, case, device):
    """Schema, autograd, fake tensors, and graphs with dynamic shapes."""
    ops = torch.ops.onepass
    for grad in (False, True):
        given = operator_arguments(name, case, device, grad)
        some: Any = {} if grad else {"test_utils": ("test_schema", "test_faketensor")}
        opcheck(ops.scored.default, given, **some)
        x, *rest = given
        rest[5 + 2] = F32  # the dtype of the gradient
        if name != "logsumexp":
            g, of_cap = (maker(F32, device, seed)(*SHAPE).requires_grad_(grad) for seed in (4, 5))
            opcheck(ops.scored_backward.default, (g, x, of_cap if rest[5 + 6] else None, *rest), **some)
        else:
            g, lse = (maker(F32, device, seed)(*SHAPE[:3], 1).requires_grad_(grad) for seed in (4, 5))
            for of_scores in (False, True):
                opcheck(ops.scored_logsumexp_backward.default, (g, lse + 20, of_scores, x, *rest), **some)


@pytest.mark.parametrize("layout", ["permuted", "sliced", "expanded"])
def test_the_operators_strides(function, layout, device):
    """Fake tensors have those of real ones."""
    x = maker(F32, device)(4, 6, 8)
    x = {"permuted": x.permute(2, 0, 1), "sliced": x[:, ::2, 1:], "expanded": x[:1].expand(4, 6, 8)}[layout]
    name = "softmax" if function == "softmin" else function
    numbers = (0.5, 0.0, -INF, 1, 0, None, False)
    for dims, keepdim, sink in itertools.product(([0], [1, 2]), (False, True), (None, x.new_zeros(()))):
        given = (x, None, None, None, sink, None, name, dims, None, keepdim, x.device.type, *numbers)
        opcheck(torch.ops.onepass.scored.default, given, test_utils=("test_schema", "test_faketensor"))


# Refusals -------------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 4)
FLOATS = "float32, float64, float16 and bfloat16"
ROW_SHAPE = "broadcasts to the input's shape with reduced dims of size 1, [2, 3, 1], got shape"
REFUSED: list[tuple[type[Exception], str, Options]] = [  # with dim=-1 of an input of shape (2, 3, 4)
    (TypeError, "scale must be a number or a Tensor, got 'a'", {"scale": "a"}),
    (TypeError, "scale must be a number or a Tensor, got True", {"scale": True}),
    (TypeError, f"scale takes {FLOATS}, got torch.int64", {"scale": X.long()}),
    (ValueError, f"scale {ROW_SHAPE} [4]", {"scale": X.new_ones(4)}),
    (ValueError, f"sink {ROW_SHAPE} [2, 3]", {"sink": X.new_ones(2, 3)}),
    (ValueError, f"sink {ROW_SHAPE} [1, 2, 3, 1]", {"sink": X.new_ones(1, 2, 3, 1)}),
    (TypeError, "sink must be a number or a Tensor, got [0.0]", {"sink": [0.0]}),
    (TypeError, "bias must be a Tensor, got float", {"bias": 1.0}),
    (ValueError, "bias broadcasts to the input's shape, [2, 3, 4], got shape [3]", {"bias": X.new_ones(3)}),
    (TypeError, f"bias takes {FLOATS}, got torch.bool", {"bias": X.bool()}),
    (NotImplementedError, "bias must be a dense strided tensor, got torch.sparse_coo", {"bias": X.to_sparse()}),
    (
        RuntimeError,
        "bias must be on cpu, as the input is, got meta; a tensor without dims may also be on the CPU",
        {"bias": X.to("meta")},
    ),
    (ValueError, "mask broadcasts to the input's shape, [2, 3, 4], got shape [2, 3]", {"mask": X.bool()[..., 0]}),
    (
        TypeError,
        "mask takes torch.bool, True where an element takes part, got torch.float32; a mask that is added is a bias",
        {"mask": X},
    ),
    (TypeError, "mask takes torch.bool, True where an element takes part, got torch.int64", {"mask": X.long()}),
    (ValueError, "alibi broadcasts to the dims before the last two, [2], got shape [3]", {"alibi": X.new_ones(3)}),
    (TypeError, "causal must be a bool, got 1", {"causal": 1}),
    (TypeError, "window must be a pair (left, right), got 3", {"window": 3}),
    (TypeError, "window must be a pair (left, right), got (1, 2, 3)", {"window": (1, 2, 3)}),
    (TypeError, "window takes ints or None, got 0.5", {"window": (0.5, None)}),
    (ValueError, "window takes two numbers from 0 up, or None for no bound, got (-1, 0)", {"window": (-1, 0)}),
    (TypeError, "offset takes ints or None, got 1.0", {"offset": 1.0, "causal": True}),
    (ValueError, "offset goes with causal, window or alibi, got offset=1 alone", {"offset": 1}),
    (TypeError, "softcap must be a number, got '3'", {"softcap": "3"}),
    (ValueError, "softcap must be a positive finite number, got 0.0", {"softcap": 0}),
    (ValueError, "softcap must be a positive finite number, got inf", {"softcap": INF}),
    (ValueError, "empty must be 'nan' or 'zero', got 0", {"empty": 0}),
]


@pytest.mark.parametrize(("error", "words", "options"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_what_is_refused(function, error, words, options):
    with pytest.raises(error) as info:
        ours(function)(X, -1, **options)
    assert type(info.value) is error
    assert str(info.value) == f"onepass.{function}(): {words}"


def test_other_refusals(function):
    f = ours(function)
    with pytest.raises(TypeError, match=rf"{function}\(\) got an unexpected keyword argument 'scales'"):
        f(X, -1, scales=1.0)
    for options in ({"causal": True}, {"window": (1, 1)}, {"alibi": torch.ones(())}):
        words = rf"onepass.{function}\(\): causal, window and alibi need the dims \(query, key\), got shape \[4\]"
        with pytest.raises(ValueError, match=words):
            f(X[0, 0], -1, **options)
    with pytest.raises(IndexError, match="got 3"):
        f(X, 3, scale=1.0)
    with pytest.raises(ValueError, match="'fpu'"):
        f(X, -1, scale=1.0, engine="fpu")


def test_outs_that_are_refused(function):
    f, kept = ours(function), X[..., 0] if function == "logsumexp" else X
    for out, error, words in (
        (kept[:1], ValueError, "never resized"),
        (kept.double(), RuntimeError, "the result is torch.float32"),
        (torch.zeros(1).expand(kept.shape), RuntimeError, "elements of out share memory"),
    ):
        with pytest.raises(error, match=words):
            f(X, -1, scale=2.0, out=out)
    bias = torch.zeros(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="an argument requires one"):
        f(X, -1, bias=bias, out=torch.empty_like(kept))
    with torch.no_grad():
        assert not f(X, -1, bias=bias, out=torch.empty_like(kept)).requires_grad
    if function != "logsumexp":
        x = torch.zeros(10)
        with pytest.raises(RuntimeError, match="out must be the input itself or share no memory with it"):
            f(x[:-1], -1, scale=2.0, out=x[1:])


def test_out_may_be_one_of_the_options(function):
    if function == "logsumexp":
        return
    bias = maker(F32)(3, 4)
    want = ours(function)(torch.ones(3, 4), -1, bias=bias)
    assert same(ours(function)(torch.ones(3, 4), -1, bias=bias, out=bias), want)
    assert same(bias, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_of_large_inputs(dtype, engine, device):
    """tanh is 1 there, and no exponential on the way to it is infinite."""
    x = torch.tensor([[6e4, -6e4, 0.0, 3e4], [-6e4, 1.0, 6e4, 2.0]], dtype=dtype, device=device)
    got = onepass.softmax(x, softcap=5.0, engine=engine)
    assert_scored("softmax", got, x, -1, {"softcap": 5.0})
