"""An `out` that cannot take the result is refused before anything is written, with torch's type of error if any."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from support import DTYPES, TORCH, every_function, every_softmax, ours, raised, randn, refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _out(function: str, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    return torch.empty(3 if function == "logsumexp" else (3, 4), dtype=dtype, **kwargs)


@pytest.mark.parametrize("shape", [(0,), (2, 2), (4, 3), (3, 5), (12,), (1, 3, 4), ()], ids=str)
@every_function
def test_out_of_another_shape_is_never_resized(function, shape):
    refused(function, (ValueError, RuntimeError), re.escape(str(list(shape))), randn(), -1, out=torch.zeros(shape))


def test_keepdim_counts_in_the_shape_of_out():
    refused("logsumexp", (ValueError, RuntimeError), r"\[3, 1\]", randn(), -1, out=torch.zeros(3, 1))
    refused("logsumexp", (ValueError, RuntimeError), r"\[3\]", randn(), -1, True, out=torch.zeros(3))


@pytest.mark.parametrize(
    "dtype", [d for d in (*DTYPES, torch.int64, torch.complex64) if d is not torch.float32], ids=str
)
@every_function
def test_out_of_another_dtype(function, dtype):
    if function in ("softmax", "log_softmax"):
        assert raised(TORCH[function], randn(), -1, out=_out(function, dtype=dtype)) is RuntimeError
    refused(function, RuntimeError, str(dtype), randn(), -1, out=torch.zeros_like(_out(function, dtype=dtype)))


@every_softmax
def test_out_must_have_the_dtype_asked_for(function):
    refused(function, RuntimeError, "torch.float64", randn(), -1, dtype=torch.float64, out=torch.zeros(3, 4))


@every_function
def test_out_on_another_device(function):
    out = _out(function, device="meta")
    expected = raised(torch.exp, torch.empty(out.shape), out=out)
    assert expected is RuntimeError
    refused(function, expected, "meta", randn(), -1, out=out)


@pytest.mark.parametrize("out", [[1.0], 3, np.zeros((3, 4), np.float32)], ids=["list", "int", "ndarray"])
@every_function
def test_out_is_no_tensor(function, out):
    assert raised(torch.logsumexp, randn(), -1, out=out) is TypeError
    refused(function, TypeError, type(out).__name__, randn(), -1, out=out)


@every_function
def test_out_that_is_sparse(function):
    out = torch.zeros(_out(function).shape).to_sparse()
    assert issubclass(raised(torch.logsumexp, randn(), -1, out=out), RuntimeError)
    refused(function, (RuntimeError, TypeError), "sparse", randn(), -1, out=out)


@every_function
def test_out_has_no_gradient(function):
    out = torch.zeros_like(_out(function)).requires_grad_()
    assert raised(torch.logsumexp, randn(), -1, out=out) is RuntimeError
    refused(function, RuntimeError, "grad", randn(), -1, out=out)
    x = randn().requires_grad_()
    assert raised(torch.logsumexp, x, -1, out=torch.zeros(3)) is RuntimeError
    refused(function, RuntimeError, "grad", x, -1, out=torch.zeros_like(_out(function)))
    with torch.no_grad():  # and nothing is wrong with them where no gradient is recorded
        ours(function)(x, -1, out=out)


@every_function
def test_out_with_elements_that_share_memory(function):
    shape = _out(function).shape
    out = torch.zeros(1).expand(shape)
    assert raised(torch.logsumexp, randn(), -1, out=torch.zeros(1).expand(3)) is RuntimeError
    refused(function, RuntimeError, "share|overlap", randn(), -1, out=out)
    if len(shape) == 2:
        refused(function, RuntimeError, "share|overlap", randn(), -1, out=torch.zeros(10).as_strided((3, 4), (2, 1)))


@every_function
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


@every_softmax
def test_out_of_another_width_over_the_input(function):
    base = torch.zeros(4, 8)
    refused(
        function, (RuntimeError, ValueError), "overlap|share",
        base.view(torch.float16)[:, :8], -1, dtype=torch.float32, out=base,
    )  # fmt: skip
