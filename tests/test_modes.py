"""The surroundings of a call: compiling, exporting, fake tensors, autocast, threads, subclasses, checkpoints."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import reference
from support import (
    SOFTMAXES,
    TORCH,
    assert_defined,
    every_dtype,
    every_engine,
    every_function,
    every_softmax,
    maker,
    ours,
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Compiling and exporting --------------------------------------------------------------------------------------------


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


# Tensors without data -----------------------------------------------------------------------------------------------

SHAPES = [((3, 4), 1), ((2, 3, 4), (0, 2)), ((), 0), ((0, 3), 0), ((3, 0), 1)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@every_dtype
@every_function
def test_meta_and_fake_tensors(function, dtype, shape, dim):
    x = maker(dtype)(*shape)
    want = ours(function)(x, dim)
    with FakeTensorMode() as mode:
        fake = ours(function)(mode.from_tensor(x), dim)
    for y in (fake, ours(function)(x.to("meta"), dim)):
        assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())
    assert fake.device.type == "cpu"


@every_softmax
def test_strides_of_meta_results_are_those_of_real_ones(function):
    for x in (torch.zeros(4, 5).t(), torch.zeros(4, 1).expand(4, 5), torch.zeros(2, 3, 4, 5)[:, ::2].transpose(1, 3)):
        meta = ours(function)(
            x.to("meta") if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), device="meta"), 0
        )
        assert meta.stride() == ours(function)(x, 0).stride()


# Autocast -----------------------------------------------------------------------------------------------------------


@every_engine
@every_dtype
@every_function
def test_autocast_gives_torchs_dtype(function, dtype, engine, device):
    x = maker(dtype, device)(3, 4)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = ours(function)(x, 1, engine=engine), TORCH[function](x, 1)
    assert got.dtype is want.dtype
    assert_defined(function, got, x.to(got.dtype), 1)


# Threads ------------------------------------------------------------------------------------------------------------


@every_function
def test_any_number_of_threads(function):
    before = torch.get_num_threads()
    try:
        for shape, dim in (
            ((2000, 130), 1),
            ((3, 60_000), 1),
            ((4, 300, 200), 1),
            ((1, 400_000), 1),
            ((500, 400), (0, 1)),
        ):
            x = maker(torch.float32)(*shape)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_defined(function, ours(function)(x, dim), x, dim, f" on {threads} threads")
    finally:
        torch.set_num_threads(before)


@every_engine
@every_function
def test_calls_from_several_python_threads(function, engine, device):
    if engine == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter is no matter of several threads")
    inputs = [maker(torch.float32, device, seed)(50, 900 + seed) for seed in range(8)]
    want = [ours(function)(x, 1, engine=engine) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda x: ours(function)(x, 1, engine=engine), inputs))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_engine
def test_backward_in_autograds_threads(engine, device):
    def gradient(seed):
        x = maker(torch.float64, device, seed)(20, 30).requires_grad_()
        onepass.softmax(x, 1, engine=engine).square().sum().backward()
        return x.grad

    want = [gradient(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(gradient, range(6)), want, strict=True))


# Other surroundings -------------------------------------------------------------------------------------------------


@every_engine
@every_function
def test_checkpoint(function, engine, device):
    x = maker(torch.float64, device)(3, 4).requires_grad_()
    y = checkpoint(lambda t: ours(function)(t, 1, engine=engine).square(), x, use_reentrant=False)
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(ours(function)(x, 1, engine=engine).square().sum(), x)
    torch.testing.assert_close(got, want)


class Tagged(torch.Tensor):
    """A subclass as users write them: no more than a name of its own."""


@every_engine
@every_function
def test_subclasses(function, engine, device):
    x = maker(torch.float32, device)(3, 4)
    y = ours(function)(x.as_subclass(Tagged), 1, engine=engine)
    assert type(y) is type(TORCH[function](x.as_subclass(Tagged), 1))
    assert_defined(function, y.as_subclass(torch.Tensor), x, 1)
    parameter = torch.nn.Parameter(x)
    assert type(ours(function)(parameter, 1, engine=engine)) is torch.Tensor
    leaf = x.as_subclass(Tagged).requires_grad_()
    ours(function)(leaf, 1, engine=engine).sum().backward()
    assert leaf.grad is not None


@every_function
def test_inference_tensors(function):
    with torch.inference_mode():
        x = maker(torch.float32)(3, 4)
        y = ours(function)(x, 1)
    assert y.is_inference()
    assert_defined(function, ours(function)(x, 1), x, 1)


def test_importing_onepass_imports_nothing_heavy_and_touches_no_gpu():
    code = (
        "import sys, torch, onepass; "
        "names = ('triton', 'matplotlib', 'rich', 'click', 'torch._dynamo', 'torch._inductor'); "
        "heavy = [m for m in names if m in sys.modules]; "
        "onepass.softmax(torch.zeros(3)); "
        "print(heavy, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[] False"


def test_names():
    assert set(onepass.__all__) >= {
        *SOFTMAXES,
        "logsumexp",
        "engines",
        "explain",
        "Explanation",
        "reference",
        "__version__",
    }
