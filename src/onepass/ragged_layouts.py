"""Tensors whose layout has rows of unequal length: jagged nested tensors, and sparse tensors in compressed rows.

Over the ragged dim a function is computed over segments of `values()`. Over any other dim it is computed over that dim
of `values()`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._engines import resolve
from .segment_arithmetic import SegmentSpec
from .segment_ops import segment_call
from .settings import autocast_to_float32
from .validation import FLOATS, TAKES, check_dtype, normalize_dims

RAGGED = (torch.jagged, torch.sparse_csr)
Plain = Callable[[str, Tensor, int, Any, None, str], Tensor]  # (function, x, dim, dtype or keepdim, out, engine)


def call_ragged(
    function: str, x: Tensor, dim: Any, option: Any, out: Any, engine: str, scores: Mapping[str, Any], plain: Plain
) -> Tensor:
    """A call of a function of the family. `plain` calls it for a dense tensor."""
    what = "a nested tensor" if x.is_nested else f"layout {x.layout}"
    if scores or out is not None:
        given = "out=" if out is not None else next(iter(scores)) + "="
        raise NotImplementedError(f"onepass.{function}(): of {what} takes no {given}")
    if x.dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{function}(): takes {TAKES}, got {x.dtype}")
    dims = normalize_dims(function, x, dim)
    if len(dims) != 1:
        raise NotImplementedError(f"onepass.{function}(): of {what} takes one dim, got {tuple(dims)}")
    return (_jagged if x.is_nested else _compressed)(function, x, dims[0], option, engine, plain)


def _of_segments(function: str, values: Tensor, offsets: Tensor, dim: int, option: Any, engine: str) -> Tensor:
    dtype = None if function == "logsumexp" else option
    if dtype is not None:
        check_dtype(function, values, dtype)
    elif autocast_to_float32(values):
        dtype = torch.float32
    factor = -1.0 if function == "softmin" else 1.0
    name = "softmax" if function == "softmin" else function
    spec = SegmentSpec(dim, name, factor, dtype, resolve(engine, values.device))
    return segment_call(values, offsets, None, None, spec)


def _jagged(function: str, x: Any, dim: int, option: Any, engine: str, plain: Plain) -> Tensor:
    if dim == 0:
        raise NotImplementedError(f"onepass.{function}(): of a nested tensor takes no dim 0, the batch")
    if x.lengths() is not None:  # there are gaps between its rows
        x = x.contiguous()
    values, offsets, ragged = x.values(), x.offsets(), x._ragged_idx
    reduces = function == "logsumexp"
    if dim == ragged:
        y = _of_segments(function, values, offsets, dim - 1, option, engine)
        if reduces:
            y = y.movedim(dim - 1, 0)
            return y.unsqueeze(dim) if option else y
    else:
        y = plain(function, values, dim - 1, option, None, engine)
        if reduces and not option and dim < ragged:
            ragged -= 1
    return torch.nested.nested_tensor_from_jagged(y, offsets, jagged_dim=ragged)


def _compressed(function: str, x: Tensor, dim: int, option: Any, engine: str, plain: Plain) -> Tensor:
    if x.dim() - x.dense_dim() != 2:
        raise NotImplementedError(f"onepass.{function}(): of layout {x.layout} takes no batch, got {list(x.shape)}")
    if dim == 0:
        raise NotImplementedError(f"onepass.{function}(): of layout {x.layout} takes no dim 0, the rows")
    values, rows, columns = x.values(), x.crow_indices(), x.col_indices()
    shape = list(x.shape)
    if dim == 1:
        y = _of_segments(function, values, rows, 0, option, engine)
        if function == "logsumexp":
            return y.unsqueeze(1) if option else y
    else:
        y = plain(function, values, dim - 1, option, None, engine)
        if function == "logsumexp":
            shape = shape[:2] + list(y.shape[1:])
    return torch.sparse_csr_tensor(rows, columns, y, shape, check_invariants=False)
