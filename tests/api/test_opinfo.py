"""torch's own samples (OpInfo), with our functions and with torch's under a patch: values and gradients,
noncontiguous inputs too."""

from collections import Counter

import pytest
import torch

from lib.patch import with_and_without
from lib.support import FUNCTIONS, SOFTMAXES, ours

pytest.importorskip("expecttest", reason="torch.testing's op_db needs it")
from torch.testing._internal.common_methods_invocations import op_db

NAMES = {
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "nn.functional.softmin": "softmin",
    "logsumexp": "logsumexp",
}
OPS = [op for op in op_db if op.name in NAMES]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAIRS = [
    pytest.param(op, dtype, id=f"{NAMES[op.name]}{'-with_dtype' * bool(op.variant_test_name)}-{str(dtype)[6:]}")
    for op in OPS
    for dtype in sorted(op.supported_dtypes("cpu"), key=str)
    if not dtype.is_complex and dtype in (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
]


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_values_and_gradients(op, dtype, engine, device):
    """Also of samples that are not contiguous."""
    function, recorded = NAMES[op.name], dtype in FLOATS[:2]
    if function == "softmin" and dtype in (torch.uint8, torch.bool):
        pytest.skip("torch negates before it converts, which wraps around or raises")
    samples = list(op.sample_inputs(device, dtype, requires_grad=recorded))
    assert samples
    for sample in samples:
        x, args, kwargs = sample.input, sample.args, sample.kwargs
        if dtype in FLOATS[2:] and not kwargs.get("dtype"):  # on a CPU torch's log_softmax of them rounds its sum
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
    "nn.functional.cross_entropy": "log_softmax",
    "nn.functional.multi_head_attention_forward": "softmax",
    "nn.functional.scaled_dot_product_attention": "softmax",
    "masked.softmax": "softmax",
    "masked.softmin": "softmax",
    "masked.log_softmax": "log_softmax",
    "masked.logsumexp": "logsumexp",
    "_softmax_backward_data": "softmax backward",
}
PATCHED = [
    pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype)[6:]}")
    for op in op_db
    for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64)
    if op.name in SERVED and dtype in op.supported_dtypes("cpu")
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("op", "dtype"), PATCHED)
def test_samples_under_a_patch(op, dtype):
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


def test_all_samples_are_here():
    found = [(NAMES[op.name], op.variant_test_name) for op in OPS]
    assert sorted(found) == sorted([*((f, "") for f in FUNCTIONS), *((f, "with_dtype") for f in SOFTMAXES)])
    assert {param.values[0].name for param in PATCHED} == set(SERVED)
