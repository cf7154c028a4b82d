"""`Segments`: the offsets of segments and the order of their items, computed from an index; and checks of both."""

import functools
from typing import Any

import torch
from torch import Tensor

from ._engines import resolve
from .item_route import Route, route_of
from .scored import _dispatch_modes, _function_modes

INDICES = (torch.int64, torch.int32)
_MOST_INT32 = 2**31 - 1
_sort_kernel = functools.partial(torch._C._dispatch_call_boxed, torch.ops.onepass._segment_sort.default._handle)


class Segments:
    """The segments of a dim, computed from an index once. Any number of calls take it in place of offsets.

    Args:
        index: the segment of each item, int32 or int64, (items), in any order.
        num_segments: the number of segments; without it, the largest index plus one.

    Attributes:
        offsets: (num_segments + 1), where each segment begins among the sorted items, and where the last one ends.
        order: (items), the permutation that sorts the items by segment: the positions of the items of segment 0, then
            of segment 1 and so on. None if the items are sorted already.
        num_segments: the number of segments.

    Both tensors are int32 if that holds the number of items. The sort is stable, so a result has the same bits from run
    to run. Calls with millions of small items on a GPU also cache here how to permute the items in two passes, eight
    bytes an item (item_route.py).

    Raises:
        TypeError, ValueError: `index` is no index, or has a segment that does not exist.

    >>> import torch, onepass
    >>> segments = onepass.Segments(torch.tensor([1, 0, 1, 1]))
    >>> segments.offsets, segments.order
    (tensor([0, 1, 4], dtype=torch.int32), tensor([1, 0, 2, 3], dtype=torch.int32))
    >>> onepass.segment_softmax(torch.zeros(4), segments)
    tensor([0.3333, 1.0000, 0.3333, 0.3333])
    """

    __slots__ = ("_route", "offsets", "order")
    offsets: Tensor
    order: Tensor | None
    _route: Route | None

    def __init__(self, index: Tensor, num_segments: int | None = None):
        check_index("Segments", index)
        if num_segments is None:
            num_segments = int(index.max()) + 1 if index.numel() else 0
        _check_count("Segments", num_segments)
        self.offsets, self.order = _sort("Segments", index, num_segments)
        self._route = None

    @classmethod
    def from_offsets(cls, offsets: Tensor, order: Tensor | None = None) -> "Segments":
        """Makes Segments from offsets, and an order if the items are not sorted by segment.

        Args:
            offsets: as `segment_softmax` takes them.
            order: a permutation of the items, of the dtype of the offsets.

        Raises:
            TypeError, ValueError: offsets that do not begin at 0 or that decrease; an order that is no permutation.
            Both are checked, which waits for a GPU.

        >>> import torch, onepass
        >>> onepass.Segments.from_offsets(torch.tensor([0, 2, 2, 5])).num_segments
        3
        """
        check_offsets("Segments", offsets, offsets.device)
        check_values("Segments", offsets, None)
        if order is not None:
            if not isinstance(order, Tensor) or order.dtype is not offsets.dtype or order.dim() != 1:
                raise TypeError("onepass.Segments(): order must be a Tensor of the offsets' dtype and of one dim")
            items = torch.arange(int(offsets[-1]), dtype=order.dtype, device=order.device)
            if not torch.equal(order.sort().values, items):
                raise ValueError("onepass.Segments(): order is no permutation of the items")
        self = cls.__new__(cls)
        self.offsets, self.order = offsets.contiguous(), None if order is None else order.contiguous()
        self._route = None
        return self

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "Segments":
        """Makes Segments that follow each other from their lengths: integers, none negative, (num_segments).

        >>> import torch, onepass
        >>> onepass.Segments.from_lengths(torch.tensor([2, 0, 3])).offsets
        tensor([0, 2, 2, 5])
        """
        if not isinstance(lengths, Tensor) or lengths.dtype not in INDICES or lengths.dim() != 1:
            raise TypeError("onepass.Segments(): lengths must be an int64 or int32 Tensor of one dim")
        return cls.from_offsets(torch.cat((lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0))))

    @property
    def num_segments(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def route(self) -> Route | None:
        """How to permute items into the order (item_route.py), computed at the first use. None if it is not computed
        yet while a CUDA graph is captured, because replays of the graph would compute it again."""
        if self._route is None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            assert self.order is not None
            self._route = route_of(self.order)
        return self._route

    def to(self, device: torch.device | str) -> "Segments":
        """The same segments on another device."""
        self_there = type(self).__new__(type(self))
        self_there.offsets = self.offsets.to(device)
        self_there.order = None if self.order is None else self.order.to(device)
        self_there._route = None
        return self_there

    def __repr__(self) -> str:
        ordered = "" if self.order is None else ", with an order"
        return f"Segments({self.num_segments} on {self.offsets.device}{ordered})"


def _sort(name: str, index: Tensor, num_segments: int, sorts: bool = True) -> tuple[Tensor, Tensor | None]:
    """(offsets, order) of an index. The order is None if the index is sorted, which it must be if `sorts` is False."""
    index = index.contiguous()
    to = _index_dtype(index.numel())
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
        return _found_offsets(index, num_segments), None
    if not sorts:
        raise ValueError(f"onepass.{name}(): index is not sorted; give Segments(index), which puts it in order")
    index, order = index.sort(stable=True)
    return _found_offsets(index, num_segments), order.to(to)


def _index_dtype(items: int) -> torch.dtype:
    return torch.int32 if items < _MOST_INT32 else torch.int64


def _found_offsets(index: Tensor, num_segments: int) -> Tensor:
    """The offsets of a sorted index on a GPU."""
    offsets = index.new_empty(num_segments + 1, dtype=_index_dtype(index.numel()))
    if num_segments < 1 << 30 and resolve("auto", index.device) == "cuda":
        _sort_kernel(index, offsets, None)
        return offsets
    return offsets.copy_(_searched(index, num_segments))


def _searched(index: Tensor, num_segments: int) -> Tensor:
    return torch.searchsorted(index, torch.arange(num_segments + 1, dtype=index.dtype, device=index.device))


def offsets_of(name: str, index: Any, num_segments: Any, x: Tensor, dim: int, check: bool) -> Tensor:
    """The offsets of an index that is sorted."""
    check_index(name, index, x.device)
    if index.shape[0] != x.shape[dim]:
        raise ValueError(f"onepass.{name}(): index has a segment for each of {x.shape[dim]} items, got {len(index)}")
    if num_segments is None:
        num_segments = int(index[-1]) + 1 if index.numel() else 0
    if torch.compiler.is_compiling() or _function_modes() or _dispatch_modes():
        return _searched(index.contiguous(), num_segments)
    _check_count(name, num_segments)
    if check or x.is_cpu:
        return _sort(name, index, num_segments, False)[0]
    return _found_offsets(index.contiguous(), num_segments)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_indices(name: str, what: str, t: Any, device: torch.device | None) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"onepass.{name}(): {what} must be a Tensor, got {type(t).__name__}")
    if t.dtype not in INDICES:
        raise TypeError(f"onepass.{name}(): {what} must be int64 or int32, got {t.dtype}")
    if device is not None and t.device != device:
        raise RuntimeError(f"onepass.{name}(): {what} must be on {device}, as x is, got {t.device}")


def _check_count(name: str, num_segments: Any) -> None:
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 0:
        raise ValueError(f"onepass.{name}(): num_segments is a number of segments, got {num_segments!r}")


def check_index(name: str, index: Any, device: torch.device | None = None) -> None:
    check_indices(name, "index", index, device)
    if index.dim() != 1:
        raise ValueError(f"onepass.{name}(): index has one dim, got shape {list(index.shape)}")


def check_offsets(name: str, offsets: Any, device: torch.device) -> None:
    check_indices(name, "offsets", offsets, device)
    if offsets.dim() != 1 or not offsets.shape[0]:
        raise ValueError(f"onepass.{name}(): offsets are segments + 1 numbers, got shape {list(offsets.shape)}")


def check_values(name: str, offsets: Tensor, items: int | None) -> None:
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
