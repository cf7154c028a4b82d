"""The fast path of the plain call, with an `out` and without: taken where it may be, and there no call differs in any
respect from the same call by the general path."""

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import onepass
from lib import support
from lib.modes import Functions, Operators
from lib.support import DTYPES, INTEGERS, LAYOUTS, SOFTMAXES, TORCH, assert_defined, ints, maker, ours, same
from onepass import _engines as engines
from onepass import functional, ops


def rows() -> Tensor:
    return maker(torch.float32)(3, 4)


class WrongPath(Exception):
    """A call took the other path."""


def refuse(*_: Any, **__: Any) -> Any:
    raise WrongPath


@pytest.fixture
def only_fast(monkeypatch):
    monkeypatch.setattr(functional, "check_input", refuse)  # what the general path does first


def outcome(call: Callable[..., Tensor], given: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """What a call does: everything about its result but the values, or the error; and the values."""
    out = given[1] if given else None
    version = None if out is None or out.is_inference() else out._version
    try:
        y = call(*given)
    except Exception as error:
        facts = type(error), str(error), type(error.__context__)  # no trace of the first attempt
        return (facts, out is None or version is None or out._version == version), type(error) if out is None else out
    facts = y.dtype, y.shape, y.stride(), y.device, y.layout, y.requires_grad, y.is_inference(), y.is_neg()
    return (facts, y is out, version is None or y._version > version), y


def assert_same_on_both_paths(
    monkeypatch: Any, call: Callable[..., Tensor], make: Callable[[], tuple[Tensor, ...]] = tuple
) -> Any:
    """`make` gives what `call` takes, new each time: nothing, or an input and an out. Gives the result, or the error's
    type."""
    fast, y = outcome(call, make())
    with monkeypatch.context() as patch:
        patch.setattr(functional, "call_boxed", lambda *_: None)
        general, want = outcome(call, make())
    assert fast == general
    if isinstance(y, Tensor) and y.layout is torch.strided and not y.is_nested and y.device.type != "meta":
        y_values, want_values = (t.detach().resolve_neg().flatten() for t in (y, want))  # of any number of dims
        assert same(y_values, want_values)
    return fast[0][0] if isinstance(fast[0][0], type) else y


# Which path -----------------------------------------------------------------------------------------------------------


def test_the_plain_call_takes_the_fast_path(function, dtype, only_fast):
    for layout in LAYOUTS.values():
        x = layout(maker(dtype))
        for dim in ints(x):
            y = ours(function)(x, dim)
            out = torch.full_like(y, 7)
            assert ours(function)(x, dim, out=out) is out
            assert same(out, y)
    leaf = maker(dtype)(3, 4).requires_grad_()
    with torch.no_grad():
        assert not ours(function)(leaf, 1).requires_grad
    with torch.inference_mode():
        assert ours(function)(maker(dtype)(3, 4), 1).is_inference()
    assert ours(function)(torch.empty(3, 4, device="meta", dtype=dtype), 1).device.type == "meta"


def test_every_spelling_of_the_plain_call_takes_the_fast_path(only_fast):
    x = rows()
    for function in functional.softmax, functional.log_softmax, functional.softmin:
        assert torch.equal(function(x), function(input=x, dim=-1, dtype=None, out=None, engine="auto"))
        assert function(x, 1, dtype=torch.float16).dtype is torch.float16
        assert function(x, 1, torch.float64).dtype is function(x, axis=1, dtype=float).dtype is torch.float64
    assert onepass.logsumexp(x, 1, True).shape == onepass.logsumexp(x, axis=1, keepdims=True).shape == (3, 1)
    assert onepass.logsumexp(x, dim=0, keepdim=False).shape == (4,)


class Axis(enum.IntEnum):
    last = 1


def test_a_device_takes_it_once_its_engine_is_the_native_one(monkeypatch):
    monkeypatch.setattr(engines, "_ready_devices", {-1})
    loaded: list[int] = []
    monkeypatch.setattr(engines, "load_once", loaded.append)
    monkeypatch.setattr(engines, "unavailable", lambda engine, device: None if engine == "cuda" else "no")
    assert engines._best.__wrapped__(torch.device("cuda", 3)) == "cuda"
    assert loaded == [3]
    assert sorted(engines._ready_devices) == [-1, 3]
    monkeypatch.setattr(engines, "unavailable", lambda engine, device: None if engine == "triton" else "no")
    assert engines._best.__wrapped__(torch.device("cuda", 4)) == "triton"
    assert engines._best.__wrapped__(torch.device("xpu", 5)) == "triton"
    assert sorted(engines._ready_devices) == [-1, 3]


def test_a_device_without_the_native_engine_takes_the_general_path(function, monkeypatch):
    monkeypatch.setattr(functional, "call_boxed", refuse)
    monkeypatch.setattr(functional, "_ready_devices", {0})
    assert_defined(function, ours(function)(rows(), 1), rows(), 1)


# Who sees the call ----------------------------------------------------------------------------------------------------


def test_modes_and_the_profiler_see_the_call(function):
    x = rows()
    with Functions() as functions, Operators() as operators:
        got = ours(function)(x, 1)
    assert any("onepass" in str(called) for called in functions.seen)
    assert operators.names() == [f"onepass.{function}.default"]
    with Operators() as mode, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        again = ours(function)(x, 1)
    assert torch.equal(again, got)
    assert mode.names() == [f"onepass._{function}.int"]
    assert f"onepass::_{function}" in {event.name for event in profile.events()}
    with Operators() as mode:
        ours(function)(x, 1, out=torch.zeros_like(got))
    assert f"onepass.{function}.out" in mode.names()  # a graph keeps the public name


def test_make_fx_records_the_call(function):
    graph = make_fx(lambda x: ours(function)(x, 1))(rows())
    (target,) = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    assert target == f"onepass.{function}.default"
    other = maker(torch.float32, seed=1)(3, 4)
    assert torch.equal(graph(other), ours(function)(other, 1))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace_records_the_call_and_its_gradient_with_it(function, requires_grad):
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


# The operator ---------------------------------------------------------------------------------------------------------


def test_opcheck_of_the_plain_operator(function):
    operator = getattr(torch.ops.onepass, f"_{function}").int
    tests = ("test_schema", "test_faketensor")
    for x, dim in ((rows(), 1), (rows(), 0), (rows().t(), -1), (torch.zeros(()), 0), (torch.zeros(0, 3), 1)):
        opcheck(operator, (x, dim), test_utils=tests)
    opcheck(operator, (rows(), 1, True if function == "logsumexp" else torch.float16), test_utils=tests)


# Both paths agree -----------------------------------------------------------------------------------------------------


ODD_INPUTS = {
    **{str(t): lambda t=t: torch.ones(3, 4, dtype=t) for t in (*INTEGERS, torch.complex64)},
    "plain": rows,
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "negated": lambda: torch.complex(rows(), rows()).conj().imag,
    "meta": lambda: rows().to("meta"),
    "meta of integers": lambda: rows().to("meta").int(),
    "65 dims": lambda: torch.zeros([1] * 65),
    "64 dims": lambda: torch.zeros([1] * 64),
    "NaN and inf": lambda: torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]]),
    "a tensor of a tensor": lambda: rows()[0, 0],
    "a parameter": lambda: torch.nn.Parameter(rows()),
    "not a leaf": lambda: rows().requires_grad_() * 2,
    "a list": lambda: [1.0, 2.0],
    "a number": lambda: 3.0,
    "None": lambda: None,
}


@pytest.mark.parametrize("case", ODD_INPUTS)
def test_both_paths_agree_on_odd_inputs(function, case, monkeypatch):
    x = ODD_INPUTS[case]()
    dims: list[Any] = [0, 1, -1, 2, -3, 64, -4, 2**40, -(2**63), 2**63, 2**70]
    dims += [True, None, 1.0, "1", torch.tensor(1), numpy.int32(1), Axis.last, (0, 1), [1]]
    named: list[dict[str, Any]] = [{"engine": None}, {"engine": "triton"}, {"engine": "".join("auto")}]
    named += [{"out": 3}, {"out": torch.zeros(2)}]
    if function == "logsumexp":
        named += [{"keepdim": 1}]
    else:
        odd = (torch.float32, torch.int32, torch.bool, torch.complex64, 6, "float32", float)
        named += [{"dtype": dtype} for dtype in odd]
    for dim, options in [*((dim, {}) for dim in dims), *((0, options) for options in named)]:
        assert_same_on_both_paths(monkeypatch, lambda d=dim, n=options: ours(function)(x, d, **n))


# An input and an out; test_errors.py has the others that are refused.
OUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "separate": lambda: (rows(), torch.zeros(3, 4)),
    "in place": lambda: (lambda x: (x, x))(rows()),
    "a view of the input": lambda: (lambda x: (x, x.view(3, 4)))(rows()),
    "transposed": lambda: (rows(), torch.zeros(4, 3).t()),
    "columns between columns": lambda: (lambda x: (x[:, :4], x[:, 4:]))(torch.ones(3, 8)),
    "every other column": lambda: (lambda x: (x[:, ::2], x[:, 1::2]))(torch.ones(3, 8)),
    "every other row": lambda: (lambda x: (x[::2], x[1::2]))(torch.ones(6, 4)),
    "inner and outer interleaved": lambda: (rows(), torch.zeros(20).as_strided((3, 4), (4, 3))),
    "empty, another shape": lambda: (torch.zeros(0, 4), torch.zeros(0, 5)),
    "empty": lambda: (torch.zeros(0, 4), torch.zeros(0, 4)),
    "empty rows": lambda: (torch.zeros(3, 0), torch.zeros(3, 0)),
    "reduced": lambda: (rows(), torch.zeros(3)),
    "reduced, of empty rows": lambda: (torch.zeros(3, 0), torch.zeros(3)),
    "integers": lambda: (torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 4)),
    "no numbers": lambda: (torch.tensor(1.0), torch.tensor(2.0)),
    "a negated out": lambda: (rows(), torch.zeros(3, 4, dtype=torch.complex64).conj().imag),
    "a negated input": lambda: (torch.complex(rows(), rows()).conj().imag, torch.zeros(3, 4)),
    "meta": lambda: (rows().to("meta"), torch.zeros(3, 4, device="meta")),
    "a meta out": lambda: (rows(), torch.zeros(3, 4, device="meta")),
    "a meta input": lambda: (rows().to("meta"), torch.zeros(3, 4)),
    "a gradient of the input": lambda: (rows().requires_grad_(), torch.zeros(3, 4)),
    "out is a view of a leaf": lambda: (rows(), torch.zeros(3, 4, requires_grad=True)[:]),
    "a parameter as out": lambda: (rows(), torch.nn.Parameter(torch.zeros(3, 4))),
}


ON_THE_FAST_PATH = ("separate", "in place", "a view of the input", "transposed", "columns between columns", "empty")


@pytest.mark.parametrize("case", OUTS)
def test_both_paths_agree_into_an_out(function, case, monkeypatch):
    calls: list[tuple[Any, dict[str, Any]]] = [(dim, {}) for dim in (0, 1, -1, 2, True)]
    calls += [(1, o) for o in ([{"keepdim": True}] if function == "logsumexp" else [{"dtype": d} for d in DTYPES])]
    calls += [(1, {"dtype": torch.int64})] * (function != "logsumexp")
    for dim, named in calls:
        call = lambda x, out, d=dim, n=named: ours(function)(x, d, out=out, **n)  # noqa: E731
        assert_same_on_both_paths(monkeypatch, call, OUTS[case])
    with torch.no_grad():
        assert_same_on_both_paths(monkeypatch, lambda x, out: ours(function)(x, 1, out=out), OUTS[case])
    if case in (*ON_THE_FAST_PATH, "every other column", "every other row") and function != "logsumexp":
        if case in ON_THE_FAST_PATH:
            monkeypatch.setattr(functional, "check_input", refuse)
        x, out = OUTS[case]()
        given, version = x.clone(), out._version
        assert ours(function)(x, 1, out=out) is out
        assert out._version > version  # autograd notices
        assert out.data_ptr() == x.data_ptr() or torch.equal(x, given)
        assert_defined(function, out, given, 1)


def inference() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return rows(), torch.zeros(3, 4)


SURROUNDINGS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "dual level": forward_ad.dual_level,
    "torch function mode": Functions,
    "fake, of a real tensor": FakeTensorMode,
    "fake, real tensors allowed": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("case", SURROUNDINGS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_both_paths_agree_in_every_surrounding(function, requires_grad, case, monkeypatch):
    x = rows().to(torch.bfloat16).requires_grad_(requires_grad)

    def call(*given: Tensor) -> Tensor:
        with SURROUNDINGS[case]():
            return ours(function)(given[0], 1, out=given[1]) if given else ours(function)(x, 1)

    if case.startswith("fake"):
        with monkeypatch.context() as patch:
            fast = shape_or_error(call)
            patch.setattr(functional, "call_boxed", lambda *_: None)
            assert fast == shape_or_error(call)
        return
    assert_same_on_both_paths(monkeypatch, call)
    if function in SOFTMAXES and not requires_grad:
        assert isinstance(assert_same_on_both_paths(monkeypatch, call, OUTS["separate"]), Tensor)
        error = RuntimeError if case != "inference_mode" else None
        got = assert_same_on_both_paths(monkeypatch, call, inference)
        assert got is error if error else isinstance(got, Tensor)


def shape_or_error(call: Any) -> Any:
    y = support.outcome(call)
    return type(y) if isinstance(y, Exception) else (type(y), y.shape, y.dtype, y.stride())


def tangent(f: Callable[..., Tensor]) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(rows(), rows()), 0)).tangent


TRANSFORMS = {
    "dual": tangent,
    "vmap": lambda f: torch.vmap(lambda x: f(x, 0))(rows()),
    "vmap of 0-d": lambda f: torch.vmap(lambda x: f(x, 0))(rows()[0]),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(lambda x: f(x, 0)))(rows()[None]),
    "captured by vmap": lambda f: (lambda y: torch.vmap(lambda x: x + f(y, 0).sum())(rows()))(rows()),
    "grad of grad": lambda f: torch.func.hessian(lambda x: f(x, 0).square().sum())(rows()[0]),
    "grad of vmap": lambda f: torch.func.jacrev(torch.vmap(lambda x: f(x, 0)))(rows()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x, 0).square().sum()))(rows()),
    "jvp": lambda f: torch.func.jvp(lambda x: f(x, 0), (rows(),), (rows(),))[1],
    "captured by grad": lambda f: torch.func.grad(lambda x, y: (x * f(y, 0)).sum())(rows(), rows()),
    "no_grad in grad": lambda f: torch.func.grad(lambda x: x.sum() + torch.no_grad()(f)(x, 0).sum())(rows()),
    "out of range in vmap": lambda f: torch.vmap(lambda x: f(x, 1))(rows()),
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_both_paths_agree_under_transforms(function, case, monkeypatch):
    got = assert_same_on_both_paths(monkeypatch, lambda: TRANSFORMS[case](ours(function)))
    if isinstance(got, type):
        assert (case, got) == ("out of range in vmap", IndexError)
    else:
        torch.testing.assert_close(got, TRANSFORMS[case](TORCH[function]))


@pytest.mark.parametrize("out", [False, True])
def test_an_error_of_the_fast_path_is_raised_and_the_call_is_not_made_again(function, out, monkeypatch):
    calls = []

    def failing(*given: Any) -> Tensor:
        calls.append(given)
        raise RuntimeError("out of memory")

    named = {"out": torch.zeros(3 if function == "logsumexp" else (3, 4))} if out else {}
    for module in functional, ops:
        monkeypatch.setattr(module, "call_boxed", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        ours(function)(rows(), 1, **named)
    assert len(calls) == 1


@pytest.mark.gpu
def test_on_a_gpu(function, dtype, monkeypatch):
    f, x = ours(function), maker(dtype, "cuda")(3, 4)
    y = f(x, 1)  # from now on the device takes the fast path

    def make() -> tuple[Tensor, Tensor]:
        return maker(dtype, "cuda")(3, 4), torch.full_like(y, 7)

    def write(x: Tensor, out: Tensor) -> Tensor:
        return f(x, 1, out=out)

    assert_same_on_both_paths(monkeypatch, lambda: f(x, 1))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert f(x, 1).dtype is (torch.float32 if dtype.itemsize == 2 else dtype)
    assert isinstance(assert_same_on_both_paths(monkeypatch, write, make), Tensor)
    for one, two in ("cpu", "cuda"), ("cuda", "cpu"):
        mixed = lambda a=one, b=two: (make()[0].to(a), make()[1].to(b))  # noqa: E731
        assert assert_same_on_both_paths(monkeypatch, write, mixed) is RuntimeError
    if "cuda" in engines.ENGINES and onepass.engines()["cuda"] is None:
        monkeypatch.setattr(functional, "check_input", refuse)
        f(x, 1)
        out = make()[1]
        assert f(x, 1, out=out) is out
