"""torch.compile in training: what the graphs hold, how often they are made, and torch.func and checkpoints in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lib.modes import Graphs
from lib.support import FUNCTIONS, TORCH, maker, ours, slow
from onepass import autograd

pytestmark = pytest.mark.usefixtures("fresh_compiler")
BACKWARD = dict.fromkeys(FUNCTIONS, "_softmax_backward") | {"logsumexp": "_logsumexp_backward"}


def test_a_training_graph_holds_the_fused_operators(function):
    backend = Graphs()
    f = torch.compile(lambda x: ours(function)(x * 2, 1) + 1, fullgraph=True, backend=backend)
    x = maker(torch.float32)(3, 4).requires_grad_()
    y = f(x)
    g = maker(torch.float32, seed=2)(*y.shape)
    (got,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(got, torch.autograd.grad(TORCH[function](x * 2, 1), x, g)[0])
    assert backend.operators() == [[function], [BACKWARD[function]]]


def test_a_checkpointed_graph_runs_the_forward_again_and_saves_the_input_alone(function):
    backend = Graphs()

    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda t: ours(function)(t, 1).square(), x, use_reentrant=False)

    x = maker(torch.float32)(3, 4).requires_grad_()
    y = torch.compile(f, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(f(x).sum(), x))
    assert backend.operators() == [[function], [function, BACKWARD[function]]]
    (results,) = (node.args[0] for node in backend.made[0].graph.nodes if node.op == "output")
    assert [node.op for node in results[1:]] == ["placeholder"]


# Twenty shapes, both sizes of each another.
SHAPES = [*((2 + i, 5 + 3 * i) for i in range(10)), *((30 - i, 7 + i) for i in range(10))]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("dynamic", "limit"), [(None, 2), slow(True, 1)])
def test_twenty_shapes_are_compiled_twice_at_most(function, dynamic, limit, train, engine, device):
    backend = CompileCounterWithBackend("aot_eager")
    f = torch.compile(
        lambda x: ours(function)(x * 2, -1, engine=engine), fullgraph=True, backend=backend, dynamic=dynamic
    )
    for shape in SHAPES if device == "cuda" or engine == "cpu" else SHAPES[:4]:
        x = maker(torch.float32, device)(*shape).requires_grad_(train)
        y, want = f(x), TORCH[function](x * 2, -1)
        torch.testing.assert_close(y, want)
        if train:
            g = maker(torch.float32, device, 3)(*want.shape)
            torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, x, g))
    assert backend.frame_count <= limit


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


@pytest.mark.parametrize(
    ("function", "transform"),
    [(slow(f, t) if (k + m) % 4 else (f, t)) for k, t in enumerate(WITHIN) for m, f in enumerate(FUNCTIONS)],
)
def test_transforms_within_a_graph(function, transform, engine, device):
    """With a gradient registered on the operator alone, jvp gave zeros here and grad an error."""
    x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)

    def f(x: Tensor) -> Tensor:
        return ours(function)(x, 1, engine=engine)

    compiled = torch.compile(lambda x, t: WITHIN[transform](f, x, t), fullgraph=True, backend="aot_eager")
    want = WITHIN[transform](lambda x: TORCH[function](x, 1), x, t)
    torch.testing.assert_close(compiled(x, t), want)


def test_forward_mode_through_a_graph(function, engine, device):
    x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)
    f = torch.compile(lambda x: ours(function)(x, 1, engine=engine), fullgraph=True, backend="aot_eager")
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
        want = forward_ad.unpack_dual(TORCH[function](forward_ad.make_dual(x, t), 1)).tangent
    torch.testing.assert_close(got, want)


def test_one_function_compiled_for_every_mode_of_autograd(function):
    """Recording, not recording and in inference mode, in turn: a graph for each, and never one for another."""
    f = torch.compile(lambda x: ours(function)(x * 2, 1), fullgraph=True, backend="aot_eager")
    x = maker(torch.float32)(3, 4)
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
    x = maker(torch.float64)(3, 4).requires_grad_()
    errors = []
    for f in (ours(function), TORCH[function]):
        y = torch.compile(lambda x, f=f: f(x, 1), fullgraph=True, backend="aot_eager")(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as info:
            torch.autograd.grad(g.sum(), x)
        errors.append(str(info.value))
    assert errors[0] == errors[1]


def test_inductor_trains_as_eager_does():
    """One graph with all functions in it: what inductor makes takes seconds to compile."""

    def loss(x: Tensor) -> Tensor:
        return sum(ours(f)(x * (i + 1), 1).square().sum() for i, f in enumerate(FUNCTIONS))

    x = maker(torch.float32)(7, 33).requires_grad_()
    got, want = (torch.autograd.grad(f(x), x)[0] for f in (torch.compile(loss, fullgraph=True), loss))
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_cuda_graphs_over_forward_and_backward(function):
    x = maker(torch.float32, "cuda")(64, 300).requires_grad_()
    g = maker(torch.float32, "cuda", 2)(*TORCH[function](x, 1).shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is loaded and allocated once
        torch.autograd.grad(ours(function)(x, 1), x, g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours(function)(x, 1)
        (dx,) = torch.autograd.grad(y, x, g)
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(maker(torch.float32, "cuda", seed)(64, 300))
        graph.replay()
        want = TORCH[function](x, 1)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(dx, torch.autograd.grad(want, x, g)[0])


@pytest.mark.gpu
def test_reduce_overhead_trains(function):
    """torch.compile's own CUDA graphs."""
    f = torch.compile(lambda x: ours(function)(x, 1) * 2, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = maker(torch.float32, "cuda", seed)(64, 300).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(f(x).square().sum(), x)
        want = torch.autograd.grad((TORCH[function](x, 1) * 2).square().sum(), x)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4)  # of terms of 40 that cancel


def test_every_device_that_has_the_operator_uses_it():
    assert {"cpu", "meta"} <= autograd.FUSED <= {"cpu", "cuda", "meta"}
