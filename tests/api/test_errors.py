"""Bad calls: the type of error that torch raises there, with what was got and what is taken, and nothing touched.

The expected type is found by running torch's namesake, or the judge that a case names. Where torch serves the call and
onepass refuses it, it is a TypeError, a ValueError or a NotImplementedError. An `out` that cannot take the result is
refused before anything is written.
"""

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import onepass
from lib.support import (
    DTYPES,
    SOFTMAXES,
    TORCH,
    every_operator,
    every_softmax,
    ours,
    outcome,
    raised,
    randn,
    refused,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
REFUSALS = (TypeError, NotImplementedError)
OUT_ERRORS = (ValueError, RuntimeError)
Judge = Callable[..., Any] | None  # None: torch's namesake


def out_of(function: str, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    return torch.zeros(3 if function == "logsumexp" else (3, 4), dtype=dtype, **kwargs)


def check(function: str, words: str, error: Any, judge: Judge, *args: Any, **kwargs: Any) -> None:
    """The call is refused with the judge's error. `error`: what that is, where the case knows; or, if the judge takes
    the call, what onepass raises in its place."""
    expected = raised(judge or TORCH.get(function, torch.logsumexp), *args, **kwargs)
    if error is None:
        assert expected is not None
    elif not isinstance(error, tuple):
        assert expected in (error, None)
    refused(function, error or expected, words, *args, **kwargs)


# Dims ---------------------------------------------------------------------------------------------------------------

DIMS = [  # dim, what the message says
    (2, r"2.*|.*\[-2, 1\]"),
    (-3, "-3"),
    (2**40, str(2**40)),
    (1.0, "1.0"),
    (True, "True"),
    ((0, 2), "2"),
    ((0, 0), r"\(0, 0\)"),
    ((0, -2), r"\(0, -2\)"),
    ((0, 1.0), "1.0"),
    ((0, "1"), "'1'"),
    ({0: 1}, r"\{0: 1\}"),
]


@pytest.mark.parametrize(("dim", "words"), DIMS, ids=lambda v: str(v)[:12])
@every_operator
def test_wrong_dim(function, dim, words):
    check(function, words, None, None if isinstance(dim, int) else torch.logsumexp, randn(), dim)  # which takes several


@every_operator
def test_dims_that_are_no_numbers(function):
    refused(function, TypeError, "'0'", randn(), "0")  # torch before 2.13 takes it for a named dim
    assert raised(torch.softmax, randn(), None)  # softmin's guess of a dim is deprecated in torch
    refused(function, TypeError, "None", randn(), None)


@pytest.mark.parametrize("dim", [1, -2, (0, 0), (0, -1)], ids=str)
@every_operator
def test_wrong_dim_of_0_d_and_of_an_empty_tensor(function, dim):
    check(function, re.escape(str(dim)), None, torch.logsumexp, torch.tensor(1.0), dim)
    check(function, "5", None, None, torch.empty(0, 3), 5)


# Inputs -------------------------------------------------------------------------------------------------------------

NOT_TENSORS = {"list": [1.0, 2.0], "None": None, "ndarray": np.zeros(3), "float": 1.0, "str": "x"}


@pytest.mark.parametrize("kind", NOT_TENSORS)
@every_operator
def test_input_is_no_tensor(function, kind):
    check(function, type(NOT_TENSORS[kind]).__name__, TypeError, torch.softmax, NOT_TENSORS[kind], 0)


def _kinds() -> dict[str, tuple[Tensor, str]]:
    """Tensors that are not served, each with what a message must say of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, rows = randn(), [torch.randn(2, 3), torch.randn(1, 3)]
        return {
            "complex64": (torch.randn(3, 4, dtype=torch.complex64), "complex64"),
            "complex128": (torch.randn(3, 4, dtype=torch.complex128), "complex128"),
            "sparse_coo": (x.to_sparse(), "sparse"),
            "sparse_csc": (x.to_sparse_csc(), "sparse"),
            "mkldnn": (x.to_mkldnn(), "mkldnn"),
            "quantised": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "qint8"),
            "nested": (torch.nested.nested_tensor(rows), "nested"),
            "float8": (x.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        }


@pytest.mark.parametrize("kind", _kinds())
@every_operator
def test_input_of_another_kind(function, kind):
    x, words = _kinds()[kind]
    # torch's type where it raises one that says so; where it serves the input, or stumbles inside: a type of refusal.
    expected = raised(TORCH.get(function, torch.logsumexp), x, -1)
    refused(function, expected if expected is NotImplementedError else REFUSALS, words, x, -1)
    if function in SOFTMAXES and kind not in ("complex128", "mkldnn", "float8"):
        refused(function, REFUSALS, words, x, -1, dtype=torch.float32)  # a dtype does not let it in
    if function == "logsumexp" and kind == "complex64":
        torch.logsumexp(x, -1)  # torch serves it
        refused(function, TypeError, "complex64.*|float32", x, -1)


@pytest.mark.parametrize("given", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@every_softmax
def test_integers_need_a_dtype(function, given):
    check(function, f"{given}.*dtype", NotImplementedError, torch.softmax, torch.ones(2, 3, dtype=given), -1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@every_softmax
def test_dtype_is_no_float(function, dtype):
    check(function, str(dtype), NotImplementedError, None, randn(), -1, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", 32, np.float32], ids=str)
@every_softmax
def test_dtype_is_no_dtype(function, dtype):
    assert raised(TORCH[function], randn(), -1, dtype="float32") is TypeError
    refused(function, TypeError, re.escape(repr(dtype)), randn(), -1, dtype=dtype)


@pytest.mark.parametrize("function", ["logsumexp", "state"])
@pytest.mark.parametrize("keepdim", ["x", None, 2, 0.0], ids=repr)
def test_keepdim_is_no_bool(function, keepdim):
    check(function, re.escape(repr(keepdim)), TypeError, None, randn(), -1, keepdim)


# Calls --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["gpu", "", "CPU", "torch", None, 3])
@every_operator
def test_unknown_engine(function, engine):
    error = ValueError if isinstance(engine, str) else (ValueError, TypeError)
    refused(function, error, repr(engine), randn(), -1, engine=engine)


@every_operator
def test_an_engine_that_cannot_run_says_why(function):
    refused(function, RuntimeError, "'cuda'.*(CUDA|driver|NVRTC)", randn(), -1, engine="cuda")
    if function != "state":
        refused(function, RuntimeError, "'cuda'", randn(), -1, engine="cuda", out=out_of(function))
    if onepass.engines()["triton"] is not None:
        refused(function, RuntimeError, "'triton'.*", randn(), -1, engine="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("engine", "device", "words"),
    [("cpu", "cuda", r"cpu.*cuda:0"), ("cuda", "cpu", "cuda.*cpu"), ("triton", "cpu", "triton.*cpu")],
)
def test_engines_refuse_a_tensor_of_another_device(function, engine, device, words):
    with pytest.raises(RuntimeError, match=words):
        ours(function)(randn().to(device), -1, engine=engine)


# out= -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (2, 2), (4, 3), (3, 5), (12,), (1, 3, 4), ()], ids=str)
def test_out_of_another_shape_is_never_resized(function, shape):
    refused(function, OUT_ERRORS, re.escape(str(list(shape))), randn(), -1, out=torch.zeros(shape))


def test_keepdim_counts_in_the_shape_of_out():
    refused("logsumexp", OUT_ERRORS, r"\[3, 1\]", randn(), -1, out=torch.zeros(3, 1))
    refused("logsumexp", OUT_ERRORS, r"\[3\]", randn(), -1, True, out=torch.zeros(3))


@pytest.mark.parametrize("dtype", [*DTYPES[1:], torch.int64, torch.complex64], ids=str)
def test_out_of_another_dtype(function, dtype):
    if function in ("softmax", "log_softmax"):
        assert raised(TORCH[function], randn(), -1, out=out_of(function, dtype=dtype)) is RuntimeError
    refused(function, RuntimeError, str(dtype), randn(), -1, out=out_of(function, dtype=dtype))
    if function != "logsumexp" and dtype in DTYPES:
        refused(function, RuntimeError, str(dtype), randn(), -1, dtype=dtype, out=torch.zeros(3, 4))


OUTS: dict[str, tuple[Callable[[str], Any], Any, str]] = {  # an out, torch's error, what the message says
    "on another device": (lambda f: out_of(f, device="meta"), RuntimeError, "meta"),
    "a list": (lambda f: [1.0], TypeError, "list"),
    "an int": (lambda f: 3, TypeError, "int"),
    "an ndarray": (lambda f: np.zeros((3, 4), np.float32), TypeError, "ndarray"),
    "sparse": (lambda f: out_of(f).to_sparse(), (RuntimeError, TypeError), "sparse"),
    "with a gradient": (lambda f: out_of(f).requires_grad_(), RuntimeError, "grad"),
    "of elements that share memory": (lambda f: torch.zeros(1).expand(out_of(f).shape), RuntimeError, "share|overlap"),
}


@pytest.mark.parametrize("case", OUTS)
def test_outs_that_are_refused(function, case):
    make, error, words = OUTS[case]
    wanted = raised(torch.logsumexp, randn(), -1, out=make("logsumexp"))
    assert wanted is not None
    assert issubclass(wanted, error)
    refused(function, error, words, randn(), -1, out=make(function))


def test_out_has_no_gradient(function):
    x = randn().requires_grad_()
    assert raised(torch.logsumexp, x, -1, out=torch.zeros(3)) is RuntimeError
    refused(function, RuntimeError, "grad", x, -1, out=out_of(function))
    with torch.no_grad():  # and nothing is wrong with them where no gradient is recorded
        ours(function)(x, -1, out=out_of(function).requires_grad_())


def test_out_that_partly_overlaps_the_input(function):
    base = randn(6, 6)
    assert raised(torch.exp, base[:-1], out=base[1:]) is RuntimeError
    if function == "logsumexp":
        refused(function, OUT_ERRORS, "overlap|share", base, -1, out=base[0])
        refused(function, OUT_ERRORS, "overlap|share", base[:1], 0, out=base[0])
    else:
        refused(function, OUT_ERRORS, "overlap|share", randn(), -1, out=torch.zeros(10).as_strided((3, 4), (2, 1)))
        wide = torch.zeros(4, 8)
        narrow = wide.view(torch.float16)[:, :8]
        refused(function, OUT_ERRORS, "overlap|share", narrow, -1, dtype=torch.float32, out=wide)
    for x, out in [
        (base[:-1], base[1:]),
        (base, base.t()),
        (base[:, :5], base[:, 1:]),
        (base[:, ::2], base[:, 2:5]),
        (base[::2], base[1:4]),
        (base.view(-1)[:-1], base.view(-1)[1:]),
        (base[:1].expand(6, 6), base),
        (randn(6, 6), torch.zeros(1).expand(6, 6)),
    ]:
        before = base.clone()
        if function != "logsumexp":
            refused(function, OUT_ERRORS, "overlap|share", x, -1, out=out)
        # The operators refuse it themselves: graphs and C++ do not come by the checks of the functions.
        with pytest.raises(RuntimeError, match=rf"onepass.{function}\(\): .*(overlap|share memory)"):
            getattr(torch.ops.onepass, function).out(x, [-1], out=out[..., 0] if function == "logsumexp" else out)
        assert torch.equal(base, before)
    columns = base[:, 3] if function == "logsumexp" else base[:, 3:]
    getattr(torch.ops.onepass, function).out(base[:, :3], [-1], out=columns)  # beside each other in every row
    assert torch.equal(columns, ours(function)(before[:, :3], -1))


SURROUNDINGS = {  # of a call of f(input, out): whose out= cannot have what it is asked for
    "a dual input": lambda f, x, out: f(forward_ad.make_dual(x, x), out),
    "a dual out": lambda f, x, out: f(x, forward_ad.make_dual(out, out)),
    "a dual input without gradients": lambda f, x, out: torch.no_grad()(f)(forward_ad.make_dual(x, x), out),
    "no dual": lambda f, x, out: f(x, out),
    "jvp": lambda f, x, out: torch.func.jvp(lambda x: f(x, out), (x,), (x,)),
    "jvp, out made inside": lambda f, x, out: torch.func.jvp(lambda x: f(x, torch.zeros_like(out)), (x,), (x,)),
    "jvp, a constant": lambda f, x, out: torch.func.jvp(lambda t: t + f(x, out).sum(), (x,), (x,))[0],
    "jvp, a constant made inside": lambda f, x, out: torch.func.jvp(
        lambda t: t + f(torch.ones_like(x), torch.zeros_like(out)).sum(), (x,), (x,)
    )[0],
    "vmap": lambda f, x, out: torch.vmap(f)(x.expand(2, 3, 4), out.expand(2, *out.shape).clone()),
    "vmap, out made inside": lambda f, x, out: torch.vmap(lambda x: f(x, torch.zeros_like(out)))(x.expand(2, 3, 4)),
    "vmap of out": lambda f, x, out: torch.vmap(lambda o: f(x, o))(out.expand(2, *out.shape).clone()),
    "vmap, a constant": lambda f, x, out: torch.vmap(lambda t: t + f(x, out).sum())(x),
    "grad": lambda f, x, out: torch.func.grad(lambda x: f(x, out).sum())(x),
    "grad of vmap": lambda f, x, out: torch.func.grad(lambda x: torch.vmap(lambda o: f(x, o))(out[None]).sum())(x),
    "vmap of grad": lambda f, x, out: torch.vmap(torch.func.grad(lambda x: f(x, out).sum()))(x.expand(2, 3, 4)),
    "grad, a constant": lambda f, x, out: torch.func.grad(lambda t: t.sum() + f(x, out).sum())(x),
    "grad, a constant made inside": lambda f, x, out: torch.func.grad(
        lambda t: (t * f(torch.ones_like(x), torch.zeros_like(out)).sum()).sum()
    )(x),
}


@pytest.mark.parametrize("case", SURROUNDINGS)
def test_transforms_and_forward_mode(function, case):
    """Where torch.logsumexp raises (torch.softmax may drop a gradient without a word) so does onepass, and says what to
    do; where it serves the call, the results are those without out=."""

    def run(named: Any) -> Any:
        out = out_of(function)
        with forward_ad.dual_level() if "dual" in case else contextlib.nullcontext():
            return outcome(SURROUNDINGS[case], lambda x, out: named(x, -1, out=out), randn(), out), out

    want, _ = run(lambda x, dim, out: torch.logsumexp(x, dim, out=out if function == "logsumexp" else out[:, 0]))
    got, out = run(ours(function))
    if isinstance(want, Exception):
        assert type(got) is type(want)
        assert re.search(rf"onepass\.{function}\(\): out=.* without out=", str(got))
        assert not out.any()
    else:
        torch.testing.assert_close(got, run(lambda x, dim, out: TORCH[function](x, dim))[0])


@pytest.mark.parametrize("input_too", [False, True])
def test_an_inference_tensor_is_written_in_inference_mode_alone(function, input_too):
    with torch.inference_mode():
        out, theirs, inference = out_of(function), out_of(function), randn()
    x = inference if input_too else randn()
    assert raised(torch.softmax if function == "softmin" else TORCH[function], x, -1, out=theirs) is RuntimeError
    for call in (
        lambda: ours(function)(x, -1, out=out),
        lambda: ours(function)(x, -1, out=out, engine="cpu"),
        lambda: getattr(torch.ops.onepass, function).out(x, [-1], out=out),
    ):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(RuntimeError, match="inference"):
                call()
        assert not out.any()
        with torch.inference_mode():
            call()
            assert torch.equal(out, ours(function)(x, -1))
            out.zero_()
    normal, version = out_of(function), 0
    with torch.inference_mode():
        ours(function)(x, -1, out=normal)
    assert normal._version > version
