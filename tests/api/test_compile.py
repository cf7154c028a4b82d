"""torch.compile: one operator in the graph, the same values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onepass
from lib.support import assert_defined, every_softmax, maker, ours, slow
from onepass import reference

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_compile_forward_and_backward(function, engine, device):
    f = torch.compile(lambda x, d: ours(function)(x * 2, d, engine=engine) + 1, fullgraph=True, backend="aot_eager")
    for dim in (0, -1, (0, 2)):
        x = maker(torch.float64, device)(3, 4, 5).requires_grad_()
        y = f(x, dim)
        want = getattr(reference, function)(x * 2, dim) + 1
        torch.testing.assert_close(y, want)
        g = maker(torch.float64, device, 2)(*y.shape)
        got, expected = torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, x, g)[0]
        torch.testing.assert_close(got, expected)


def test_compile_without_gradients_and_with_half(function, engine, device):
    f = torch.compile(lambda x: ours(function)(x.t(), 0, engine=engine), fullgraph=True, backend="aot_eager")
    x = maker(torch.bfloat16, device)(4, 300)
    assert_defined(function, f(x), x.t(), 0)
    with torch.no_grad():
        assert_defined(function, f(x.requires_grad_()), x.detach().t(), 0)


@every_softmax
def test_compile_with_dtype(function, engine, device):
    f = torch.compile(
        lambda x: ours(function)(x, 0, dtype=torch.float32, engine=engine), fullgraph=True, backend="aot_eager"
    )
    for given in (torch.float16, torch.float64, torch.int64):
        x = maker(torch.float64, device)(7, 5).to(given)
        y = f(x)
        assert y.dtype is torch.float32
        assert_defined(function, y, x.float(), 0)


def test_compile_with_dynamic_shapes(function, engine, device):
    f = torch.compile(lambda x: ours(function)(x, -1, engine=engine), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((3, 4), (5, 6), (2, 33)):
        x = maker(torch.float32, device)(*shape).requires_grad_()
        y = f(x)
        assert_defined(function, y.detach(), x.detach(), -1)
        y.sum().backward()


def test_compiled_graph_holds_one_operator(function, engine, device):
    """The call is kept by name, whole: no decomposition, nothing of torch's family, nothing of Python."""
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(lambda x: ours(function)(x, 0, engine=engine), fullgraph=True, backend=backend)(
        maker(torch.float32, device)(3, 4)
    )
    assert len([name for name in seen if "onepass" in name]) == 1
    assert not [name for name in seen if "onepass" not in name]


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_out(function, backend, auto, engine, device):
    named = {"engine": "auto" if auto and engine != "triton" else engine}
    f = torch.compile(ours(function), backend=backend, fullgraph=True)
    for dim in (1, -1, (0, 2)):
        x = maker(torch.float32, device)(3, 4, 5)
        out = torch.full_like(ours(function)(x, dim, **named), 7.0)
        assert f(x, dim, out=out, **named) is out
        assert_defined(function, out, x, dim)
    if function != "logsumexp":
        x = maker(torch.float16, device)(3, 4)
        out = torch.full_like(x, 7.0, dtype=torch.float32)
        f(x, 1, dtype=torch.float32, out=out, **named)
        assert_defined(function, out, x.float(), 1)
        before = x.clone()
        f(x, 1, out=x, **named)
        assert_defined(function, x, before, 1)


OVERLAPS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "the next row": lambda b: (b[:-1], b[1:]),
    "transposed": lambda b: (b.t(), b),
    "transposed out": lambda b: (b, b.t()),
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
    base = maker(torch.float32, device)(40, 40)
    compiled = torch.compile(
        lambda b: onepass.softmax(OVERLAPS[case](b)[0], 1, out=OVERLAPS[case](b)[1], engine=engine),
        backend=backend,
        fullgraph=True,
    )
    given = base.clone()
    try:
        compiled(given)
    except RuntimeError as error:
        assert "onepass.softmax(): out must be the input itself" in str(error)  # noqa: PT017  (of a call that may do)
        assert torch.equal(given, base)
    else:
        assert backend != "eager" or case == "transposed out"
        assert_defined("softmax", OVERLAPS[case](given)[1], OVERLAPS[case](base)[0], 1)


def test_compile_with_an_out_of_any_strides(function, engine, device):
    f = torch.compile(ours(function), backend="aot_eager", fullgraph=True)
    x = maker(torch.float32, device)(3, 4, 5)
    want = ours(function)(x, 1, engine=engine)
    wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), 7.0, device=device)
    for out in (wide[..., ::2], torch.full_like(want, 7.0).transpose(0, -1).contiguous().transpose(0, -1)):
        assert f(x, 1, out=out, engine=engine) is out
        torch.testing.assert_close(out, want)
    assert (wide[..., 1::2] == 7).all()


def test_an_out_between_the_inputs_columns_is_served_as_eagerly(engine, device):
    base = maker(torch.float32, device)(6, 8)
    want = onepass.softmax(base[:, ::2], 1, engine=engine)
    f = torch.compile(lambda b: onepass.softmax(b[:, ::2], 1, out=b[:, 1::2], engine=engine), backend="eager")
    assert torch.equal(f(base), want)
    assert torch.equal(base[:, 1::2], want)
