"""Losses: the launches of the kernels that make the terms of rows, and the gradient of the input from theirs.

csrc/core/loss_problem.h has the definitions. The input and its gradient are read and written where they lie, by any
strides.
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

# The elements of a tile that a thread has, by the bytes of one. Forward, registers hold up to 5 numbers per element.
_ELEMENTS = {False: {2: 8, 4: 8, 8: 4}, True: {2: 16, 4: 8, 8: 4}}  # forward, backward


class Numbers(NamedTuple):
    """The numbers of a call, as kernels take them. They are compiled for what there is: what there is not is an empty
    tuple."""

    factor: Maybe
    softcap: Maybe
    on_class: Maybe  # of a cross-entropy: the factor of the loss of the class,
    on_all: Maybe  # that of the spread,
    z_loss: Maybe  # and that of the square of lse


class Tile(NamedTuple):
    """Rows and classes of a program, powers of two, and the most programs of a launch."""

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
    """Write the terms of all rows of ``x`` to ``terms``, and the losses of a cross-entropy to ``result`` too. False
    where there is no kernel for the call; then nothing is written.

    ``x``: float64, float32, float16 or bfloat16, any strides, on a device for which ``unavailable`` says None. Its rows
    are the indices of the dims other than ``spec.dim``, the last one fastest. The accumulator is float64 for float64,
    else float32. All other tensors are contiguous.
    ``index``: int64, (rows, picks) or (rows,). A class that is not there is not read, and its loss is NaN.
    ``weight``, ``weight_sum``: (n,) and one number, in the accumulator's dtype. ``scale``: (rows,), likewise.
    ``terms``: (planes, rows), in the accumulator's dtype. ``result``: a floating number per row.
    ``tile`` takes the place of the one that would be chosen.
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
    """Write the gradient of ``x`` to ``dx``. False where there is no kernel for the call; then nothing is written.

    ``grads``: those of the terms, in the accumulator's dtype; or, of a cross-entropy, that of the result: a floating
    number per row or one for all. ``total``, which divides it: one number in the accumulator's dtype.
    ``grad_lse``: of a cross-entropy, the gradient of the logsumexp of each row, in the accumulator's dtype.
    ``dx``: of the shape of ``x``, any strides, possibly ``x`` itself. The others are those of `launch_loss_forward`.
    """
    if not x.numel():
        return False
    tensors = (x, dx, terms, index, weight, weight_sum, scale, grads, total, grad_lse)
    per_row = {"GRADS_PER_ROW": grads.numel() > 1}
    _launch(True, tensors, (x.stride(), dx.stride()), index, spec, tile, per_row)
    return True


@functools.cache
def _kernel(backward: bool) -> Any:
    """This imports triton."""
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
    """The numbers that are needed, for kernels of the type of ``x``."""
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
    """Launch a kernel over the rows of ``x``. ``strides``: of the tensors of the shape of ``x``."""
    rows, n, *layout, has_columns = _layout(x.shape, dim, strides)
    if tile is None:
        warp = getattr(properties_of(x.device), "warp_size", 32)
        tile = _tile(backward, n, has_columns, x.element_size(), warp)
    meta = {
        **constants,
        "ROWS": tile.rows,
        "BLOCK": tile.classes,
        # Of the count of rows, which is no reason for another kernel but where they are read side by side.
        "MULTIPLE": 16 if has_columns and rows % 16 == 0 else 1,
        # FP fusion is asked for by name because its default is about to change; no result here depends on it.
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
    """The count of rows and of classes, how to walk the rows, the steps from class to class, and whether it is rows
    that lie side by side."""
    n = shape[dim]
    rows = math.prod(shape) // n
    steps = tuple(of[dim] for of in strides)
    row_sizes, row_strides = levels_of(tuple(d for d in range(len(shape)) if d != dim), shape, *strides)
    if rows == 1:  # as if it were one of many rows, so that Triton compiles (and rounds) the same
        row_strides = tuple((n * step,) for step in steps)
    has_columns = n > 1 and row_strides[0][0] < steps[0]
    return rows, n, row_sizes, row_strides, steps, has_columns


@functools.lru_cache(maxsize=4096)
def _tile(backward: bool, n: int, has_columns: bool, itemsize: int, warp: int) -> Tile:
    """Whatever the number of rows is, so that a row's bits do not depend on the rows beside it."""
    per_thread, width = _ELEMENTS[backward][itemsize], 1 << (n - 1).bit_length()
    # As timings on an H200 have it (2026-11). Forward, the places of a tile are merged in the end, so that each gets
    # several classes first. Where rows lie side by side, there are at least 32 or 64 bytes of them.
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
