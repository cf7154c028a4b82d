"""Launches of kernels with scores, and the further arguments that these kernels take.

../scores.py describes scores. The side tensors are read by the strides that broadcasting gives them, and the input and
the result by theirs, for all reduced dims. Nothing is copied.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native import REDUCTIONS
from ..scores import Scores, SideTensors
from .launch import Order, launch_kernel, levels_of, order_of, properties_of
from .plan import Plan, plan_scored

__all__ = ["launch_scored_backward", "launch_scored_forward", "launch_scored_logsumexp_backward"]

_MAIN = ("x", "out", "grad", "lse")  # the tensors that kernels without scores take too
_MOST = 2**30  # kernels compute distances of keys and queries in 32 bits
Steps = tuple[int, ...]
Maybe = tuple[()] | tuple[float | int]


class Operand(NamedTuple):
    """A side tensor, as kernels take it. ``strides`` are those within a row, or () if it is constant within a row."""

    data: Tensor
    row_strides: Steps
    strides: Steps


class Distance(NamedTuple):
    """The distance k - q of key and query, which is given by strides, like the offset in a tensor."""

    row_strides: Steps
    strides: Steps


class Score(NamedTuple):
    """The arguments of a kernel with scores. A field that a call does not have is (), and the kernel is compiled
    without it.

    Numbers are floats, or for kernels of doubles the bits of doubles. Integers are multiplied by 16, because Triton
    compiles another kernel for an integer that is 1 or a multiple of 16.
    """

    factor: Maybe
    softcap: Maybe
    sink: Maybe
    least: Maybe  # the least distance k - q in the window
    most: Maybe  # the largest distance k - q in the window
    offset: Maybe  # the offset for alibi
    empty: Maybe  # not () if a row without a score above -inf is 0, or -inf in a log_softmax
    whole: Maybe  # not () if a gradient reads masked-out elements, or the mask in every row
    of_scores: Maybe  # not () if the gradient of the scores is computed
    distance: Distance | tuple[()] = ()
    scale: Operand | tuple[()] = ()
    bias: Operand | tuple[()] = ()
    alibi: Operand | tuple[()] = ()
    sinks: Operand | tuple[()] = ()
    mask: Operand | tuple[()] = ()
    input: Operand | tuple[()] = ()  # the input, for a gradient with a softcap


def launch_scored_forward(
    function: str,
    x: Tensor,
    out: Tensor,
    lse: Tensor | None,
    dims: tuple[int, ...],
    side: SideTensors,
    scores: Scores,
    *,
    plan: Plan | None = None,
) -> bool:
    """Write ``function`` (softmax, log_softmax or logsumexp) of the scores of ``x`` to ``out``. Returns False, and
    writes nothing, if there is no kernel for the call.

    ``x``, ``out``, ``dims``, ``plan``: as for `launch_forward`.
    ``lse``: None, or a tensor for the logsumexp of each row. It has the shape of ``x`` with size 1 in ``dims``, and is
    float64 if ``out`` is, else float32.
    """
    if not _has_kernel(x, side, scores):
        return False
    scale, bias, alibi, sinks, mask = side
    tensors = {"x": x, "out": out, "lse": lse, "scale": scale, "bias": bias, "alibi": alibi, "sinks": sinks}
    empty = scores.empty_is_zero and function not in REDUCTIONS
    if sinks is not None:
        scores = scores._replace(sink=-math.inf)
    _launch(function, {**tensors, "mask": mask}, dims, scores, out.dtype, empty, plan)
    return True


def launch_scored_backward(
    function: str,
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    dx: Tensor,
    dims: tuple[int, ...],
    side: SideTensors,
    scores: Scores,
    *,
    plan: Plan | None = None,
) -> bool:
    """Write the gradient of the input to ``dx``, from the result ``y`` of softmax or log_softmax and the upstream
    gradient. Returns False, and writes nothing, if there is no kernel for the call.

    ``x``: the input, needed for a softcap. ``side``, ``scores``: their scale, softcap, mask and window are used.
    """
    if not _has_kernel(y, side, scores):
        return False
    tensors = {"x": y, "out": dx, "grad": grad, "scale": side.scale, "mask": side.mask, "input": x}
    wide = torch.float64 if torch.float64 in (y.dtype, grad.dtype) else torch.float32
    empty = scores.empty_is_zero and function == "log_softmax"
    _launch(function, tensors, dims, scores._replace(sink=-math.inf), wide, empty, plan)
    return True


def launch_scored_logsumexp_backward(
    grad: Tensor,
    lse: Tensor,
    x: Tensor,
    dx: Tensor,
    dims: tuple[int, ...],
    side: SideTensors,
    scores: Scores,
    of_scores: bool,
    *,
    plan: Plan | None = None,
) -> bool:
    """Write the gradient of the input ``x``, or with ``of_scores`` of its scores, to ``dx``, from the logsumexp ``lse``
    of each row and its gradient. Returns False, and writes nothing, if there is no kernel for the call.

    ``grad``, ``lse``: of size 1 in ``dims``.
    """
    if not _has_kernel(x, side, scores):
        return False
    scale, bias, alibi, _, mask = side
    tensors = {"x": x, "out": dx, "grad": grad, "lse": lse, "scale": scale, "bias": bias, "alibi": alibi, "mask": mask}
    tensors["input"] = x if scores.softcap and not of_scores else None
    wide = torch.float64 if torch.float64 in (x.dtype, grad.dtype) else torch.float32
    scores = scores._replace(sink=-math.inf)
    _launch("logsumexp", tensors, dims, scores, wide, scores.empty_is_zero, plan, of_scores)
    return True


def _has_kernel(x: Tensor, side: SideTensors, scores: Scores) -> bool:
    if not x.numel():
        return False
    has_positions = scores.has_window() or side.alibi is not None
    return not has_positions or max(*x.shape[-2:], abs(_offset(x, scores))) < _MOST


def _launch(
    function: str,
    tensors: Mapping[str, Tensor | None],
    dims: tuple[int, ...],
    scores: Scores,
    wide: torch.dtype,
    empty: bool,
    plan: Plan | None,
    of_scores: bool = False,
) -> None:
    """Launch a kernel with scores. ``tensors``: by the names in ``_MAIN`` and in `Score`. ``wide``: the accumulator's
    dtype."""
    there = {name: t for name, t in tensors.items() if t is not None}
    x = there["x"]
    order = order_of(x.shape, x.stride(), dims)
    if plan is None:
        dtypes = tuple(there[name].dtype for name in ("x", "out", "grad", "bias", "input") if name in there)
        plan = plan_scored(order.rows, order.n, dtypes, properties_of(x.device))
    plan.check(order.n)
    steps = {name: _steps(t, x.ndim, 2 if name == "alibi" else 0) for name, t in there.items()}
    if scores.has_window() or "alibi" in there:
        steps["distance"] = (*[0] * (x.ndim - 2), -1, 1)
    row_sizes, row_strides, sizes, strides = _layout(order, x.shape, *steps.values())
    places = dict(zip(steps, zip(row_strides, strides, strict=True), strict=True))
    operands: dict[str, Any] = {
        name: Operand(t, places[name][0], places[name][1] if any(places[name][1]) else ())
        for name, t in there.items()
        if name not in _MAIN
    }
    if "distance" in places:
        operands["distance"] = Distance(*places["distance"])
    offset = _offset(x, scores)
    score = Score(
        _number(scores.factor, wide),
        _number(scores.softcap, wide) if scores.softcap else (),
        _number(scores.sink, wide) if scores.sink != -math.inf else (),
        () if scores.left is None else _integer(offset - scores.left),
        () if scores.right is None else _integer(offset + scores.right),
        _integer(offset) if "alibi" in there else (),
        (1,) if empty else (),
        (1,) if function != "softmax" and "grad" in there else (),
        (1,) if of_scores else (),
        **operands,
    )
    main = [places.get(name, ((), ())) for name in _MAIN]
    layout = (row_sizes, tuple(rows for rows, _ in main), sizes, tuple(own for _, own in main))
    launch_kernel(function, "grad" in there, plan, tuple(map(tensors.get, _MAIN)), order, layout, score)


def _number(value: float, wide: torch.dtype) -> tuple[float | int]:
    return struct.unpack("q", struct.pack("d", value)) if wide is torch.float64 else (value,)


def _integer(value: int) -> tuple[int]:
    return (16 * max(-_MOST, min(value, _MOST)),)


def _offset(x: Tensor, scores: Scores) -> int:
    """The key of the first query."""
    if scores.offset is not None:
        return scores.offset
    return x.size(-1) - x.size(-2) if x.ndim > 1 else 0


def _steps(t: Tensor, rank: int, dropped: int) -> Steps:
    """The strides of a tensor along the dims of the input, 0 for dims along which it is broadcast. It lacks the last
    ``dropped`` dims of the input."""
    own = tuple(0 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True))
    return (0,) * (rank - dropped - t.ndim) + own + (0,) * dropped


@functools.lru_cache(maxsize=4096)
def _layout(order: Order, shape: torch.Size, *strides: Steps) -> tuple[Any, ...]:
    """Sizes and strides of the levels of rows, and of the elements of a row."""
    row_sizes, row_strides = levels_of(order.outer, shape, *strides)
    sizes, own = levels_of(order.reduced, shape, *strides)
    if order.rows == 1:  # as with many rows, so that Triton compiles the same kernel (and rounds alike)
        row_strides = tuple((order.n * inner[0],) for inner in own)
    return row_sizes, row_strides, sizes, own
