"""The derivatives of the functions of scores (scored.py).

A call that autograd records or that is under a transform goes through `ScoredFunction`, whose gradient is an operator
too. If the gradient is recorded itself, it is computed by torch arithmetic, which has derivatives of every order.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import needs_no_autograd, one_level_out
from .decompositions import unsqueeze_reduced
from .native import library
from .scored import (
    _accumulator,
    _as_arguments,
    _backward_operator,
    _BelowAutograd,
    _forward_operator,
    _is_direct,
    _is_transformed,
    _keeps_lse,
    _launch_backward,
    _launch_bias_grad,
    _launch_logsumexp_backward,
    _logsumexp_backward_operator,
    _parse,
    _result_dtype,
    _slope_of_cap,
    _taking_part,
    _weights,
    backward_arithmetic,
    caps_from_result,
    logsumexp_backward_arithmetic,
)
from .scores import Scores, SideTensors, blocked, distances, scaled, score, slopes, upcast
from .validation import HALF_DTYPES, Spec

_SUM_KERNEL = functools.partial(torch._C._dispatch_call_boxed, torch.ops.onepass._sum_to_kernel.default._handle)

Like = tuple[Sequence[int], torch.dtype]


def _sum_to(t: Tensor, like: Like | None, times: float = 1.0) -> Tensor:
    """The sum of `t` / `times` over the dims along which a tensor of shape `like` was broadcast, computed in the
    accumulator's dtype, or in float64 for a float64 gradient."""
    assert like is not None
    shape, dtype = like
    t = t.double() if dtype is torch.float64 else t
    if t.is_cpu and _is_direct(t):  # a kernel whose result does not depend on the number of threads
        total = t.new_empty(shape, dtype=dtype)
        if _SUM_KERNEL(t, total, times) or _SUM_KERNEL(t.contiguous(), total, times):
            return total
    lead = t.dim() - len(shape)
    dims = [d for d, size in enumerate(t.shape) if d < lead or (size != 1 and shape[d - lead] == 1)]
    # On a GPU torch accumulates half types in float32 anyway, so the result may be written as a half type, which moves
    # fewer bytes. That is exact if it is not divided afterwards, or if a bfloat16 is divided by a power of two.
    is_exact = times == 1 or (dtype is torch.bfloat16 and abs(math.frexp(times)[0]) == 0.5)
    made_in = dtype if is_exact and t.dtype is dtype and t.is_cuda else _accumulator(t.dtype, t.dtype)
    total = t.sum(dims, keepdim=True, dtype=made_in) if dims else t
    total = total.reshape(shape)
    return (total if times == 1 else upcast(total) / times).to(dtype)


class ScoredFunction(torch.autograd.Function):
    """A call with derivatives."""

    @staticmethod
    def forward(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        with _BelowAutograd():
            return _forward_operator(x, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, side, ctx.spec, ctx.scores = _parse(inputs)
        y, lse = output
        ctx.input_dtype = x.dtype
        ctx.set_materialize_grads(False)
        lse_wide = lse if _keeps_lse(x, side, ctx.spec, ctx.scores) else None
        scale_grad = side.scale is not None and side.scale.requires_grad
        needs_score = ctx.spec.function == "logsumexp"
        needs_x = needs_score or ctx.scores.softcap or scale_grad or _is_transformed()
        ctx.likes = [None if t is None else (t.shape, t.dtype) for t in side[:-1]]
        ctx.caps_from_result = caps_from_result(x, side, ctx.spec, ctx.scores)
        if not needs_score and not _is_transformed():
            side = side._replace(bias=side.bias if ctx.caps_from_result else None, alibi=None)
        kept = x if needs_x else None, *side, y, lse_wide
        ctx.save_for_backward(*kept)
        if _is_transformed():
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors, y, lse = ctx.saved_tensors
        side = SideTensors(*tensors)
        if lse is None:  # then the second output is empty
            g_lse = None
        call = ctx.spec, ctx.scores, ctx.input_dtype, ctx.needs_input_grad[:5], ctx.likes, ctx.caps_from_result
        grads = gradients(x, side, y, lse, g, g_lse, *call)
        return *grads, *[None] * 13

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        count = len(ctx.saved_tensors)

        def compute(*tensors: Any) -> Any:
            (x, *side), (y, lse) = tensors[: count - 2], tensors[count - 2 : count]
            return _tangents(x, SideTensors(*side), y, lse, tensors[count:], ctx.spec, ctx.scores)

        return one_level_out(compute, *ctx.saved_tensors, *tangents[:5])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        x, side, spec, scores = _parse(given)
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        moved = []
        for t, dim, dropped in zip(side, in_dims[1:6], (0, 0, 2, 0, 0), strict=True):
            if t is not None and dim is not None:  # the batch dim goes first, then dims of size 1 that t lacks
                t = t.movedim(dim, 0)
                t = t.reshape(t.size(0), *[1] * (x.dim() - dropped - t.dim()), *t.shape[1:])
            moved.append(t)
        spec = spec._replace(dims=[d + 1 for d in spec.dims])
        result = ScoredFunction.apply(x, *moved, *_as_arguments(spec), *scores)
        return result, (0, 0 if _keeps_lse(x, side, spec, scores) else None)


def _backward(
    g: Tensor,
    y: Tensor,
    x: Tensor | None,
    lse: Tensor | None,
    side: SideTensors,
    spec: Spec,
    scores: Scores,
    to: torch.dtype,
) -> Tensor:
    """The gradient of the input of softmax or log_softmax, of dtype `to`. x and, if it was kept, lse are for a
    softcap."""
    side, spec = side._replace(bias=None if lse is None else side.bias, alibi=None, sink=None), spec._replace(dtype=to)
    if _is_direct(g, y, x, lse, *side):
        return _launch_backward(g, y, x, lse, side, spec, scores)
    return _backward_operator(g, y, x, lse, *side, *_as_arguments(spec), *scores)


def _logsumexp_backward(
    g: Tensor, lse: Tensor, of_scores: bool, x: Tensor, side: SideTensors, spec: Spec, scores: Scores, to: torch.dtype
) -> Tensor:
    """The gradient of the input of logsumexp, or of its scores, of dtype `to`."""
    if not (spec.dtype is torch.float32 and x.dtype in HALF_DTYPES):
        x = x.to(_result_dtype(x, spec.dtype))  # as the forward rounded it
    side, spec = side._replace(sink=None), spec._replace(dtype=to)
    if _is_direct(g, lse, x, *side):
        return _launch_logsumexp_backward(g, lse, of_scores, x, side, spec, scores)
    return _logsumexp_backward_operator(g, lse, of_scores, x, *side, *_as_arguments(spec), *scores)


def gradients(
    x: Tensor | None,
    side: SideTensors,
    y: Tensor,
    lse: Tensor | None,
    g: Tensor | None,
    g_lse: Tensor | None,
    spec: Spec,
    scores: Scores,
    to: torch.dtype,
    needed: Sequence[bool],
    likes: Sequence[Like | None],
    from_result: bool,
) -> list[Tensor | None]:
    """The gradients of the input, of dtype `to`, and of scale, bias, alibi and sink, of the shapes and dtypes `likes`.
    None for those that are not `needed`. `from_result`: see `caps_from_result`."""
    result: list[Tensor | None] = [None] * 5
    times = 1.0  # `ds` is the gradient of the scores times this
    if g is None and g_lse is None:
        return result
    dims = spec.dims
    wide = _accumulator(y.dtype, y.dtype)
    needs_x, needs_scale, needs_bias, needs_alibi, needs_sink = needed
    # If is_plain, the operator computes dx, and ds, if it is needed, is dx divided by the factor.
    is_number = side.scale is None and not scores.softcap
    is_plain = not needs_scale and (is_number or not (needs_bias or needs_alibi))
    if spec.function == "logsumexp":
        if g_lse is not None:
            g_lse = g_lse.reshape(unsqueeze_reduced(y, dims, spec.keepdim).shape)
        given = [] if g is None else [unsqueeze_reduced(g, dims, spec.keepdim).to(wide)]
        given += [] if g_lse is None else [g_lse]
        total = given[0] if len(given) == 1 else given[0] + given[1]
        whole = unsqueeze_reduced(y, dims, spec.keepdim).to(wide) if lse is None else lse
        ds = dx = None
        if any(needed[:4]):
            assert x is not None
            if any(needed[1:4]):
                ds = _logsumexp_backward(total, whole, True, x, side, spec, scores, wide)
            else:
                dx = _logsumexp_backward(total, whole, False, x, side, spec, scores, to)
        sum_of_row = -total  # the gradient of the sink is minus this times the sink's weight
    else:
        g = torch.zeros_like(y) if g is None else g
        ds = dx = both = None
        if needs_x and needs_bias and not (needs_scale or needs_alibi) and g_lse is None and likes[1] is not None:
            is_one = is_plain and scores.factor == 1 and math.prod(likes[1][0]) == y.numel()  # dx is both
            of_cap = x if scores.softcap else None
            both = None if is_one else _launch_bias_grad(g, y, of_cap, side, spec, scores, to, likes[1])
        if both is not None:
            dx, result[2] = both
            needs_bias = False
        elif is_plain and needs_x and g_lse is None:
            of_cap, cap_lse = x if scores.softcap else None, lse if from_result else None
            dx = _backward(g, y, of_cap, cap_lse, side, spec, scores, to)
            if (needs_bias or needs_alibi) and scores.factor:  # sums of dx are divided by the factor
                ds, times = dx, scores.factor
        if ds is None and any(needed[:4]) and (dx is None or needs_bias or needs_alibi):
            plain = scores._replace(factor=1.0, softcap=0.0)
            ds = _backward(g, y, None, None, SideTensors(mask=side.mask), spec, plain, wide)
            if g_lse is not None:
                ds = ds + g_lse * (upcast(y) if spec.function == "softmax" else upcast(y).exp())
        if needs_sink:
            g_wide, y_wide = upcast(g), upcast(y)
            terms = g_wide * y_wide if spec.function == "softmax" else g_wide
            sum_of_row = _sum_to(terms, ([1 if d in dims else n for d, n in enumerate(y.shape)], wide))
            sum_of_row = sum_of_row if g_lse is None else sum_of_row - g_lse
    if dx is None and (needs_x or needs_scale):
        assert ds is not None
        dx = ds
        if scores.softcap:
            assert x is not None
            dx = dx * _slope_of_cap(x, side, spec, scores)
        if needs_scale:
            assert x is not None
            through = dx * _taking_part(x, side, spec, scores)[0]
            result[1] = _sum_to(through * scores.factor, likes[0])
        if needs_x:
            scale = None if side.scale is None else side.scale.to(wide)
            dx = scaled(dx, SideTensors(scale), scores).to(to)
    result[0] = dx if needs_x else None
    if needs_bias:
        assert ds is not None
        result[2] = _sum_to(ds, likes[1], times)
    if needs_alibi:
        assert ds is not None
        assert likes[2] is not None
        shape, dtype = likes[2]
        result[3] = _sum_to(upcast(ds) * distances(ds, scores).abs(), ((*shape, 1, 1), dtype), -times).reshape(shape)
    if needs_sink:
        assert side.sink is not None
        assert lse is not None
        result[4] = _sum_to(-_weights(side.sink.to(wide), lse, scores) * sum_of_row, likes[3])
    return result


def _tangents(
    x: Tensor,
    side: SideTensors,
    y: Tensor,
    lse: Tensor | None,
    tangents: Sequence[Tensor | None],
    spec: Spec,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """The tangents of the result and of the logsumexp of each row."""
    dims = spec.dims
    x_wide, side_wide = _taking_part(x, side, spec, scores)
    tx, tscale, tbias, talibi, tsink = (None if t is None else t.to(x_wide.dtype) for t in tangents)
    ts = torch.zeros_like(x_wide)
    if tx is not None:
        ts = ts + scaled(tx, side_wide, scores)
    if tscale is not None:
        ts = ts + scaled(x_wide, SideTensors(tscale), scores)
    if scores.softcap:
        ts = ts * (1 - (scaled(x_wide, side_wide, scores) / scores.softcap).tanh().square())
    if tbias is not None:
        ts = ts + tbias
    if talibi is not None:
        ts = ts - slopes(x, talibi) * distances(x, scores).abs()
    out = blocked(x, side.mask, scores)
    if out is not None:
        ts = ts.masked_fill(out, 0)
    if spec.function == "logsumexp":
        whole = unsqueeze_reduced(y, dims, spec.keepdim).to(ts.dtype) if lse is None else lse
        weights = _weights(score(x_wide, side_wide, scores), whole, scores)
    else:
        weights = upcast(y) if spec.function == "softmax" else upcast(y).exp()
    tlse = (weights * ts).sum(dims, keepdim=True)
    if tsink is not None and lse is not None:
        assert side_wide.sink is not None
        tlse = tlse + _weights(side_wide.sink, lse, scores) * tsink
    if spec.function == "logsumexp":
        ty = tlse if spec.keepdim else tlse.squeeze(dims)
    else:
        ty = ts - tlse
        ty = weights * ty if spec.function == "softmax" else ty
    return ty.to(y.dtype), tlse if lse is not None else tlse.new_zeros(0)


def _forward_autograd(*given: Any) -> Any:
    if needs_no_autograd(*given[:6]):
        with _BelowAutograd():
            return _forward_operator(*given)
    x, _, spec, _ = _parse(given)
    if spec.function == "logsumexp" and spec.dtype is None and x.dtype in HALF_DTYPES:  # see ops._differentiable
        y, lse = ScoredFunction.apply(*given[:8], torch.float32, *given[9:])
        return y.to(x.dtype), lse
    return ScoredFunction.apply(*given)


def _backward_autograd(g: Tensor, y: Tensor, x: Tensor | None, lse: Tensor | None, *given: Any) -> Tensor:
    if needs_no_autograd(g, y, x, *given[:5]):
        with _BelowAutograd():
            return _backward_operator(g, y, x, lse, *given)
    _, side, spec, scores = _parse((y, *given))
    return backward_arithmetic(g, y, x, side, spec, scores)


def _logsumexp_backward_autograd(g: Tensor, lse: Tensor, of_scores: bool, *given: Any) -> Tensor:
    if needs_no_autograd(g, lse, *given[:5]):
        with _BelowAutograd():
            return _logsumexp_backward_operator(g, lse, of_scores, *given)
    return logsumexp_backward_arithmetic(g, lse, of_scores, *_parse(given))


for _name, _autograd in (
    ("scored", _forward_autograd),
    ("scored_backward", _backward_autograd),
    ("scored_logsumexp_backward", _logsumexp_backward_autograd),
):
    for _key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(_name, _autograd, _key)
