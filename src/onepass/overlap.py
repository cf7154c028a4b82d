"""Whether two tensors share memory, or one shares memory with itself: csrc/core/memory_overlap.h, asked from Python."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from torch import Tensor

from . import native

__all__ = ["overlap", "self_overlap"]


def overlap(a: Tensor, b: Tensor) -> Literal["none", "same", "partial"]:
    """How the memory of two strided tensors overlaps.

    "same": they address the same elements in the same order (equal address, sizes, element size, and strides where
    the size is above 1), so that an element-wise kernel may write one while it reads the other. "none": no byte is
    shared. "partial": some byte is shared, or 10,000 steps of a search did not rule it out. Any shapes and dtypes are
    taken.

    >>> import torch
    >>> x = torch.zeros(4, 4)
    >>> overlap(x, x), overlap(x, x.t()), overlap(x[::2], x[1::2]), overlap(x[:-1], x[1:])
    ('same', 'partial', 'none', 'partial')
    """
    if a.device != b.device:
        return "none"
    if a.device.type == "meta" and a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return "none"  # meta storages have no address to compare
    return ("none", "same", "partial")[native.call("onepass_overlap", *_extent(a), *_extent(b))]


def self_overlap(t: Tensor) -> bool:
    """Whether two indices of a strided tensor address the same element, as in an expanded one.

    True also where 10,000 steps of a search did not rule it out.

    >>> import torch
    >>> x = torch.zeros(10)
    >>> self_overlap(x.expand(3, 10)), self_overlap(x.as_strided((3, 3), (2, 1))), self_overlap(x.view(2, 5).t())
    (True, True, False)
    """
    return bool(native.call("onepass_self_overlap", *_extent(t)))


def _extent(t: Tensor) -> tuple[Any, ...]:
    """As the C functions take a tensor: address, bytes of an element, rank, sizes, strides."""
    start = int(t.storage_offset()) * t.element_size() if t.device.type == "meta" else t.data_ptr()
    int64s = ctypes.c_int64 * max(t.dim(), 1)
    return ctypes.c_uint64(start), t.element_size(), t.dim(), int64s(*t.shape), int64s(*t.stride())
