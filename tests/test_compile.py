"""torch.compile and torch.export: one operator in the graph, the same values and gradients."""

from __future__ import annotations

import pytest
import torch

from onepass import reference
from support import assert_defined, every_engine, every_function, every_softmax, maker, ours


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@every_engine
@every_function
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


@every_engine
@every_function
def test_compile_without_gradients_and_with_half(function, engine, device):
    f = torch.compile(lambda x: ours(function)(x.t(), 0, engine=engine), fullgraph=True, backend="aot_eager")
    x = maker(torch.bfloat16, device)(4, 300)
    assert_defined(function, f(x), x.t(), 0)
    with torch.no_grad():
        assert_defined(function, f(x.requires_grad_()), x.detach().t(), 0)


@every_engine
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


@every_engine
@every_function
def test_compile_with_dynamic_shapes(function, engine, device):
    f = torch.compile(lambda x: ours(function)(x, -1, engine=engine), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((3, 4), (5, 6), (2, 33)):
        x = maker(torch.float32, device)(*shape).requires_grad_()
        y = f(x)
        assert_defined(function, y.detach(), x.detach(), -1)
        y.sum().backward()


@every_engine
@every_function
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


@every_engine
@every_function
def test_compile_with_out(function, engine, device):
    def call(x, out):
        return ours(function)(x, 1, out=out, engine=engine)

    x = maker(torch.float32, device)(3, 4)
    out = torch.full((3,) if function == "logsumexp" else (3, 4), 7.0, device=device)
    torch.compile(call, backend="aot_eager")(x, out)
    assert_defined(function, out, x, 1)


class Model(torch.nn.Module):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ours(self.function)(x * self.scale, -1) * 2


@every_function
def test_export(function):
    x = maker(torch.float32)(3, 4)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Model(function), (x,), dynamic_shapes={"x": {0: rows}})
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert f"onepass.{function}.default" in targets
    for shape in ((3, 4), (9, 4)):
        x = maker(torch.float32)(*shape)
        torch.testing.assert_close(program.module()(x), Model(function)(x))
    lowered = program.run_decompositions()
    assert f"onepass.{function}.default" in [str(n.target) for n in lowered.graph.nodes if n.op == "call_function"]


@every_softmax
def test_export_with_dtype_survives_a_file(function, tmp_path):
    class WithDtype(torch.nn.Module):
        def forward(self, x):
            return ours(function)(x, (0, 1), dtype=torch.float32)

    x = maker(torch.float16)(3, 4)
    torch.export.save(torch.export.export(WithDtype(), (x,)), tmp_path / "model.pt2")
    y = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert y.dtype is torch.float32
    assert_defined(function, y, x.float(), (0, 1))
