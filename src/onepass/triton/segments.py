"""Launches of the kernels of segments, rows of unequal length.

csrc/core/segment_problem.h has the definitions. All tensors may have any strides and are not copied. The CPU never
reads offsets here, so it does not wait for the GPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..settings import is_batch_invariant
from .launch import levels_of, on_device, properties_of
from .plan import _MOST_PROGRAMS, _MOST_THREADS
from .scored import Maybe, Steps, _number

if TYPE_CHECKING:
    from ..segment_arithmetic import SegmentSpec

__all__ = ["launch_segment_backward", "launch_segment_forward"]

_THREADS = 128
# Elements of a tile per thread, by the bytes of the accumulator. A gradient with sums (True) reads two operands.
_ELEMENTS = {False: {4: 16, 8: 8}, True: {4: 8, 8: 4}}
_STEPS = 4  # items of a row per thread, if the row then has at least _FEWEST_LANES threads
_FEWEST_LANES = 4  # the fewest threads that share a row
_MOST_ROWS = 4  # the most rows that a thread takes part in: each has numbers in registers
_MOST_HEADS = 32
_MOST_PARTS = 1024  # the most parts of a row
_MOST_NARROW = 2**30  # the largest index that is computed in 32 bits


class Operand(NamedTuple):
    """A tensor: its data, its stride from an item (or a segment) to the next, and the strides of the inner dims."""

    data: Tensor
    step: int
    strides: Steps


class Operands(NamedTuple):
    """The arguments of a kernel. A field that a call does not have is (), and the kernel is compiled without it."""

    offsets: Tensor
    order: tuple[Tensor] | tuple[()]
    sizes: Steps  # sizes of the inner dims except the slowest
    plane: tuple[int]  # the stride between the planes of a state
    is_gradient: Maybe  # not () for a gradient
    factor: Maybe
    first: Operand  # x; for a gradient with sums, the result of the forward
    second: Operand | tuple[()]  # the bias; for a gradient with sums, the upstream gradient
    result: Operand  # the tensor to write
    row: Operand | tuple[()]  # for the gradient of logsumexp: the result of the forward
    grad: Operand | tuple[()]  # for the gradient of logsumexp: the upstream gradient


class SegmentTile(NamedTuple):
    """How rows are cut and distributed over programs. All fields but the last are powers of two."""

    steps: int  # items of a row per thread at a time
    lanes: int  # threads that share a row
    rows: int  # rows of a program
    heads: int  # positions of the inner dims of a program
    span: int  # the most items of a row that is not cut
    part: int  # the fewest items of a part, if the row has as many
    most_parts: int  # the most parts of a row
    part_steps: int
    part_lanes: int
    group: int  # slots of a program of `part_kernel`
    num_warps: int
    grid: int  # the most programs of a launch


def launch_segment_forward(
    x: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    spec: SegmentSpec,
    *,
    tile: SegmentTile | None = None,
) -> bool:
    """Write the function of the segments of ``x`` to ``y``. Returns False, and writes nothing, if there is no kernel
    for the call.

    ``x``: float64, float32, float16 or bfloat16, any strides, on a device for which ``unavailable`` returns None. The
    accumulator is float64 for float64, else float32.
    ``offsets``, ``order``: int32 or int64, contiguous.
    ``bias``: of the shape of ``x``, of its dtype or the accumulator's, any strides.
    ``y``: of the result's shape, any strides, possibly ``x`` itself. It has the dtype of ``x``, or float32 for half
    types, or the accumulator's dtype for a state.
    ``tile`` replaces the tile that would be chosen.
    """
    if not x.numel():
        return False
    _launch(spec, False, (x, bias, y, None, None), offsets, order, tile)
    return True


def launch_segment_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    offsets: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    dx: Tensor,
    spec: SegmentSpec,
    *,
    tile: SegmentTile | None = None,
) -> bool:
    """Write the gradient of the input of softmax, log_softmax or logsumexp to ``dx``. Returns False, and writes
    nothing, if there is no kernel for the call.

    ``y``, ``grad``: the result and its gradient, any strides, in the accumulator's dtype for logsumexp.
    ``x``, ``bias``: for logsumexp only. ``dx``: of the input's shape, any strides. It has the dtype of ``x``, or
    without x that of ``y``, or a half type if ``y`` is float32. All else is as in `launch_segment_forward`.
    """
    if not dx.numel():
        return False
    tensors = (y, grad, dx, None, None) if x is None else (x, bias, dx, y, grad)
    _launch(spec, True, tensors, offsets, order, tile)
    return True


@functools.cache
def _kernel(function: str, backward: bool, of_parts: bool) -> tuple[Any, dict[str, Any]]:
    """Imports triton. Returns a kernel and its policies."""
    from . import epilogue, segment_kernels

    policies = epilogue.POLICIES[function][backward]
    kernel = segment_kernels.part_kernel if of_parts else segment_kernels.row_kernel
    return kernel, {name: policies[name] for name in ("TERM", "ROW", "EPILOGUE")}


def _launch(
    spec: SegmentSpec,
    backward: bool,
    tensors: tuple[Tensor | None, ...],
    offsets: Tensor,
    order: Tensor | None,
    tile: SegmentTile | None,
) -> None:
    """Launch the kernels of a call. ``tensors``: those of the last five fields of `Operands`."""
    first, _, result, row, _ = tensors
    assert first is not None
    assert result is not None
    dim, items, segments = spec.dim, first.shape[spec.dim], offsets.shape[0] - 1
    columns, plane = first.numel() // items, 0
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    if spec.function == "state":
        plane, tensors = result.stride(0), (*tensors[:2], result[0], *tensors[3:])
    sizes, strides = _inner(first.shape, dim, *((0,) * first.ndim if t is None else t.stride() for t in tensors))
    if tile is None:
        warp = getattr(properties_of(first.device), "warp_size", 32)
        tile = tile_of(backward and row is None, first, dim, segments, strides, warp)

    operands: Any = (
        () if t is None else Operand(t, t.stride(dim), own) for t, own in zip(tensors, strides, strict=True)
    )
    where = () if order is None else (order,)
    call = Operands(offsets, where, sizes, (plane,), (1,) if backward else (), _number(spec.factor, wide), *operands)
    is_wide = max(items, segments, *(_extent(t) for t in tensors if t is not None)) > _MOST_NARROW
    run = functools.partial(_run, spec.function, backward, tile, is_wide, call, items, columns)
    if items <= tile.span:
        run(segments, None)
        return
    slots = -(-items // tile.span)
    owners = first.new_full((slots,), -1, dtype=torch.int64)
    run(segments, owners)
    states: tuple[Tensor, ...] = ()
    if row is None:
        states = first.new_empty((2, slots, columns), dtype=wide).unbind()
        run(slots, owners, states, False)
    run(slots, owners, states, True)


def _run(
    function: str,
    backward: bool,
    tile: SegmentTile,
    is_wide: bool,
    call: Operands,
    items: int,
    columns: int,
    count: int,
    owners: Tensor | None,
    states: tuple[Tensor, ...] = (),
    finishes: bool | None = None,
) -> None:
    """Launch `row_kernel` over ``count`` segments, or if ``finishes`` is a bool, `part_kernel` over ``count`` slots."""
    of_parts = finishes is not None
    kernel, policies = _kernel(function, backward, of_parts)
    meta: dict[str, Any] = {
        **policies,
        "IS_WIDE": is_wide,
        "HEADS": tile.heads,
        "SPAN": tile.span,
        "PART": tile.part,
        "MOST": tile.most_parts,
        # FP fusion is set explicitly because its default is about to change. No result here depends on it.
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    if of_parts:
        meta |= {"FINISHES": finishes, "GROUP": tile.group, "STEPS": tile.part_steps, "LANES": tile.part_lanes}
    else:
        meta |= {"ROWS": tile.rows, "STEPS": tile.steps, "LANES": tile.lanes}
    scratch: Any = (owners, states) if of_parts else (owners,)
    programs = -(-count // (tile.group if of_parts else tile.rows)) * -(-columns // tile.heads)
    with on_device(call.offsets.device):
        for start in range(0, programs, tile.grid):
            grid = (min(tile.grid, programs - start),)
            kernel[grid](call, *scratch, start, count, items, columns, **meta)


def _extent(t: Tensor) -> int:
    """The distance in memory from the first element to the last."""
    return sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))


@functools.lru_cache(maxsize=4096)
def _inner(shape: torch.Size, dim: int, *strides: Steps) -> tuple[Steps, tuple[Steps, ...]]:
    """Levels (`levels_of`) of the inner dims, those with the smallest strides in the first tensor fastest."""
    dims = sorted((d for d in range(len(shape)) if d != dim), key=lambda d: -strides[0][d])
    return levels_of(tuple(dims), shape, *strides)


def tile_of(sums: bool, x: Tensor, dim: int, segments: int, strides: tuple[Steps, ...], warp: int) -> SegmentTile:
    """The tile of a call. ``strides``: the strides of the inner dims, those of ``x`` first."""
    items, wide = x.shape[dim], 8 if x.dtype is torch.float64 else 4
    mean, beside = _power(items // max(segments, 1)), x.numel() // items if strides[0][0] < x.stride(dim) else 1
    return _tile(sums, items.bit_length(), mean, beside, wide, warp, is_batch_invariant())


@functools.lru_cache(maxsize=4096)
def _tile(sums: bool, bits: int, mean: int, beside: int, wide: int, warp: int, invariant: bool) -> SegmentTile:
    """``bits``: of the number of items. ``mean``: items of a row. ``beside``: positions of the inner dims, if they are
    closer in memory than items. In the batch-invariant mode the tile depends only on the dtypes."""
    threads, per_thread = _THREADS, _ELEMENTS[sums][wide]
    if invariant:  # a warp computes a row
        threads, mean, beside = 32, 128, 1
    heads = min(_power(beside), _MOST_HEADS)
    of_head = threads // heads
    block = min(max(mean, _FEWEST_LANES), of_head * per_thread)
    rows = 1 if invariant else of_head * per_thread // block
    lanes = max(min(max(block // _STEPS, _FEWEST_LANES), 32 // heads), of_head // rows)
    span = max(256, 8 * block)  # a program waits for its longest row
    num_warps = max(1, threads // warp)
    return SegmentTile(
        steps=block // lanes,
        lanes=lanes,
        rows=min(rows, _MOST_ROWS * of_head // lanes),
        heads=heads,
        span=span,
        part=max(1024, span),
        most_parts=_MOST_PARTS,
        part_steps=per_thread,
        part_lanes=of_head,
        group=16 if 1 << bits > 2**15 * span else 1,
        num_warps=num_warps,
        grid=min(_MOST_PROGRAMS, _MOST_THREADS // (num_warps * warp)),
    )


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
