"""The quick way of the plain call: taken where it may be, and there the same call in every respect as the other way."""

from __future__ import annotations

import enum
import sys
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from lib.host_path import Watch, assert_same_both_ways, rows
from lib.support import (
    LAYOUTS,
    assert_defined,
    every_dtype,
    every_function,
    ints,
    maker,
    ours,
)
from onepass import functional

engines = sys.modules["onepass._engines"]


class WrongWay(BaseException):
    """Not an Exception: the quick way falls back on those."""


def refuse(*_: Any, **__: Any) -> Any:
    raise WrongWay


@pytest.fixture
def no_slow_way(monkeypatch):
    monkeypatch.setattr(functional, "check_input", refuse)  # what the other way does first


@pytest.fixture
def no_quick_way(monkeypatch):
    monkeypatch.setattr(functional, "call_boxed", refuse)


# Which way ------------------------------------------------------------------------------------------------------------


@every_dtype
@every_function
def test_the_plain_call_goes_the_quick_way(function, dtype, no_slow_way):
    for layout in LAYOUTS.values():
        x = layout(maker(dtype))
        for dim in ints(x):
            ours(function)(x, dim)
    leaf = maker(dtype)(3, 4).requires_grad_()
    with torch.no_grad():
        assert not ours(function)(leaf, 1).requires_grad
    with torch.inference_mode():
        assert ours(function)(maker(dtype)(3, 4), 1).is_inference()
    assert ours(function)(torch.empty(3, 4, device="meta", dtype=dtype), 1).device.type == "meta"


def test_every_spelling_of_the_plain_call_goes_the_quick_way(no_slow_way):
    x = rows()
    for function in functional.softmax, functional.log_softmax, functional.softmin:
        assert torch.equal(function(x), function(input=x, dim=-1, dtype=None, out=None, engine="auto"))
        assert function(x, 1, dtype=torch.float16).dtype is torch.float16
        assert function(x, 1, torch.float64).dtype is function(x, axis=1, dtype=float).dtype is torch.float64
    assert onepass.logsumexp(x, 1, True).shape == onepass.logsumexp(x, axis=1, keepdims=True).shape == (3, 1)
    assert onepass.logsumexp(x, dim=0, keepdim=False).shape == (4,)


class Tagged(torch.Tensor):
    """A subclass as users write them."""


class Axis(enum.IntEnum):
    last = 1


OTHER_CALLS = {  # calls that more than the operator has a say in
    "subclass": lambda f: f(rows().as_subclass(Tagged), 1),
    "parameter": lambda f: f(torch.nn.Parameter(rows()), 1),
    "numpy dim": lambda f: f(rows(), numpy.int64(1)),
    "enum dim": lambda f: f(rows(), Axis.last),
    "tuple": lambda f: f(rows(), (0, 1)),
    "list": lambda f: f(rows(), [1]),
    "engine": lambda f: f(rows(), 1, engine="cpu"),
    "gradient": lambda f: f(rows().requires_grad_(), 1),
    "not a leaf": lambda f: f(rows().requires_grad_() * 2, 1),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
@every_function
def test_other_calls_go_the_other_way(function, case, no_quick_way):
    OTHER_CALLS[case](ours(function))


@every_function
def test_arguments_out_of_the_ordinary_go_the_other_way(function, no_quick_way):
    x = rows()
    if function != "logsumexp":
        with pytest.raises(TypeError, match="dtype"):
            ours(function)(x, 1, dtype=6)  # the number of float32 in libtorch
    with pytest.raises(TypeError, match="dim"):
        ours(function)(x, True)
    with pytest.raises(TypeError, match="Tensor"):
        ours(function)([1.0, 2.0], 0)
    with pytest.raises(ValueError, match="engine"):
        ours(function)(x, 1, engine="gpu")


@every_function
def test_forward_mode_goes_the_other_way(function, no_quick_way):
    x, t = rows().double(), rows().double() + 1
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(ours(function)(forward_ad.make_dual(x, t), 1)).tangent
    want = torch.func.jvp(lambda x: ours(function)(x, 1), (x,), (t,))[1]
    torch.testing.assert_close(got, want)


@every_function
def test_a_torch_function_mode_sees_the_call(function, no_quick_way):
    with Watch() as mode:
        got = ours(function)(rows(), 1)
    assert_defined(function, got, rows(), 1)
    assert any("onepass" in name for name in mode.seen)


def test_a_device_comes_in_once_its_engine_is_the_native_one(monkeypatch):
    monkeypatch.setattr(engines, "_ready_devices", {-1})
    loaded: list[int] = []
    monkeypatch.setattr(engines, "load_once", loaded.append)
    monkeypatch.setattr(engines, "_unavailable", lambda engine, kind, index: None if engine == "cuda" else "no")
    assert engines._best.__wrapped__("cuda", 3) == "cuda"
    assert loaded == [3]
    assert sorted(engines._ready_devices) == [-1, 3]
    monkeypatch.setattr(engines, "_unavailable", lambda engine, kind, index: None if engine == "triton" else "no")
    assert engines._best.__wrapped__("cuda", 4) == "triton"
    assert engines._best.__wrapped__("xpu", 5) == "triton"
    assert sorted(engines._ready_devices) == [-1, 3]


@every_function
def test_a_device_that_is_not_in_goes_the_other_way(function, no_quick_way, monkeypatch):
    monkeypatch.setattr(functional, "_ready_devices", {0})
    assert_defined(function, ours(function)(rows(), 1), rows(), 1)


# Who looks on ---------------------------------------------------------------------------------------------------------


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@every_function
def test_a_dispatch_mode_sees_the_call(function):
    x = rows()
    with Log() as mode:
        got = ours(function)(x, 1)
    assert mode.seen == [f"onepass._{function}.int"]
    assert_defined(function, got, x, 1)


@every_function
def test_make_fx_writes_the_call_down(function):
    graph = make_fx(lambda x: ours(function)(x, 1))(rows())
    (target,) = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    assert target == f"onepass.{function}.default"
    other = maker(torch.float32, seed=1)(3, 4)
    assert torch.equal(graph(other), ours(function)(other, 1))


@pytest.mark.parametrize("requires_grad", [False, True])
@every_function
def test_jit_trace_writes_the_call_down_and_its_gradient_with_it(function, requires_grad):
    traced = torch.jit.trace(lambda x: ours(function)(x, 1), rows().requires_grad_(requires_grad))
    assert f"onepass::{function}(" in str(traced.graph)
    x = rows().requires_grad_()
    got, want = (torch.autograd.grad(f(x).square().sum(), x) for f in (traced, lambda x: ours(function)(x, 1)))
    torch.testing.assert_close(got, want)
    other = maker(torch.float32, seed=1)(3, 4)
    assert torch.equal(traced(other), ours(function)(other, 1))
    if function != "logsumexp":
        traced = torch.jit.trace(lambda x: ours(function)(x, 1, dtype=torch.float16), rows())
        assert torch.equal(traced(other), ours(function)(other, 1, dtype=torch.float16))


@every_function
def test_dynamo_keeps_the_registered_operator(function):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = rows()
    got = torch.compile(lambda x: ours(function)(x, 1), backend=backend, fullgraph=True)(x)
    assert torch.equal(got, ours(function)(x, 1))
    assert [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"] == [
        f"onepass.{function}.default"
    ]


def test_the_profiler_sees_the_call():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        onepass.softmax(rows(), 1)
    assert "onepass::_softmax" in {event.name for event in profile.events()}


# The operator ---------------------------------------------------------------------------------------------------------


@every_function
def test_opcheck_of_the_plain_operator(function):
    operator = getattr(torch.ops.onepass, f"_{function}").int
    tests = ("test_schema", "test_faketensor")
    for x, dim in ((rows(), 1), (rows(), 0), (rows().t(), -1), (torch.zeros(()), 0), (torch.zeros(0, 3), 1)):
        opcheck(operator, (x, dim), test_utils=tests)
    opcheck(operator, (rows(), 1, True if function == "logsumexp" else torch.float16), test_utils=tests)


@every_function
def test_the_operator_of_the_fast_path_returns_nothing_for_other_calls(function):
    operators = getattr(torch.ops.onepass, f"_{function}")
    x, option = rows(), False if function == "logsumexp" else None
    many = torch.zeros([1] * 65)
    others = [(x, 2), (x, -3), (torch.zeros(()), 1), (x.int(), 1), (x.cfloat(), 1), (x.to_sparse(), 1), (many, 0)]
    for given, dim in others:
        assert operators.int(given, dim) is None
    out = torch.zeros(3 if function == "logsumexp" else (3, 4))
    for given, dim in others:
        assert operators.int_out(given, dim, option, out) is False
    for bad in (out[1:], out.double(), out.int(), out.to("meta"), torch.zeros(1).expand(out.shape), x.view(-1)[1:]):
        assert operators.int_out(x, 1, option, bad) is False
    assert operators.int_out(x, 1, option, out) is True
    if function != "logsumexp":
        assert operators.int(x, 1, torch.int32) is None
        assert operators.int_out(x, 1, torch.float64, out) is False


@pytest.mark.gpu
@every_dtype
@every_function
def test_on_a_gpu(function, dtype, monkeypatch):
    x = maker(dtype, "cuda")(3, 4)
    ours(function)(x, 1)  # lets the device in
    assert_same_both_ways(monkeypatch, lambda: ours(function)(x, 1))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_same_both_ways(monkeypatch, lambda: ours(function)(x, 1))
    if "cuda" in engines.ENGINES and onepass.engines()["cuda"] is None:
        monkeypatch.setattr(functional, "check_input", refuse)
        ours(function)(x, 1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert ours(function)(x, 1).dtype is (torch.float32 if dtype.itemsize == 2 else dtype)
