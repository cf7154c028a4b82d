"""torch's own samples (OpInfo), with our functions and with torch's under a patch: values, errors, gradients,
noncontiguous inputs, schema, fake tensors, torch.compile."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode

from lib.patch import with_and_without
from lib.support import TORCH, ours, slow

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


every_op = pytest.mark.parametrize(
    "op", OPS, ids=lambda op: f"{NAMES[op.name]}{'-with_dtype' * bool(op.variant_test_name)}"
)


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
    """torch's result; of half types that of float32, rounded (on a CPU torch's log_softmax of them rounds its sum)."""
    x = sample.input
    if x.dtype in FLOATS[2:] and not sample.kwargs.get("dtype"):
        return op(x.float(), *sample.args, **sample.kwargs).to(x.dtype)
    return op(x, *sample.args, **sample.kwargs)


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


@pytest.mark.parametrize("op", [op for op in OPS if op.error_inputs_func], ids=lambda op: NAMES[op.name])
def test_errors(op):
    for case in op.error_inputs("cpu"):
        args, kwargs = _arguments(case.sample_input)
        with pytest.raises(case.error_type):
            ours(NAMES[op.name])(case.sample_input.input, *args, **kwargs)


def calls(
    op: Any, engine: str, device: str, nth: int = 1, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Callable[..., Tensor], Any]]:
    """Every nth sample: our function with the sample's arguments, and the sample."""
    samples = list(op.sample_inputs(device, dtype, requires_grad=True))[::nth]
    assert samples
    for sample in samples[: 3 if engine == "triton" and device == "cpu" else None]:  # an interpreter takes its time
        args, kwargs = _arguments(sample)
        yield (lambda x, a=args, k=kwargs: ours(NAMES[op.name])(x, *a, **k, engine=engine)), sample


every_nth = pytest.mark.parametrize("nth", [4, slow(1)])


@every_op
def test_gradients_are_torchs_and_those_of_noncontiguous_samples(op, engine, device):
    for dtype in FLOATS[:2]:
        for f, sample in calls(op, engine, device, dtype=dtype):
            x, other = sample.input, sample.noncontiguous().input
            mine, z, want = f(x), f(other), _theirs(op, sample)
            torch.testing.assert_close(mine, z)
            g = torch.randn_like(want)
            (expected,) = torch.autograd.grad(want, x, g)
            for y, leaf in ((mine, x), (z, other)):
                torch.testing.assert_close(torch.autograd.grad(y, leaf, g)[0], expected)


@every_op
def test_schema_and_fake_tensors(op, engine, device):
    """What the operators of forward and backward write, alias and shape is what they say."""
    for f, sample in calls(op, engine, device):
        for mode in (SchemaCheckMode(), CrossRefFakeMode(check_strides=True)):
            with mode:
                y = f(sample.input)
                torch.autograd.grad(y, sample.input, torch.ones_like(y))


@every_nth
@every_op
def test_compiled(op, nth, engine, device):
    """One graph for each sample's arguments, forward and backward; static and dynamic shapes take turns."""
    for i, (f, sample) in enumerate(calls(op, engine, device, nth)):
        torch.compiler.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=i % 2 == 1)
        got, want = compiled(sample.input), _theirs(op, sample)
        torch.testing.assert_close(got, want)
        g = torch.randn_like(want)
        torch.testing.assert_close(
            torch.autograd.grad(got, sample.input, g), torch.autograd.grad(want, sample.input, g)
        )


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


def test_all_samples_of_a_patch_are_here():
    assert {param.values[0].name for param in PATCHED} == set(SERVED)


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
