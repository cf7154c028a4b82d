"""The registered operators: torch.library.opcheck on each (schema, autograd, fake tensors, AOT dispatch with dynamic
shapes), the dims that they take, and what they refuse."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import onepass
from lib import support
from lib.samples import SAMPLES
from lib.support import FUNCTIONS, SOFTMAXES, TORCH, assert_state, every_operator, every_softmax, keepdims, maker, slow
from onepass import State

ops = torch.ops.onepass
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
NO_GRAPH: dict[str, Any] = {"test_utils": ("test_schema", "test_faketensor")}


def operands(name: str, device: str, dtype: torch.dtype = F32) -> tuple[Tensor, list[int]]:
    make, dims = SAMPLES[name]
    return make(maker(dtype, device)).detach(), list(dims)


@pytest.mark.parametrize("sample", SAMPLES)
@every_operator
def test_schema_and_fake_tensors(function, sample, device):
    for dtype, named in itertools.product((F32, BF16), keepdims(function)):
        x, dims = operands(sample, device, dtype)
        for given in (x, x.clone().requires_grad_()):
            opcheck(getattr(ops, function).default, (given, dims), named, **NO_GRAPH)


either = pytest.mark.parametrize("requires_grad", [slow(False), True])


@either
@pytest.mark.parametrize("sample", [s if s in ("two dims", "0-d", "empty dim") else slow(s) for s in SAMPLES])
@every_operator
def test_in_graphs(function, sample, requires_grad, device):
    x, dims = operands(sample, device)
    opcheck(getattr(ops, function).default, (x.requires_grad_(requires_grad), dims), keepdims(function)[-1])


@pytest.mark.parametrize(("given", "dtype"), [(F16, F32), slow(BF16, None), slow(F32, F16), slow(F64, F32)], ids=str)
@every_softmax
def test_dtype_in_graphs(function, given, dtype, device):
    opcheck(getattr(ops, function).default, (maker(given, device)(4, 7).requires_grad_(), [1]), {"dtype": dtype})


def test_out(function, device):
    x = maker(F32, device)(4, 7)
    out = torch.empty(7 if function == "logsumexp" else (4, 7), device=device)
    opcheck(getattr(ops, function).out, (x, [0]), {"out": out}, **NO_GRAPH)


@support.thin_product(
    5, sample=["middle", "two dims", "0-d"], keepdim=[False, True], wide=[False, True], requires_grad=[True, False]
)
def test_logsumexp_and_its_gradient_in_graphs(sample, keepdim, wide, requires_grad, device):
    """`wide`: of a half input in float32."""
    if wide and device == "cpu" and sample == "middle":
        pytest.skip("the other samples are enough")
    x, dims = operands(sample, device, F16 if wide else F32)
    given: dict[str, Any] = {"dtype": F32} if wide else {}
    lse = ops.logsumexp(x, dims, keepdim, **given)
    if wide:
        opcheck(ops.logsumexp.default, (x.clone().requires_grad_(requires_grad), dims, keepdim), given)
        opcheck(ops.logsumexp.out, (x, dims, keepdim), {**given, "out": torch.empty_like(lse)}, **NO_GRAPH)
    tensors = (maker(F32, device, 3)(*lse.shape), x, lse)
    grads = tuple(t.clone().requires_grad_(requires_grad) for t in tensors)
    opcheck(ops._logsumexp_backward.default, (*grads, dims, keepdim))
    opcheck(ops._logsumexp_backward.out, (*tensors, dims, keepdim, torch.empty_like(x)), **NO_GRAPH)


@either
@pytest.mark.parametrize("sample", ["middle", "0-d"])
@every_softmax
def test_gradients_in_graphs(function, sample, requires_grad, device):
    x, dims = operands(sample, device)
    given = tuple(t.requires_grad_(requires_grad) for t in (x.flip(0) if x.dim() else x.clone(), x))
    number = SOFTMAXES.index(function)
    for to in (F32, F16):
        opcheck(ops._softmax_backward.default, (*given, number, dims, to))
        out = torch.empty(x.shape, dtype=to, device=device)
        opcheck(ops._softmax_backward.out, (*(t.detach() for t in given), number, dims, out), **NO_GRAPH)


@every_operator
def test_operators_take_the_dims_that_torch_takes(function):
    x, op = maker(F32)(3, 4), getattr(ops, function)
    assert torch.equal(op(x, 1), op(x, [-1]))  # int[1]: one int will do
    with pytest.raises(RuntimeError, match="2"):
        op(x, [2])
    with pytest.raises(RuntimeError, match="twice"):
        op(x, [0, -2])


def test_the_operator_of_states_gives_two_planes():
    x = maker(F16)(3, 4, 5)
    planes = ops.state(x, [0, -1])
    assert (planes.shape, planes.dtype) == ((2, 4), F32)
    assert ops.state(x, 1, True).shape == (2, 3, 1, 5)
    assert_state(State(*planes), x, (0, 2))
    assert onepass.state(x.to("meta"), 1).l.shape == (3, 5)


def test_versions_of_gradients():
    out = torch.empty(3, 4)
    version = out._version
    into(G, out)
    assert out._version == version + 1


G, Y = torch.ones(3, 4), torch.ones(3, 4)
ROW = G[:, 0]


def gradient(g: Tensor, *given: Any) -> Tensor:
    return ops._softmax_backward(g, Y, *given)


def into(g: Tensor, out: Tensor) -> Tensor:
    return ops._softmax_backward.out(g, Y, 0, [1], out=out)


def lse_gradient(*given: Any, out: Tensor | None = None) -> Tensor:
    if out is None:
        return ops._logsumexp_backward(*given, [1], False)
    return ops._logsumexp_backward.out(*given, [1], False, out=out)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "narrower": (lambda: ops.logsumexp(Y, [1], dtype=F16), "logsumexp of float32 gives float32, got dtype=float16"),
    "float64": (lambda: ops.logsumexp(Y, [1], dtype=F64), "gives float32, got dtype=float64"),
    "another half": (lambda: ops.logsumexp(Y.half(), [1], dtype=BF16), "gives float16 or float32, got dtype=bfloat16"),
    "integers": (lambda: ops.logsumexp(Y, [1], dtype=torch.int32), "takes float32, .* got"),
    "out": (lambda: ops.logsumexp.out(Y.half(), [1], out=Y.new_empty(3)), "another dtype than out, which is float32"),
    "narrow out": (
        lambda: ops.logsumexp.out(Y, [1], dtype=F16, out=Y.new_empty(3).half()),
        "logsumexp of float32 gives float32, got an out of float16",
    ),
    "shape of grad": (lambda: gradient(G[:2], 0, [1], F32), r"shape of the result, \[3, 4\], got \[2, 4\]"),
    "dtype of grad": (lambda: gradient(G.double(), 0, [1], F32), "grad has dtype float64.*float32"),
    "dim": (lambda: gradient(G, 0, [2], F32), "dim 2 is out of range for a tensor of 2 dims"),
    "dim twice": (lambda: gradient(G, 0, [1, -1], F32), "dim 1 appears twice"),
    "function": (lambda: gradient(G, 3, [1], F32), "function is 0 .* got 3"),
    "gradient of integers": (lambda: gradient(G, 0, [1], torch.int32), "takes float32, .* got"),
    "out of a gradient": (lambda: into(G, G.new_empty(3)), r"shape \[3, 4\], got an out .* \[3\]"),
    "overlap": (lambda: into(G, G.new_empty(4).expand(3, 4)), "may share memory"),
    "lse": (lambda: lse_gradient(G[0], Y, G[0]), r"gives shape \[3\] .* got an lse of shape \[4\]"),
    "grad of lse": (lambda: lse_gradient(G, Y, ROW), r"shape of the result, \[3\], got \[3, 4\]"),
    "lse out": (lambda: lse_gradient(ROW, Y, ROW, out=G.half()), "dtype float32, got an out of float16"),
    "narrow lse": (lambda: lse_gradient(ROW.half(), Y, ROW.half()), "float32 does not give float16, .* dtype of lse"),
    "lse of float64": (lambda: lse_gradient(ROW.double(), Y.half(), ROW.double()), "float16 does not give float64"),
    "narrow grad": (lambda: lse_gradient(ROW.half(), Y.half(), ROW), "grad has dtype float16, .* tensor of float32"),
    "wide out": (lambda: lse_gradient(ROW, Y.half(), ROW, out=G.clone()), "dtype float16, got an out of float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()


def test_complex_inputs_and_outs_of_another_shape_are_refused(function):
    op = getattr(ops, function)
    assert set(op.overloads()) == {"default", "out"}
    with pytest.raises(RuntimeError, match=r"(?i)complex"):
        op(torch.zeros(3, dtype=torch.complex64), [0])
    with pytest.raises(RuntimeError, match=r"\[3\].*\[2\]|\[2\].*\[3\]"):
        op.out(torch.zeros(3, 3) if function == "logsumexp" else torch.zeros(3), [0], out=torch.zeros(2))


WITHOUT_GRADIENT: dict[str, Any] = {  # called with a tensor that asks for one
    **{
        f"{f}.out": lambda x, f=f: getattr(ops, f).out(x, [1], out=x.new_empty(TORCH[f](x.detach(), 1).shape))
        for f in FUNCTIONS
    },
    "_softmax_backward.out": lambda x: ops._softmax_backward.out(x, x, 0, [1], out=torch.empty(3, 4)),
    "_logsumexp_backward.out": lambda x: lse_gradient(x[:, 0], x, x[:, 0], out=torch.empty(3, 4)),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_an_operator_without_a_gradient_says_so(name):
    """torch by itself would warn in backward, and leave the gradient away."""
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"onepass::{name} has no gradient"):
        WITHOUT_GRADIENT[name](x)
    with torch.no_grad():
        if name.endswith(".out"):
            WITHOUT_GRADIENT[name](x)
