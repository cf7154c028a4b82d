"""The operators of segments: softmax, log_softmax, logsumexp and state over the segments of a dim, and derivatives.

csrc/core/segment_problem.h defines them. `onepass::segment_forward` reads each element once.
`onepass::segment_backward` computes the gradient of x: that of the scores, factor * x + bias, times the factor.
segment_arithmetic.py has the derivatives of a higher order and those of function transforms.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, _add_batch_dim, _unwrap_batched, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from . import triton as triton_engine
from .autograd import needs_no_autograd
from .loss_ops import _is_eager, _laid_out, implement
from .native import FUNCTIONS, library
from .scored import _accumulator, _BelowAutograd, _is_transformed
from .segment_arithmetic import SegmentSpec, backward_arithmetic, forward_arithmetic
from .validation import HALF_DTYPES

_CALL = "int dim, str function, float factor"
# `offsets`: (segments + 1), int32 or int64; `order` has the same dtype. The bias has the shape of x.
library.define(
    "segment_forward(Tensor x, Tensor offsets, Tensor? order, Tensor? bias, "
    f"{_CALL}, ScalarType? dtype, str engine) -> Tensor"
)
# `y`: the result, in the accumulator's dtype for logsumexp and state. Only these two take x and the bias.
library.define(
    "segment_backward(Tensor grad, Tensor y, Tensor? x, Tensor offsets, Tensor? order, Tensor? bias, "
    f"{_CALL}, ScalarType dtype, str engine) -> Tensor"
)
_ops = torch.ops.onepass
_operator, _backward_operator = _ops.segment_forward.default, _ops.segment_backward.default
_forward_kernel, _backward_kernel = (
    functools.partial(torch._C._dispatch_call_boxed, op.default._handle)
    for op in (_ops._segment_kernel, _ops._segment_backward_kernel)
)
_NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}


def segment_call(
    x: Tensor, offsets: Tensor, order: Tensor | None, bias: Tensor | None, spec: SegmentSpec, out: Tensor | None = None
) -> Tensor:
    """The result of a checked call. `out` may be given only if autograd does not record the call."""
    if not _is_eager(x, offsets, order, bias):
        y = _operator(x, offsets, order, bias, *spec)
        return y if out is None else out.copy_(y)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _recorded(_record, x, offsets, order, bias, spec, True)
    return _launch(x, offsets, order, bias, spec, out)


# Kernels --------------------------------------------------------------------------------------------------------------


def _fuses(read: torch.dtype, made: torch.dtype) -> bool:
    """Whether kernels can read elements of dtype `read` and write a result of dtype `made`."""
    return read is made or (read in HALF_DTYPES and made is torch.float32)


def _checked(launch: Any, *given: Any) -> bool:
    """Launches a kernel. Raises ValueError for wrong offsets or a wrong order."""
    try:
        return bool(launch(*given))
    except RuntimeError as error:
        if "offsets" not in str(error) and "order" not in str(error):
            raise
        raise ValueError(str(error)) from None


def _launch(
    x: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    spec: SegmentSpec,
    out: Tensor | None = None,
) -> Tensor:
    to = spec.result_dtype(x)
    if not _fuses(x.dtype, to):
        x = x.to(to)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(_accumulator(x.dtype, x.dtype))
    y = _empty(x, offsets, spec) if out is None else out
    given = x, offsets, order, bias, y
    if spec.engine == "triton":
        launched = triton_engine.launch_segment_forward(*given, spec)
    else:
        launched = _checked(_forward_kernel, *given, _NUMBERS[spec.function], spec.dim, spec.factor)
    if launched:
        return y
    made = forward_arithmetic(x, offsets, order, bias, spec)
    return _laid_out(made, y) if out is None else out.copy_(made)


def _launch_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    offsets: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    spec: SegmentSpec,
) -> Tensor:
    dx = _empty_gradient(y, x, spec)
    if spec.function != "state":
        made = dx
        if x is not None:
            made = torch.empty_like(x)
            if bias is not None and bias.dtype is not x.dtype:
                bias = bias.to(y.dtype)
        elif not _fuses(dx.dtype, y.dtype):
            made = torch.empty_like(y)
        given = grad.to(y.dtype), y, x, offsets, order, bias, made
        if spec.engine == "triton":
            launched = triton_engine.launch_segment_backward(*given, spec)
        else:
            launched = _checked(_backward_kernel, *given, _NUMBERS[spec.function], spec.dim, spec.factor)
        if launched:
            return made if made.dtype is dx.dtype else dx.copy_(made)
    return dx.copy_(backward_arithmetic(grad, y, x, offsets, order, bias, spec))


def _empty(x: Tensor, offsets: Tensor, spec: SegmentSpec) -> Tensor:
    to = spec.result_dtype(x)
    if not spec.reduces:
        return torch.empty_like(x, dtype=to)
    shape = list(x.shape)
    shape[spec.dim] = offsets.shape[0] - 1
    return x.new_empty([2, *shape] if spec.function == "state" else shape, dtype=to)


def _empty_gradient(y: Tensor, x: Tensor | None, spec: SegmentSpec) -> Tensor:
    return torch.empty_like(y if x is None else x, dtype=spec.dtype)


# Derivatives ----------------------------------------------------------------------------------------------------------


def _recorded(apply: Any, x: Tensor, offsets: Tensor, order: Any, bias: Any, spec: SegmentSpec, eager: bool) -> Tensor:
    """A call with a gradient. For logsumexp it is computed from the result, so the unrounded result is saved."""
    to = spec.result_dtype(x)
    if spec.function == "logsumexp" and to in HALF_DTYPES:
        rounded: Tensor = apply(x, offsets, order, bias, spec._replace(dtype=torch.float32), eager).to(to)
        return rounded
    y: Tensor = apply(x, offsets, order, bias, spec, eager)
    return y


class SegmentFunction(torch.autograd.Function):
    """A call with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, order: Any, bias: Any, spec: SegmentSpec, eager: bool) -> Tensor:
        if eager:
            y = _launch(x, offsets, order, bias, spec)
        else:
            with _BelowAutograd():
                y = _operator(x, offsets, order, bias, *spec)
        ctx.spec, ctx.x_dtype, ctx.bias_dtype = spec, x.dtype, None if bias is None else bias.dtype
        kept = (x, bias) if spec.reduces else (None, None)
        ctx.save_for_backward(y, offsets, order, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, offsets, order, x, bias = ctx.saved_tensors
        of_x, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        spec = ctx.spec._replace(dtype=y.dtype if of_bias else ctx.x_dtype)
        given = grad, y, x, offsets, order, bias
        if not torch.is_grad_enabled() and _is_eager(grad, y, x, bias):
            dx = _launch_backward(*given, spec)
        else:
            dx = _backward_operator(*given, *spec)
        ds = None
        if of_bias:  # the gradient of the bias is that of the scores
            ds = dx if spec.factor == 1 else dx.to(_accumulator(dx.dtype, dx.dtype)) / spec.factor
            ds = ds.to(ctx.bias_dtype)
        return dx.to(ctx.x_dtype) if of_x else None, None, None, ds, None, None


_record = super(torch.autograd.Function, SegmentFunction).apply


def _batched(interpreter: Any, x: Tensor, offsets: Tensor, order: Any, bias: Any, spec: SegmentSpec) -> Tensor:
    """A call under vmap: the batch becomes the last dim."""
    level = interpreter.level()

    def last(t: Any) -> Any:
        if t is None:
            return None
        t, batch = _unwrap_batched(t, level)
        return t.unsqueeze(-1).expand(*t.shape, interpreter.batch_size()) if batch is None else t.movedim(batch, -1)

    where = [None if t is None else _unwrap_batched(t, level)[0] for t in (offsets, order)]
    with interpreter.lower():
        y = _operator(last(x), *where, last(bias), *spec)
    batched: Tensor = _add_batch_dim(y, y.dim() - 1, level)
    return batched


# Registrations --------------------------------------------------------------------------------------------------------


def _autograd(x: Tensor, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    if needs_no_autograd(x, bias):
        with _BelowAutograd():
            return _operator(x, offsets, order, bias, *given)
    spec = SegmentSpec(*given)
    if _is_transformed():
        interpreter = None if peek_interpreter_stack() is None else retrieve_current_functorch_interpreter()
        if interpreter is not None and interpreter.key() == TransformType.Vmap:
            return _batched(interpreter, x, offsets, order, bias, spec)
        return forward_arithmetic(x, offsets, order, bias, spec)
    return _recorded(SegmentFunction.apply, x, offsets, order, bias, spec, False)


def _backward_autograd(grad: Tensor, y: Tensor, x: Any, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    if needs_no_autograd(grad, y, x, bias):
        with _BelowAutograd():
            return _backward_operator(grad, y, x, offsets, order, bias, *given)
    return backward_arithmetic(grad, y, x, offsets, order, bias, SegmentSpec(*given))


@torch._disable_dynamo
def _kernel(x: Tensor, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    return _launch(x, offsets, order, bias, SegmentSpec(*given))


@torch._disable_dynamo
def _gradient_kernel(grad: Tensor, y: Tensor, x: Any, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    return _launch_backward(grad, y, x, offsets, order, bias, SegmentSpec(*given))


def _fake(x: Tensor, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    return _empty(x, offsets, SegmentSpec(*given))


def _gradient_fake(grad: Tensor, y: Tensor, x: Any, offsets: Tensor, order: Any, bias: Any, *given: Any) -> Tensor:
    return _empty_gradient(y, x, SegmentSpec(*given))


implement("segment_forward", _kernel, _autograd, _fake)
implement("segment_backward", _gradient_kernel, _backward_autograd, _gradient_fake)
