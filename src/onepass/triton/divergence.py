"""Launches of the kernels of divergences, which compute the terms of rows of two tensors, and the gradients of both
tensors from the gradients of the terms. Also launches of the two steps of the gradient of a softmax (products).

csrc/core/divergence_problem.h has the definitions. The inputs and their gradients may have any strides and are not
copied.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .loss import Tile, launch_rows, numbers_of

if TYPE_CHECKING:
    from ..loss_arithmetic import DivergenceSpec

__all__ = ["launch_divergence_backward", "launch_divergence_forward", "launch_product", "launch_product_gradient"]


def launch_divergence_forward(
    x: Tensor, y: Tensor, weight: Tensor | None, terms: Tensor, spec: DivergenceSpec, *, tile: Tile | None = None
) -> bool:
    """Write the terms of all rows of ``x`` and ``y`` to ``terms``. Returns False, and writes nothing, if there is no
    kernel for the call.

    ``x``, ``y``: of one shape and dtype, float64, float32, float16 or bfloat16, any strides, on a device for which
    ``unavailable`` returns None. Rows are the dims other than ``spec.dim``, flattened, the last one fastest. The
    accumulator is float64 for float64, else float32. All other tensors are contiguous, in the accumulator's dtype.
    ``weight``: (n,). ``terms``: (planes, rows). ``tile`` replaces the tile that would be chosen.
    """
    if not x.numel():
        return False
    _launch(False, (x, y, weight, terms), (x, y), spec, tile)
    return True


def launch_divergence_backward(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    terms: Tensor,
    grads: Tensor,
    dx: Tensor | None,
    dy: Tensor | None,
    spec: DivergenceSpec,
    *,
    tile: Tile | None = None,
) -> bool:
    """Write the gradient of ``x`` to ``dx`` and that of ``y`` to ``dy``. Returns False, and writes nothing, if there is
    no kernel for the call.

    ``grads``: the gradients of the terms. ``dx``, ``dy``: of the shape and dtype of ``x``, any strides; None if the
    gradient is not needed. All other arguments are as in `launch_divergence_forward`.
    """
    if not x.numel():
        return False
    strided = (x, y, x if dx is None else dx, x if dy is None else dy)
    _launch(True, (x, y, weight, terms, grads, dx, dy), strided, spec, tile)
    return True


def launch_product(x: Tensor, y: Tensor, sums: Tensor, dim: int, *, tile: Tile | None = None) -> bool:
    """Write the sums of x y over ``dim`` to ``sums``, (rows,) in the accumulator's dtype. Returns False if there is no
    kernel for the call. ``x`` and ``y`` are as in `launch_divergence_forward`."""
    return _launch_rows("product_kernel", (x, y, sums), (x, y), dim, tile)


def launch_product_gradient(
    x: Tensor, y: Tensor, sums: Tensor, dx: Tensor, dim: int, *, tile: Tile | None = None
) -> bool:
    """Write x (y - sums) to ``dx``, of the shape and dtype of ``x``, any strides."""
    return _launch_rows("product_gradient_kernel", (x, y, sums, dx), (x, y, dx), dim, tile)


def _launch_rows(
    name: str, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...], dim: int, tile: Tile | None
) -> bool:
    if not strided[0].numel():
        return False
    strides, numbers = tuple(t.stride() for t in strided), numbers_of(strided[0], (), ())
    launch_rows(_kernel(name), "gradient" in name, strided[0], tensors, strides, dim, (), numbers, {}, tile)
    return True


@functools.cache
def _kernel(name: str) -> Any:
    """Imports triton and returns a kernel."""
    from . import divergence_kernels

    return getattr(divergence_kernels, name)


def _launch(
    backward: bool,
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    spec: DivergenceSpec,
    tile: Tile | None,
) -> None:
    x = strided[0]
    given = (spec.factor, spec.softcap, 1 - spec.smoothing, spec.smoothing / x.shape[spec.dim], 0.0)
    numbers = numbers_of(x, given, (True, spec.softcap, spec.smoothing, spec.smoothing, False))
    strides = tuple(t.stride() for t in strided)
    constants = {"IS_KL": spec.is_kl}
    launch_rows(
        _kernel("backward_kernel" if backward else "forward_kernel"),
        backward,
        x,
        tensors,
        strides,
        spec.dim,
        (),
        numbers,
        constants,
        tile,
    )
