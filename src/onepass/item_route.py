"""Permutes items into the order of their segments and back, in two passes (csrc/cuda/kernels/item_moves.cu).

With an unsorted index, the kernels of segments gather each item from where it lies if items are large or few, or if the
call has a bias. Many small items on a GPU are permuted into the order first, and the results are permuted back, because
gathering them one by one takes about eight times as long. A Route holds the permutation, computed once for an order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .segment_arithmetic import SegmentSpec
from .segment_ops import segment_call

CHUNK = 24576  # items of a chunk: kMoveChunk of C++
LEAST, MOST = 1 << 22, 1 << 27  # the fewest and the most items of a call that are permuted (H200, 2026-11-30)
_ITEM_BYTES = (2, 4, 8)
_move_kernel = functools.partial(torch._C._dispatch_call_boxed, torch.ops.onepass._move_items.default._handle)


class Route(NamedTuple):
    """A permutation in two passes, as in a bucket sort. Memory and the order are cut into chunks of neighbouring items.
    Between the two passes the items lie in buckets, one bucket for each chunk of the order. Within a bucket they are
    sorted by the chunk of memory that they come from."""

    from_memory: Tensor  # (items) int16: for each chunk of memory, its items sorted by bucket, as positions in it
    places: Tensor  # (items) int32: for each item of `from_memory`, its position among the items of all buckets
    to_order: Tensor  # (items) int16: for each item of the order, its position in its bucket


def route_of(order: Tensor, chunk: int = CHUNK) -> Route:
    """The route to an order, which is a permutation of the items, int32 or int64, (items)."""
    items = torch.arange(len(order), dtype=torch.int32, device=order.device)
    chunks = -(-len(order) // chunk)
    bucket = torch.empty_like(items)
    bucket[order] = items // chunk
    # Sort the items of each chunk of memory by bucket.
    pair, by_pair = (items // chunk * chunks + bucket).sort(stable=True)
    # Where the items of each pair (chunk, bucket) begin: `begins` in that sorted sequence, `first` in the buckets.
    begins = torch.searchsorted(pair, torch.arange(chunks * chunks + 1, dtype=pair.dtype, device=pair.device))
    in_buckets = begins.diff().view(chunks, chunks).t().flatten()
    first = (in_buckets.cumsum(0) - in_buckets).view(chunks, chunks).t().flatten()
    places = items + (first - begins[:-1]).to(torch.int32)[pair]
    in_bucket = torch.empty_like(items)
    in_bucket[by_pair] = places % chunk
    return Route(_as_int16(by_pair % chunk), places, _as_int16(in_bucket[order]))


def _as_int16(t: Tensor) -> Tensor:
    """Numbers below 65536 as the bits of uint16, in a tensor of int16."""
    return torch.where(t < 1 << 15, t, t - (1 << 16)).to(torch.int16)


def moves(x: Tensor, order: Tensor | None, bias: Tensor | None, spec: SegmentSpec, least: int = LEAST) -> bool:
    """Whether a call permutes its items into the order and its result back."""
    if order is None or bias is not None or spec.engine != "cuda" or spec.dim or not least <= len(x) <= MOST:
        return False
    each = x.numel() // len(x)
    wide = x.new_empty(0, dtype=spec.result_dtype(x)).element_size()
    return x.is_contiguous() and each * x.element_size() in _ITEM_BYTES and each * wide in _ITEM_BYTES


def bytes_of_moves(x: Tensor, function: str, options: Sequence[str], dim: int, result: torch.dtype, engine: str) -> int:
    """The bytes that the permutations of a call read and write, for `explain`. 0 if the call permutes nothing."""
    spec = SegmentSpec(dim, function.removeprefix("segment_"), dtype=result, engine=engine)
    if "order" not in options or not moves(x, x, x if "bias" in options else None, spec):
        return 0
    indices = 8 * len(x)  # bytes of a Route, read by each permutation
    results = 0 if spec.reduces else 4 * x.numel() * result.itemsize + indices
    return 4 * x.numel() * x.element_size() + indices + results


def routed_call(x: Tensor, offsets: Tensor, route: Route, spec: SegmentSpec, out: Tensor | None = None) -> Tensor:
    """`segment_call` of permuted items, whose result is permuted back."""
    in_order = _move(x, route, True)
    if spec.reduces:
        return segment_call(in_order, offsets, None, None, spec, out)
    y = segment_call(in_order, offsets, None, None, spec)
    if out is None:
        return _move(y, route, False)
    takes = out.is_contiguous() and _is_aligned(out)
    return _moved(y, route, False, out) if takes else out.copy_(_moved(y, route, False))


def _is_aligned(t: Tensor) -> bool:
    """Whether each item lies at a multiple of its size. A view of pairs of bfloat16 may begin at an odd element."""
    return t.data_ptr() % (t.numel() // len(t) * t.element_size()) == 0


def _moved(t: Tensor, route: Route, is_into_order: bool, to: Tensor | None = None) -> Tensor:
    t, to = t if _is_aligned(t) else t.clone(), torch.empty_like(t) if to is None else to
    between = torch.empty_like(t)
    if is_into_order:
        _move_kernel(t, between, route.from_memory, route.places, True)
        _move_kernel(between, to, route.to_order, None, True)
    else:
        _move_kernel(t, between, route.to_order, None, False)
        _move_kernel(between, to, route.from_memory, route.places, False)
    return to


class _Move(torch.autograd.Function):
    """Permutes items into the order or back. The gradient is permuted the other way."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, route: Route, is_into_order: bool) -> Tensor:
        ctx.route, ctx.is_into_order = route, is_into_order
        return _moved(t, route, is_into_order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _move(grad.contiguous(), ctx.route, not ctx.is_into_order), None, None


def _move(t: Tensor, route: Route, is_into_order: bool) -> Tensor:
    if t.requires_grad and torch.is_grad_enabled():
        moved: Tensor = _Move.apply(t, route, is_into_order)
        return moved
    return _moved(t, route, is_into_order)
