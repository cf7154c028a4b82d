"""Bad input: the type of error that torch raises there, with what was got and what is taken, and nothing touched.

Each case names the call; the expected type is found by running torch's namesake in the test. Where torch serves the
call and onepass refuses it, it is a TypeError, a ValueError or a NotImplementedError. `out` has a file of its own.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

import onepass
from lib.support import FUNCTIONS, SOFTMAXES, TORCH, every_softmax, ours, raised, randn, refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# Dims ---------------------------------------------------------------------------------------------------------------

DIMS = [  # dim, what the message says
    (2, r"2.*|.*\[-2, 1\]"),
    (-3, "-3"),
    (2**40, str(2**40)),
    (1.0, "1.0"),
    ("0", "'0'"),
    (True, "True"),
    ((0, 2), "2"),
    ((0, 0), r"\(0, 0\)"),
    ((0, -2), r"\(0, -2\)"),
    ((0, 1.0), "1.0"),
    ((0, "1"), "'1'"),
    ({0: 1}, r"\{0: 1\}"),
]


@pytest.mark.parametrize(("dim", "got"), DIMS, ids=lambda v: str(v)[:12])
def test_wrong_dim(function, dim, got):
    x = randn()
    theirs = TORCH[function] if isinstance(dim, int) else torch.logsumexp  # which alone takes several dims
    expected = raised(theirs, x, dim)
    assert expected is not None
    if isinstance(dim, str):
        expected = TypeError  # torch before 2.13 takes it for a named dim, and raises RuntimeError
    refused(function, expected, got, x, dim)


def test_dim_none_names_no_dim(function):
    assert raised(torch.softmax, randn(), None)  # softmin's guess of a dim is deprecated in torch
    refused(function, TypeError, "None", randn(), None)


@pytest.mark.parametrize("dim", [1, -2, (0, 0), (0, -1)], ids=str)
def test_wrong_dim_of_0_d(function, dim):
    x = torch.tensor(1.0)
    expected = raised(torch.logsumexp, x, dim)
    assert expected in (IndexError, RuntimeError)
    refused(function, expected, re.escape(str(dim)), x, dim)


def test_wrong_dim_of_an_empty_tensor(function):
    x = torch.empty(0, 3)
    refused(function, raised(TORCH[function], x, 5), "5", x, 5)


# Inputs -------------------------------------------------------------------------------------------------------------

NOT_TENSORS = {"list": [1.0, 2.0], "None": None, "ndarray": np.zeros(3), "float": 1.0, "str": "x"}


@pytest.mark.parametrize("kind", NOT_TENSORS)
def test_input_is_no_tensor(function, kind):
    assert raised(torch.softmax, NOT_TENSORS[kind], 0) is TypeError
    refused(function, TypeError, type(NOT_TENSORS[kind]).__name__, NOT_TENSORS[kind], 0)


def _kinds() -> dict[str, tuple[torch.Tensor, str]]:
    """Tensors that are not served, each with what a message must say of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = randn()
        rows = [torch.randn(2, 3), torch.randn(1, 3)]
        return {
            "complex64": (torch.randn(3, 4, dtype=torch.complex64), "complex64"),
            "complex128": (torch.randn(3, 4, dtype=torch.complex128), "complex128"),
            "sparse_coo": (x.to_sparse(), "sparse"),
            "sparse_csr": (x.to_sparse_csr(), "sparse"),
            "mkldnn": (x.to_mkldnn(), "mkldnn"),
            "quantised": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "qint8"),
            "nested": (torch.nested.nested_tensor(rows), "nested"),
            "jagged": (torch.nested.nested_tensor(rows, layout=torch.jagged), "nested|jagged"),
            "float8": (x.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        }


@pytest.mark.parametrize("kind", _kinds())
def test_input_of_another_kind(function, kind):
    x, got = _kinds()[kind]
    # torch's type where it raises one that says so; where it serves the input, or stumbles inside: a type of refusal.
    expected = raised(TORCH[function], x, -1)
    refusals = (TypeError, NotImplementedError)
    refused(function, expected if expected is NotImplementedError else refusals, got, x, -1)


@pytest.mark.parametrize("kind", ["complex64", "sparse_coo", "sparse_csr", "quantised", "nested", "jagged"])
@every_softmax
def test_dtype_does_not_let_them_in(function, kind):
    x, got = _kinds()[kind]
    refused(function, (TypeError, NotImplementedError), got, x, -1, dtype=torch.float32)


def test_logsumexp_of_complex_is_a_type_error():
    torch.logsumexp(_kinds()["complex64"][0], -1)  # torch serves it
    refused("logsumexp", TypeError, "complex64.*|float32", _kinds()["complex64"][0], -1)


@pytest.mark.parametrize("given", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@every_softmax
def test_integers_need_a_dtype(function, given):
    x = torch.ones(2, 3, dtype=given)
    expected = raised(torch.softmax, x, -1)
    assert expected is NotImplementedError
    refused(function, expected, f"{given}.*dtype", x, -1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@every_softmax
def test_dtype_is_no_float(function, dtype):
    expected = raised(TORCH[function], randn(), -1, dtype=dtype)
    assert expected is NotImplementedError
    refused(function, expected, str(dtype), randn(), -1, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", 32, np.float32], ids=str)
@every_softmax
def test_dtype_is_no_dtype(function, dtype):
    assert raised(TORCH[function], randn(), -1, dtype="float32") is TypeError
    refused(function, TypeError, re.escape(repr(dtype)), randn(), -1, dtype=dtype)


@pytest.mark.parametrize("keepdim", ["x", None, 2, 0.0], ids=repr)
def test_keepdim_is_no_bool(keepdim):
    assert raised(torch.logsumexp, randn(), -1, keepdim) is TypeError
    refused("logsumexp", TypeError, re.escape(repr(keepdim)), randn(), -1, keepdim)


# Calls --------------------------------------------------------------------------------------------------------------

MISUSES = [
    ("input twice", SOFTMAXES, lambda f, x: f(x, input=x, dim=-1)),
    ("dim twice", FUNCTIONS, lambda f, x: f(x, -1, dim=-1)),
    ("no input", FUNCTIONS, lambda f, x: f(dim=0)),
    ("nothing", FUNCTIONS, lambda f, x: f()),
    ("unknown keyword", FUNCTIONS, lambda f, x: f(x, -1, axis=1)),
    ("logsumexp without dim", ["logsumexp"], lambda f, x: f(x)),
    ("logsumexp with dtype", ["logsumexp"], lambda f, x: f(x, 0, dtype=torch.float64)),
    ("logsumexp, out by position", ["logsumexp"], lambda f, x: f(x, 0, False, torch.empty(4))),
    ("softmax with keepdim", ["softmax", "log_softmax"], lambda f, x: f(x, 0, keepdim=True)),
]


@pytest.mark.parametrize(
    ("function", "call"), [pytest.param(f, call, id=f"{name}-{f}") for name, fs, call in MISUSES for f in fs]
)
def test_misuse(function, call):
    assert raised(call, TORCH[function], randn()) is TypeError
    with pytest.raises(TypeError, match=function):
        call(ours(function), randn())


# Engines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["gpu", "", "CPU", "torch"])
def test_unknown_engine(function, engine):
    refused(function, ValueError, f"'{engine}'", randn(), -1, engine=engine)


@pytest.mark.parametrize("engine", [None, 3], ids=str)
def test_engine_of_another_kind(function, engine):
    refused(function, (ValueError, TypeError), repr(engine), randn(), -1, engine=engine)


def test_an_engine_that_cannot_run_says_why(function):
    refused(function, RuntimeError, "'cuda'.*(CUDA|driver|NVRTC)", randn(), -1, engine="cuda")
    refused(
        function,
        RuntimeError,
        "'cuda'",
        randn(),
        -1,
        engine="cuda",
        out=torch.empty(3 if "sum" in function else (3, 4)),
    )
    if onepass.engines()["triton"] is not None:
        refused(function, RuntimeError, "'triton'.*", randn(), -1, engine="triton")


@pytest.mark.gpu
def test_the_cpu_engine_refuses_a_gpu_tensor(function):
    with pytest.raises(RuntimeError, match=r"cpu.*cuda:0"):
        ours(function)(randn().cuda(), -1, engine="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda", "triton"])
def test_gpu_engines_refuse_a_cpu_tensor(function, engine):
    with pytest.raises(RuntimeError, match=f"{engine}.*cpu"):
        ours(function)(randn(), -1, engine=engine)
