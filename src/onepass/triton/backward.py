"""The entry point of gradients: layout, plan, launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import layout, plans
from .launch import on_device, properties

__all__ = ["backward"]


def backward(
    function: str,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    dx: Tensor,
    dims: tuple[int, ...],
    *,
    plan: plans.Plan | None = None,
) -> None:
    """Write the input's gradient to ``dx`` from the result's, ``grad``. No other tensor is made.

    ``function``: one of ``plans.DIFFERENTIABLE``.
    ``saved``: of the softmax family the result, of logsumexp the input and the result.
    ``grad``: of the result's shape. A result of logsumexp, and its gradient, have ``dims`` kept as 1.
    ``dx``: of the input's shape, allocated by the caller, no two elements in one place, and none where others lie.
    All are float64, float32, float16 or bfloat16 (sums are float64 if ``grad`` or ``saved`` is, else float32; ``dx`` is
    rounded once), of any strides (0 too), on a device for which ``unavailable`` says None.
    ``dims``: not negative, sorted, unique.
    ``plan`` forces a tier. ValueError where it cannot serve the call, and for what is not as described.
    """
    _check(function, grad, saved, dx, dims)
    y, lse = saved[0], saved[1] if function == "logsumexp" else None
    walk = layout.order(y, dims)
    rows, n = walk.sizes(y)
    if plan is not None:
        plan.check(n)
    if dx.numel() == 0:
        return
    if plan is None:
        plan = plans.backward_plan(rows, n, (y.dtype, grad.dtype, dx.dtype), properties(y.device))

    tensors = [y, grad.expand_as(y), y if lse is None else lse.expand_as(y), dx]
    row_sizes, row_strides = layout.levels(walk.outer, y.shape, tensors)
    sizes, strides = layout.levels(walk.reduced, y.shape, tensors)
    if rows == 1:  # as if it were one of many rows, so that Triton compiles (and rounds) the same
        row_strides = [(n * inner[0],) for inner in strides]
    levels = (row_sizes, *row_strides, sizes, strides[0], strides[1], strides[3])
    kernel = kernels()[plan.tier]
    # FP fusion is asked for by name because its default is about to change; no result here depends on it.
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "enable_fp_fusion": True}
    span = plan.grid * plan.rows
    with on_device(y.device):
        for first in range(0, rows, span):
            grid = (-(-min(span, rows - first) // plan.rows),)
            if plan.tier == "row":
                numbers, tile = (first, rows, n), (plan.rows, plan.block)
            else:
                numbers, tile = (first, n, -(-n // (plan.depth * plan.block))), (plan.depth, plan.block)
            kernel[grid](y, grad, lse, dx, *numbers, *levels, function, *tile, **options)


def _check(function: str, grad: Tensor, saved: tuple[Tensor, ...], dx: Tensor, dims: tuple[int, ...]) -> None:
    if function not in plans.DIFFERENTIABLE:
        known = ", ".join(plans.DIFFERENTIABLE)
        raise ValueError(f"the Triton engine has gradients of {known}, got {function!r}")
    names = ("input", "result") if function == "logsumexp" else ("result",)
    if len(saved) != len(names):
        raise ValueError(f"gradients of {function} need its {' and '.join(names)}, got {len(saved)} tensors")
    shape = saved[0].shape
    kept = torch.Size(1 if d in dims else size for d, size in enumerate(shape)) if function == "logsumexp" else shape
    given = {"the result": (saved[-1], kept), "its gradient": (grad, kept), "the input's gradient": (dx, shape)}
    for name, (tensor, want) in given.items():
        if tensor.shape != want:
            raise ValueError(f"{name} has shape {list(want)} here, got {list(tensor.shape)}")
        if tensor.device != saved[0].device:
            raise ValueError(f"{name} is on {tensor.device}, what the forward saved on {saved[0].device}")


@functools.cache
def kernels() -> dict[str, Any]:
    """The kernel of each tier. Importing them imports triton, hence not before a call needs it."""
    from .gradients import online_backward_kernel, rows_backward_kernel

    return {"row": rows_backward_kernel, "online": online_backward_kernel}
