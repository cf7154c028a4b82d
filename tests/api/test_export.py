"""torch.export, AOTInductor, and the native core without Python: a graph of any of our functions runs elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import onepass
from lib.cpp import build_with_torch, output
from lib.support import TORCH, assert_defined, every_operator, every_softmax, maker, ours
from onepass import native

BOTH = {"rows": torch.export.Dim("rows", min=2, max=64), "columns": torch.export.Dim("columns", min=2, max=512)}


# Up to torch 2.12 AOTInductor hands an operator's dtype on by its number in the file of the graph, which is another one
# than in memory: of float32 it makes float64.
HANDS_DTYPES_ON = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


class Model(torch.nn.Module):
    """All functions, a parameter before them and torch's own operators between."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * self.scale
        if HANDS_DTYPES_ON:
            narrow = onepass.softmax(x.bfloat16(), -1, dtype=torch.float32)
        else:
            narrow = onepass.softmax(x.bfloat16(), -1).float()
        return narrow + onepass.softmin(x, 0), onepass.log_softmax(x, (0, 1)), onepass.logsumexp(x, 1).tanh()


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@every_operator
def test_any_size_survives_a_file(function, dtype, tmp_path):
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            y = ours(function)(x * self.scale, -1)
            return y.logsumexp() if function == "state" else y * 2

    x = maker(dtype)(3, 4)
    program = torch.export.export(One(), (x,), dynamic_shapes={"x": {0: BOTH["rows"], 1: BOTH["columns"]}})
    for graph in (program.graph, program.run_decompositions().graph):
        assert f"onepass.{function}.default" in calls_of(graph)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in ((3, 4), (2, 2), (40, 301)):
        x = maker(dtype)(*shape)
        assert torch.equal(loaded(x), One()(x))


@every_softmax
def test_a_dtype_and_several_dims_survive_a_file(function, tmp_path):
    class WithDtype(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ours(function)(x, (0, 1), dtype=torch.float32)

    x = maker(torch.float16)(3, 4)
    torch.export.save(torch.export.export(WithDtype(), (x,)), tmp_path / "model.pt2")
    y = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert y.dtype is torch.float32
    assert_defined(function, y, x.float(), (0, 1))


@pytest.mark.parametrize("engine", ["auto", "cpu"])
@pytest.mark.parametrize("in_place", [False, True])
def test_strict_export_of_a_call_with_out(function, in_place, engine):
    class One(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            return ours(function)(x, (0, 1), out=x if in_place else out, engine=engine)

    if in_place and function == "logsumexp":
        pytest.skip("its result has another shape than its input")
    x = maker(torch.float32)(3, 4)
    want = ours(function)(x, (0, 1))
    program = torch.export.export(One(), (x.clone(), torch.zeros_like(want)), strict=True)
    for module in (program.module(), program.run_decompositions().module()):
        given, out = x.clone(), torch.zeros_like(want)
        assert torch.equal(module(given, out), want)
        assert torch.equal(given if in_place else out, want)


def test_an_exported_graph_refuses_an_out_that_overlaps_in_part(function):
    class One(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            return ours(function)(x, 1, out=out)

    base = maker(torch.float32)(7, 6)
    given = base[:-1], base[1:, 0] if function == "logsumexp" else base[1:]
    module = torch.export.export(One(), tuple(t.clone() for t in given), strict=True).module()
    with pytest.raises(RuntimeError, match=rf"onepass.{function}\(\): out must be the input itself"):
        module(*given)


def test_a_graph_exported_for_training_has_gradients(function):
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return ours(function)(x * self.scale, 1)

    x = maker(torch.float64)(3, 4).requires_grad_()
    module = torch.export.export(One().double(), (x,)).module()
    y = module(x)
    wanted = [x, *module.parameters()]
    got = torch.autograd.grad(y.square().sum(), wanted)
    want = torch.autograd.grad(TORCH[function](x * wanted[1], 1).square().sum(), wanted)
    torch.testing.assert_close(got, want)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = maker(torch.float32)(3, 4)
    shapes = {"x": {0: BOTH["rows"], 1: BOTH["columns"]}}
    program = torch.export.export(Model(), (x,), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="torch 2.11 crashes as it loads a package in Python, one of torch.softmax alone too",
)
def test_aot_inductor_in_python(package):
    model = torch._inductor.aoti_load_package(str(package))
    for shape in ((3, 4), (17, 300)):
        x = maker(torch.float32)(*shape)
        torch.testing.assert_close(tuple(model(x)), Model()(x))


def test_aot_inductor_in_a_program_without_python(package, tmp_path):
    program = build_with_torch(tmp_path, "packaged", "-std=c++20", libraries=("-ltorch",))
    for rows, columns in ((2, 3), (5, 33)):
        answer = output(program, native.PATH, package, rows, columns)
        with torch.no_grad():
            want = Model()(torch.arange(rows * columns).view(rows, columns) * 0.1)
        got = torch.tensor([float(word) for word in answer.split()])
        torch.testing.assert_close(got, torch.cat([t.flatten() for t in want]), rtol=1e-4, atol=2e-6)


def test_an_operator_runs_in_a_program_without_python(tmp_path):
    program = build_with_torch(tmp_path, "plain", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000")
    answer = output(program, native.PATH)
    y = torch.tensor([1.0, 2.0]).exp() / torch.tensor([1.0, 2.0]).exp().sum()
    assert [float(word) for word in answer.split()] == [round(v, 6) for v in [*y.tolist(), *y.tolist()]]


def test_the_binary_needs_neither_python_nor_cuda():
    libraries = output("ldd", native.PATH)
    assert not re.search(r"libpython|libcuda|libcudart|libnvrtc|torch_cuda", libraries), libraries
    wanted = re.findall(r" U (\S+)", output("nm", "-D", "--undefined-only", native.PATH))
    assert not [name for name in wanted if name.startswith(("Py", "_Py"))]
    # Of libtorch only the C functions of the stable ABI: no C++ symbol of c10, at or torch.
    assert not [name for name in wanted if re.search(r"N3c10|N2at|N5torch", name)]
    assert any(name.startswith("aoti_torch_") for name in wanted)
