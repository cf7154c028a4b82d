"""Rows of unequal length: softmax and its kin over the segments of a dim, as graphs, packed sequences and sets have."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from ._engines import resolve
from ._state import State, state
from .functional import log_softmax, logsumexp, softmax
from .item_route import moves, routed_call
from .loss_ops import _is_eager
from .scored import _accumulator, _dispatch_modes, _function_modes, _is_transformed
from .segment_arithmetic import SegmentSpec
from .segment_offsets import Segments, check_indices, check_offsets, check_values, offsets_of
from .segment_ops import segment_call
from .settings import autocast_to_float32
from .validation import (
    FLOATS,
    HALF_DTYPES,
    TAKES,
    Default,
    check_dtype,
    check_input,
    check_out,
    overlap,
    self_overlap,
    wrap_dims,
)

__all__ = ["Segments", "segment_log_softmax", "segment_logsumexp", "segment_softmax", "segment_state"]

_FIRST: Any = Default(0)


def segment_softmax(
    x: Tensor,
    offsets: "Tensor | Segments | None" = None,
    dim: int = _FIRST,
    *,
    index: Tensor | None = None,
    num_segments: int | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    check: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The softmax of each segment of a dim, whatever their lengths, each element read once and written once.

    All other dims, heads for example, lie side by side: each place of theirs has a softmax of its own. A segment may be
    empty, or as long as the dim. Segments are given in one of three ways.

    Args:
        x: a tensor of any shape and strides, float64, float32, float16 or bfloat16.
        offsets: where segments begin, and where the last one ends: int32 or int64, (segments + 1), from 0 to the size
            of `dim`. Or `Segments`, which an index in any order has made.
        dim: the ragged dim. With lengths it is by default the dim behind theirs.
        index: the segment of each item, int32 or int64, (items), sorted.
        num_segments: how many segments an index has; without it, one more than the last, for which a GPU is waited.
        lengths: of padded rows, int32 or int64, of the shape of the leading dims of x: so many of the items of `dim`
            belong to the row. The others are 0 in the result (of log_softmax -inf), and so is all of a row in which no
            score is above -inf.
        scale: a number that x is multiplied by before.
        bias: a tensor that is added to that, of a floating dtype; it broadcasts to the shape of x.
        dtype: the result's dtype. x is rounded to it first. Half types are computed in float32.
        out: takes the result: the shape of x, the result's dtype; x itself for in place. It is never resized.
        check: on a GPU, whether to look at offsets and index before anything is launched, which waits for it. Without
            it wrong ones give results without meaning, and nothing outside of a tensor is read or written. On a CPU
            they are always looked at.
        engine: "auto", or "cpu", "cuda", "triton" to force one.

    Returns:
        A tensor of the shape and layout of x. Infinities and NaNs are as `onepass.softmax` has them in a row alone.

    Raises:
        ValueError: offsets that fall, or do not go from 0 to the size of `dim`; an index that is not sorted, or has a
        segment that does not exist; shapes that do not go together; segments given twice or not at all. TypeError: no
        tensors, or dtypes of indices that are not taken. RuntimeError: two devices, an `out` that cannot be.
        IndexError: no such dim. NotImplementedError: a dtype or layout that is not served, a scale that is a tensor.

    >>> import torch, onepass
    >>> x = torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0])
    >>> onepass.segment_softmax(x, torch.tensor([0, 2, 2, 5]))
    tensor([0.5000, 0.5000, 0.0900, 0.2447, 0.6652])
    >>> onepass.segment_softmax(x, index=torch.tensor([0, 0, 2, 2, 2]))
    tensor([0.5000, 0.5000, 0.0900, 0.2447, 0.6652])
    >>> onepass.segment_softmax(torch.zeros(2, 3), lengths=torch.tensor([3, 2]))
    tensor([[0.3333, 0.3333, 0.3333],
            [0.5000, 0.5000, 0.0000]])
    """
    given = offsets, dim, index, num_segments, lengths, scale, bias, dtype, out, check, engine
    return _call("softmax", x, *given)


def segment_log_softmax(
    x: Tensor,
    offsets: "Tensor | Segments | None" = None,
    dim: int = _FIRST,
    *,
    index: Tensor | None = None,
    num_segments: int | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    check: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The logarithms of `segment_softmax`, whose arguments and errors it has.

    >>> import torch, onepass
    >>> onepass.segment_log_softmax(torch.zeros(5), torch.tensor([0, 1, 5]))
    tensor([ 0.0000, -1.3863, -1.3863, -1.3863, -1.3863])
    """
    given = offsets, dim, index, num_segments, lengths, scale, bias, dtype, out, check, engine
    return _call("log_softmax", x, *given)


def segment_logsumexp(
    x: Tensor,
    offsets: "Tensor | Segments | None" = None,
    dim: int = _FIRST,
    *,
    index: Tensor | None = None,
    num_segments: int | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    check: bool = False,
    engine: str = "auto",
) -> Tensor:
    """log(sum(exp(x))) of each segment. Arguments and errors are those of `segment_softmax`; `out` may not be x.

    Returns:
        A tensor of the shape of x, with the segments in the place of the items; of padded rows without `dim`. It is
        -inf for an empty segment.

    >>> import torch, onepass
    >>> onepass.segment_logsumexp(torch.zeros(5), torch.tensor([0, 1, 1, 5]))
    tensor([0.0000,   -inf, 1.3863])
    """
    given = offsets, dim, index, num_segments, lengths, scale, bias, dtype, out, check, engine
    return _call("logsumexp", x, *given)


def segment_state(
    x: Tensor,
    offsets: "Tensor | Segments | None" = None,
    dim: int = _FIRST,
    *,
    index: Tensor | None = None,
    num_segments: int | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    check: bool = False,
    engine: str = "auto",
) -> State:
    """The state of each segment, the maximum m and l = sum(exp(x - m)), in one read. `onepass.merge` merges states.

    Arguments and errors are those of `segment_softmax`.

    Returns:
        A `State(m, l)`, float64 for float64 and float32 for all else, of the shape that `segment_logsumexp` gives. That
        of an empty segment is (-inf, 0).

    >>> import torch, onepass
    >>> onepass.segment_state(torch.tensor([1.0, 3.0, 3.0]), torch.tensor([0, 3, 3]))
    State(m=tensor([3., -inf]), l=tensor([2.1353, 0.0000]))
    """
    planes = _call("state", x, offsets, dim, index, num_segments, lengths, scale, bias, None, None, check, engine)
    return State(planes[0], planes[1])


def _call(
    function: str,
    x: Tensor,
    offsets: Any,
    dim: Any,
    index: Any,
    num_segments: Any,
    lengths: Any,
    scale: Any,
    bias: Any,
    dtype: Any,
    out: Any,
    check: bool,
    engine: str,
) -> Any:
    name = f"segment_{function}"
    check_input(name, x)
    if x.dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{name}(): takes {TAKES}, got {x.dtype}")
    if (offsets is not None) + (index is not None) + (lengths is not None) != 1:
        raise ValueError(f"onepass.{name}(): takes one of offsets, index= and lengths=")
    if num_segments is not None and index is None:
        raise ValueError(f"onepass.{name}(): num_segments goes with index=")
    if not x.dim():
        raise ValueError(f"onepass.{name}(): x has a dim of items, got a tensor without dims")
    factor = _checked_scale(name, scale)
    if dtype is not None:
        check_dtype(name, x, dtype)
    elif out is None and x.dtype in HALF_DTYPES and function != "state" and autocast_to_float32(x):
        dtype = torch.float32
    if bias is not None:
        _check_bias(name, bias, x)
    if lengths is not None:
        return _padded(function, x, lengths, dim, factor, bias, dtype, out, check, engine)
    (dim,) = wrap_dims(name, x, (0 if type(dim) is Default else dim,))
    order = segments = None
    if index is not None:
        offsets = offsets_of(name, index, num_segments, x, dim, check)
    elif isinstance(offsets, Segments):
        segments, offsets, order = offsets, offsets.offsets, offsets.order
        if offsets.device != x.device:
            raise RuntimeError(f"onepass.{name}(): segments must be on {x.device}, as x is, got {offsets.device}")
    else:
        check_offsets(name, offsets, x.device)
        offsets = offsets if offsets.is_contiguous() else offsets.contiguous()
    if _functorch.is_batchedtensor(offsets) or (order is not None and _functorch.is_batchedtensor(order)):
        raise NotImplementedError(f"onepass.{name}(): vmap takes one set of segments for the whole batch")
    # The kernels of the CPU engine look at them; a transform may not go by these.
    if (_is_transformed() if x.is_cpu else check) and not torch.compiler.is_compiling():
        check_values(name, offsets, x.shape[dim])
    if order is not None and order.shape[0] != x.shape[dim]:
        raise ValueError(f"onepass.{name}(): segments have {order.shape[0]} items, dim {dim} of x has {x.shape[dim]}")
    spec = SegmentSpec(dim, function, factor, dtype, resolve(engine, x.device))
    result = spec.result_dtype(x)
    if out is not None:
        shape = list(x.shape)
        if spec.reduces:
            shape[dim] = offsets.shape[0] - 1
        check_out(name, x, out, shape, result, [bias])
        if torch.compiler.is_compiling() or _dispatch_modes() or _function_modes():
            return out.copy_(segment_call(x, offsets, order, _expanded(bias, x), spec))
        _check_memory(name, x, out, spec.reduces, offsets, order, bias)
    if spec.reduces and dtype is not None:  # its gradient comes from what was rounded
        x = x.to(dtype) if x.dtype not in HALF_DTYPES or dtype is not torch.float32 else x
    if factor == 0:
        x, spec = x * 0, spec._replace(factor=1.0)  # of which the gradient of the scores is no quotient
    call = partial(segment_call, x, offsets, order, _expanded(bias, x), spec)
    if segments is not None and _is_eager(x, offsets, order) and moves(x, order, bias, spec):
        route = segments.route
        call = call if route is None else partial(routed_call, x, offsets, route, spec)
    if out is None:
        return call()
    call(out.detach())
    if not out.is_inference():
        torch._C._increment_version((out,))
    return out


def _expanded(bias: Tensor | None, x: Tensor) -> Tensor | None:
    """The bias as the operators take it. One that is broadcast has the accumulator's dtype, in which its gradient is
    added up."""
    if bias is None or (bias.dtype is x.dtype and bias.shape == x.shape):
        return bias
    return bias.to(_accumulator(x.dtype, x.dtype)).expand(x.shape)


# Padded rows ----------------------------------------------------------------------------------------------------------


def _padded(
    function: str,
    x: Tensor,
    lengths: Any,
    dim: Any,
    factor: float,
    bias: Tensor | None,
    dtype: Any,
    out: Tensor | None,
    check: bool,
    engine: str,
) -> Any:
    name = f"segment_{function}"
    check_indices(name, "lengths", lengths, x.device)
    lead = lengths.dim()
    if lengths.shape != x.shape[:lead] or lead >= x.dim():
        raise ValueError(
            f"onepass.{name}(): lengths have the shape of leading dims of x {list(x.shape)}, got {list(lengths.shape)}"
        )
    (dim,) = wrap_dims(name, x, (lead if type(dim) is Default else dim,))
    if dim < lead:
        raise ValueError(f"onepass.{name}(): lengths are of rows in a dim behind theirs, got dim {dim}")
    if (check or x.is_cpu) and not torch.compiler.is_compiling() and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > x.shape[dim]:
            raise ValueError(f"onepass.{name}(): lengths are from 0 to {x.shape[dim]}, got {low} to {high}")
    mask = torch.arange(x.shape[dim], device=x.device) < lengths.unsqueeze(-1)
    mask = mask.reshape(*lengths.shape, *(x.shape[d] if d == dim else 1 for d in range(lead, x.dim())))
    if function == "state":
        wide = x.to(_accumulator(x.dtype, x.dtype))
        s = wide * factor if factor != 1 else wide
        s = s if bias is None else s + bias.to(s.dtype)
        return state(s.masked_fill(~mask, -torch.inf), dim, engine=engine)
    scores: dict[str, Any] = {"mask": mask, "empty": "zero", "engine": engine, "out": out}
    scores |= {} if factor == 1 else {"scale": factor}
    scores |= {} if bias is None else {"bias": bias}
    if function == "logsumexp":
        return logsumexp(x if dtype is None else x.to(dtype), dim, **scores)
    return (softmax if function == "softmax" else log_softmax)(x, dim, dtype, **scores)


# Checks ---------------------------------------------------------------------------------------------------------------


def _checked_scale(name: str, scale: Any) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        raise NotImplementedError(f"onepass.{name}(): scale is a number; multiply x by a tensor before")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"onepass.{name}(): scale must be a number, got {scale!r}")
    return float(scale)


def _check_bias(name: str, bias: Any, x: Tensor) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"onepass.{name}(): bias must be a Tensor, got {type(bias).__name__}")
    if bias.dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{name}(): bias takes {TAKES}, got {bias.dtype}")
    if bias.device != x.device:
        raise RuntimeError(f"onepass.{name}(): bias must be on {x.device}, as x is, got {bias.device}")
    try:
        fits = torch.broadcast_shapes(bias.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"onepass.{name}(): bias broadcasts to {list(x.shape)}, got {list(bias.shape)}")


def _check_memory(name: str, x: Tensor, out: Tensor, reduces: bool, *others: Tensor | None) -> None:
    if self_overlap(out):
        raise RuntimeError(f"onepass.{name}(): elements of out share memory; clone() it first")
    shared = overlap(x, out)
    if shared == "partial" or (shared == "same" and reduces):
        raise RuntimeError(f"onepass.{name}(): out must be x itself or share no memory with it; they overlap")
    if any(t is not None and overlap(t, out) != "none" for t in others):
        raise RuntimeError(f"onepass.{name}(): out shares memory with another argument")
