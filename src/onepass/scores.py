"""Scores: the input of a softmax after scale, softcap, bias, alibi and masks. This file has the arguments, their checks
and the scores in plain torch arithmetic, which is differentiable to any order.

The score of the element x at query q and key k, in this order:

    s = x * scale
    s = softcap * tanh(s / softcap)
    s = s + bias - alibi * |k - (q + offset)|
    s = -inf        where `mask` is False, or k is outside q + offset - left ... q + offset + right
    sink            is one more score of the row, which takes probability and has no output

Queries are the last but one dim and keys the last, whichever dim is reduced. Sources: softcap is from Gemma 2
(arXiv:2408.00118), alibi from Press, Smith and Lewis (arXiv:2108.12409), the window from Mistral (arXiv:2310.06825),
the sink from Xiao et al. (arXiv:2309.17453) and, with the value 0, from E. Miller, "Attention is off by one" (2023).
"""

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from .validation import FLOATS, HALF_DTYPES, TAKES

__all__ = ["ScoreOptions", "Scores", "SideTensors", "check_scores"]


class ScoreOptions(TypedDict, total=False):
    """The keyword arguments of scores. `onepass.softmax` describes them."""

    scale: float | Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    causal: bool
    window: tuple[int | None, int | None] | None
    offset: int | None
    alibi: Tensor | None
    softcap: float | None
    sink: float | Tensor | None
    empty: Literal["nan", "zero"]


NAMES = frozenset(ScoreOptions.__annotations__)


class SideTensors(NamedTuple):
    """The tensor arguments of scores, or None. They broadcast by torch's rules: bias and mask to the input, scale and
    sink to the input with reduced dims of size 1, alibi to all dims of the input but the last two."""

    scale: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None


class Scores(NamedTuple):
    """The arguments of scores that are numbers, as the operators take them."""

    factor: float = 1.0  # the scale if that is a number; negative for softmin
    softcap: float = 0.0  # 0 is none
    sink: float = -math.inf  # the sink if that is a number; -inf is none
    left: int | None = None  # how many keys a query sees before its own; None is all
    right: int | None = None  # how many keys a query sees after its own; None is all
    offset: int | None = None  # the key of the first query; None aligns the last query with the last key
    empty_is_zero: bool = False

    def has_window(self) -> bool:
        return self.left is not None or self.right is not None


# Checks ---------------------------------------------------------------------------------------------------------------


def check_scores(function: str, x: Tensor, dims: list[int], given: Mapping[str, Any]) -> tuple[SideTensors, Scores]:
    """The checked arguments. Every error message says what was got and what is taken."""
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    scale, factor = _number_or_rows(function, "scale", given.get("scale"), x, dims, 1.0)
    sink, sink_number = _number_or_rows(function, "sink", given.get("sink"), x, dims, -math.inf)
    bias, alibi, mask = given.get("bias"), given.get("alibi"), given.get("mask")
    if bias is not None:
        bias = _check_tensor(function, "bias", bias, x, FLOATS, list(x.shape), "the input's shape")
    if mask is not None:
        mask = _check_tensor(function, "mask", mask, x, {torch.bool}, list(x.shape), "the input's shape")
    left, right, offset = _check_window(function, x, given, alibi is not None)
    if alibi is not None:
        alibi = _check_tensor(function, "alibi", alibi, x, FLOATS, list(x.shape[:-2]), "the dims before the last two")
    softcap = given.get("softcap")
    if softcap is not None:
        softcap = _as_float(function, "softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"onepass.{function}(): softcap must be a positive finite number, got {softcap}")
    empty = given.get("empty", "nan")
    if empty not in ("nan", "zero"):
        raise ValueError(f"onepass.{function}(): empty must be 'nan' or 'zero', got {empty!r}")
    if function == "softmin":
        factor = -factor
    scores = Scores(factor, softcap or 0.0, sink_number, left, right, offset, empty == "zero")
    return SideTensors(scale, bias, alibi, sink, mask), scores


def _as_float(function: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"onepass.{function}(): {name} must be a number, got {value!r}")
    return float(value)


def _number_or_rows(
    function: str, name: str, value: Any, x: Tensor, dims: list[int], default: float
) -> tuple[Tensor | None, float]:
    """(tensor, number) of an argument that is a number or a tensor with one value per row."""
    if value is None:
        return None, default
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"onepass.{function}(): {name} must be a number or a Tensor, got {value!r}")
        return None, float(value)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    described = "the input's shape with reduced dims of size 1"
    return _check_tensor(function, name, value, x, FLOATS, shape, described), default


def _check_tensor(
    function: str, name: str, value: Any, x: Tensor, dtypes: Any, shape: list[int], described: str
) -> Tensor:
    """Checks that `value` is a strided tensor of one of `dtypes`, on the device of `x`, and broadcasts to `shape`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"onepass.{function}(): {name} must be a Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:
        raise NotImplementedError(f"onepass.{function}(): {name} must be a dense strided tensor, got {value.layout}")
    if value.dtype not in dtypes:
        takes = TAKES if dtypes is FLOATS else "torch.bool, True where an element takes part"
        hint = "; a mask that is added is a bias" if name == "mask" and value.dtype in FLOATS else ""
        raise TypeError(f"onepass.{function}(): {name} takes {takes}, got {value.dtype}{hint}")
    fits = value.dim() <= len(shape) and all(
        own == 1 or own == size for own, size in zip(reversed(value.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"onepass.{function}(): {name} broadcasts to {described}, {shape}, got shape {list(value.shape)}"
        )
    if value.device != x.device:
        if value.dim() or value.device.type != "cpu":
            raise RuntimeError(
                f"onepass.{function}(): {name} must be on {x.device}, as the input is, got {value.device}; "
                "a tensor without dims may also be on the CPU"
            )
        value = value.to(x.device)
    return value


def _check_window(
    function: str, x: Tensor, given: Mapping[str, Any], has_alibi: bool
) -> tuple[int | None, int | None, int | None]:
    """(left, right, offset)."""
    causal, window, offset = given.get("causal", False), given.get("window"), given.get("offset")
    if not isinstance(causal, bool):
        raise TypeError(f"onepass.{function}(): causal must be a bool, got {causal!r}")
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"onepass.{function}(): window must be a pair (left, right), got {window!r}")
        left, right = (_index(function, "window", each) for each in window)
        if any(each is not None and each < 0 for each in (left, right)):
            raise ValueError(
                f"onepass.{function}(): window takes two numbers from 0 up, or None for no bound, got {tuple(window)}"
            )
    if causal:
        right = 0
    has_positions = causal or window is not None or has_alibi
    if has_positions and x.dim() < 2:
        raise ValueError(
            f"onepass.{function}(): causal, window and alibi need the dims (query, key), got shape {list(x.shape)}"
        )
    if offset is not None:
        offset = _index(function, "offset", offset)
        if not has_positions:
            words = f"offset goes with causal, window or alibi, got offset={offset} alone"
            raise ValueError(f"onepass.{function}(): {words}")
    return left, right, offset


def _index(function: str, name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)):
        return value  # type: ignore[return-value]  # a graph of any number has a SymInt
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"onepass.{function}(): {name} takes ints or None, got {value!r}") from None


# Arithmetic -----------------------------------------------------------------------------------------------------------
# `x` and the side tensors have the accumulator's dtype.


def upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x


def distances(x: Tensor, scores: Scores) -> Tensor:
    """k - (q + offset) for each query and key of `x`."""
    queries, keys = x.shape[-2:]
    offset = keys - queries if scores.offset is None else scores.offset
    at = torch.arange(keys, device=x.device) - offset
    return at - torch.arange(queries, device=x.device)[:, None]


def blocked(x: Tensor, mask: Tensor | None, scores: Scores) -> Tensor | None:
    """A bool tensor, True where an element is masked out; None if no element is."""
    out = None if mask is None else ~mask
    if scores.has_window():
        distance = distances(x, scores)
        for bound, is_outside in ((scores.left, torch.lt), (scores.right, torch.gt)):
            if bound is not None:
                outside = is_outside(distance, -bound if is_outside is torch.lt else bound)
                out = outside if out is None else out | outside
    return out


def scaled(x: Tensor, side: SideTensors, scores: Scores) -> Tensor:
    """x times the scale."""
    if scores.factor != 1:
        x = x * scores.factor
    return x if side.scale is None else x * side.scale


def slopes(x: Tensor, alibi: Tensor) -> Tensor:
    """One slope per head as a tensor that broadcasts against x."""
    return alibi[..., None, None]


def score(x: Tensor, side: SideTensors, scores: Scores) -> Tensor:
    """The scores of all elements."""
    s = scaled(x, side, scores)
    if scores.softcap:
        s = scores.softcap * (s / scores.softcap).tanh()
    if side.bias is not None:
        s = s + side.bias
    if side.alibi is not None:
        s = s - slopes(x, side.alibi) * distances(x, scores).abs()
    out = blocked(x, side.mask, scores)
    return s if out is None else s.masked_fill(out, -torch.inf)


def sink_of(side: SideTensors, scores: Scores, like: Tensor) -> Tensor | None:
    """The sink of each row, or None."""
    if side.sink is not None:
        return side.sink
    return None if scores.sink == -math.inf else torch.full_like(like[:0].sum(), scores.sink)
