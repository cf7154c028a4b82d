"""The operators of calls with scores (scores.py), and torch arithmetic for calls that no kernel takes.

`onepass::scored` computes softmax, log_softmax or logsumexp of scores; softmin is softmax with a negative factor. The
gradient of softmax and log_softmax is `onepass::scored_backward`, which needs the result but not the input, as in
torch. The gradient of logsumexp is `onepass::scored_logsumexp_backward`, which computes the scores again. If autograd
records a call or a transform is active, the call goes through score_gradients.py.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from . import triton as triton_engine
from .autograd import PLAIN_TYPES, needs_no_autograd
from .decompositions import unsqueeze_reduced
from .native import FUNCTIONS, library
from .ops import call as call_plain
from .scores import Scores, SideTensors, blocked, scaled, score, sink_of, slopes, upcast
from .settings import autocast_to_float32
from .validation import HALF_DTYPES, Spec, overlap

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_SIDE = "Tensor? scale, Tensor? bias, Tensor? alibi, Tensor? sink, Tensor? mask"
_CALL = "str function, int[] dim, ScalarType? dtype, bool keepdim, str engine"
_WINDOW = "SymInt? left, SymInt? right, SymInt? offset"
_NUMBERS = f"float factor, float softcap, float sink_number, {_WINDOW}, bool empty_is_zero"
# The result, and the logsumexp of the scores of each row if a gradient needs it (`_keeps_lse`).
library.define(f"scored(Tensor input, {_SIDE}, {_CALL}, {_NUMBERS}) -> (Tensor, Tensor)")
# It takes the input `x` only with a softcap, and then perhaps `lse`, the logsumexp of each row.
_SAVED = "Tensor y, Tensor? x, Tensor? lse"
library.define(f"scored_backward(Tensor grad, {_SAVED}, {_SIDE}, {_CALL}, {_NUMBERS}) -> Tensor")
# The gradient of the input (or of its scores if `of_scores`) from `lse`, the logsumexp of each row, and its gradient
# `grad`. Both have the accumulator's dtype and reduced dims of size 1.
library.define(
    f"scored_logsumexp_backward(Tensor grad, Tensor lse, bool of_scores, Tensor input, {_SIDE}, {_CALL}, {_NUMBERS}) "
    "-> Tensor"
)
_forward_operator = torch.ops.onepass.scored.default
_backward_operator = torch.ops.onepass.scored_backward.default
_logsumexp_backward_operator = torch.ops.onepass.scored_logsumexp_backward.default


def call_scored(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> Tensor:
    """A call whose arguments are checked."""
    if not x.dim():  # the operators need one dim
        y = call_scored(x.unsqueeze(0), side, spec._replace(dims=[0], keepdim=False), scores)
        return y if spec.function == "logsumexp" else y.squeeze(0)
    arguments = _as_arguments(spec)
    if _is_direct(x, *side):
        launched = _launch_forward(x, side, spec._replace(function=arguments[0]), scores, keeps_lse=False)
        if launched is not None:
            return launched[0]
    return _forward_operator(x, *side, *arguments, *scores)[0]


def score_at_once(function: str, x: Tensor, dims: list[int], side: SideTensors, scores: Scores) -> Tensor | None:
    """The result of a checked call over one dim, from a kernel of the CPU or CUDA engine. None if the call has to take
    another path."""
    own = x.dtype
    if not x.numel() or x.is_nested or (own in HALF_DTYPES and autocast_to_float32(x)) or not _is_direct(x, *side):
        return None
    wide = torch.float64 if own is torch.float64 else torch.float32
    if function == "logsumexp":
        y = x.new_empty([n for d, n in enumerate(x.shape) if d not in dims])
        whole = y.unsqueeze(dims[0])
    else:
        y = whole = torch.empty_like(x)
    tensors = _kernel_tensors(x, side, wide)
    return y if _KERNELS[0](x, *tensors, whole, None, _NUMBERS_OF[function], dims, *scores) else None


def _is_direct(*tensors: Tensor | None) -> bool:
    """Whether nothing traces, records or transforms a call. Then the kernel can be called directly, which saves the
    dispatcher's two calls back into Python."""
    if torch.compiler.is_compiling() or _function_modes() or _dispatch_modes() or not needs_no_autograd(*tensors):
        return False
    for t in tensors:
        if t is not None and (type(t) not in PLAIN_TYPES or is_legacy_batchedtensor(t) or not (t.is_cpu or t.is_cuda)):
            return False
    return True


def score_into(x: Tensor, side: SideTensors, spec: Spec, scores: Scores, out: Tensor) -> bool:
    """Writes the result of a checked call to `out` and returns True. Returns False if no kernel takes the call, if a
    tensor is not a plain one, or if any tensor but the input shares memory with `out`."""
    others = [t for t in side if t is not None]
    if not x.numel() or not x.dim() or any(type(t) not in PLAIN_TYPES for t in (x, out, *others)):
        return False
    if any(overlap(t, out) != "none" for t in others):
        return False
    function = _as_arguments(spec)[0]
    return _launch_forward(x, side, spec._replace(function=function), scores, out.detach(), False) is not None


def _as_arguments(spec: Spec) -> tuple[Any, ...]:
    function = "softmax" if spec.function == "softmin" else spec.function
    return function, spec.dims, spec.dtype, spec.keepdim, spec.engine


def _result_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return x.dtype if dtype is None else dtype


def _accumulator(x: torch.dtype, y: torch.dtype) -> torch.dtype:
    """The accumulator's dtype for an input of dtype `x` and a result of dtype `y`."""
    return torch.float64 if torch.float64 in (x, y) else torch.float32


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _in_accumulator(x: Tensor, side: SideTensors, dtype: torch.dtype | None) -> tuple[Tensor, SideTensors]:
    """The input, rounded to `dtype` as torch does, and the side tensors, all in the accumulator's dtype."""
    rounded = x if dtype is None else x.to(dtype)
    wide = _accumulator(rounded.dtype, rounded.dtype)
    scale, bias, alibi, sink = (None if t is None else t.to(wide) for t in side[:-1])
    return rounded.to(wide), SideTensors(scale, bias, alibi, sink, side.mask)


def _taking_part(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> tuple[Tensor, SideTensors]:
    """`_in_accumulator`, with 0 in place of elements that are masked out: a NaN there would make derivatives NaN."""
    x, side = _in_accumulator(x, side, spec.dtype)
    out = blocked(x, side.mask, scores)
    return x if out is None else x.masked_fill(out, 0), side


def _weights(s: Tensor, lse: Tensor, scores: Scores) -> Tensor:
    """The softmax of scores, or of the sink, from the logsumexp of each row."""
    s = s - lse
    return (s.masked_fill(lse == -math.inf, -math.inf) if scores.empty_is_zero else s).exp()


def forward_arithmetic(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> tuple[Tensor, Tensor]:
    """(result, logsumexp of each row with its reduced dims)."""
    to = _result_dtype(x, spec.dtype)
    x, side = _in_accumulator(x, side, spec.dtype)
    s = score(x, side, scores)
    # The maximum is subtracted first, so that a large one costs no precision. It is a constant to autograd, because the
    # result does not depend on it.
    m = s.detach().amax(spec.dims, keepdim=True) if s.numel() else s.detach().sum(spec.dims, keepdim=True)
    m = m.masked_fill(m.isinf(), 0)
    shifted = s - m
    lse = call_plain(shifted, Spec("logsumexp", spec.dims, None, True, spec.engine))
    sink = sink_of(side, scores, s)
    if sink is not None:
        top = torch.maximum(lse, sink - m)
        shift = top.masked_fill(top.isinf(), 0)
        lse = shift + ((lse - shift).exp() + (sink - m - shift).exp()).log()
    if spec.function == "logsumexp":
        y = lse + m
        return (y if spec.keepdim else y.squeeze(spec.dims)).to(to), lse + m
    nothing, top = lse == -math.inf, lse == math.inf
    y = shifted - lse.masked_fill(top, math.nan)
    if spec.function == "softmax":
        y = y.exp()
    if scores.empty_is_zero:
        y = torch.where(nothing, 0.0 if spec.function == "softmax" else -math.inf, y)
    return y.to(to), lse + m


def _score_gradient(g: Tensor, y: Tensor, mask: Tensor | None, spec: Spec, scores: Scores) -> Tensor:
    """The gradient of the scores, from the result y of softmax or log_softmax and the upstream gradient g."""
    g, y = upcast(g), upcast(y)
    if spec.function == "softmax":
        ds = y * (g - (g * y).sum(spec.dims, keepdim=True))
    else:
        weights = y.exp()
        ds = g - weights * g.sum(spec.dims, keepdim=True)
        if scores.empty_is_zero:
            ds = ds.masked_fill((y == -math.inf).all(spec.dims, keepdim=True) if y.numel() else y == 0, 0)
    out = blocked(y, mask, scores)
    return ds if out is None else ds.masked_fill(out, 0)


def backward_arithmetic(
    g: Tensor, y: Tensor, x: Tensor | None, side: SideTensors, spec: Spec, scores: Scores
) -> Tensor:
    """`onepass::scored_backward` in torch arithmetic."""
    ds = _score_gradient(g, y, side.mask, spec, scores)
    scale = SideTensors(side.scale if side.scale is None else side.scale.to(ds.dtype), mask=side.mask)
    if scores.softcap:
        assert x is not None
        ds = ds * _slope_of_cap(x, scale, spec._replace(dtype=y.dtype), scores)
    return scaled(ds, scale, scores).to(spec.dtype)


def logsumexp_backward_arithmetic(
    g: Tensor, lse: Tensor, of_scores: bool, x: Tensor, side: SideTensors, spec: Spec, scores: Scores
) -> Tensor:
    """`onepass::scored_logsumexp_backward` in torch arithmetic."""
    own = spec._replace(dtype=None)
    x_wide, side_wide = _taking_part(x, side, own, scores)
    ds = g * _weights(score(x_wide, side_wide, scores), lse, scores)
    out = blocked(x_wide, side.mask, scores)
    ds = ds if out is None else ds.masked_fill(out, 0)
    if not of_scores:
        if scores.softcap:
            ds = ds * _slope_of_cap(x, side, own, scores)
        ds = scaled(ds, side_wide, scores)
    return ds.to(spec.dtype)


def _slope_of_cap(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> Tensor:
    """The derivative of softcap * tanh(s / softcap) at s = x * scale."""
    x, side = _taking_part(x, side, spec, scores)
    return 1 - (scaled(x, side, scores) / scores.softcap).tanh().square()


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _parse(given: Sequence[Any]) -> tuple[Tensor, SideTensors, Spec, Scores]:
    return given[0], SideTensors(*given[1:6]), Spec(*given[6:11]), Scores(*given[11:18])


# Operators ------------------------------------------------------------------------------------------------------------


def _keeps_lse(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> bool:
    """Whether the logsumexp of each row is a result too: for the gradient of a sink, or to compute the slope of a
    softcap (`caps_from_result`)."""
    return side.sink is not None or caps_from_result(x, side, spec, scores)


def caps_from_result(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> bool:
    """Whether a gradient computes the slope of a softcap from the result, the logsumexp of its row, and a bias. Then a
    kernel reads no x, except in rows whose bias is far from 0 (`is_far` in csrc/cuda/kernels/scored_row.cuh). Rounding
    changes a result of a half type by a part in 256 at most, and so the slope by 1 / (128 softcap) at most. If that may
    be more than a part in 2048, x is read."""
    if scores.softcap < LEAST_FROM_RESULT or not x.is_cuda or spec.engine == "triton" or spec.function != "softmax":
        return False
    if x.dtype not in HALF_DTYPES or _result_dtype(x, spec.dtype) is not x.dtype or side.alibi is not None:
        return False
    # A bias is read in place of x, so it should have fewer elements. (Comparing sizes with 1 adds no guards to graphs.)
    bias = side.bias
    own = () if bias is None else (*[1] * (x.dim() - bias.dim()), *bias.shape)
    return bias is None or any(size == 1 != whole for size, whole in zip(own, x.shape, strict=True))


def _empty_lse(x: Tensor, side: SideTensors, spec: Spec, scores: Scores) -> Tensor | None:
    if not _keeps_lse(x, side, spec, scores):
        return None
    to = _result_dtype(x, spec.dtype)
    return x.new_empty([1 if d in spec.dims else n for d, n in enumerate(x.shape)], dtype=_accumulator(to, to))


def _empty_result(x: Tensor, spec: Spec) -> Tensor:
    to = _result_dtype(x, spec.dtype)
    if spec.function != "logsumexp":
        return torch.empty_like(x, dtype=to)
    return x.new_empty(
        [1 if d in spec.dims else n for d, n in enumerate(x.shape) if spec.keepdim or d not in spec.dims], dtype=to
    )


def _both_results(y: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two results of the operator: an empty tensor stands for no logsumexp."""
    return y, y.new_empty(0, dtype=_accumulator(y.dtype, y.dtype)) if lse is None else lse


_NUMBERS_OF = {name: number for number, name in enumerate(FUNCTIONS)}
_NUMBERS_OF["softmin"] = _NUMBERS_OF["softmax"]  # with a negative factor
_ops = torch.ops.onepass
_KERNELS = tuple(
    functools.partial(torch._C._dispatch_call_boxed, op.default._handle)
    for op in (
        _ops._scored_kernel,
        _ops._scored_backward_kernel,
        _ops._scored_logsumexp_backward_kernel,
        _ops._scored_bias_grad_kernel,
    )
)
# For the gradient of a bias: how many elements keep a GPU busy, and the fewest rows that are summed in one part.
_BUSY_ELEMENTS, _LEAST_ROWS = 1 << 22, 8
LEAST_FROM_RESULT = 16.0  # the least softcap whose slope is computed from results


def _kernel_tensors(x: Tensor, side: SideTensors, wide: torch.dtype) -> list[Tensor | None]:
    """The side tensors as the kernels take them: they broadcast to the input, and the bias is in its own dtype."""
    if side.scale is side.alibi is side.sink is None:
        return [None, side.bias, None, None, side.mask]
    alibi = None if side.alibi is None else slopes(x, side.alibi)
    scale, alibi, sink = (None if t is None else t.to(wide) for t in (side.scale, alibi, side.sink))
    return [scale, side.bias, alibi, sink, side.mask]


def _launch_forward(
    x: Tensor, side: SideTensors, spec: Spec, scores: Scores, out: Tensor | None = None, keeps_lse: bool = True
) -> tuple[Tensor, Tensor | None] | None:
    """The results of a kernel, the first one in `out` if that is given. None if no kernel takes the call."""
    y = _empty_result(x, spec) if out is None else out
    lse = _empty_lse(x, side, spec, scores) if keeps_lse else None
    whole = unsqueeze_reduced(y, spec.dims, spec.keepdim) if spec.function == "logsumexp" else y
    if spec.engine == "triton":
        call = spec.function, x, whole, lse, tuple(sorted(spec.dims)), side, scores
        return (y, lse) if triton_engine.launch_scored_forward(*call) else None
    numbers = _NUMBERS_OF[spec.function], spec.dims, *scores
    to = _result_dtype(x, spec.dtype)
    tensors = _kernel_tensors(x, side, _accumulator(to, to))
    if _KERNELS[0](x, *tensors, whole, lse, *numbers):
        return y, lse
    rows = _as_rows(x, spec)
    into = whole if spec.function == "logsumexp" else torch.empty_like(rows, dtype=y.dtype)
    if not _KERNELS[0](rows, *tensors, into, lse, *numbers):
        return None
    if into is not whole:
        whole.copy_(into)
    return y, lse


def _as_rows(t: Tensor, spec: Spec) -> Tensor:
    """A copy whose reduced dims are the innermost ones in memory. The kernels always take such rows, even in the
    batch-invariant mode, or if the dims do not merge into the few that the column kernels of a GPU take."""
    order = [d for d in range(t.dim()) if d not in spec.dims] + sorted(spec.dims)
    return t.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])


@torch._disable_dynamo
def _forward_kernel(*given: Any) -> tuple[Tensor, Tensor]:
    x, side, spec, scores = _parse(given)
    launched = _launch_forward(x, side, spec, scores)
    if launched is not None:
        return _both_results(*launched)
    y, lse = forward_arithmetic(x, side, spec, scores)
    if spec.function != "logsumexp":
        y = _laid_out(y, x)
    return _both_results(y, lse if _keeps_lse(x, side, spec, scores) else None)


@torch._disable_dynamo
def _backward_kernel(g: Tensor, y: Tensor, x: Tensor | None, lse: Tensor | None, *given: Any) -> Tensor:
    _, side, spec, scores = _parse((y, *given))
    return _launch_backward(g, y, x, lse, side, spec, scores)


def _launch_backward(
    g: Tensor, y: Tensor, x: Tensor | None, lse: Tensor | None, side: SideTensors, spec: Spec, scores: Scores
) -> Tensor:
    dx = torch.empty_like(y, dtype=spec.dtype)
    if spec.engine == "triton":
        call = spec.function, g, y, x, dx, tuple(sorted(spec.dims)), side, scores
        if triton_engine.launch_scored_backward(*call):
            return dx
    else:
        scale, bias, _, _, mask = _kernel_tensors(y, side, _accumulator(y.dtype, y.dtype))
        numbers = _NUMBERS_OF[spec.function], spec.dims, *scores
        if _KERNELS[1](g, y, x, lse, scale, bias, mask, dx, *numbers):
            return dx
        of_g, of_y, of_x = _as_rows(g, spec), _as_rows(y, spec), None if x is None else _as_rows(x, spec)
        into = torch.empty_like(of_y, dtype=dx.dtype)
        if _KERNELS[1](of_g, of_y, of_x, lse, scale, bias, mask, into, *numbers):
            return dx.copy_(into)
    return _laid_out(backward_arithmetic(g, y, x, side, spec, scores), y)


def _launch_bias_grad(
    g: Tensor,
    y: Tensor,
    x: Tensor | None,
    side: SideTensors,
    spec: Spec,
    scores: Scores,
    to: torch.dtype,
    like: tuple[Sequence[int], torch.dtype],
) -> tuple[Tensor, Tensor] | None:
    """The gradients of the input, of dtype `to`, and of the bias, in one launch on a GPU. None if no kernel computes
    both. If the bias has few rows, its gradient is summed in parts first, enough of them to keep the GPU busy."""
    shape, dtype = like
    side = side._replace(bias=None, alibi=None, sink=None)
    if not y.is_cuda or spec.engine == "triton" or not y.numel() or not _is_direct(g, y, x, *side):
        return None
    wide = _accumulator(y.dtype, y.dtype)
    n = math.prod(y.shape[d] for d in spec.dims)
    bias_rows = max(math.prod(shape) // n, 1)
    sharing = y.numel() // n // bias_rows  # rows that share a row of the bias
    parts = max(min(sharing // _LEAST_ROWS, _BUSY_ELEMENTS // (n * bias_rows)), 1)
    sums = torch.empty((parts, *shape), dtype=wide if parts > 1 else dtype, device=y.device)
    dx = torch.empty_like(y, dtype=to)
    scale, _, _, _, mask = _kernel_tensors(y, side, wide)
    given = g, y, x, scale, mask, dx, sums[0], parts, _NUMBERS_OF[spec.function], spec.dims
    if not _KERNELS[3](*given, *scores):
        return None
    return dx, sums[0] if parts == 1 else sums.sum(0).to(dtype)


@torch._disable_dynamo
def _logsumexp_backward_kernel(g: Tensor, lse: Tensor, of_scores: bool, *given: Any) -> Tensor:
    return _launch_logsumexp_backward(g, lse, of_scores, *_parse(given))


def _launch_logsumexp_backward(
    g: Tensor, lse: Tensor, of_scores: bool, x: Tensor, side: SideTensors, spec: Spec, scores: Scores
) -> Tensor:
    wide, dx = _accumulator(x.dtype, x.dtype), torch.empty_like(x, dtype=spec.dtype)
    if spec.engine == "triton":
        call = g, lse, x, dx, tuple(sorted(spec.dims)), side, scores, of_scores
        if triton_engine.launch_scored_logsumexp_backward(*call):
            return dx
    elif g.dtype is lse.dtype is wide:
        scale, bias, alibi, _, mask = _kernel_tensors(x, side, wide)
        numbers = _NUMBERS_OF[spec.function], spec.dims, *scores
        if _KERNELS[2](g, x, lse, scale, bias, alibi, mask, dx, of_scores, *numbers):
            return dx
    return _laid_out(logsumexp_backward_arithmetic(g, lse, of_scores, x, side, spec, scores), x)


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """`t` with the strides that a kernel's result would have."""
    like = torch.empty_like(like, dtype=t.dtype)
    return t if t.stride() == like.stride() else like.copy_(t)


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor]:
    x, side, spec, scores = _parse(given)
    return _both_results(_empty_result(x, spec), _empty_lse(x, side, spec, scores))


def _backward_fake(g: Tensor, y: Tensor, x: Tensor | None, lse: Tensor | None, *given: Any) -> Tensor:
    return torch.empty_like(y, dtype=given[7])


def _logsumexp_backward_fake(g: Tensor, lse: Tensor, of_scores: bool, x: Tensor, *given: Any) -> Tensor:
    return torch.empty_like(x, dtype=given[7])


for _name, _kernel, _fake in (
    ("scored", _forward_kernel, _forward_fake),
    ("scored_backward", _backward_kernel, _backward_fake),
    ("scored_logsumexp_backward", _logsumexp_backward_kernel, _logsumexp_backward_fake),
):
    torch.library.register_fake(f"onepass::{_name}", _fake, lib=library)
    for _key in ("CPU", "CUDA", "XPU"):
        library.impl(_name, _kernel, _key)
