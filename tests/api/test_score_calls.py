"""Scores: the ways of a call, and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from lib import support
from lib.modes import Graphs, Operators
from lib.scored import (
    BF16,
    F16,
    F32,
    F64,
    FLOAT_TENSORS,
    INF,
    SHAPE,
    Options,
    assert_scored,
    half_true,
    options_of,
    tensors_of,
    unbatched,
)
from lib.support import every_softmax, maker, ours, same, slow

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
            opcheck(ops.scored_backward.default, (g, x, of_cap if rest[5 + 6] else None, None, *rest), **some)
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


@every_softmax
def test_out_may_be_one_of_the_options(function):
    bias = maker(F32)(3, 4)
    want = ours(function)(torch.ones(3, 4), -1, bias=bias)
    assert same(ours(function)(torch.ones(3, 4), -1, bias=bias, out=bias), want)
    assert same(bias, want)
