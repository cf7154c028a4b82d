"""torch's own samples (OpInfo) of what ends in the family's operators, with and without a patch: values, strides."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lib.patch import with_and_without

pytest.importorskip("expecttest", reason="torch.testing's op_db needs it")
from torch.testing._internal.common_methods_invocations import op_db

# By name: what is counted for its samples of floats.
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
OPS = [
    pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype)[6:]}")
    for op in op_db
    for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64)
    if op.name in SERVED and dtype in op.supported_dtypes("cpu")
]


def test_all_samples_are_here():
    assert {param.values[0].name for param in OPS} == set(SERVED)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_samples(op, dtype):
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
