"""`explain` for calls of losses, of segments and with scores."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import native
from ._call_names import LOSSES, SCORED
from .losses import _check_logits, _result_dtype
from .scored import _accumulator
from .segment_arithmetic import SegmentSpec
from .segment_ops import _fuses
from .tables import GpuModel
from .triton import loss as triton_loss
from .triton import segments as triton_segments
from .validation import HALF_DTYPES, Default, check_dtype, reduces_to, result_dtype, wrap_dims

_INDEX_BYTES = 8  # bytes of a class, and at most of an offset of segments


def check_call(
    function: str, x: Tensor, dim: Any, out_dtype: torch.dtype | None, segments: int | None
) -> tuple[Tensor, list[int], torch.dtype]:
    """The input as its kernel takes it, the dim of the classes or of the items, and the dtype of the result. Raises the
    errors that the call would raise."""
    if not isinstance(dim, int):
        raise TypeError(f"onepass.explain(): {function} takes one dim, got {dim!r}")
    if function in SCORED:
        check_dtype(function, x, out_dtype)
        to = result_dtype(function, x.dtype, out_dtype)
        return (x if x.dim() else x.unsqueeze(0)), wrap_dims(function, x, [-1 if type(dim) is Default else dim]), to
    if function not in LOSSES:
        return _check_segments(function, x, dim, out_dtype, segments)
    _check_logits(function, x)
    x = x if x.dim() else x.unsqueeze(0)
    if function != "cross_entropy":
        return x, wrap_dims(function, x, [dim]), _result_dtype(function, x, out_dtype)
    classes = 0 if x.dim() == 1 else 1
    if type(dim) is not Default and wrap_dims(function, x, [dim]) != [classes]:
        raise ValueError(f"onepass.explain(): cross_entropy has its classes in dim {classes}, got dim {dim}")
    if out_dtype not in (None, x.dtype) and not (x.dtype in HALF_DTYPES and out_dtype is torch.float32):
        raise ValueError(f"onepass.explain(): {function} has no dtype=; of {x.dtype} no out_dtype is {out_dtype}")
    return x, [classes], out_dtype or x.dtype


def _check_segments(
    function: str, x: Tensor, dim: int, out_dtype: torch.dtype | None, segments: int | None
) -> tuple[Tensor, list[int], torch.dtype]:
    if type(segments) is not int or segments < 0:
        raise ValueError(f"onepass.explain(): {function} takes segments=, how many there are, got {segments!r}")
    if not x.dim():
        raise ValueError(f"onepass.{function}(): x has a dim of items, got a tensor without dims")
    dims = wrap_dims(function, x, [0 if type(dim) is Default else dim])
    of_segments = SegmentSpec(dims[0], function.removeprefix("segment_"), dtype=out_dtype)
    if out_dtype is not None:
        check_dtype(function, x, out_dtype)
    to = of_segments.result_dtype(x)
    if of_segments.function == "state" and not reduces_to("state", x.dtype, out_dtype or to):
        raise ValueError(f"onepass.explain(): {function} has no dtype=; of {x.dtype} no out_dtype is {out_dtype}")
    return x, dims, to


def describe_call(
    engine: str,
    call: str,
    x: Tensor,
    dim: int,
    y_type: torch.dtype,
    segments: int | None,
    out: Tensor | None,
    address: int,
    chip: GpuModel,
    properties: Any,
    notes: list[str],
) -> tuple[str, dict[str, Any], int]:
    """(tier, launch numbers, bytes) of the chosen engine, as explain() has them for a softmax. Appends to `notes`.
    `call` is the name that `native.call_plan` takes."""
    if engine == "none":
        return "none", {}, 0
    moved = _bytes(call, x, dim, y_type, segments)
    if not x.numel():
        notes.append("nothing to compute")
        return "none", {}, moved
    if segments is not None and not _fuses(x.dtype, y_type):
        notes.append(f"the input is cast to {y_type} first, into a temporary")
        x, address = torch.empty_like(x, dtype=y_type, device="meta"), 0
    is_scored = call.split()[0] in SCORED
    if engine == "triton":
        if is_scored:
            notes.append("this engine makes its plan as it launches")
            return "rows", {}, moved
        tier, launch = _triton_launch(x, dim, segments, properties)
        return tier, launch, moved
    strides = [*x.stride(), *_result_strides(call, x, dim, segments, out)]
    types = (x.dtype, y_type if is_scored or segments is not None else x.dtype)
    gpu = chip.compute, chip.multiprocessors, chip.name
    launch = native.call_plan(call, types, x.shape, strides, dim, segments or 0, address, gpu)
    if not launch:
        most = "" if segments is not None else ", nor rows of 2**30 elements"
        dims = 5 if is_scored else 6
        notes.append(
            f"no kernel takes more than {dims} dims beside that do not merge{most}: plain arithmetic computes it"
        )
        return "arithmetic", {}, moved
    launch.pop("kernels", None)
    tier = launch.pop("tier")
    return tier, launch if engine == "cuda" else {"threads": torch.get_num_threads(), **launch}, moved


def _result_strides(call: str, x: Tensor, dim: int, segments: int | None, out: Tensor | None) -> Sequence[int]:
    """The strides of a result of segments (without the planes of a state) or of scores. Plans of losses use none."""
    if out is not None:
        return out.stride()
    if call.split()[0] == "logsumexp":
        rows = torch.empty([n for d, n in enumerate(x.shape) if d != dim], device="meta").stride()
        return [*rows[:dim], 0, *rows[dim:]]
    if segments is None:
        return x.stride()
    if "softmax" in call:
        return torch.empty_like(x, device="meta").stride()
    shape = [segments if d == dim else size for d, size in enumerate(x.shape)]
    return torch.empty(shape, device="meta").stride()


def _bytes(call: str, x: Tensor, dim: int, y_type: torch.dtype, segments: int | None) -> int:
    """The bytes that a call reads and writes, each element once. Class weights are few and not counted."""
    function, *options = call.split()
    size, of_x = y_type.itemsize, x.numel() * x.element_size()
    rows = math.prod(n for d, n in enumerate(x.shape) if d != dim)
    if function in SCORED:  # a bias and a mask of x's shape
        results = rows if function == "logsumexp" else x.numel()
        return of_x + results * size + (of_x if "bias" in options else 0) + (x.numel() if "mask" in options else 0)
    if segments is not None:
        results = rows * segments * (2 if function == "segment_state" else 1) if "softmax" not in call else x.numel()
        indices = segments + 1 + (x.shape[dim] if "order" in options else 0)
        return of_x * (2 if "bias" in options else 1) + results * size + indices * _INDEX_BYTES
    if function == "entropy":
        return of_x + rows * size
    if function == "kl_div":
        return 2 * of_x + rows * size
    second = of_x if "probabilities" in options else rows * _INDEX_BYTES
    if function == "log_prob":
        return of_x + second + rows * size * (2 if "return_entropy" in options else 1)
    lse = rows * _accumulator(x.dtype, x.dtype).itemsize if "return_lse" in options else 0
    return of_x + second + size + lse  # one number, the mean


def _triton_launch(x: Tensor, dim: int, segments: int | None, properties: Any) -> tuple[str, dict[str, Any]]:
    warp = getattr(properties, "warp_size", 32)
    if segments is None:
        rows, n, *_, has_columns = triton_loss._layout(x.shape, dim, (x.stride(),))
        tile = triton_loss._tile(False, n, has_columns, x.element_size(), warp)
        numbers = {"grid": -(-rows // tile.rows), "rows": tile.rows, "classes": tile.classes}
        return "columns" if has_columns else "rows", {**numbers, "num_warps": tile.num_warps}
    _, strides = triton_segments._inner(x.shape, dim, x.stride())
    part = triton_segments.tile_of(False, x, dim, segments, strides, warp)
    grid = -(-segments // part.rows) * -(-(x.numel() // x.shape[dim]) // part.heads)
    return "segments", {"grid": grid, "rows": part.rows, "heads": part.heads, "num_warps": part.num_warps}
