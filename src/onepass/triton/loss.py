"""Launches of the kernels of losses: the terms of rows, and the gradient of the input from the gradients of the terms.

csrc/core/loss_problem.h has the definitions. The input and its gradient may have any strides and are not copied.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .launch import levels_of, on_device, properties_of
from .plan import _MOST_PROGRAMS, _MOST_THREADS
from .scored import Maybe, Steps, _number

if TYPE_CHECKING:
    from ..loss_arithmetic import LossSpec

__all__ = ["launch_loss_backward", "launch_loss_forward"]

# Elements of a tile per thread, by the bytes of an element. The forward keeps up to 5 numbers per element in registers.
_ELEMENTS = {False: {2: 8, 4: 8, 8: 4}, True: {2: 16, 4: 8, 8: 4}}  # forward, backward


class Numbers(NamedTuple):
    """The numbers of a call, as kernels take them. A number that a call does not have is (), and kernels are compiled
    without it."""

    factor: Maybe
    softcap: Maybe
    on_class: Maybe  # for a cross-entropy: the factor of the target class's loss
    on_all: Maybe  # the factor of the spread (label smoothing)
    z_loss: Maybe  # the factor of lse^2


class Tile(NamedTuple):
    """Rows and classes of a program (powers of two), its warps, and the most programs of a launch."""

    rows: int
    classes: int
    num_warps: int
    grid: int


def launch_loss_forward(
    x: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    scale: Tensor | None,
    terms: Tensor,
    result: Tensor | None,
    spec: LossSpec,
    *,
    tile: Tile | None = None,
) -> bool:
    """Write the terms of all rows of ``x`` to ``terms``, and the losses of a cross-entropy to ``result`` too. Returns
    False, and writes nothing, if there is no kernel for the call.

    ``x``: float64, float32, float16 or bfloat16, any strides, on a device for which ``unavailable`` returns None. Its
    rows are the dims other than ``spec.dim``, flattened, the last one fastest. The accumulator is float64 for float64,
    else float32. All other tensors are contiguous.
    ``index``: int64, (rows, picks) or (rows,). A class that does not exist is not read, and its loss is NaN.
    ``weight``, ``weight_sum``, ``scale``: (n,), one number and (rows,), in the accumulator's dtype.
    ``terms``: (planes, rows), in the accumulator's dtype. ``result``: a floating number per row.
    ``tile`` replaces the tile that would be chosen.
    """
    if not x.numel():
        return False
    tensors = (x, result, terms, index, weight, weight_sum, scale)
    _launch(False, tensors, (x.stride(),), index, spec, tile)
    return True


def launch_loss_backward(
    x: Tensor,
    terms: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    scale: Tensor | None,
    grads: Tensor,
    total: Tensor | None,
    grad_lse: Tensor | None,
    dx: Tensor,
    spec: LossSpec,
    *,
    tile: Tile | None = None,
) -> bool:
    """Write the gradient of ``x`` to ``dx``. Returns False, and writes nothing, if there is no kernel for the call.

    ``grads``: the gradients of the terms, in the accumulator's dtype. For a cross-entropy the gradient of the result: a
    floating number per row or one for all. ``total``: the divisor of ``grads``, a number in the accumulator's dtype.
    ``grad_lse``: for a cross-entropy, the gradient of the logsumexp of each row, in the accumulator's dtype.
    ``dx``: of the shape of ``x``, any strides, possibly ``x`` itself. All else is as in `launch_loss_forward`.
    """
    if not x.numel():
        return False
    tensors = (x, dx, terms, index, weight, weight_sum, scale, grads, total, grad_lse)
    per_row = {"GRADS_PER_ROW": grads.numel() > 1}
    _launch(True, tensors, (x.stride(), dx.stride()), index, spec, tile, per_row)
    return True


@functools.cache
def _kernel(backward: bool) -> Any:
    """Imports triton and returns a kernel."""
    from . import loss_kernels

    return loss_kernels.backward_kernel if backward else loss_kernels.forward_kernel


def _launch(
    backward: bool,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[Steps, ...],
    index: Tensor | None,
    spec: LossSpec,
    tile: Tile | None,
    more: dict[str, bool] | None = None,
) -> None:
    x = tensors[0]
    assert x is not None
    n = x.shape[spec.dim]
    on_class, on_all, z_loss = 0.0, 0.0, 0.0
    if spec.is_cross:
        on_class, on_all, z_loss = 1 - spec.smoothing, spec.smoothing / n, spec.z_loss
    given = (spec.factor, spec.softcap, on_class, on_all, z_loss)
    numbers = numbers_of(x, given, (True, spec.softcap, spec.is_cross, on_all, z_loss))
    constants = {
        "IS_CROSS": spec.is_cross,
        "SPREAD": on_all != 0 if spec.is_cross else spec.spread,
        "ENTROPY": spec.entropy and not spec.is_cross,
        **(more or {}),
    }
    integers = (0 if index is None else index.numel() * n // x.numel(), spec.ignore_index)
    launch_rows(_kernel(backward), backward, x, tensors, strides, spec.dim, integers, numbers, constants, tile)


def numbers_of(x: Tensor, given: tuple[float, ...], needed: tuple[Any, ...]) -> Numbers:
    """The numbers ``given``, as kernels for the dtype of ``x`` take them; () for those not ``needed``."""
    made = [_number(v, x.dtype) if is_there else () for v, is_there in zip(given, needed, strict=True)]
    return Numbers(*made, *[()] * (len(Numbers._fields) - len(made)))


def launch_rows(
    kernel: Any,
    backward: bool,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[Steps, ...],
    dim: int,
    integers: tuple[int, ...],
    numbers: Numbers,
    constants: dict[str, bool],
    tile: Tile | None,
) -> None:
    """Launch a kernel over the rows of ``x``. ``strides``: the strides of all tensors that have the shape of ``x``."""
    rows, n, *layout, has_columns = _layout(x.shape, dim, strides)
    if tile is None:
        warp = getattr(properties_of(x.device), "warp_size", 32)
        tile = _tile(backward, n, has_columns, x.element_size(), warp)
    meta = {
        **constants,
        "ROWS": tile.rows,
        "BLOCK": tile.classes,
        # Whether the number of rows is a multiple of 16. It matters only if rows are adjacent in memory; otherwise it
        # should not compile another kernel.
        "MULTIPLE": 16 if has_columns and rows % 16 == 0 else 1,
        # FP fusion is set explicitly because its default is about to change. No result here depends on it.
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    programs = -(-rows // tile.rows) * (-(-n // tile.classes) if backward else 1)
    with on_device(x.device):
        for first in range(0, programs, tile.grid):
            grid = (min(tile.grid, programs - first),)
            kernel[grid](*tensors, first, rows, n, *integers, *layout, numbers, **meta)


@functools.lru_cache(maxsize=4096)
def _layout(shape: torch.Size, dim: int, strides: tuple[Steps, ...]) -> tuple[Any, ...]:
    """(rows, classes, levels of the rows (sizes and strides), strides from class to class, whether it is the rows that
    are adjacent in memory)."""
    n = shape[dim]
    rows = math.prod(shape) // n
    steps = tuple(of[dim] for of in strides)
    row_sizes, row_strides = levels_of(tuple(d for d in range(len(shape)) if d != dim), shape, *strides)
    if rows == 1:  # as with many rows, so that Triton compiles the same kernel (and rounds alike)
        row_strides = tuple((n * step,) for step in steps)
    has_columns = n > 1 and row_strides[0][0] < steps[0]
    return rows, n, row_sizes, row_strides, steps, has_columns


@functools.lru_cache(maxsize=4096)
def _tile(backward: bool, n: int, has_columns: bool, itemsize: int, warp: int) -> Tile:
    """The tile. It does not depend on the number of rows, so that a row's bits do not depend on other rows."""
    per_thread, width = _ELEMENTS[backward][itemsize], 1 << (n - 1).bit_length()
    # By timings on an H200 (2026-11). The forward merges the elements of a tile at the end, so a tile is narrow enough
    # that each element gets several classes first. If rows are adjacent in memory, a tile has at least 32 or 64 bytes
    # of them.
    if has_columns:
        classes, wanted, most = max(2, width // (4 if backward else 32)), width, 256 if backward else 512
    else:
        classes = wanted = max(8, width // (1 if backward else 8))
        most = 256
    elements = max(128 * per_thread, min(wanted, most * per_thread))
    fewest_rows = (64 if backward else 32) // itemsize if has_columns else 1
    classes = min(classes, width, elements // fewest_rows)
    num_warps = max(1, elements // per_thread // warp)
    grid = min(_MOST_PROGRAMS, _MOST_THREADS // (num_warps * warp))
    return Tile(elements // classes, classes, num_warps, grid)
