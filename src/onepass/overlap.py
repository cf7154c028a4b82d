"""Whether two tensors share memory, and whether a tensor shares memory with itself.

An element at indices ``i`` starts at byte ``start + sum(i_k * stride_k)``. Two tensors share a byte if and only if a
bounded linear equation has a solution in integers, and a depth-first search with pruning finds it or proves that there
is none. In general that is NP-hard; for the strides of real views nearly every branch is cut at its first step, and a
search that takes more than ``LIMIT`` steps gives up and reports a shared byte, which is the safe answer.

Source: ``numpy.shares_memory`` (numpy/core/src/common/mem_overlap.c) treats the same equation in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import gcd
from typing import Literal

from torch import Tensor

__all__ = ["overlap", "self_overlap"]

LIMIT = 10_000  # steps; about 1 us each, so that a call is never held up for more than some 10 ms

Term = tuple[int, int]  # (coefficient > 0, bound): the variable runs over 0 .. bound


def overlap(a: Tensor, b: Tensor) -> Literal["none", "same", "partial"]:
    """How the memory of two strided tensors overlaps.

    "same": they address the same elements in the same order (equal address, sizes, element size, and strides where
    the size is above 1), so that an element-wise kernel may write one while it reads the other. "none": no byte is
    shared. "partial": some byte is shared, or ``LIMIT`` steps did not rule it out. Any shapes and dtypes are taken.

    >>> import torch
    >>> x = torch.zeros(4, 4)
    >>> overlap(x, x), overlap(x, x.t()), overlap(x[::2], x[1::2]), overlap(x[:-1], x[1:])
    ('same', 'partial', 'none', 'partial')
    """
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return "none"
    if a is b:
        return "same"
    if a.device.type == "meta" and a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return "none"  # meta storages have no address to compare
    a_size, b_size = a.element_size(), b.element_size()
    a_start, b_start = _start(a), _start(b)
    if a_start == b_start and a_size == b_size and a.shape == b.shape and _moves(a) == _moves(b):
        return "same"
    a_terms, b_terms = _terms(a), _terms(b)
    a_last, b_last = _span(a_terms) + a_size - 1, _span(b_terms) + b_size - 1  # offset of the last byte
    if a_start + a_last < b_start or b_start + b_last < a_start:
        return "none"
    # a_start + i*s + u = b_start + j*t + v, with bytes u of a's element and v of b's. Counting j and v from their ends
    # (j' = max - j, v' = max - v) makes every coefficient positive: i*s + j'*t + (u + v') = b_start - a_start + b_last.
    terms = [*a_terms, *b_terms, (1, a_size + b_size - 2)]
    return "partial" if _solvable(terms, b_start - a_start + b_last) else "none"


def self_overlap(t: Tensor) -> bool:
    """Whether two indices of a strided tensor address the same element, as in an expanded one.

    True also where ``LIMIT`` steps did not rule it out.

    >>> import torch
    >>> x = torch.zeros(10)
    >>> self_overlap(x.expand(3, 10)), self_overlap(x.as_strided((3, 3), (2, 1))), self_overlap(x.view(2, 5).t())
    (True, True, False)
    """
    if t.numel() == 0 or t.is_contiguous():
        return False
    moves = _moves(t)
    if any(stride == 0 for stride, _ in moves):
        return True
    moves.sort(reverse=True)
    rest = [_span(moves[k + 1 :]) for k in range(len(moves))]  # how far the smaller strides reach
    # Two indices of one address differ first, from the largest stride down, in some k, by 1 + z (z in 0 .. bound - 1).
    # Later dims of strides s make up for it by differences d: sum(d * s) = (1 + z) * stride. With d' = d + bound_s in
    # 0 .. 2 * bound_s and z' = bound - 1 - z no sign is negative: sum(d' * s) + z' * stride = rest + bound * stride.
    for k, (stride, bound) in enumerate(moves):
        if stride > rest[k]:  # one step leaps over all that the smaller strides reach
            continue
        terms = [(s, 2 * b) for s, b in moves[k + 1 :]]
        if _solvable([*terms, (stride, bound - 1)], rest[k] + bound * stride):
            return True
    return False


def _start(t: Tensor) -> int:
    return int(t.storage_offset()) * t.element_size() if t.device.type == "meta" else t.data_ptr()


def _moves(t: Tensor) -> list[Term]:
    """(stride, largest index) in elements, of the dims that an index can move in."""
    return [(stride, size - 1) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _terms(t: Tensor) -> list[Term]:
    """The same in bytes; a stride of 0 moves nothing."""
    size = t.element_size()
    return [(stride * size, bound) for stride, bound in _moves(t) if stride]


def _span(terms: Iterable[Term]) -> int:
    """The largest value of sum(coefficient * variable)."""
    return sum(coefficient * bound for coefficient, bound in terms)


def _solvable(terms: Iterable[Term], target: int) -> bool:
    """Whether sum(coefficient * variable) = target for variables in 0 .. bound; True if ``LIMIT`` steps do not tell."""
    bounds: Counter[int] = Counter()
    for coefficient, bound in terms:  # variables of equal coefficient are one variable
        if bound:
            bounds[coefficient] += bound
    ordered = sorted(bounds.items(), reverse=True)
    count = len(ordered)
    reach, divisor = [0] * (count + 1), [0] * (count + 1)  # of the terms from k on: the largest sum, the gcd
    for k in range(count - 1, -1, -1):
        coefficient, bound = ordered[k]
        reach[k] = reach[k + 1] + coefficient * bound
        divisor[k] = gcd(divisor[k + 1], coefficient)
    if not 0 <= target <= reach[0]:
        return False
    stack, steps = [(0, target)], 0
    while stack:
        k, left = stack.pop()
        if left == 0:
            return True
        if k == count or left % divisor[k]:
            continue
        steps += 1
        if steps > LIMIT:
            return True
        coefficient, bound = ordered[k]
        low, high = max(0, -((reach[k + 1] - left) // coefficient)), min(bound, left // coefficient)
        if k == count - 1:
            if low <= high:  # divisor[k] is the coefficient, so left / coefficient is whole, and low is it
                return True
            continue
        # What is left must be divisible by the gcd of the later terms: the variable runs in steps from a residue.
        stride = divisor[k + 1] // divisor[k]
        residue = left // divisor[k] * pow(coefficient // divisor[k], -1, stride) % stride
        first = low + (residue - low) % stride
        if (high - first) // stride >= LIMIT:  # too many to list
            return True
        stack.extend((k + 1, left - coefficient * value) for value in range(first, high + 1, stride))
    return False
