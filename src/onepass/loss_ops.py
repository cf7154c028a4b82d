"""The operators of losses: the terms of each row that losses are made of, and their derivatives.

csrc/core/loss_problem.h defines the terms: planes of one number per row, among them the logsumexp, negative
log-probabilities and the entropy. `onepass::loss_terms` computes them in one read of the input, and its gradient reads
the input once more. `onepass::cross_entropy` computes losses from them in the same launch. loss_arithmetic.py has the
derivatives of a higher order and those of function transforms.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from . import triton as triton_engine
from .autograd import PLAIN_TYPES, needs_no_autograd
from .loss_arithmetic import (
    LossSpec,
    cross_arithmetic,
    cross_backward_arithmetic,
    loss_dtype,
    ordered_sum,
    terms_arithmetic,
    terms_backward_arithmetic,
    weight_of,
)
from .native import library
from .scored import _accumulator, _BelowAutograd, _dispatch_modes, _function_modes, _is_transformed
from .validation import overlap

_CALL = (
    "int dim, float factor, float softcap, bool spread, bool entropy, bool is_cross, int ignore_index, "
    "float smoothing, float z_loss, bool wide, str engine"
)
# `index`: (rows, picks), or (rows) for a cross-entropy. `scale`: (rows). Rows are all dims of the input but `dim`,
# flattened. Terms are (planes, rows), in the accumulator's dtype.
library.define(f"loss_terms(Tensor input, Tensor? index, Tensor? weight, Tensor? scale, {_CALL}) -> Tensor")
library.define(
    "loss_terms_backward(Tensor grads, Tensor terms, Tensor input, Tensor? index, Tensor? weight, Tensor? scale, "
    f"{_CALL}) -> Tensor"
)
# Returns the loss, which is (rows) without a reduction; the terms; the sum of the weights of the rows' classes, for a
# mean or a sum.
library.define(
    f"cross_entropy(Tensor input, Tensor index, Tensor? weight, str reduction, {_CALL}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "cross_entropy_backward(Tensor grad, Tensor? grad_terms, Tensor terms, Tensor total, Tensor input, Tensor index, "
    f"Tensor? weight, str reduction, {_CALL}) -> Tensor"
)
_ops = torch.ops.onepass
_terms_operator, _terms_backward_operator = _ops.loss_terms.default, _ops.loss_terms_backward.default
_cross_operator, _cross_backward_operator = _ops.cross_entropy.default, _ops.cross_entropy_backward.default
_forward_kernel, _backward_kernel = (
    functools.partial(torch._C._dispatch_call_boxed, op.default._handle)
    for op in (_ops._loss_kernel, _ops._loss_backward_kernel)
)


def loss_terms(x: Tensor, index: Tensor | None, weight: Tensor | None, scale: Tensor | None, spec: LossSpec) -> Tensor:
    """The terms of a checked call."""
    if not _is_eager(x, scale):
        return _terms_operator(x, index, weight, scale, *spec)
    if x.requires_grad and torch.is_grad_enabled():
        return _record_terms(x, index, weight, scale, spec, True)
    return _launch_terms(x, index, weight, scale, spec)


def cross_entropy(
    x: Tensor, index: Tensor, weight: Tensor | None, reduction: str, in_place: bool, alone: bool, spec: LossSpec
) -> tuple[Tensor, ...]:
    """The results of the operator for a checked call. With `alone` only the loss need be returned. `in_place`: whether
    the gradient may overwrite the input."""
    if not _is_eager(x):
        return _cross_operator(x, index, weight, reduction, *spec)
    if x.requires_grad and torch.is_grad_enabled():
        results = _record_cross(x, index, weight, reduction, in_place, alone, spec, True)
        return (results,) if alone else results
    return _launch_cross(x, index, weight, reduction, spec)


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or transforms a call; eager autograd may record it. Then its kernels can be called
    directly, which saves the dispatcher's two calls back into Python."""
    if torch.compiler.is_compiling() or _function_modes() or _dispatch_modes() or _is_transformed():
        return False
    return all(
        t is None or (type(t) in PLAIN_TYPES and (t.is_cpu or t.is_cuda) and not is_legacy_batchedtensor(t))
        for t in tensors
    )


# Kernels --------------------------------------------------------------------------------------------------------------


def _numbers(spec: LossSpec) -> tuple[Any, ...]:
    return spec[:-1]


def _wide_weight(x: Tensor, weight: Tensor | None, spread: bool) -> tuple[Tensor | None, Tensor | None]:
    """(weights as kernels take them, their sum if `spread` is True)."""
    if weight is None:
        return None, None
    weight = weight.detach().to(_accumulator(x.dtype, x.dtype)).contiguous()
    return weight, ordered_sum(weight) if spread else None


def _checked(launch: Callable[..., Any], *given: Any) -> bool:
    """Launches a kernel. Raises IndexError, as torch does, for a class that does not exist."""
    try:
        return bool(launch(*given))
    except RuntimeError as error:
        if "is out of range" not in str(error):
            raise
        raise IndexError(str(error)) from None


def _launch_terms(
    x: Tensor, index: Tensor | None, weight: Tensor | None, scale: Tensor | None, spec: LossSpec
) -> Tensor:
    picks = 0 if index is None else index.shape[-1]
    if x.numel():
        terms = _empty_terms(x, picks, spec)
        tensors = x, index, *_wide_weight(x, weight, spec.spread), scale, terms, None
        if spec.engine == "triton":
            if triton_engine.launch_loss_forward(*tensors, spec):
                return terms
        elif _checked(_forward_kernel, *tensors, None, None, False, *_numbers(spec)):
            return terms
    return terms_arithmetic(x, index, weight, scale, spec)


def _launch_terms_backward(
    grads: Tensor,
    terms: Tensor,
    x: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    spec: LossSpec,
) -> Tensor:
    dx = torch.empty_like(x)
    tensors = x, terms, index, *_wide_weight(x, weight, spec.spread), scale, grads.contiguous(), None, None, dx
    if not x.numel() or _launch_gradient(tensors, spec):
        return dx
    return _laid_out(terms_backward_arithmetic(grads, x, index, weight, scale, spec, terms), x)


def _launch_gradient(tensors: tuple[Any, ...], spec: LossSpec) -> bool:
    if spec.engine == "triton":
        launch: Callable[..., bool] = triton_engine.launch_loss_backward
        return launch(*tensors, spec)
    return bool(_backward_kernel(*tensors, *_numbers(spec)))


def _launch_cross(
    x: Tensor, index: Tensor, weight: Tensor | None, reduction: str, spec: LossSpec
) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel():
        return cross_arithmetic(x, index, weight, reduction, spec)
    wide, to = _accumulator(x.dtype, x.dtype), loss_dtype(x, spec)
    terms = x.new_empty((3, index.numel()), dtype=wide)  # takes half the time of torch.empty
    given = x, index, *_wide_weight(x, weight, spec.spread), None, terms
    result = loss = total = None
    if reduction == "none":
        result = x.new_empty(index.shape, dtype=to)
    elif spec.engine != "triton":
        loss, total = x.new_empty((), dtype=to if x.is_cuda else wide), x.new_empty((), dtype=wide)
    if spec.engine == "triton":
        launched = triton_engine.launch_loss_forward(*given, result, spec)
    else:
        launched = _checked(_forward_kernel, *given, result, loss, total, reduction == "mean", *_numbers(spec))
    if not launched:
        return cross_arithmetic(x, index, weight, reduction, spec)
    if result is not None:
        return result, terms, terms.new_empty(0)
    if loss is None or total is None:
        total = ordered_sum(weight_of(index, weight, wide, spec)[1])
        loss = ordered_sum(terms[2], torch.float64)
        loss = loss / total if reduction == "mean" else loss
    return loss if loss.dtype is to else loss.to(to), terms, total


def _launch_cross_backward(
    grad: Tensor,
    grad_terms: Tensor | None,
    terms: Tensor,
    total: Tensor,
    x: Tensor,
    index: Tensor,
    weight: Tensor | None,
    reduction: str,
    spec: LossSpec,
    in_place: bool = False,
) -> Tensor:
    if in_place and overlap(x, x) == "same":
        dx = x.detach()
        torch.autograd.graph.increment_version(x)
    else:
        dx = torch.empty_like(x)
    own = _wide_weight(x, weight, spec.spread)
    grad = grad.expand(index.shape).contiguous() if reduction == "none" else grad
    grad_lse = None if grad_terms is None else grad_terms[1].contiguous()
    divisor = total if reduction == "mean" else None
    tensors = x, terms, index, *own, None, grad, divisor, grad_lse, dx
    if not x.numel() or _launch_gradient(tensors, spec):
        return dx
    return _laid_out(cross_backward_arithmetic(grad, grad_terms, total, x, index, weight, reduction, spec), x)


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    like = torch.empty_like(like)
    return t if t.stride() == like.stride() else like.copy_(t)


def _empty_terms(x: Tensor, picks: int, spec: LossSpec) -> Tensor:
    rows = math.prod(size for d, size in enumerate(x.shape) if d != spec.dim)
    return x.new_empty((spec.planes(picks), rows), dtype=_accumulator(x.dtype, x.dtype))


# Derivatives ----------------------------------------------------------------------------------------------------------


class TermsFunction(torch.autograd.Function):
    """Terms with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Any, weight: Any, scale: Any, spec: LossSpec, is_eager: bool) -> Tensor:
        if is_eager:
            terms = _launch_terms(x, index, weight, scale, spec)
        else:
            with _BelowAutograd():
                terms = _terms_operator(x, index, weight, scale, *spec)
        ctx.spec = spec
        ctx.save_for_backward(terms, x, index, weight, scale)
        return terms

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        terms, x, index, weight, scale = ctx.saved_tensors
        if not torch.is_grad_enabled() and _is_eager(grads, x):
            dx = _launch_terms_backward(grads, terms, x, index, weight, scale, ctx.spec)
        else:
            dx = _terms_backward_operator(grads, terms, x, index, weight, scale, *ctx.spec)
        return dx, None, None, None, None, None


class CrossFunction(torch.autograd.Function):
    """A cross-entropy with a gradient. `grad_terms` is the gradient of the logsumexp if the caller uses that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        weight: Any,
        reduction: str,
        in_place: bool,
        alone: bool,
        spec: LossSpec,
        is_eager: bool,
    ) -> Any:
        if is_eager:
            loss, terms, total = _launch_cross(x, index, weight, reduction, spec)
        else:
            with _BelowAutograd():
                loss, terms, total = _cross_operator(x, index, weight, reduction, *spec)
        ctx.spec, ctx.reduction, ctx.in_place = spec, reduction, in_place
        ctx.save_for_backward(terms, total, x, index, weight)
        ctx.set_materialize_grads(False)
        if alone:  # every further result takes CPU time, in the forward and in the backward
            return loss
        ctx.mark_non_differentiable(total)
        return loss, terms, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_terms: Any = None, _: Any = None) -> tuple[Tensor | None, ...]:
        terms, total, x, index, weight = ctx.saved_tensors
        dx = None
        if grad is not None or grad_terms is not None:
            if grad is None:
                shape = index.shape if ctx.reduction == "none" else ()
                grad = x.new_zeros(shape, dtype=loss_dtype(x, ctx.spec))
            tensors = terms, total, x, index, weight
            if not torch.is_grad_enabled() and _is_eager(grad, x):
                dx = _launch_cross_backward(grad, grad_terms, *tensors, ctx.reduction, ctx.spec, ctx.in_place)
            else:
                dx = _cross_backward_operator(grad, grad_terms, *tensors, ctx.reduction, *ctx.spec)
        return dx, None, None, None, None, None, None, None


# `apply` without its checks for transforms, which an eager call does not need.
_record_terms = super(torch.autograd.Function, TermsFunction).apply
_record_cross = super(torch.autograd.Function, CrossFunction).apply


# Registrations --------------------------------------------------------------------------------------------------------


def implement(name: str, kernel: Callable[..., Any], autograd: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator's kernel for devices, its kernel for autograd and transforms, and its fake kernel."""
    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    for key in ("CPU", "CUDA", "XPU"):
        library.impl(name, kernel, key)
    for key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(name, autograd, key)


def _terms_autograd(x: Tensor, index: Any, weight: Any, scale: Any, *spec: Any) -> Tensor:
    if needs_no_autograd(x, scale):
        with _BelowAutograd():
            return _terms_operator(x, index, weight, scale, *spec)
    if _is_transformed():
        return terms_arithmetic(x, index, weight, scale, LossSpec(*spec))
    return TermsFunction.apply(x, index, weight, scale, LossSpec(*spec), False)


def _terms_backward_autograd(
    grads: Tensor, terms: Tensor, x: Tensor, index: Any, weight: Any, scale: Any, *spec: Any
) -> Tensor:
    if needs_no_autograd(grads, terms, x, scale):
        with _BelowAutograd():
            return _terms_backward_operator(grads, terms, x, index, weight, scale, *spec)
    return terms_backward_arithmetic(grads, x, index, weight, scale, LossSpec(*spec))


def _cross_autograd(x: Tensor, index: Tensor, weight: Any, reduction: str, *spec: Any) -> Any:
    if needs_no_autograd(x):
        with _BelowAutograd():
            return _cross_operator(x, index, weight, reduction, *spec)
    if _is_transformed():
        return cross_arithmetic(x, index, weight, reduction, LossSpec(*spec))
    return CrossFunction.apply(x, index, weight, reduction, False, False, LossSpec(*spec), False)


def _cross_backward_autograd(
    grad: Tensor, grad_terms: Any, terms: Tensor, total: Tensor, x: Tensor, index: Any, weight: Any, *given: Any
) -> Tensor:
    reduction, *spec = given
    if needs_no_autograd(grad, grad_terms, terms, x):
        with _BelowAutograd():
            return _cross_backward_operator(grad, grad_terms, terms, total, x, index, weight, reduction, *spec)
    return cross_backward_arithmetic(grad, grad_terms, total, x, index, weight, reduction, LossSpec(*spec))


@torch._disable_dynamo
def _terms_kernel(x: Tensor, index: Any, weight: Any, scale: Any, *spec: Any) -> Tensor:
    return _launch_terms(x, index, weight, scale, LossSpec(*spec))


@torch._disable_dynamo
def _terms_backward_kernel(grads: Tensor, terms: Tensor, x: Tensor, *given: Any) -> Tensor:
    index, weight, scale, *spec = given
    return _launch_terms_backward(grads, terms, x, index, weight, scale, LossSpec(*spec))


@torch._disable_dynamo
def _cross_kernel(x: Tensor, index: Tensor, weight: Any, reduction: str, *spec: Any) -> Any:
    return _launch_cross(x, index, weight, reduction, LossSpec(*spec))


@torch._disable_dynamo
def _cross_backward_kernel(grad: Tensor, grad_terms: Any, terms: Tensor, total: Tensor, x: Tensor, *given: Any) -> Any:
    index, weight, reduction, *spec = given
    return _launch_cross_backward(grad, grad_terms, terms, total, x, index, weight, reduction, LossSpec(*spec))


def _terms_fake(x: Tensor, index: Any, weight: Any, scale: Any, *spec: Any) -> Tensor:
    return _empty_terms(x, 0 if index is None else index.shape[-1], LossSpec(*spec))


def _cross_fake(x: Tensor, index: Tensor, weight: Any, reduction: str, *spec: Any) -> Any:
    terms = _empty_terms(x, 1, LossSpec(*spec))
    shape = index.shape if reduction == "none" else ()
    total = terms.new_empty(0 if reduction == "none" else ())
    return x.new_empty(shape, dtype=loss_dtype(x, LossSpec(*spec))), terms, total


def _terms_backward_fake(grads: Tensor, terms: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _cross_backward_fake(grad: Tensor, grad_terms: Any, terms: Tensor, total: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


implement("loss_terms", _terms_kernel, _terms_autograd, _terms_fake)
implement("loss_terms_backward", _terms_backward_kernel, _terms_backward_autograd, _terms_backward_fake)
implement("cross_entropy", _cross_kernel, _cross_autograd, _cross_fake)
implement("cross_entropy_backward", _cross_backward_kernel, _cross_backward_autograd, _cross_backward_fake)
