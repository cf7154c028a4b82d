"""The quick way of the plain call and the other one agree: values, dtypes, strides, errors and their words."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import onepass
from lib.host_path import Watch, assert_same_both_ways, rows
from lib.paths import NATIVE
from lib.support import (
    INTEGERS,
    TORCH,
    every_function,
    every_softmax,
    ints,
    ours,
)
from onepass import functional, ops


@every_function
def test_both_ways_agree_on_every_dim(function, monkeypatch):
    x = rows()
    for dim in [*ints(x), x.dim() + 1, -x.dim() - 2, 64, 2**40, -(2**63), 2**63, 2**70]:
        assert_same_both_ways(monkeypatch, lambda dim=dim: ours(function)(x, dim))


def quantized() -> Tensor:
    return torch.quantize_per_tensor(rows(), 0.1, 0, torch.qint8)


ODD_INPUTS = {
    **{str(t): lambda t=t: torch.ones(3, 4, dtype=t) for t in (*INTEGERS, torch.complex64, torch.float8_e4m3fn)},
    "sparse": lambda: rows().to_sparse(),
    "csr": lambda: rows().to_sparse_csr(),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "negated": lambda: torch.complex(rows(), rows()).conj().imag,
    "meta": lambda: rows().to("meta"),
    "meta of integers": lambda: rows().to("meta").int(),
    "65 dims": lambda: torch.zeros([1] * 65),
    "64 dims": lambda: torch.zeros([1] * 64),
    "NaN and inf": lambda: torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]]),
    "a tensor of a tensor": lambda: rows()[0, 0],
    "a number": lambda: 3.0,
    "None": lambda: None,
}


@pytest.mark.parametrize("case", ODD_INPUTS)
@every_function
def test_both_ways_agree_on_odd_inputs(function, case, monkeypatch):
    x = ODD_INPUTS[case]()
    for dim in (0, 1, -1, 2, -3, 64, True, None, 1.0, "1", torch.tensor(1), numpy.int32(1)):
        assert_same_both_ways(monkeypatch, lambda dim=dim: ours(function)(x, dim))
    for dtype in (torch.float32, torch.int32, torch.bool, torch.complex64, 6, "float32", float):
        if function != "logsumexp":
            assert_same_both_ways(monkeypatch, lambda dtype=dtype: ours(function)(x, 0, dtype=dtype))


@every_function
def test_both_ways_agree_on_other_arguments(function, monkeypatch):
    x = rows()
    for named in (
        {"engine": None},
        {"engine": "triton"},
        {"out": 3},
        {"out": torch.zeros(2)},
        {"engine": "".join("auto")},
    ):
        assert_same_both_ways(monkeypatch, lambda named=named: ours(function)(x, 1, **named))
    if function == "logsumexp":
        assert_same_both_ways(monkeypatch, lambda: onepass.logsumexp(x, 1, 1))


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "dual level": forward_ad.dual_level,
    "fake, of a real tensor": FakeTensorMode,
    "fake, real tensors allowed": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "torch function mode": Watch,
}


@pytest.mark.parametrize("case", SURROUNDINGS)
@pytest.mark.parametrize("needs_gradient", [False, True])
@every_function
def test_both_ways_agree_in_every_surrounding(function, needs_gradient, case, monkeypatch):
    x = rows().to(torch.bfloat16).requires_grad_(needs_gradient)

    def call() -> Tensor:
        with SURROUNDINGS[case]():
            return ours(function)(x, 1)

    if case.startswith("fake"):
        with monkeypatch.context() as patch:
            quick = shape_or_error(call)
            patch.setattr(functional, "call_boxed", lambda *_: None)
            assert quick == shape_or_error(call)
    else:
        assert_same_both_ways(monkeypatch, call)


def under_vmap(function: Any, captured: Tensor) -> Tensor:
    return torch.vmap(lambda x: x + function(captured, 0).sum())(rows())


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(lambda x: f(x, 0))(rows()),
    "vmap over the last": lambda f: torch.vmap(lambda x: f(x, -1), in_dims=1)(rows()),
    "vmap of 0-d": lambda f: torch.vmap(lambda x: f(x, 0))(rows()[0]),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(lambda x: f(x, 0)))(rows()[None]),
    "captured by vmap": lambda f: under_vmap(f, rows()),
    "grad": lambda f: torch.func.grad(lambda x: f(x, 0).square().sum())(rows()[0]),
    "grad of grad": lambda f: torch.func.hessian(lambda x: f(x, 0).square().sum())(rows()[0]),
    "grad of vmap": lambda f: torch.func.jacrev(torch.vmap(lambda x: f(x, 0)))(rows()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x, 0).square().sum()))(rows()),
    "jvp": lambda f: torch.func.jvp(lambda x: f(x, 0), (rows(),), (rows(),))[1],
    "captured by grad": lambda f: torch.func.grad(lambda x, y: (x * f(y, 0)).sum())(rows(), rows()),
    "no_grad in grad": lambda f: torch.func.grad(lambda x: x.sum() + torch.no_grad()(f)(x, 0).sum())(rows()),
    "out of range in vmap": lambda f: torch.vmap(lambda x: f(x, 1))(rows()),
}


@pytest.mark.parametrize("case", TRANSFORMS)
@every_function
def test_both_ways_agree_under_transforms(function, case, monkeypatch):
    got = assert_same_both_ways(monkeypatch, lambda: TRANSFORMS[case](ours(function)))
    if got is IndexError:
        assert case == "out of range in vmap"
    else:
        torch.testing.assert_close(got, TRANSFORMS[case](TORCH[function]))


def shape_or_error(call: Any) -> Any:
    try:
        y = call()
    except Exception as error:
        return type(error)
    return type(y), y.shape, y.dtype, y.stride()


@pytest.mark.parametrize("out", [False, True])
@every_function
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


# The layout of contiguous rows ----------------------------------------------------------------------------------------


def test_the_layout_of_contiguous_rows_is_the_one_that_is_made_for_any(tmp_path):
    program = tmp_path / "layouts"
    source, include = NATIVE / "layouts.cpp", Path(onepass.__file__).with_name("csrc")
    subprocess.run(["g++", "-std=c++17", f"-I{include}", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, str(4 * sum(4**rank for rank in range(1, 6))))


@every_softmax
def test_results_of_contiguous_tensors_keep_odd_strides(function):
    x = torch.zeros(40).as_strided((1, 3, 1, 4), (7, 4, 100, 1))
    assert x.is_contiguous()
    assert ours(function)(x, -1).stride() == ours(function)(x, [-1]).stride() == torch.empty_like(x).stride()
