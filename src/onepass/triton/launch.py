"""The entry point of the Triton engine: layout, plan, launch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from . import layout, plans

__all__ = ["forward", "kernels", "on_device", "properties"]


def forward(function: str, x: Tensor, out: Tensor, dims: tuple[int, ...], *, plan: plans.Plan | None = None) -> None:
    """Write ``function`` of ``x`` over ``dims`` to ``out``.

    ``function``: one of ``plans.FUNCTIONS``.
    ``x``: float64, float32, float16 or bfloat16, any strides, on a device for which ``unavailable`` says None.
    ``out``: allocated by the caller, no two elements in one place. For the softmax family of the shape of ``x``, of any
    of these dtypes (``x`` is rounded to it first), and possibly ``x`` itself; for logsumexp of the dtype of ``x``, or
    float32 of half types, and its shape with ``dims`` kept as 1; for state of two such planes (maxima, sums), float64
    of float64, else float32.
    ``dims``: not negative, sorted, unique.
    ``plan`` forces a tier; ValueError where it cannot serve the call.
    """
    walk = layout.order(x, dims)
    rows, n = walk.sizes(x)
    if plan is not None:
        plan.check(n)
    if out.numel() == 0:
        return
    reduces, planes = function in ("logsumexp", "state"), function == "state"
    first = out[0] if planes else out
    if n == 0:  # over nothing: log(0), a maximum of -inf, a sum of 0
        if planes:
            out.zero_()
        first.fill_(-float("inf"))
        return
    if plan is None:
        plan = plans.plan(function, rows, n, x.dtype, out.dtype, properties(x.device))

    source, target = x, out
    x_strides, out_strides = layout.strides(x, walk), layout.strides(first, walk)
    if x_strides is None:
        source, x_strides = walk.permuted(x).contiguous(), (n, 1)
    if out_strides is None:
        # The copy of the input serves as the buffer of the result where it can.
        reusable = source is not x and not reduces and x.dtype == out.dtype
        shape = walk.permuted(first).shape
        target = source if reusable else out.new_empty((2, *shape) if planes else shape)
        out_strides = (1 if reduces else n, 1)
    if planes:  # what has no elements along a row needs no stride there: it is told how far on the sums are
        out_strides = (out_strides[0], target.stride(0))
    _launch(function, plan, source, target, rows, n, x_strides, out_strides)
    if target is not out:
        for part, made in zip(out, target, strict=True) if planes else ((out, target),):
            walk.permuted(part).copy_(made)


@functools.cache
def kernels() -> dict[str, Any]:
    """The kernel of each tier. Importing them imports triton, hence not before a call needs it."""
    from .online import online_kernel
    from .rows import rows_kernel

    return {"row": rows_kernel, "online": online_kernel}


def _launch(
    function: str,
    plan: plans.Plan,
    x: Tensor,
    out: Tensor,
    rows: int,
    n: int,
    x_strides: tuple[int, int],
    out_strides: tuple[int, int],
) -> None:
    kernel = kernels()[plan.tier]
    # FP fusion is asked for by name because its default is about to change; no result here depends on it.
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "enable_fp_fusion": True}
    span = plan.grid * plan.rows
    with on_device(x.device):
        for first in range(0, rows, span):
            count = min(span, rows - first)
            if first:
                x_part, out_part = _from_row(x, first * x_strides[0]), _from_row(out, first * out_strides[0])
            else:
                x_part, out_part = x, out
            if plan.tier == "row":
                sizes, tile = (count, n), (plan.rows, plan.block)
            else:
                sizes, tile = (n, -(-n // (plan.depth * plan.block))), (plan.depth, plan.block)
            grid = (-(-count // plan.rows),)
            kernel[grid](x_part, out_part, *sizes, *x_strides, *out_strides, function, *tile, **options)


def _from_row(tensor: Tensor, offset: int) -> Tensor:
    """The tensor's memory from ``offset`` elements on; the kernel takes only the address."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current, as a Triton launch needs.

    On a CPU it is Triton's interpreter that runs, in NumPy, which would warn of every infinity that a kernel handles.
    """
    if device.type == "cpu":
        import numpy

        return numpy.errstate(all="ignore")
    return torch.get_device_module(device).device(device)


@functools.cache
def properties(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).get_device_properties(device)
