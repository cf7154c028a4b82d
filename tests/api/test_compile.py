"""torch.compile: one operator in a graph, the same values and gradients, few graphs, torch.func and checkpoints in
them, and `out`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import onepass
from lib.modes import Graphs
from lib.support import (
    FUNCTIONS,
    OPERATORS,
    TORCH,
    assert_defined,
    both,
    every_operator,
    every_softmax,
    keepdims,
    maker,
    ours,
    slow,
    thin_product,
)
from onepass import State, autograd, reference

pytestmark = pytest.mark.usefixtures("fresh_compiler")
F32, F64 = torch.float32, torch.float64
BACKWARD = dict.fromkeys(FUNCTIONS, "_softmax_backward") | {"logsumexp": "_logsumexp_backward"}


def compiled(f: Callable[..., Any], backend: Any = "aot_eager", **named: Any) -> Callable[..., Any]:
    return torch.compile(f, fullgraph=True, backend=backend, **named)


# What a graph holds ---------------------------------------------------------------------------------------------------


@every_operator
def test_one_operator_in_the_graph_values_and_gradients(function, engine, device):
    """The call is kept by name, whole: no decomposition, nothing of torch's family, nothing of Python."""
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for dim, named in itertools.product((0, -1, (0, 2)), keepdims(function)):
        torch.compiler.reset()
        seen.clear()
        x = maker(F64, device)(3, 4, 5).requires_grad_()
        y = compiled(lambda x, d=dim, named=named: ours(function)(x, d, engine=engine, **named), backend)(x)
        ours_in_it = [name for name in seen if "onepass" in name]
        assert len(ours_in_it) == 1
        if function == "state":
            assert isinstance(y, State)
            y = torch.stack(y)
        else:
            assert ours_in_it == seen
        want = both(function, dim=dim, **named)[1](x)
        torch.testing.assert_close(y, want)
        g = maker(F64, device, 2)(*y.shape)
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, x, g))


def test_a_merge_in_a_graph(engine, device):
    def f(x: Tensor) -> Tensor:
        got = onepass.state(x, (0, 2), engine=engine)
        return onepass.merge(got, got).logsumexp()

    x = maker(F64, device)(3, 4, 5)
    torch.testing.assert_close(compiled(f)(x), reference.logsumexp(x, (0, 2)) + torch.tensor(2.0).log())


def test_half_with_and_without_gradients(function, engine, device):
    f = compiled(lambda x: ours(function)(x.t(), 0, engine=engine))
    x = maker(torch.bfloat16, device)(4, 300)
    assert_defined(function, f(x), x.t(), 0)
    with torch.no_grad():
        assert_defined(function, f(x.requires_grad_()), x.detach().t(), 0)


@every_softmax
def test_dtype(function, engine, device):
    f = compiled(lambda x: ours(function)(x, 0, dtype=F32, engine=engine))
    for given in (torch.float16, F64, torch.int64):
        x = maker(F64, device)(7, 5).to(given)
        y = f(x)
        assert y.dtype is F32
        assert_defined(function, y, x.float(), 0)


def test_a_training_graph_holds_the_fused_operators(function):
    backend = Graphs()
    x = maker(F32)(3, 4).requires_grad_()
    y = compiled(lambda x: ours(function)(x * 2, 1) + 1, backend)(x)
    torch.autograd.grad(y.sum(), x)
    assert backend.operators() == [[function], [BACKWARD[function]]]


def test_a_checkpointed_graph_runs_the_forward_again_and_saves_the_input_alone(function):
    backend = Graphs()

    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda t: ours(function)(t, 1).square(), x, use_reentrant=False)

    x = maker(F32)(3, 4).requires_grad_()
    y = compiled(f, backend)(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(f(x).sum(), x))
    assert backend.operators() == [[function], [function, BACKWARD[function]]]
    (results,) = (node.args[0] for node in backend.made[0].graph.nodes if node.op == "output")
    assert [node.op for node in results[1:]] == ["placeholder"]


# Twenty shapes, both sizes of each another.
SHAPES = [*((2 + i, 5 + 3 * i) for i in range(10)), *((30 - i, 7 + i) for i in range(10))]


@thin_product(3, train=[True, False], dynamic=[None, True], function=OPERATORS)
def test_twenty_shapes_are_compiled_twice_at_most(function, dynamic, train, engine, device):
    backend = CompileCounterWithBackend("aot_eager")
    mine, ref = both(function, engine, dim=-1)
    f = compiled(lambda x: mine(x * 2), backend, dynamic=dynamic)
    for shape in SHAPES if device == "cuda" or engine == "cpu" else SHAPES[:4]:
        x = maker(F32, device)(*shape).requires_grad_(train)
        y, want = f(x), ref(x * 2)
        torch.testing.assert_close(y.double(), want, rtol=1.3e-6, atol=1e-5)
        if train:
            g = maker(F32, device, 3)(*want.shape)
            got, want = torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, x, g.double())[0]
            torch.testing.assert_close(got, want, rtol=1.3e-6, atol=1e-5)
    assert backend.frame_count <= (1 if dynamic else 2)


# torch.func and other modes in a graph and around it ------------------------------------------------------------------


def _loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).square().sum()


WITHIN: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Any]] = {  # of what is compiled
    "grad": lambda f, x, t: torch.func.grad(_loss(f))(x),
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](f(t)),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)),
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(_loss(f))(x),
    "jvp of jvp": lambda f, x, t: torch.func.jvp(lambda v: torch.func.jvp(f, (v,), (t,))[1], (x,), (t,)),
    "vmap": lambda f, x, t: torch.func.vmap(f, in_dims=1)(torch.stack((x, t, x), 1)),
    "vmap of grad": lambda f, x, t: torch.func.vmap(torch.func.grad(_loss(f)))(torch.stack((x, t))),
}


@thin_product(7, transform=WITHIN, function=FUNCTIONS)
def test_transforms_within_a_graph(function, transform, engine, device):
    """With a gradient registered on the operator alone, jvp gave zeros here and grad an error."""
    x, t = maker(F64, device)(3, 4), maker(F64, device, 9)(3, 4)
    f, ref = both(function, engine, dim=1)
    got = compiled(lambda x, t: WITHIN[transform](f, x, t))(x, t)
    torch.testing.assert_close(got, WITHIN[transform](ref, x, t))


def test_forward_mode_through_a_graph(function, engine, device):
    x, t = maker(F64, device)(3, 4), maker(F64, device, 9)(3, 4)
    f, ref = both(function, engine, dim=1)
    with forward_ad.dual_level():
        got, want = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent for f in (compiled(f), ref))
    torch.testing.assert_close(got, want)


def test_one_function_compiled_for_every_mode_of_autograd(function):
    """Recording, not recording and in inference mode, in turn: a graph for each, and never one for another."""
    f = compiled(lambda x: ours(function)(x * 2, 1))
    x = maker(F32)(3, 4)
    want = ours(function)(x * 2, 1)
    for _ in range(2):
        with torch.inference_mode():
            y = f(x)
            assert y.is_inference()
        torch.testing.assert_close(y, want)
        with torch.no_grad():
            assert not f(x.clone().requires_grad_()).requires_grad
        leaf = x.clone().requires_grad_()
        f(leaf).sum().backward()
        assert leaf.grad is not None


def test_double_backward_through_a_graph_is_refused_as_torchs_is(function):
    """torch.compile has none, whatever is compiled; it has to say so."""
    x = maker(F64)(3, 4).requires_grad_()
    errors = []
    for f in (ours(function), TORCH[function]):
        (g,) = torch.autograd.grad(compiled(lambda x, f=f: f(x, 1))(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as info:
            torch.autograd.grad(g.sum(), x)
        errors.append(str(info.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("functions", [("softmax",), slow(FUNCTIONS)], ids=len)
def test_inductor_trains_as_eager_does(functions):
    """Each kernel that inductor makes takes three seconds to compile."""

    def loss(x: Tensor) -> Tensor:
        return sum(ours(f)(x * (i + 1), 1).square().sum() for i, f in enumerate(functions))

    x = maker(F32)(7, 33).requires_grad_()
    got, want = (torch.autograd.grad(f(x), x)[0] for f in (compiled(loss, "inductor"), loss))
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_reduce_overhead_trains(function):
    """torch.compile's own CUDA graphs."""
    f = torch.compile(lambda x: ours(function)(x, 1) * 2, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = maker(F32, "cuda", seed)(64, 300).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(f(x).square().sum(), x)
        want = torch.autograd.grad((TORCH[function](x, 1) * 2).square().sum(), x)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4)  # of terms of 40 that cancel


def test_every_device_that_has_the_operator_uses_it():
    assert {"cpu", "meta"} <= autograd.FUSED <= {"cpu", "cuda", "meta"}


# out= -----------------------------------------------------------------------------------------------------------------


@thin_product(7, function=FUNCTIONS, backend=("aot_eager", "eager"), auto=(True, False))
def test_out(function, backend, auto, engine, device):
    """Of any strides, of another dtype, in place."""
    named = {"engine": "auto" if auto and engine != "triton" else engine}
    f = compiled(ours(function), backend)
    for dim in (-1, (0, 2)):
        torch.compiler.reset()
        x = maker(F32, device)(3, 4, 5)
        want = ours(function)(x, dim, **named)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), 7.0, device=device)
        transposed = torch.full_like(want, 7.0).transpose(0, -1).contiguous().transpose(0, -1)
        for out in (torch.full_like(want, 7.0), wide[..., ::2], transposed):
            assert f(x, dim, out=out, **named) is out
            torch.testing.assert_close(out, want)
        assert (wide[..., 1::2] == 7).all()
    if function != "logsumexp":
        torch.compiler.reset()
        x = maker(torch.float16, device)(3, 4)
        out = torch.full_like(x, 7.0, dtype=F32)
        f(x, 1, dtype=F32, out=out, **named)
        assert_defined(function, out, x.float(), 1)
        before = x.clone()
        f(x, 1, out=x, **named)
        assert_defined(function, x, before, 1)


OVERLAPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the next row": lambda b: (b[:-1], b[1:]),
    "transposed": lambda b: (b.t(), b),
    "transposed out": lambda b: (b, b.t()),
    "columns between columns": lambda b: (b[:, ::2], b[:, 1::2]),  # no overlap: served
}


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, backend) for case in OVERLAPS for backend in ("eager", "aot_eager")),
        *(("transposed", "inductor"), slow("the next row", "inductor"), slow("transposed out", "inductor")),
    ],
)
def test_an_out_that_overlaps_in_part_is_refused_or_given_the_right_numbers(case, backend, engine, device):
    """A graph may hold a copy of one of the two; otherwise it is the eager call's error, and nothing is written."""
    base = maker(F32, device)(40, 40)

    def f(b: Tensor) -> Tensor:
        x, out = OVERLAPS[case](b)
        return onepass.softmax(x, 1, out=out, engine=engine)

    given = base.clone()
    try:
        compiled(f, backend)(given)
    except RuntimeError as error:
        assert case != "columns between columns"
        assert "onepass.softmax(): out must be the input itself" in str(error)  # noqa: PT017  (of a call that may do)
        assert torch.equal(given, base)
    else:
        assert backend != "eager" or case in ("transposed out", "columns between columns")
        assert_defined("softmax", OVERLAPS[case](given)[1], OVERLAPS[case](base)[0], 1)
