"""torch.library.opcheck on the native operators: schema, autograd, fake tensors, AOT dispatch with dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import onepass  # noqa: F401  (loads the operators)
from lib.samples import SAMPLES
from lib.support import SOFTMAXES, every_softmax, maker

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_sample = pytest.mark.parametrize("sample", SAMPLES)


@every_sample
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(function, requires_grad, sample, device):
    make, dims = SAMPLES[sample]
    x = make(maker(torch.float32, device)).detach().requires_grad_(requires_grad)
    opcheck(getattr(torch.ops.onepass, function).default, (x, dims))


def test_opcheck_keepdim(device):
    x = maker(torch.float64, device)(2, 3, 4).requires_grad_()
    for dims in ([0], [0, 2], [-1, -3]):
        opcheck(torch.ops.onepass.logsumexp.default, (x, dims, True))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, None),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@every_softmax
def test_opcheck_dtype(function, given, dtype, device):
    x = maker(given, device)(4, 7).requires_grad_()
    opcheck(getattr(torch.ops.onepass, function).default, (x, [1]), {"dtype": dtype})


@every_sample
def test_opcheck_of_the_raw_operator(function, sample, device):
    make, dims = SAMPLES[sample]
    tests = ("test_schema", "test_faketensor")
    opcheck(
        getattr(torch.ops.onepass, f"_{function}").default, (make(maker(torch.float32, device)), dims), test_utils=tests
    )


def test_opcheck_out(function, device):
    x = maker(torch.float32, device)(4, 7)
    out = torch.empty(7 if function == "logsumexp" else (4, 7), device=device)
    opcheck(
        getattr(torch.ops.onepass, function).out, (x, [0]), {"out": out}, test_utils=("test_schema", "test_faketensor")
    )


def test_operators_take_the_dims_that_torch_takes(function):
    x = maker(torch.float32)(3, 4)
    op = getattr(torch.ops.onepass, function)
    assert torch.equal(op(x, 1), op(x, [-1]))  # int[1]: one int will do
    with pytest.raises(RuntimeError, match="2"):
        op(x, [2])
    with pytest.raises(RuntimeError, match="twice"):
        op(x, [0, -2])


def test_operators_refuse_what_they_cannot_serve(function):
    op = getattr(torch.ops.onepass, function)
    with pytest.raises(RuntimeError, match=r"(?i)complex"):
        op(torch.zeros(3, dtype=torch.complex64), [0])
    with pytest.raises(RuntimeError, match=r"\[3\].*\[2\]|\[2\].*\[3\]"):
        op.out(torch.zeros(3, 3) if function == "logsumexp" else torch.zeros(3), [0], out=torch.zeros(2))


def test_there_is_an_operator_of_every_function():
    for function in (*SOFTMAXES, "logsumexp"):
        assert set(getattr(torch.ops.onepass, function).overloads()) == {"default", "out"}
