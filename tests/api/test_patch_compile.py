"""onepass.patch and compilers: graphs that keep aten's operators are served, TorchInductor's are as they were."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from lib.patch import with_and_without
from lib.support import TORCH, maker


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_that_keep_atens_operators_are_served(backend):
    x = maker(torch.float32)(3, 4).requires_grad_()
    compiled = torch.compile(lambda t: torch.softmax(t * 2, 1).square().sum(), backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        (want,) = torch.autograd.grad(compiled(x), x)
        with onepass.patch(report=True) as patched:  # compiled before it
            (got,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(got, want)
        assert patched.report.served == {"softmax": 1, "softmax backward": 1}
        compiled(x)
    assert patched.report.served == {"softmax": 1, "softmax backward": 1}


@pytest.mark.usefixtures("_fresh_compiler")
def test_graphs_of_inductor_are_as_they_were():
    x = maker(torch.float32)(3, 4)
    with onepass.patch(report=True) as patched:  # it makes a softmax of arithmetic of its own, which is fused
        got = torch.compile(lambda t: torch.softmax(t * 2, 1), backend="inductor", fullgraph=True)(x)
    torch.testing.assert_close(got, torch.softmax(x * 2, 1))
    assert not patched.report.served
    assert not patched.report.left


@pytest.mark.usefixtures("_fresh_compiler")
def test_within_a_compiled_function():
    @torch.compile(backend="eager")
    def call(x):
        with onepass.patch(report=True) as patched:
            return x.softmax(0), patched.report

    y, report = call(torch.zeros(4))
    assert y.sum() == 1
    assert report.served == {"softmax": 1}


def test_exported_and_traced_graphs_hold_torchs_operator():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.softmax(1)

    x = maker(torch.float32)(3, 4)
    with onepass.patch(report=True) as patched:
        program = torch.export.export(Model(), (x,))
        assert not patched.report.served
        assert "aten.softmax.int" in str(program.graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(Model(), x, check_trace=False)
        assert "aten::softmax" in str(traced.graph)
    with onepass.patch(report=True) as patched:
        torch.testing.assert_close(program.module()(x), traced(x))
    assert patched.report.served == {"softmax": 2}


def test_fake_and_meta_tensors_are_torchs(function):
    x = maker(torch.float32)(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)

    def shapes():
        with FakeTensorMode() as mode:
            fake = TORCH[function](mode.from_tensor(x).requires_grad_(), 1)
            fake.sum().backward()
        meta = TORCH[function](x.to("meta"), 1)
        return [(t.shape, t.dtype, t.stride()) for t in (fake, meta)]

    plain, ours, patched = with_and_without(shapes)
    assert ours == plain
    assert not patched.report.served
    real = with_and_without(lambda: TORCH[function](x, 1))[1]
    assert ours[0] == (real.shape, real.dtype, real.stride())
