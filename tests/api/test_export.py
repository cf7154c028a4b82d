"""torch.export, AOTInductor, and the native core without Python: a graph of any of our functions runs elsewhere."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib.cpp import build_with_torch, output
from lib.support import FUNCTIONS, OPERATORS, TORCH, assert_defined, every_softmax, maker, ours, thin_product
from onepass import native

BOTH = {"x": {0: torch.export.Dim("rows", min=2, max=64), 1: torch.export.Dim("columns", min=2, max=512)}}


IS_213 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)


class Of(torch.nn.Module):
    """A call of what is given, the first of it scaled by a parameter."""

    def __init__(self, call: Callable[..., Any], scale: float | None = None) -> None:
        super().__init__()
        self.call = call
        self.scale = None if scale is None else torch.nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Any:
        x = x if self.scale is None else x * self.scale
        return self.call(x) if out is None else self.call(x, out)


def all_functions(x: Tensor) -> tuple[Tensor, ...]:
    """With torch's own operators between. Up to torch 2.12 AOTInductor hands an operator's dtype on by its number in
    the file of the graph, which is another one than in memory: of float32 it makes float64."""
    narrow = onepass.softmax(x.bfloat16(), -1, **({"dtype": torch.float32} if IS_213 else {})).float()
    return narrow + onepass.softmin(x, 0), onepass.log_softmax(x, (0, 1)), onepass.logsumexp(x, 1).tanh()


MODEL = Of(all_functions, 1.5)


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@thin_product(3, function=OPERATORS, dtype=[torch.float32, torch.bfloat16])
def test_any_size_survives_a_file(function, dtype, tmp_path):
    def call(x: Tensor) -> Tensor:
        y = ours(function)(x, -1)
        return y.logsumexp() if function == "state" else y * 2

    module = Of(call, 1.5)
    program = torch.export.export(module, (maker(dtype)(3, 4),), dynamic_shapes=BOTH)
    for graph in (program.graph, program.run_decompositions().graph):
        assert f"onepass.{function}.default" in calls_of(graph)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in ((3, 4), (2, 2), (40, 301)):
        x = maker(dtype)(*shape)
        assert torch.equal(loaded(x), module(x))


@every_softmax
def test_a_dtype_and_several_dims_survive_a_file(function, tmp_path):
    x = maker(torch.float16)(3, 4)
    module = Of(lambda x: ours(function)(x, (0, 1), dtype=torch.float32))
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "model.pt2")
    y = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert y.dtype is torch.float32
    assert_defined(function, y, x.float(), (0, 1))


@thin_product(5, function=FUNCTIONS, engine=["auto", "cpu"], in_place=[False, True])
def test_strict_export_of_a_call_with_out(function, in_place, engine):
    if in_place and function == "logsumexp":
        pytest.skip("its result has another shape than its input")
    call = Of(lambda x, out: ours(function)(x, (0, 1), out=x if in_place else out, engine=engine))
    x = maker(torch.float32)(3, 4)
    want = ours(function)(x, (0, 1))
    program = torch.export.export(call, (x.clone(), torch.zeros_like(want)), strict=True)
    for module in (program.module(), program.run_decompositions().module()):
        given, out = x.clone(), torch.zeros_like(want)
        assert torch.equal(module(given, out), want)
        assert torch.equal(given if in_place else out, want)


def test_a_graph_exported_for_training_has_gradients(function):
    x = maker(torch.float64)(3, 4).requires_grad_()
    module = torch.export.export(Of(lambda x: ours(function)(x, 1), 1.5).double(), (x,)).module()
    wanted = [x, *module.parameters()]
    got = torch.autograd.grad(module(x).square().sum(), wanted)
    want = torch.autograd.grad(TORCH[function](x * wanted[1], 1).square().sum(), wanted)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_aot_inductor_in_python_and_in_a_program_without_it(tmp_path):
    """Up to torch 2.12 Python crashes as it loads a package, one of torch.softmax alone too."""
    x = maker(torch.float32)(3, 4)
    program = torch.export.export(MODEL, (x,), dynamic_shapes=BOTH)
    path = tmp_path / "model.pt2"
    quickly = {"precompile_headers": False, "compile_wrapper_opt_level": "O0"}  # half the time of compiling
    known = torch._inductor.config.get_config_copy()
    options = {f"aot_inductor.{name}": value for name, value in quickly.items() if f"aot_inductor.{name}" in known}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    if IS_213:
        model = torch._inductor.aoti_load_package(str(path))
        for shape in ((3, 4), (17, 300)):
            x = maker(torch.float32)(*shape)
            torch.testing.assert_close(tuple(model(x)), MODEL(x))
    program = build_with_torch(tmp_path, "packaged", "-std=c++20", libraries=("-ltorch",))
    for rows, columns in ((2, 3), (5, 33)):
        answer = output(program, native.PATH, path, rows, columns)
        with torch.no_grad():
            want = MODEL(torch.arange(rows * columns).view(rows, columns) * 0.1)
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
