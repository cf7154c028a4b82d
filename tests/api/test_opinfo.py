"""torch's own samples (OpInfo) under the checks of torch's own suite, with our functions and with torch's under a
patch: values, errors, gradients of both modes and orders, noncontiguous inputs, schema, fake tensors, torch.compile,
vmap."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_map

from lib.patch import with_and_without
from lib.support import TORCH, ours, slow

pytest.importorskip("expecttest", reason="torch.testing's op_db needs it")
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's batched checks tell of operators without rules

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


@pytest.mark.parametrize(("op", "dtype"), [p for p in PAIRS if p.values[1] in FLOATS[:2]])
def test_gradients_are_torchs(op, dtype, engine, device):
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


# Gradients, transforms, graphs ---------------------------------------------------------------------------------------

F64 = torch.float64


def calls(op: Any, engine: str, device: str, nth: int = 1) -> Iterator[tuple[Callable[..., Tensor], Any]]:
    """Every nth sample: our function with the sample's arguments, and the sample."""
    samples = list(op.sample_inputs(device, F64, requires_grad=True))[::nth]
    assert samples
    for sample in samples[: 3 if engine == "triton" and device == "cpu" else None]:  # an interpreter takes its time
        args, kwargs = _arguments(sample)
        yield (lambda x, a=args, k=kwargs: ours(NAMES[op.name])(x, *a, **k, engine=engine)), sample


every_nth = pytest.mark.parametrize("nth", [4, slow(1)])
CHECKS: dict[str, Callable[..., Any]] = {  # as torch's test_ops_gradients.py has them
    "fn_grad": functools.partial(gradcheck, check_batched_grad=True),
    "fn_gradgrad": functools.partial(gradgradcheck, check_batched_grad=True, gen_non_contig_grad_outputs=True),
    "forward_mode_AD": functools.partial(
        gradcheck, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    ),
    "fwgrad_bwgrad": functools.partial(
        gradgradcheck, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    ),
}


@every_nth
@pytest.mark.parametrize("check", CHECKS)
@every_op
def test_gradients(op, check, nth, engine, device):
    for f, sample in calls(op, engine, device, nth):
        x = sample.input
        if x.numel() == 0 and check != "fn_grad":
            continue
        # torch's suite is slow or fast by its environment; all elements of the large samples take minutes.
        assert CHECKS[check](f, (x,), fast_mode=x.numel() > 30 or engine == "triton")


@every_op
def test_noncontiguous_samples(op, engine, device):
    for f, sample in calls(op, engine, device):
        x, other = sample.input, sample.noncontiguous().input
        y, z = f(x), f(other)
        torch.testing.assert_close(y, z)
        g = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(z, other, g))


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


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {  # as functorch's test_ops.py
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](f(t)),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)),
    "vjpvjp": lambda f, x, t: torch.func.vjp(lambda v: torch.func.vjp(f, x)[1](v)[0], f(t))[1](x),
    "vjpjvp": lambda f, x, t: torch.func.vjp(lambda v: torch.func.jvp(f, (v,), (t,))[1], x)[1](f(t)),
    "jvpvjp": lambda f, x, t: torch.func.jvp(lambda v: torch.func.vjp(f, v)[1](f(t))[0], (x,), (t,)),
    "jvpjvp": lambda f, x, t: torch.func.jvp(lambda v: torch.func.jvp(f, (v,), (t,))[1], (x,), (t,)),
    "jvpjvpvjp": lambda f, x, t: torch.func.jvp(
        lambda u: torch.func.jvp(lambda v: torch.func.vjp(f, v)[1](f(u))[0], (u,), (t,))[1], (x,), (t,)
    ),
}


@every_nth
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_op
def test_transforms_and_vmap_of_them(op, transform, nth, engine, device):
    for f, sample in calls(op, engine, device, nth):
        x, t = sample.input.detach(), torch.randn_like(sample.input)
        mine = functools.partial(TRANSFORMS[transform], f)
        want = TRANSFORMS[transform](lambda v, s=sample: op(v, *s.args, **s.kwargs), x, t)
        torch.testing.assert_close(mine(x, t), want)
        twice = torch.func.vmap(mine, in_dims=(0, -1))(torch.stack((x, x)), torch.stack((t, t), -1))
        torch.testing.assert_close(twice, tree_map(lambda w: torch.stack((w, w)), want))


# Under a patch --------------------------------------------------------------------------------------------------------

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
