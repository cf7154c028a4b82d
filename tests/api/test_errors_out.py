"""An `out` that cannot take the result is refused before anything is written, with torch's type of error if any."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from lib.support import DTYPES, TORCH, every_softmax, ours, raised, randn, refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _out(function: str, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    return torch.empty(3 if function == "logsumexp" else (3, 4), dtype=dtype, **kwargs)


@pytest.mark.parametrize("shape", [(0,), (2, 2), (4, 3), (3, 5), (12,), (1, 3, 4), ()], ids=str)
def test_out_of_another_shape_is_never_resized(function, shape):
    refused(function, (ValueError, RuntimeError), re.escape(str(list(shape))), randn(), -1, out=torch.zeros(shape))


def test_keepdim_counts_in_the_shape_of_out():
    refused("logsumexp", (ValueError, RuntimeError), r"\[3, 1\]", randn(), -1, out=torch.zeros(3, 1))
    refused("logsumexp", (ValueError, RuntimeError), r"\[3\]", randn(), -1, True, out=torch.zeros(3))


@pytest.mark.parametrize(
    "dtype", [d for d in (*DTYPES, torch.int64, torch.complex64) if d is not torch.float32], ids=str
)
def test_out_of_another_dtype(function, dtype):
    if function in ("softmax", "log_softmax"):
        assert raised(TORCH[function], randn(), -1, out=_out(function, dtype=dtype)) is RuntimeError
    refused(function, RuntimeError, str(dtype), randn(), -1, out=torch.zeros_like(_out(function, dtype=dtype)))


@every_softmax
def test_out_must_have_the_dtype_asked_for(function):
    refused(function, RuntimeError, "torch.float64", randn(), -1, dtype=torch.float64, out=torch.zeros(3, 4))


def test_out_on_another_device(function):
    out = _out(function, device="meta")
    expected = raised(torch.exp, torch.empty(out.shape), out=out)
    assert expected is RuntimeError
    refused(function, expected, "meta", randn(), -1, out=out)


@pytest.mark.parametrize("out", [[1.0], 3, np.zeros((3, 4), np.float32)], ids=["list", "int", "ndarray"])
def test_out_is_no_tensor(function, out):
    assert raised(torch.logsumexp, randn(), -1, out=out) is TypeError
    refused(function, TypeError, type(out).__name__, randn(), -1, out=out)


def test_out_that_is_sparse(function):
    out = torch.zeros(_out(function).shape).to_sparse()
    assert issubclass(raised(torch.logsumexp, randn(), -1, out=out), RuntimeError)
    refused(function, (RuntimeError, TypeError), "sparse", randn(), -1, out=out)


def test_out_has_no_gradient(function):
    out = torch.zeros_like(_out(function)).requires_grad_()
    assert raised(torch.logsumexp, randn(), -1, out=out) is RuntimeError
    refused(function, RuntimeError, "grad", randn(), -1, out=out)
    x = randn().requires_grad_()
    assert raised(torch.logsumexp, x, -1, out=torch.zeros(3)) is RuntimeError
    refused(function, RuntimeError, "grad", x, -1, out=torch.zeros_like(_out(function)))
    with torch.no_grad():  # and nothing is wrong with them where no gradient is recorded
        ours(function)(x, -1, out=out)


def test_out_with_elements_that_share_memory(function):
    shape = _out(function).shape
    out = torch.zeros(1).expand(shape)
    assert raised(torch.logsumexp, randn(), -1, out=torch.zeros(1).expand(3)) is RuntimeError
    refused(function, RuntimeError, "share|overlap", randn(), -1, out=out)
    if len(shape) == 2:
        refused(function, RuntimeError, "share|overlap", randn(), -1, out=torch.zeros(10).as_strided((3, 4), (2, 1)))


def test_out_that_partly_overlaps_the_input(function):
    base = randn(6, 6)
    assert raised(torch.exp, base[:-1], out=base[1:]) is RuntimeError
    if function == "logsumexp":
        refused(function, (RuntimeError, ValueError), "overlap|share", base, -1, out=base[0])
        refused(function, (RuntimeError, ValueError), "overlap|share", base[:1], 0, out=base[0])
        return
    for x, out in [
        (base[:-1], base[1:]),
        (base, base.t()),
        (base[:, :5], base[:, 1:]),
        (base[::2], base[1:4]),
        (base.view(-1)[:-1], base.view(-1)[1:]),
        (base[:1].expand(6, 6), base),
    ]:
        refused(function, (RuntimeError, ValueError), "overlap|share", x, -1, out=out)


def test_the_operators_refuse_an_overlap_themselves(function):
    """Whoever calls them: graphs and C++ do not come by the checks of the functions."""
    operator = getattr(torch.ops.onepass, function).out
    base = randn(6, 6)
    before = base.clone()
    for x, out in [
        (base[:-1], base[1:]),
        (base, base.t()),
        (base[:, ::2], base[:, 2:5]),
        (base[:1].expand(6, 6), base),
        (randn(6, 6), torch.zeros(1).expand(6, 6)),
    ]:
        with pytest.raises(RuntimeError, match=rf"onepass.{function}\(\): .*(overlap|share memory)"):
            operator(x, [-1], out=out[:, 0] if function == "logsumexp" else out)
        assert torch.equal(base, before)
    columns = base[:, 3] if function == "logsumexp" else base[:, 3:]
    operator(base[:, :3], [-1], out=columns)  # beside each other in every row
    assert torch.equal(columns, ours(function)(before[:, :3], -1))


@every_softmax
def test_out_of_another_width_over_the_input(function):
    base = torch.zeros(4, 8)
    refused(
        function, (RuntimeError, ValueError), "overlap|share",
        base.view(torch.float16)[:, :8], -1, dtype=torch.float32, out=base,
    )  # fmt: skip


# Surroundings --------------------------------------------------------------------------------------------------------

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
        out = _out(function).zero_()
        with forward_ad.dual_level() if "dual" in case else contextlib.nullcontext():
            try:
                return SURROUNDINGS[case](lambda x, out: named(x, -1, out=out), randn(), out), out
            except Exception as error:
                return error, out

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
        out, inference = _out(function).zero_(), randn()
    x = inference if input_too else randn()
    torchs = torch.softmax if function == "softmin" else TORCH[function]
    with torch.inference_mode():
        theirs = out.clone()
    assert raised(torchs, x, -1, out=theirs) is RuntimeError
    for call in (
        lambda: ours(function)(x, -1, out=out),
        lambda: ours(function)(x, -1, out=out, engine="cpu"),
        lambda: getattr(torch.ops.onepass, function).out(x, [-1], out=out),
    ):
        with pytest.raises(RuntimeError, match="inference"):
            call()
        with torch.no_grad(), pytest.raises(RuntimeError, match="inference"):
            call()
        assert not out.any()
    for engine in ("auto", "cpu"):
        with torch.inference_mode():
            out.zero_()
            ours(function)(x, -1, out=out, engine=engine)
            assert torch.equal(out, ours(function)(x, -1))
            getattr(torch.ops.onepass, function).out(x, [-1], out=out)
    normal, version = _out(function), 0
    with torch.inference_mode():
        ours(function)(x, -1, out=normal)
    assert normal._version > version
