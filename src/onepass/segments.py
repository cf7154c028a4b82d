"""Rows of unequal length: softmax and its kin over the segments of a dim, as graphs, packed sequences and sets have."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from ._engines import resolve
from ._state import State, state
from .functional import log_softmax, logsumexp, softmax
from .scored import _accumulator, _dispatch_modes, _function_modes, _is_transformed
from .segment_arithmetic import SegmentSpec
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

_INDICES = (torch.int64, torch.int32)
_FIRST: Any = Default(0)
_MOST_INT32 = 2**31 - 1
_sort_kernel = functools.partial(torch._C._dispatch_call_boxed, torch.ops.onepass._segment_sort.default._handle)


class Segments:
    """Where the segments of a dim are, found once and used by any number of calls, in the place of offsets.

    Args:
        index: the segment of each item, int32 or int64, (items), in any order.
        num_segments: how many there are; without it, one more than the largest of `index`.

    Attributes:
        offsets: (num_segments + 1), where each segment begins among the items in their order, and where the last ends.
        order: (items), the items of segment 0, of segment 1 and so on, each by its place; None where they lie so.
        num_segments: how many segments there are.

    An index that is sorted needs no order. Both tensors are int32 where that holds the number of items. Items of a
    segment keep their order, so a result has the same bits from run to run.

    Raises:
        TypeError, ValueError: no index, or one that has a segment which does not exist.

    >>> import torch, onepass
    >>> segments = onepass.Segments(torch.tensor([1, 0, 1, 1]))
    >>> segments.offsets, segments.order
    (tensor([0, 1, 4], dtype=torch.int32), tensor([1, 0, 2, 3], dtype=torch.int32))
    >>> onepass.segment_softmax(torch.zeros(4), segments)
    tensor([0.3333, 1.0000, 0.3333, 0.3333])
    """

    __slots__ = ("offsets", "order")
    offsets: Tensor
    order: Tensor | None

    def __init__(self, index: Tensor, num_segments: int | None = None):
        _check_index("Segments", index)
        if num_segments is None:
            num_segments = int(index.max()) + 1 if index.numel() else 0
        self.offsets, self.order = _sort("Segments", index, num_segments)

    @classmethod
    def from_offsets(cls, offsets: Tensor, order: Tensor | None = None) -> "Segments":
        """Segments by where they begin, and an order if they have one.

        Args:
            offsets: as `segment_softmax` takes them.
            order: a permutation of the items, of the dtype of the offsets.

        Raises:
            TypeError, ValueError: offsets that rise not from 0, an order that is no permutation. Both are looked at,
            which waits for a GPU.

        >>> import torch, onepass
        >>> onepass.Segments.from_offsets(torch.tensor([0, 2, 2, 5])).num_segments
        3
        """
        _check_offsets("Segments", offsets, offsets.device)
        _check_values("Segments", offsets, None)
        if order is not None:
            if not isinstance(order, Tensor) or order.dtype is not offsets.dtype or order.dim() != 1:
                raise TypeError("onepass.Segments(): order must be a Tensor of the offsets' dtype and of one dim")
            items = torch.arange(int(offsets[-1]), dtype=order.dtype, device=order.device)
            if not torch.equal(order.sort().values, items):
                raise ValueError("onepass.Segments(): order is no permutation of the items")
        self = cls.__new__(cls)
        self.offsets, self.order = offsets.contiguous(), None if order is None else order.contiguous()
        return self

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "Segments":
        """Segments that follow each other, by their lengths: integers, none negative, (num_segments).

        >>> import torch, onepass
        >>> onepass.Segments.from_lengths(torch.tensor([2, 0, 3])).offsets
        tensor([0, 2, 2, 5])
        """
        if not isinstance(lengths, Tensor) or lengths.dtype not in _INDICES or lengths.dim() != 1:
            raise TypeError("onepass.Segments(): lengths must be an int64 or int32 Tensor of one dim")
        return cls.from_offsets(torch.cat((lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0))))

    @property
    def num_segments(self) -> int:
        return self.offsets.shape[0] - 1

    def to(self, device: torch.device | str) -> "Segments":
        """The same segments on another device."""
        self_there = type(self).__new__(type(self))
        self_there.offsets = self.offsets.to(device)
        self_there.order = None if self.order is None else self.order.to(device)
        return self_there

    def __repr__(self) -> str:
        ordered = "" if self.order is None else ", with an order"
        return f"Segments({self.num_segments} on {self.offsets.device}{ordered})"


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
    order = None
    if index is not None:
        offsets = _offsets_of(name, index, num_segments, x, dim, check)
    elif isinstance(offsets, Segments):
        offsets, order = offsets.offsets, offsets.order
        if offsets.device != x.device:
            raise RuntimeError(f"onepass.{name}(): segments must be on {x.device}, as x is, got {offsets.device}")
    else:
        _check_offsets(name, offsets, x.device)
        offsets = offsets if offsets.is_contiguous() else offsets.contiguous()
    if _functorch.is_batchedtensor(offsets) or (order is not None and _functorch.is_batchedtensor(order)):
        raise NotImplementedError(f"onepass.{name}(): vmap takes one set of segments for the whole batch")
    # The kernels of the CPU engine look at them; a transform may not go by these.
    if (_is_transformed() if x.is_cpu else check) and not torch.compiler.is_compiling():
        _check_values(name, offsets, x.shape[dim])
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
    if out is None:
        return segment_call(x, offsets, order, _expanded(bias, x), spec)
    segment_call(x, offsets, order, _expanded(bias, x), spec, out.detach())
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
    _check_indices(name, "lengths", lengths, x.device)
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


# Segments of an index -------------------------------------------------------------------------------------------------


def _sort(name: str, index: Tensor, num_segments: int, sorts: bool = True) -> tuple[Tensor, Tensor | None]:
    """(offsets, order) of an index; no order where it is sorted. With `sorts` off it has to be."""
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 0:
        raise ValueError(f"onepass.{name}(): num_segments is a number of segments, got {num_segments!r}")
    index = index.contiguous()
    to = torch.int32 if index.numel() < _MOST_INT32 else torch.int64
    if index.is_cpu:
        offsets = torch.empty(num_segments + 1, dtype=to)
        order = torch.empty(index.numel(), dtype=to) if sorts else None
        try:
            is_sorted = _sort_kernel(index, offsets, order)
        except RuntimeError as error:
            raise ValueError(f"onepass.{name}(): {str(error).removeprefix('onepass: ')}") from None
        if not is_sorted and not sorts:
            raise ValueError(f"onepass.{name}(): index is not sorted; give Segments(index), which puts it in order")
        return offsets, None if is_sorted else order
    if index.numel():
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= num_segments:
            got = low if low < 0 else high
            raise ValueError(f"onepass.{name}(): index has segments from 0 to {num_segments - 1}, got {got}")
    is_sorted = bool((index[1:] >= index[:-1]).all())
    if is_sorted:
        return _found_offsets(index, num_segments).to(to), None
    if not sorts:
        raise ValueError(f"onepass.{name}(): index is not sorted; give Segments(index), which puts it in order")
    index, order = index.sort(stable=True)
    return _found_offsets(index, num_segments).to(to), order.to(to)


def _found_offsets(index: Tensor, num_segments: int) -> Tensor:
    return torch.searchsorted(index, torch.arange(num_segments + 1, dtype=index.dtype, device=index.device))


def _offsets_of(name: str, index: Any, num_segments: Any, x: Tensor, dim: int, check: bool) -> Tensor:
    """The offsets of an index that is sorted."""
    _check_index(name, index, x.device)
    if index.shape[0] != x.shape[dim]:
        raise ValueError(f"onepass.{name}(): index has a segment for each of {x.shape[dim]} items, got {len(index)}")
    if num_segments is None:
        num_segments = int(index[-1]) + 1 if index.numel() else 0
    if not torch.compiler.is_compiling() and (check or x.is_cpu) and not _function_modes() and not _dispatch_modes():
        return _sort(name, index, num_segments, False)[0]
    return _found_offsets(index.contiguous(), num_segments)


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_indices(name: str, what: str, t: Any, device: torch.device | None) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"onepass.{name}(): {what} must be a Tensor, got {type(t).__name__}")
    if t.dtype not in _INDICES:
        raise TypeError(f"onepass.{name}(): {what} must be int64 or int32, got {t.dtype}")
    if device is not None and t.device != device:
        raise RuntimeError(f"onepass.{name}(): {what} must be on {device}, as x is, got {t.device}")


def _check_index(name: str, index: Any, device: torch.device | None = None) -> None:
    _check_indices(name, "index", index, device)
    if index.dim() != 1:
        raise ValueError(f"onepass.{name}(): index has one dim, got shape {list(index.shape)}")


def _check_offsets(name: str, offsets: Any, device: torch.device) -> None:
    _check_indices(name, "offsets", offsets, device)
    if offsets.dim() != 1 or not offsets.shape[0]:
        raise ValueError(f"onepass.{name}(): offsets are segments + 1 numbers, got shape {list(offsets.shape)}")


def _check_values(name: str, offsets: Tensor, items: int | None) -> None:
    """The values of offsets, as the CPU engine checks them."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or (items is not None and last != items):
        to = "the number of items" if items is None else f"{items}, the items of the dim"
        raise ValueError(f"onepass.{name}(): offsets go from 0 to {to}, got {first} to {last}")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        at = int(falls[0, 0]) + 1
        raise ValueError(
            f"onepass.{name}(): offsets do not fall, got {int(offsets[at - 1])} and then {int(offsets[at])} at {at}"
        )


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
