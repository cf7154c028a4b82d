"""The operators of divergences: the terms of each pair of rows of two tensors, and their derivatives.

csrc/core/divergence_problem.h defines the terms: planes of one number per row, among them the KL divergence of two
rows of logits, or the cross-entropy of a row of logits with a row of probabilities. `onepass::divergence_terms`
computes them in one read of both tensors, and its gradient reads both once more. loss_arithmetic.py has the derivatives
of a higher order and those of function transforms.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import triton as triton_engine
from .autograd import needs_no_autograd
from .loss_arithmetic import DivergenceSpec, divergence_arithmetic, divergence_backward_arithmetic
from .loss_ops import _is_eager, _laid_out, implement
from .native import library
from .scored import _accumulator, _BelowAutograd, _is_transformed

_CALL = "int dim, bool is_kl, float factor, float softcap, float smoothing, str engine"
# Both tensors have one shape and dtype. Terms are (planes, rows), in the accumulator's dtype.
library.define(f"divergence_terms(Tensor x, Tensor y, Tensor? weight, {_CALL}) -> Tensor")
library.define(
    "divergence_terms_backward(Tensor grads, Tensor terms, Tensor x, Tensor y, Tensor? weight, bool of_x, bool of_y, "
    f"{_CALL}) -> (Tensor, Tensor)"
)
_ops = torch.ops.onepass
_operator, _backward_operator = _ops.divergence_terms.default, _ops.divergence_terms_backward.default
_forward_kernel, _backward_kernel = (
    functools.partial(torch._C._dispatch_call_boxed, op.default._handle)
    for op in (_ops._divergence_kernel, _ops._divergence_backward_kernel)
)


def divergence_terms(x: Tensor, y: Tensor, weight: Tensor | None, spec: DivergenceSpec) -> Tensor:
    """The terms of a checked call."""
    if not _is_eager(x, y):
        return _operator(x, y, weight, *spec)
    if (x.requires_grad or y.requires_grad) and torch.is_grad_enabled():
        return _record(x, y, weight, spec, True)
    return _launch(x, y, weight, spec)


# Kernels --------------------------------------------------------------------------------------------------------------


def _wide(x: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().to(_accumulator(x.dtype, x.dtype)).contiguous()


def _launch(x: Tensor, y: Tensor, weight: Tensor | None, spec: DivergenceSpec) -> Tensor:
    terms = _empty_terms(x, spec)
    tensors = x, y, _wide(x, weight), terms
    if spec.engine == "triton":
        launched = x.numel() and triton_engine.launch_divergence_forward(*tensors, spec)
    else:
        launched = x.numel() and _forward_kernel(*tensors, *spec[:-1])
    return terms if launched else divergence_arithmetic(x, y, weight, spec)


def _launch_backward(
    grads: Tensor, terms: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, of_x: bool, of_y: bool, spec: Any
) -> tuple[Tensor, Tensor]:
    dx, dy = (torch.empty_like(t) if asked else None for t, asked in ((x, of_x), (y, of_y)))
    tensors = x, y, _wide(x, weight), terms, grads.contiguous(), dx, dy
    if spec.engine == "triton":
        launched = x.numel() and triton_engine.launch_divergence_backward(*tensors, spec)
    else:
        launched = x.numel() and _backward_kernel(*tensors, *spec[:-1])
    if not launched:
        made = divergence_backward_arithmetic(grads, x, y, weight, spec)
        dx, dy = (t if t is None else _laid_out(new, t) for t, new in zip((dx, dy), made, strict=True))
    return x.new_empty(0) if dx is None else dx, y.new_empty(0) if dy is None else dy


def _empty_terms(x: Tensor, spec: DivergenceSpec) -> Tensor:
    rows = math.prod(size for d, size in enumerate(x.shape) if d != spec.dim)
    return x.new_empty((5 if spec.is_kl else 4, rows), dtype=_accumulator(x.dtype, x.dtype))


# Derivatives ----------------------------------------------------------------------------------------------------------


class DivergenceFunction(torch.autograd.Function):
    """Terms with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Any, spec: DivergenceSpec, is_eager: bool) -> Tensor:
        if is_eager:
            terms = _launch(x, y, weight, spec)
        else:
            with _BelowAutograd():
                terms = _operator(x, y, weight, *spec)
        ctx.spec = spec
        ctx.save_for_backward(terms, x, y, weight)
        return terms

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        terms, x, y, weight = ctx.saved_tensors
        of_x, of_y = ctx.needs_input_grad[:2]
        given = grads, terms, x, y, weight, of_x, of_y
        if not torch.is_grad_enabled() and _is_eager(grads, x, y):
            dx, dy = _launch_backward(*given, ctx.spec)
        else:
            dx, dy = _backward_operator(*given, *ctx.spec)
        return dx if of_x else None, dy if of_y else None, None, None, None


_record = super(torch.autograd.Function, DivergenceFunction).apply


# Registrations --------------------------------------------------------------------------------------------------------


def _autograd(x: Tensor, y: Tensor, weight: Any, *spec: Any) -> Tensor:
    if needs_no_autograd(x, y):
        with _BelowAutograd():
            return _operator(x, y, weight, *spec)
    if _is_transformed():
        return divergence_arithmetic(x, y, weight, DivergenceSpec(*spec))
    return DivergenceFunction.apply(x, y, weight, DivergenceSpec(*spec), False)


def _backward_autograd(
    grads: Tensor, terms: Tensor, x: Tensor, y: Tensor, weight: Any, of_x: bool, of_y: bool, *spec: Any
) -> tuple[Tensor, Tensor]:
    if needs_no_autograd(grads, terms, x, y):
        with _BelowAutograd():
            return _backward_operator(grads, terms, x, y, weight, of_x, of_y, *spec)
    return divergence_backward_arithmetic(grads, x, y, weight, DivergenceSpec(*spec))


@torch._disable_dynamo
def _kernel(x: Tensor, y: Tensor, weight: Any, *spec: Any) -> Tensor:
    return _launch(x, y, weight, DivergenceSpec(*spec))


@torch._disable_dynamo
def _gradient_kernel(grads: Tensor, terms: Tensor, x: Tensor, y: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    weight, of_x, of_y, *spec = given
    return _launch_backward(grads, terms, x, y, weight, of_x, of_y, DivergenceSpec(*spec))


def _fake(x: Tensor, y: Tensor, weight: Any, *spec: Any) -> Tensor:
    return _empty_terms(x, DivergenceSpec(*spec))


def _backward_fake(
    grads: Tensor, terms: Tensor, x: Tensor, y: Tensor, weight: Any, of_x: bool, of_y: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x) if of_x else x.new_empty(0), torch.empty_like(y) if of_y else y.new_empty(0)


implement("divergence_terms", _kernel, _autograd, _fake)
implement("divergence_terms_backward", _gradient_kernel, _backward_autograd, _backward_fake)
