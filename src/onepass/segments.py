"""Softmax, log_softmax and logsumexp of segments: rows of unequal length, as in graphs, packed sequences and sets."""

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
    """The softmax of each segment of a dim, of any lengths. Each element is read once and written once.

    A segment is a run of neighbouring items of `dim`. It may be empty, or as long as the dim. Each position in the
    other dims, heads for example, has a softmax of its own. Segments are given by `offsets`, `index` or `lengths`.

    Args:
        x: a tensor of any shape and strides, float64, float32, float16 or bfloat16.
        offsets: where each segment begins and the last one ends: int32 or int64, (segments + 1), from 0 to the size of
            `dim`. Or an `onepass.Segments`, made from an index in any order.
        dim: the ragged dim, 0 by default. With lengths the default is the first dim after those of lengths.
        index: the segment of each item, int32 or int64, (items), sorted.
        num_segments: the number of segments of an index. Without it, the last index plus one, which makes the CPU wait
            for the GPU.
        lengths: for padded rows: how many items of `dim` each row has, int32 or int64, of the shape of the leading
            dims of x. The items after them (padding) are 0 in the result, -inf for log_softmax. So is a whole row if
            it has no score above -inf.
        scale: a number that x is multiplied by first.
        bias: a tensor to add after the scale, of a floating dtype. It broadcasts to the shape of x.
        dtype: the result's dtype. x is rounded to it first. Half types are computed in float32.
        out: the tensor to write to, of the shape of x and the result's dtype. It may be x itself (in-place). It is
            never resized.
        check: whether to check offsets and index on a GPU before the launch, which waits for the GPU. Unchecked wrong
            values give meaningless results, but nothing outside of the tensors is read or written. On a CPU they are
            always checked.
        engine: "auto", or "cpu", "cuda", "triton" to force one.

    Returns:
        A tensor of the shape and layout of x. Infinities and NaNs act as in a row of `onepass.softmax`.

    Raises:
        ValueError: offsets that decrease, or do not go from 0 to the size of `dim`; an index that is not sorted, or has
        a segment that does not exist; shapes that do not match; segments given in two ways or not at all. TypeError: an
        argument is no tensor, or indices have an unsupported dtype. RuntimeError: two devices, an `out` that cannot be
        used. IndexError: no such dim. NotImplementedError: an unsupported dtype or layout, a scale that is a tensor.

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
    """The logarithm of `segment_softmax`, with the same arguments and errors.

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
    """log(sum(exp(x))) of each segment. Arguments and errors are as in `segment_softmax`, but `out` may not be x.

    Returns:
        A tensor of the shape of x, but with the number of segments as the size of `dim`, or without `dim` if lengths
        are given. It is -inf for an empty segment.

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

    Arguments and errors are as in `segment_softmax`.

    Returns:
        A `State(m, l)` of the shape that `segment_logsumexp` returns, float64 for float64 and float32 for all other
        dtypes. The state of an empty segment is (-inf, 0).

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
    # The kernels of the CPU engine check offsets themselves, but a call under a transform may not reach these kernels.
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
    if spec.reduces and dtype is not None:  # the gradient is computed from the rounded input
        x = x.to(dtype) if x.dtype not in HALF_DTYPES or dtype is not torch.float32 else x
    if factor == 0:
        x, spec = x * 0, spec._replace(factor=1.0)  # the gradient of a bias is that of x divided by the factor
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
    """The bias as the operators take it. A bias that broadcasts is cast to the accumulator's dtype, so that its
    gradient is summed in that dtype."""
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
