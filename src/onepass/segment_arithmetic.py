"""The functions of segments in torch arithmetic, for calls that no kernel takes.

csrc/core/segment_problem.h defines the functions. This file is also used for derivatives of a higher order and for
function transforms: it is written with sums over segments, which have derivatives of every order. The results have the
same bits from run to run.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scored import _accumulator
from .validation import result_dtype


class SegmentSpec(NamedTuple):
    """The arguments of the operators except the tensors."""

    dim: int  # the ragged dim, from 0 up
    function: str
    factor: float = 1.0  # the scores are factor * x + bias
    dtype: torch.dtype | None = None  # the dtype of the result; not None for a gradient
    engine: str = "native"

    @property
    def reduces(self) -> bool:
        return self.function in ("logsumexp", "state")

    def result_dtype(self, x: Tensor) -> torch.dtype:
        return result_dtype(self.function, x.dtype, self.dtype)


# Sums over segments ---------------------------------------------------------------------------------------------------


class _Rule(torch.autograd.Function):
    """A linear function of a tensor, whose dim 0 is the ragged dim or the dim of the segments. It also takes the
    offsets, and the segment of each item (ids). Its derivative is linear too."""

    _transposed: Any
    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @classmethod
    def _batched(cls, in_dims: tuple[Any, ...], t: Tensor, *where: Tensor) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError("onepass: vmap takes one set of segments for the whole batch")
        y = cls.apply(t.movedim(in_dims[0], -1), *where)
        return y, y.dim() - 1


class _Sum(_Rule):
    """The sum of each segment."""

    @staticmethod
    def forward(t: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        if not t.numel() or len(offsets) < 2:
            return t.new_zeros((len(offsets) - 1, *t.shape[1:]))
        return torch.segment_reduce(t.contiguous(), "sum", offsets=offsets, axis=0, initial=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Spread.apply(g, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Sum.apply(t, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Tensor) -> tuple[Tensor, int]:
        return _Sum._batched(in_dims, *given)


class _Spread(_Rule):
    """Broadcasts a value per segment to the items of the segment."""

    @staticmethod
    def forward(t: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        return t.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Sum.apply(g, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Spread.apply(t, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Tensor) -> tuple[Tensor, int]:
        return _Spread._batched(in_dims, *given)


class _Segments:
    """The segments of a call. Its methods take tensors with the ragged dim first and the items sorted by segment."""

    def __init__(self, like: Tensor, offsets: Tensor, order: Tensor | None, dim: int):
        self.dim, self.order, self.count = dim, order, offsets.shape[0] - 1
        # Wrong offsets, which may be unchecked, are made to lie within the items at least.
        self.offsets = offsets.long().clamp(0, like.shape[dim]).cummax(0).values
        items = torch.arange(like.shape[dim], device=offsets.device)
        ids = torch.searchsorted(self.offsets[1:].contiguous(), items, right=True)
        self.ids = ids.clamp(max=self.count - 1) if self.count else ids

    def items(self, t: Tensor) -> Tensor:
        t = t.movedim(self.dim, 0)
        return t if self.order is None else t.index_select(0, self.order)

    def placed(self, t: Tensor) -> Tensor:
        if self.order is not None:
            t = t.index_select(0, torch.argsort(self.order))
        return t.movedim(0, self.dim)

    def sum(self, t: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(t, self.offsets, self.ids)
        return total

    def spread(self, t: Tensor) -> Tensor:
        each: Tensor = _Spread.apply(t, self.offsets, self.ids)
        return each

    def maximum(self, t: Tensor) -> Tensor:
        """The maximum of each segment, without its NaNs. It has no derivative."""
        t = t.detach()
        t = t.masked_fill(t.isnan(), -math.inf)
        ids = self.ids.reshape(-1, *[1] * (t.dim() - 1)).expand_as(t)
        least = torch.full_like(t[:1], -math.inf) if t.shape[0] else t.new_full((1, *t.shape[1:]), -math.inf)
        return least.expand(self.count, *t.shape[1:]).scatter_reduce(0, ids, t, "amax")


def _scores(x: Tensor, bias: Tensor | None, spec: SegmentSpec, segments: _Segments) -> Tensor:
    x = x if spec.dtype is None or spec.reduces else x.to(spec.dtype)
    wide = _accumulator(x.dtype, x.dtype)
    s = segments.items(x).to(wide)
    s = s if spec.factor == 1 else s * spec.factor
    return s if bias is None else s + segments.items(bias).to(wide)


def _state(s: Tensor, segments: _Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(m, l, exponentials of items, derivative of m in each item). An infinite m is a constant."""
    top = segments.maximum(s)
    is_infinite = top.isinf()
    is_top = (s.detach() == segments.spread(top)).to(s.dtype)
    shares = is_top / segments.spread(segments.sum(is_top)).clamp(min=1)
    shares = shares.masked_fill(segments.spread(is_infinite), 0)
    change = (s - s.detach()).masked_fill(~s.isfinite(), 0)
    m = top + segments.sum(shares * change)
    e = (s - segments.spread(m.masked_fill(is_infinite, 0))).exp()
    return m, segments.sum(e), e, shares


def forward_arithmetic(
    x: Tensor, offsets: Tensor, order: Tensor | None, bias: Tensor | None, spec: SegmentSpec
) -> Tensor:
    """`onepass::segment_forward` in torch arithmetic."""
    segments = _Segments(x, offsets, order, spec.dim)
    s, to = _scores(x, bias, spec, segments), spec.result_dtype(x)
    if spec.function == "state":
        m, l, _, _ = _state(s, segments)
        return torch.stack((m.movedim(0, spec.dim), l.movedim(0, spec.dim)))
    m = segments.maximum(s)
    m = m.masked_fill(m.isinf() if spec.reduces else m == -math.inf, 0)
    shifted = s - segments.spread(m)
    l = segments.sum(shifted.exp())
    if spec.function == "logsumexp":
        return (m + l.log()).movedim(0, spec.dim).to(to)
    y = shifted.exp() / segments.spread(l) if spec.function == "softmax" else shifted - segments.spread(l.log())
    return segments.placed(y).to(to)


def backward_arithmetic(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    offsets: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    spec: SegmentSpec,
) -> Tensor:
    """`onepass::segment_backward` in torch arithmetic."""
    segments = _Segments(y if x is None else x, offsets, order, spec.dim)
    wide = _accumulator(y.dtype, y.dtype)
    grad, y = grad.to(wide), y.to(wide)
    if spec.reduces:
        assert x is not None
        s = _scores(x, bias, spec._replace(dtype=None), segments)
        if spec.function == "state":
            of_m, of_l = (t.movedim(spec.dim, 0) for t in grad.unbind())
            _, l, e, shares = _state(s, segments)
            ds = segments.spread(of_l) * e + shares * segments.spread(of_m - of_l * l)
        else:
            of_row, lse = grad.movedim(spec.dim, 0), y.movedim(spec.dim, 0)
            ds = segments.spread(of_row) * (s - segments.spread(lse)).exp()
    else:
        g, y = segments.items(grad), segments.items(y)
        if spec.function == "softmax":
            ds = y * (g - segments.spread(segments.sum(y * g)))
        else:
            ds = g - y.exp() * segments.spread(segments.sum(g))
    return segments.placed(ds * spec.factor).to(spec.dtype)
