"""Any tensor and dims as rows by n: two strides where strides can say it, a copy where they cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Order", "levels", "order", "strides"]


class Order(NamedTuple):
    """The order in which a call walks the dims of its tensors: the rows, then the elements of a row."""

    outer: tuple[int, ...]
    reduced: tuple[int, ...]

    def permuted(self, tensor: Tensor) -> Tensor:
        return tensor.permute(*self.outer, *self.reduced) if tensor.ndim else tensor

    def sizes(self, tensor: Tensor) -> tuple[int, int]:
        """(rows, n)."""
        return math.prod(tensor.shape[d] for d in self.outer), math.prod(tensor.shape[d] for d in self.reduced)


def order(tensor: Tensor, dims: Sequence[int]) -> Order:
    """Rows and elements in memory order: neither the order of the rows nor that inside a row matters to a result."""
    strides = tensor.stride()
    by_stride = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    return Order(tuple(d for d in by_stride if d not in dims), tuple(d for d in by_stride if d in dims))


def strides(tensor: Tensor, walk: Order) -> tuple[int, int] | None:
    """The strides in elements from row to row and inside a row, or None where the tensor should be copied first.

    It is copied where no single stride walks its rows (or its elements), and where neighbouring rows lie closer than
    neighbouring elements: a program that walks a row would then use 4 bytes of every 32 that it reads.
    """
    row, element = _merged(tensor, walk.outer), _merged(tensor, walk.reduced)
    if row is None or element is None:
        return None
    rows, n = walk.sizes(tensor)
    if n == 1:
        element = 1
    if rows == 1:  # as if it were one of many rows, so that Triton compiles (and rounds) the same
        row = n * element
    if rows == 1 or n == 1 or element <= max(row, 1):
        return row, element
    return None


def _merged(tensor: Tensor, dims: Sequence[int]) -> int | None:
    """The one stride that walks ``dims``, outermost first, or None; 0 where there is nothing to walk."""
    walked = [d for d in dims if tensor.shape[d] != 1]
    for before, after in itertools.pairwise(walked):
        if tensor.stride(before) != tensor.stride(after) * tensor.shape[after]:
            return None
    return tensor.stride(walked[-1]) if walked else 0


def levels(
    dims: Sequence[int], shape: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """How to walk ``dims``, outermost first, in all of the tensors at once with as few levels as their strides allow.

    Innermost first: the sizes of the levels but the outermost's, and the strides of all of them for each tensor.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in tensors]
    for d in reversed(dims):
        if shape[d] == 1:
            continue
        if sizes and all(t.stride(d) == walked[-1] * sizes[-1] for t, walked in zip(tensors, steps, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for t, walked in zip(tensors, steps, strict=True):
            walked.append(t.stride(d))
    return tuple(sizes[:-1]), [tuple(walked) or (0,) for walked in steps]
