"""Other spellings of a call: what torch's functions take under other names, by position, or as Python's types.

Each case is a call of a function; what it has to do is what a function of torch's does with it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from lib.support import SOFTMAXES, every_softmax, ours, outcome, randn, slow

OF_TORCH: dict[str, Callable[..., Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmin": lambda input, *given, **named: torch.softmax(-input, *given, **named),
    "logsumexp": torch.logsumexp,
}
OF_FUNCTIONAL: dict[str, Callable[..., Tensor]] = {
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "softmin": F.softmin,
}
F64 = torch.float64
MISUSES: dict[str, Callable[..., Any]] = {
    "dim twice": lambda f, x: f(x, -1, dim=-1),
    "no input": lambda f, x: f(dim=0),
    "nothing": lambda f, x: f(),
    "unknown keyword": lambda f, x: f(x, -1, axes=1),
}
AS_TORCH: dict[str, Callable[..., Any]] = {
    "by name": lambda f, x: f(dim=1, input=x),
    "out None": lambda f, x: f(x, 0, out=None),
    "dtype by name": lambda f, x: f(x, dim=0, dtype=F64),
    "dtype by position": lambda f, x: f(x, 1, F64),
    "None by position": lambda f, x: f(x, 1, None),
    "type by position": lambda f, x: f(x, 1, float),
    "float": lambda f, x: f(x, 1, dtype=float),
    "int": lambda f, x: f(x, 1, dtype=int),
    "bool": lambda f, x: f(x, 1, dtype=bool),
    "complex": lambda f, x: f(x, 1, dtype=complex),
    "str": lambda f, x: f(x, 1, dtype=str),
    "number as dtype": lambda f, x: f(x, 1, dtype=6),
    "number by position": lambda f, x: f(x, 1, 6),
    "bool by position": lambda f, x: f(x, 1, True),
    "axis": lambda f, x: f(x, axis=0),
    "axis with dtype": lambda f, x: f(x, axis=-1, dtype=F64),
    "axis with out": lambda f, x: f(x, axis=1, out=torch.zeros(3, 4)),
    "axis out of range": lambda f, x: f(x, axis=2),
    "axis None": lambda f, x: f(x, axis=None),
    "dim None": lambda f, x: f(x, dim=None),
    "dim and axis": lambda f, x: f(x, 1, axis=1),
    "the default dim and axis": lambda f, x: f(x, dim=-1, axis=0),
    "dtype twice": lambda f, x: f(x, 1, F64, dtype=F64),
    "dtype and more": lambda f, x: f(x, 1, F64, None, None),
    "input twice": lambda f, x: f(x, input=x, dim=-1),
    "keepdim": lambda f, x: f(x, 0, keepdim=True),
    **MISUSES,
}
AS_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "stacklevel": lambda f, x: f(x, 1, _stacklevel=5),
    "stacklevel with dtype": lambda f, x: f(x, dim=1, _stacklevel=5, dtype=F64),
    "stacklevel and dtype by position": lambda f, x: f(x, 1, 3, F64),
    "stacklevel and a type by position": lambda f, x: f(x, 1, 3, float),
    "stacklevel and None by position": lambda f, x: f(x, 1, 5, None),
    "a stacklevel that is none": lambda f, x: f(x, 1, _stacklevel="3"),
    "too many": lambda f, x: f(x, 1, 3, F64, None),
}
AS_LOGSUMEXP: dict[str, Callable[..., Any]] = {
    "by name": lambda f, x: f(keepdim=True, dim=0, input=x),
    "by position": lambda f, x: f(x, 0, True),
    "out None": lambda f, x: f(x, 0, out=None),
    "axis": lambda f, x: f(x, axis=0),
    "axes": lambda f, x: f(x, axis=(0, 1)),
    "axis with out": lambda f, x: f(x, axis=1, out=torch.zeros(3)),
    "keepdims": lambda f, x: f(x, 1, keepdims=True),
    "no keepdims": lambda f, x: f(x, 1, keepdims=False),
    "both": lambda f, x: f(x, axis=1, keepdims=True),
    "keepdims and keepdim": lambda f, x: f(x, 1, keepdim=True, keepdims=True),
    "keepdims and no keepdim": lambda f, x: f(x, 1, keepdim=False, keepdims=True),
    "keepdims and keepdim by position": lambda f, x: f(x, 1, False, keepdims=True),
    "keepdims None": lambda f, x: f(x, 1, keepdims=None),
    "dim and axis": lambda f, x: f(x, 1, axis=1),
    "neither": lambda f, x: f(x),
    "axis None": lambda f, x: f(x, axis=None),
    "stacklevel": lambda f, x: f(x, 1, _stacklevel=3),
    "dtype by position": lambda f, x: f(x, 1, F64),
    "dtype": lambda f, x: f(x, 0, dtype=F64),
    "out by position": lambda f, x: f(x, 0, False, torch.empty(4)),
    **MISUSES,
}
CASES = [
    *((f, OF_TORCH[f], name, call) for f in SOFTMAXES for name, call in AS_TORCH.items()),
    *((f, OF_FUNCTIONAL[f], name, call) for f in SOFTMAXES for name, call in AS_FUNCTIONAL.items()),
    *(("logsumexp", torch.logsumexp, name, call) for name, call in AS_LOGSUMEXP.items()),
]


def cases(rarer: Callable[..., Any], nth: int = 1) -> Any:
    """All cases; those of functions that go as another does may be rarer, and all but every nth."""
    often = ("softmax", "logsumexp")
    each = [(f in often and k % nth == 0, f, judge, call) for k, (f, judge, _, call) in enumerate(CASES)]
    params = [case if is_often else rarer(*case) for is_often, *case in each]
    return pytest.mark.parametrize(
        ("function", "judge", "call"), params, ids=[f"{f}-{name}" for f, _, name, _ in CASES]
    )


@cases(pytest.param)
def test_a_call_does_what_torchs_does(function, judge, call):
    x = randn()
    want, got = outcome(call, judge, x), outcome(call, ours(function), x)
    if isinstance(want, Exception) and "by name" in str(want):
        assert type(got) is TypeError  # torch 2.11 takes a dim of None for a dimension's name; 2.13 raises a TypeError
    elif isinstance(want, Exception):
        assert type(got) is type(want)
        assert function in str(got)
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@cases(slow, 3)
def test_a_compiled_call_does_too(function, judge, call):
    x = randn()
    want = outcome(call, judge, x)
    compiled = torch.compile(lambda x: call(ours(function), x), backend="eager", fullgraph=True)
    if isinstance(want, Exception):
        with pytest.raises(Exception, match=function):
            compiled(x)
    else:
        torch.testing.assert_close(compiled(x), want)


@pytest.mark.usefixtures("fresh_compiler")
@every_softmax
def test_no_dim_is_the_last_one_compiled_too(function):
    x = randn(2, 3, 4)
    want = ours(function)(x, 2)
    for f in (ours(function), torch.compile(ours(function), backend="eager", fullgraph=True)):
        assert torch.equal(f(x), want)
        assert torch.equal(f(x, engine="cpu"), want)


def test_a_state_takes_them_too():
    x = randn()
    want = onepass.state(x, 0, True)
    for got in (onepass.state(x, axis=0, keepdims=True), onepass.state(x, dim=0, keepdims=True)):
        assert torch.equal(got.m, want.m)
        assert torch.equal(got.l, want.l)
    for twice in ({"dim": -1, "axis": 0}, {"keepdim": False, "keepdims": True}):
        with pytest.raises(TypeError, match=r"onepass.state\(\).*both"):
            onepass.state(x, **twice)


@pytest.mark.parametrize("rank", [64, 65, 130])
def test_many_dims(function, rank):
    """softmax and its gradient take any number of dims, logsumexp at most 64: as torch."""
    flat = randn(2, 3, 4)
    for x in (
        flat.reshape(2, *[1] * (rank - 3), 3, 4),
        flat.transpose(0, 2).reshape(*[1] * (rank - 3), 4, 3, 2).transpose(-1, -3),
    ):
        x = x.detach().requires_grad_()
        for dim in (-1, -3, 0, 1):
            want, got = (outcome(lambda f, x, dim=dim: f(x, dim), f, x) for f in (OF_TORCH[function], ours(function)))
            if isinstance(want, Exception):
                assert type(got) is type(want) is RuntimeError
                assert "64 dims" in str(got)
                continue
            assert got.shape == want.shape
            torch.testing.assert_close(got.flatten(), want.flatten())
            g = torch.ones(want.shape).view(-1).cumsum(0).view(want.shape)
            (mine,), (theirs,) = (torch.autograd.grad(y, x, g) for y in (got, want))
            assert mine.shape == x.shape
            torch.testing.assert_close(mine.flatten(), theirs.flatten())


@every_softmax
def test_many_dims_with_dtype_and_out_and_in_place(function):
    x = randn(2, 3).reshape([2, *[1] * 70, 3])
    want = OF_TORCH[function](x, -1)
    for dim in (-1, (3, -1), [71]):
        out = torch.zeros(x.shape)
        assert ours(function)(x, dim, out=out) is out
        torch.testing.assert_close(out.flatten(), want.flatten())
    wide = ours(function)(x, -1, dtype=F64)
    torch.testing.assert_close(wide.flatten(), OF_TORCH[function](x.flatten(0, -2).double(), -1).flatten())
    of_one = ours(function)(x.flatten().int().view(x.shape), 5, dtype=F64)  # rows of one element
    assert (of_one.flatten() == (0 if function == "log_softmax" else 1)).all()
    assert ours(function)(x, -1, out=x) is x
    torch.testing.assert_close(x.flatten(), want.flatten())
    with pytest.raises(RuntimeError, match="share memory"):
        ours(function)(x, -1, out=torch.zeros(7).as_strided(x.shape, [1] * 72))
    empty = torch.zeros([0, *[1] * 70])
    assert ours(function)(empty, 0).shape == OF_TORCH[function](empty, 0).shape
