"""torch's own samples (OpInfo), with our functions and with torch's under a patch: values and gradients,
noncontiguous inputs too."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch

import onepass
from lib.patch import with_and_without
from lib.support import DTYPES, ours, slow

pytest.importorskip("expecttest", reason="torch.testing's op_db needs it")
# torch's name, and its variant
OPS = [(name, "") for name in ("softmax", "log_softmax", "nn.functional.softmin", "logsumexp")]
OPS += [(name, "with_dtype") for name, _ in OPS[:3]]


@functools.cache
def ops_of(name: str, variant: str | None = None) -> list[Any]:
    """Importing them takes 5 s."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.name == name and variant in (None, op.variant_test_name)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(("name", "variant"), OPS)
def test_values_and_gradients(name, variant, dtype, engine, device):
    """Also of samples that are not contiguous."""
    (op,) = ops_of(name, variant)
    function, recorded = name.removeprefix("nn.functional."), dtype in DTYPES[:2]
    if dtype not in op.supported_dtypes("cpu") or (function == "softmin" and dtype in (torch.uint8, torch.bool)):
        pytest.skip("torch takes none, or negates before it converts, which wraps around or raises")
    samples = list(op.sample_inputs(device, dtype, requires_grad=recorded))
    assert samples
    for sample in samples:
        x, args, kwargs = sample.input, sample.args, sample.kwargs
        if dtype in DTYPES[2:] and not kwargs.get("dtype"):  # on a CPU torch's log_softmax of them rounds its sum
            want = op(x.float(), *args, **kwargs).to(dtype)
        else:
            want = op(x, *args, **kwargs)
        g = torch.randn(want.shape, device=device, dtype=want.dtype)
        for leaf in (x, sample.noncontiguous().input):
            got = ours(function)(leaf, *args, **kwargs, engine=engine)
            torch.testing.assert_close(got, want)
            if recorded:
                (dx,) = torch.autograd.grad(got, leaf, g)
                (expected,) = torch.autograd.grad(want, x, g, retain_graph=True)
                torch.testing.assert_close(dx, expected)


# By name: what is counted for its floating-point samples.
SERVED = {
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "logsumexp": "logsumexp",
    "nn.functional.softmin": "softmax",
    "nn.functional.cross_entropy": "cross_entropy",
    "nn.functional.multi_head_attention_forward": "softmax",
    "nn.functional.scaled_dot_product_attention": "softmax",
    "masked.softmax": "softmax",
    "masked.softmin": "softmax",
    "masked.log_softmax": "log_softmax",
    "masked.logsumexp": "logsumexp",
    "_softmax_backward_data": "softmax backward",
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(
    "dtype", [torch.float32, slow(torch.float64), slow(torch.int64), slow(torch.complex64)], ids=str
)
@pytest.mark.parametrize("name", SERVED)
def test_samples_under_a_patch(name, dtype):
    ops = ops_of(name)
    assert ops
    for op in (op for op in ops if dtype in op.supported_dtypes("cpu")):
        check_samples(op, dtype)


def check_samples(op: Any, dtype: torch.dtype) -> None:
    counts: Counter[str] = Counter()
    for sample in op.sample_inputs("cpu", dtype):

        def call(sample=sample):
            torch.manual_seed(0)  # dropout
            y = op(sample.input, *sample.args, **sample.kwargs)
            return y if isinstance(y, tuple) else (y,)

        plain, ours, patched = with_and_without(call)
        torch.testing.assert_close(ours, plain, equal_nan=True)
        assert [y.stride() for y in ours if y is not None] == [y.stride() for y in plain if y is not None]
        counts += Counter(patched.report.served)
    if dtype.is_floating_point:
        assert set(counts) == {SERVED[op.name]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype, engine, device):
    """Values and gradients of torch's samples: classes and probabilities, of any rank."""
    (op,) = ops_of("nn.functional.cross_entropy")
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in sample.kwargs.items()
        }
        args = [v.double() if v.is_floating_point() else v for v in sample.args]
        want = op(sample.input.double(), *args, **wide)
        x = sample.input.detach().requires_grad_()
        named = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
        got = onepass.cross_entropy(x, *(v.detach() for v in sample.args), **named, engine=engine)
        assert got.dtype is dtype
        eps = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.detach().double(), want.detach(), rtol=eps, atol=eps, equal_nan=True)
        g = torch.ones_like(want)
        (dx,) = torch.autograd.grad(got, x, g.to(dtype))
        (expected,) = torch.autograd.grad(want, sample.input, g)
        torch.testing.assert_close(dx.double(), expected.double(), rtol=4 * eps, atol=eps, equal_nan=True)
