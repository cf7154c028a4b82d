"""torch's own samples (OpInfo) of the four functions: values and gradients as torch's, and its error inputs."""

from __future__ import annotations

import pytest
import torch

from lib.support import TORCH, every_engine, ours

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


def test_all_samples_are_here():
    found = [(NAMES[op.name], op.variant_test_name) for op in OPS]
    assert sorted(found) == sorted(
        [(f, v) for f in TORCH for v in ("", "with_dtype") if (f, v) != ("logsumexp", "with_dtype")]
    )


def _arguments(sample):
    kwargs = dict(sample.kwargs)
    kwargs.pop("_stacklevel", None)
    return sample.args, kwargs


def _theirs(op, sample):
    """torch's result; of halves that of float32, rounded (on a CPU torch's log_softmax of halves rounds its sum)."""
    x = sample.input
    if x.dtype in FLOATS[2:] and not sample.kwargs.get("dtype"):
        return op(x.float(), *sample.args, **sample.kwargs).to(x.dtype)
    return op(x, *sample.args, **sample.kwargs)


@every_engine
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_values(op, dtype, engine, device):
    function = NAMES[op.name]
    if function == "softmin" and dtype in (torch.uint8, torch.bool):
        pytest.skip("torch negates before it converts, which wraps around or raises")
    samples = list(op.sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        args, kwargs = _arguments(sample)
        want = _theirs(op, sample)
        got = ours(function)(sample.input, *args, **kwargs, engine=engine)
        torch.testing.assert_close(got, want)


@every_engine
@pytest.mark.parametrize(("op", "dtype"), [p for p in PAIRS if p.values[1] in FLOATS[:2]])
def test_gradients(op, dtype, engine, device):
    function = NAMES[op.name]
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        args, kwargs = _arguments(sample)
        theirs = op(sample.input, *sample.args, **sample.kwargs)
        mine = ours(function)(sample.input, *args, **kwargs, engine=engine)
        g = torch.randn_like(theirs)
        torch.testing.assert_close(
            torch.autograd.grad(mine, sample.input, g), torch.autograd.grad(theirs, sample.input, g)
        )


@pytest.mark.parametrize("op", [op for op in OPS if op.error_inputs_func], ids=lambda op: NAMES[op.name])
def test_errors(op):
    for case in op.error_inputs("cpu"):
        args, kwargs = _arguments(case.sample_input)
        with pytest.raises(case.error_type):
            ours(NAMES[op.name])(case.sample_input.input, *args, **kwargs)
