"""Bad input: the type of error that torch raises there, with what was got and what is taken, and nothing touched.

Each case names the call; the expected type is found by running torch's namesake in the test. Where torch serves the
call and onepass refuses it, it is a TypeError or a ValueError (a RuntimeError where torch's other functions with
`out=` raise one).
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import onepass
from support import DTYPES, FUNCTIONS, SOFTMAXES, TORCH, every_function, every_softmax, ours

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(0))


def _raised(call: Any, *args: Any, **kwargs: Any) -> type[BaseException] | None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error)
    return None


def _check(function: str, expected: Any, got: str, *args: Any, **kwargs: Any) -> None:
    """The call raises the expected type, its message holds `got` (a pattern), and no argument is touched."""
    tensors = [t for t in (*args, *kwargs.values()) if type(t) is torch.Tensor and _readable(t)]
    before = [(t.detach().clone(), t.shape, t._version) for t in tensors]
    with pytest.raises(expected) as info:
        ours(function)(*args, **kwargs)
    message = str(info.value)
    assert re.search(got, message), f"{got!r} is not in {message!r}"
    assert function in message or "engine" in message, message
    for t, (value, shape, version) in zip(tensors, before, strict=True):
        assert t.shape == shape
        assert t._version == version
        assert torch.equal(t.detach(), value)


def _readable(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not (t.is_meta or t.is_quantized or t.is_nested)


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
@every_function
def test_wrong_dim(function, dim, got):
    x = _x()
    theirs = TORCH[function] if isinstance(dim, int) else torch.logsumexp  # which alone takes several dims
    expected = _raised(theirs, x, dim)
    assert expected is not None
    _check(function, expected, got, x, dim)


@every_function
def test_dim_none_names_no_dim(function):
    assert _raised(torch.softmax, _x(), None) is TypeError  # softmin's guess of a dim is deprecated in torch
    _check(function, TypeError, "None", _x(), None)


@pytest.mark.parametrize("dim", [1, -2, (0, 0), (0, -1)], ids=str)
@every_function
def test_wrong_dim_of_0_d(function, dim):
    x = torch.tensor(1.0)
    expected = _raised(torch.logsumexp, x, dim)
    assert expected in (IndexError, RuntimeError)
    _check(function, expected, re.escape(str(dim)), x, dim)


@every_function
def test_wrong_dim_of_an_empty_tensor(function):
    x = torch.empty(0, 3)
    _check(function, _raised(TORCH[function], x, 5), "5", x, 5)


# Inputs -------------------------------------------------------------------------------------------------------------

NOT_TENSORS = {"list": [1.0, 2.0], "None": None, "ndarray": np.zeros(3), "float": 1.0, "str": "x"}


@pytest.mark.parametrize("kind", NOT_TENSORS)
@every_function
def test_input_is_no_tensor(function, kind):
    assert _raised(torch.softmax, NOT_TENSORS[kind], 0) is TypeError
    _check(function, TypeError, type(NOT_TENSORS[kind]).__name__, NOT_TENSORS[kind], 0)


def _kinds() -> dict[str, tuple[torch.Tensor, str]]:
    """Tensors that are not served, each with what a message must say of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = _x()
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
@every_function
def test_input_of_another_kind(function, kind):
    x, got = _kinds()[kind]
    # torch's type where it raises one that says so; where it serves the input, or stumbles inside: a type of refusal.
    expected = _raised(TORCH[function], x, -1)
    refusals = (TypeError, NotImplementedError)
    _check(function, expected if expected is NotImplementedError else refusals, got, x, -1)


@pytest.mark.parametrize("kind", ["complex64", "sparse_coo", "sparse_csr", "quantised", "nested", "jagged"])
@every_softmax
def test_dtype_does_not_let_them_in(function, kind):
    x, got = _kinds()[kind]
    _check(function, (TypeError, NotImplementedError), got, x, -1, dtype=torch.float32)


def test_logsumexp_of_complex_is_a_type_error():
    torch.logsumexp(_kinds()["complex64"][0], -1)  # torch serves it
    _check("logsumexp", TypeError, "complex64.*|float32", _kinds()["complex64"][0], -1)


@pytest.mark.parametrize("given", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@every_softmax
def test_integers_need_a_dtype(function, given):
    x = torch.ones(2, 3, dtype=given)
    expected = _raised(torch.softmax, x, -1)
    assert expected is NotImplementedError
    _check(function, expected, f"{given}.*dtype", x, -1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@every_softmax
def test_dtype_is_no_float(function, dtype):
    expected = _raised(TORCH[function], _x(), -1, dtype=dtype)
    assert expected is NotImplementedError
    _check(function, expected, str(dtype), _x(), -1, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", 32, np.float32], ids=str)
@every_softmax
def test_dtype_is_no_dtype(function, dtype):
    assert _raised(TORCH[function], _x(), -1, dtype="float32") is TypeError
    _check(function, TypeError, re.escape(repr(dtype)), _x(), -1, dtype=dtype)


@pytest.mark.parametrize("keepdim", ["x", None, 2, 0.0], ids=repr)
def test_keepdim_is_no_bool(keepdim):
    assert _raised(torch.logsumexp, _x(), -1, keepdim) is TypeError
    _check("logsumexp", TypeError, re.escape(repr(keepdim)), _x(), -1, keepdim)


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
    assert _raised(call, TORCH[function], _x()) is TypeError
    with pytest.raises(TypeError, match=function):
        call(ours(function), _x())


@every_softmax
def test_dtype_and_out_are_keywords(function):
    with pytest.raises(TypeError, match=function):
        ours(function)(_x(), -1, torch.float64)


# Engines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["gpu", "", "CPU", "torch"])
@every_function
def test_unknown_engine(function, engine):
    _check(function, ValueError, f"'{engine}'", _x(), -1, engine=engine)


@pytest.mark.parametrize("engine", [None, 3], ids=str)
@every_function
def test_engine_of_another_kind(function, engine):
    _check(function, (ValueError, TypeError), repr(engine), _x(), -1, engine=engine)


@every_function
def test_an_engine_that_cannot_run_says_why(function):
    _check(function, RuntimeError, "'cuda'.*(CUDA|driver|NVRTC)", _x(), -1, engine="cuda")
    _check(
        function, RuntimeError, "'cuda'", _x(), -1, engine="cuda", out=torch.empty(3 if "sum" in function else (3, 4))
    )
    if onepass.engines()["triton"] is not None:
        _check(function, RuntimeError, "'triton'.*", _x(), -1, engine="triton")


@pytest.mark.gpu
@every_function
def test_the_cpu_engine_refuses_a_gpu_tensor(function):
    with pytest.raises(RuntimeError, match=r"cpu.*cuda:0"):
        ours(function)(_x().cuda(), -1, engine="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda", "triton"])
@every_function
def test_gpu_engines_refuse_a_cpu_tensor(function, engine):
    with pytest.raises(RuntimeError, match=f"{engine}.*cpu"):
        ours(function)(_x(), -1, engine=engine)


# out ----------------------------------------------------------------------------------------------------------------


def _out(function: str, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    return torch.empty(3 if function == "logsumexp" else (3, 4), dtype=dtype, **kwargs)


@pytest.mark.parametrize("shape", [(0,), (2, 2), (4, 3), (3, 5), (12,), (1, 3, 4), ()], ids=str)
@every_function
def test_out_of_another_shape_is_never_resized(function, shape):
    _check(function, (ValueError, RuntimeError), re.escape(str(list(shape))), _x(), -1, out=torch.zeros(shape))


def test_keepdim_counts_in_the_shape_of_out():
    _check("logsumexp", (ValueError, RuntimeError), r"\[3, 1\]", _x(), -1, out=torch.zeros(3, 1))
    _check("logsumexp", (ValueError, RuntimeError), r"\[3\]", _x(), -1, True, out=torch.zeros(3))


@pytest.mark.parametrize(
    "dtype", [d for d in (*DTYPES, torch.int64, torch.complex64) if d is not torch.float32], ids=str
)
@every_function
def test_out_of_another_dtype(function, dtype):
    if function in ("softmax", "log_softmax"):
        assert _raised(TORCH[function], _x(), -1, out=_out(function, dtype=dtype)) is RuntimeError
    _check(function, RuntimeError, str(dtype), _x(), -1, out=torch.zeros_like(_out(function, dtype=dtype)))


@every_softmax
def test_out_must_have_the_dtype_asked_for(function):
    _check(function, RuntimeError, "torch.float64", _x(), -1, dtype=torch.float64, out=torch.zeros(3, 4))


@every_function
def test_out_on_another_device(function):
    out = _out(function, device="meta")
    expected = _raised(torch.exp, torch.empty(out.shape), out=out)
    assert expected is RuntimeError
    _check(function, expected, "meta", _x(), -1, out=out)


@pytest.mark.parametrize("out", [[1.0], 3, np.zeros((3, 4), np.float32)], ids=["list", "int", "ndarray"])
@every_function
def test_out_is_no_tensor(function, out):
    assert _raised(torch.logsumexp, _x(), -1, out=out) is TypeError
    _check(function, TypeError, type(out).__name__, _x(), -1, out=out)


@every_function
def test_out_that_is_sparse(function):
    out = torch.zeros(_out(function).shape).to_sparse()
    assert issubclass(_raised(torch.logsumexp, _x(), -1, out=out), RuntimeError)
    _check(function, (RuntimeError, TypeError), "sparse", _x(), -1, out=out)


@every_function
def test_out_has_no_gradient(function):
    out = torch.zeros_like(_out(function)).requires_grad_()
    assert _raised(torch.logsumexp, _x(), -1, out=out) is RuntimeError
    _check(function, RuntimeError, "grad", _x(), -1, out=out)
    x = _x().requires_grad_()
    assert _raised(torch.logsumexp, x, -1, out=torch.zeros(3)) is RuntimeError
    _check(function, RuntimeError, "grad", x, -1, out=torch.zeros_like(_out(function)))
    with torch.no_grad():  # and nothing is wrong with them where no gradient is recorded
        ours(function)(x, -1, out=out)


@every_function
def test_out_with_elements_that_share_memory(function):
    shape = _out(function).shape
    out = torch.zeros(1).expand(shape)
    assert _raised(torch.logsumexp, _x(), -1, out=torch.zeros(1).expand(3)) is RuntimeError
    _check(function, RuntimeError, "share|overlap", _x(), -1, out=out)
    if len(shape) == 2:
        _check(function, RuntimeError, "share|overlap", _x(), -1, out=torch.zeros(10).as_strided((3, 4), (2, 1)))


@every_function
def test_out_that_partly_overlaps_the_input(function):
    base = _x(6, 6)
    assert _raised(torch.exp, base[:-1], out=base[1:]) is RuntimeError
    if function == "logsumexp":
        _check(function, (RuntimeError, ValueError), "overlap|share", base, -1, out=base[0])
        _check(function, (RuntimeError, ValueError), "overlap|share", base[:1], 0, out=base[0])
        return
    for x, out in [
        (base[:-1], base[1:]),
        (base, base.t()),
        (base[:, :5], base[:, 1:]),
        (base[::2], base[1:4]),
        (base.view(-1)[:-1], base.view(-1)[1:]),
        (base[:1].expand(6, 6), base),
    ]:
        _check(function, (RuntimeError, ValueError), "overlap|share", x, -1, out=out)


@every_softmax
def test_out_of_another_width_over_the_input(function):
    base = torch.zeros(4, 8)
    _check(
        function, (RuntimeError, ValueError), "overlap|share",
        base.view(torch.float16)[:, :8], -1, dtype=torch.float32, out=base,
    )  # fmt: skip
