"""The definitions of the functions in plain float64 PyTorch. Every engine is tested against them.

No function here calls torch's own softmax family, and none is fast. Each takes a tensor of any real dtype, layout and
device, and returns float64 on that device. To test the argument ``dtype`` of a function, round the input first:
``reference.softmax(x.to(dtype), dim)``. The functions are differentiable, to any order.

Special values (``m`` is a row's maximum): a row with a NaN gives NaN. A row that is all ``-inf`` (``-inf - -inf``) or
has a ``+inf`` (``inf - inf``) gives NaN for the three softmaxes, and ``m`` for logsumexp. An empty row gives an empty
result, and its logsumexp is ``log(0) = -inf``. A 0-d tensor is one row of one element. In the state of a row with a
NaN, ``l`` is NaN and ``m`` is the maximum of the other elements.

All functions except `state` take the options of scores by keyword: ``sink`` and ``empty``, and those of `score`. If the
scores and the sink of a row are all ``-inf``, with ``empty="zero"`` its softmax is 0 and its log_softmax -inf.

Source: the shift by the maximum is the standard stable form, e.g. Blanchard, Higham and Higham, "Accurately computing
the log-sum-exp and softmax functions", IMA Journal of Numerical Analysis 41 (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["log_softmax", "logsumexp", "score", "softmax", "softmin", "state"]


def score(
    function: str,
    x: Tensor,
    *,
    scale: float | Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    offset: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The score of each element of ``x``. ``function`` is computed from the scores in place of ``x``.

    In this order: multiplied by ``scale``, capped at ``softcap`` by tanh, plus ``bias``, minus ``alibi`` times the
    distance of query and key, and -inf if ``mask`` is False or the key is outside the window, whatever ``x`` has there.
    Query ``q`` is aligned with key ``q + offset``; by default the last query is aligned with the last key.

    >>> import torch
    >>> score("softmin", torch.tensor([1.0, 2.0]))
    tensor([-1., -2.])
    >>> score("softmax", torch.ones(2, 3), scale=0.5, causal=True)
    tensor([[0.5000, 0.5000,   -inf],
            [0.5000, 0.5000, 0.5000]])
    """
    s = -x if function == "softmin" else x
    seen = None if mask is None else mask.expand(x.shape)
    distance = torch.zeros(())
    if causal or window is not None or alibi is not None:
        queries, keys = x.shape[-2:]
        at = torch.arange(queries, device=x.device) + (keys - queries if offset is None else offset)
        distance = torch.arange(keys, device=x.device).unsqueeze(0) - at.unsqueeze(1)
        for bound, side in zip((window or (None, None)), (-1, 1), strict=True):
            bound = 0 if causal and side == 1 else bound
            if bound is not None:
                near = side * distance <= bound
                seen = near if seen is None else seen & near
    if seen is not None:
        s = torch.where(seen, s, 0.0)  # a NaN in a masked element would make its gradient NaN
    if scale is not None:
        s = s * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if alibi is not None:
        s = s - alibi.unsqueeze(-1).unsqueeze(-1) * distance.abs().to(s.dtype)
    return s if seen is None else torch.where(seen, s, -torch.inf)


def softmax(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    sink: float | Tensor | None = None,
    empty: str = "nan",
    **options: Any,
) -> Tensor:
    """``exp(x - m) / sum(exp(x - m))`` over ``dim``, an int, or several ints for one softmax over all these dims.

    Returns float64 of the shape of ``x``.

    >>> import torch
    >>> softmax(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    >>> softmax(torch.zeros(2, 2), dim=(0, 1))
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    >>> softmax(torch.zeros(3), sink=0.0, mask=torch.tensor([True, True, False]))
    tensor([0.3333, 0.3333, 0.0000], dtype=torch.float64)
    """
    shifted, total, _, nothing = _rows("softmax", x, dim, sink, empty, options)
    return _unless(nothing, empty, shifted.exp() / total, 0.0)


def log_softmax(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    sink: float | Tensor | None = None,
    empty: str = "nan",
    **options: Any,
) -> Tensor:
    """``(x - m) - log(sum(exp(x - m)))`` over ``dim``. Returns float64 of the shape of ``x``.

    >>> import torch
    >>> log_softmax(torch.tensor([1e4, 1e4]))
    tensor([-0.6931, -0.6931], dtype=torch.float64)
    """
    shifted, total, _, nothing = _rows("log_softmax", x, dim, sink, empty, options)
    return _unless(nothing, empty, shifted - total.log(), -torch.inf)


def softmin(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    sink: float | Tensor | None = None,
    empty: str = "nan",
    **options: Any,
) -> Tensor:
    """``softmax(-x)`` over ``dim``, negated after the conversion. Returns float64 of the shape of ``x``.

    >>> import torch
    >>> softmin(torch.tensor([0.0, float("inf")]))
    tensor([1., 0.], dtype=torch.float64)
    """
    return softmax(score("softmin", x.to(torch.float64)), dim, sink=sink, empty=empty, **options)


def logsumexp(
    x: Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
    *,
    sink: float | Tensor | None = None,
    empty: str = "nan",
    **options: Any,
) -> Tensor:
    """``m + log(sum(exp(x - m)))`` over ``dim``. ``empty`` changes only the gradient.

    Returns float64 of the shape of ``x`` without ``dim``, or with size 1 there if ``keepdim``.

    >>> import torch
    >>> logsumexp(torch.zeros(2, 1), dim=1)
    tensor([0., 0.], dtype=torch.float64)
    >>> logsumexp(torch.zeros(2, 0), dim=1)
    tensor([-inf, -inf], dtype=torch.float64)
    >>> logsumexp(torch.tensor([float("inf"), 1.0]), dim=0, keepdim=True)
    tensor([inf], dtype=torch.float64)
    """
    _, total, m, nothing = _rows("logsumexp", x, dim, sink, empty, options)
    result = _unless(nothing, empty, m + total.log(), -torch.inf)
    return result if keepdim else result.sum(_dims(x, dim))  # removes dims of size 1


def state(x: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``m``, the maximum over ``dim``, and ``l = sum(exp(x - m))``, where an infinite ``m`` is not subtracted.

    Returns two float64 tensors of the shape of ``x`` without ``dim``, or with size 1 there if ``keepdim``. If several
    elements equal the maximum, they share its gradient evenly, as in ``torch.amax``.

    >>> import torch
    >>> state(torch.tensor([0.0, 0.0, float("-inf")]))
    (tensor(0., dtype=torch.float64), tensor(2., dtype=torch.float64))
    >>> state(torch.zeros(0))
    (tensor(-inf, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    x = x.to(torch.float64)
    dims = _dims(x, dim)
    if _empty(x, dims):
        total = x.sum(dims, keepdim=True)
        m = torch.full_like(total, -torch.inf)
    else:
        m = x.masked_fill(x.isnan(), -torch.inf).amax(dims, keepdim=True)
        total = _sum((x - m.masked_fill(m.isinf(), 0.0)).exp(), dims)
    return (m, total) if keepdim else (m.sum(dims), total.sum(dims))  # removes dims of size 1


def _rows(
    function: str,
    x: Tensor,
    dim: int | Sequence[int],
    sink: float | Tensor | None,
    empty: str,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores minus ``m``, the sum of their exponentials, ``m``, a mask of rows whose scores and sink are all -inf).

    With ``empty="zero"`` the scores of these rows are 0, so that they have no gradient. Detaching the maximum ``m``
    changes no derivative: the functions do not depend on it.
    """
    s = score(function, x.to(torch.float64), **options)
    dims = _dims(s, dim)
    sinks = torch.as_tensor(-torch.inf if sink is None else sink, dtype=torch.float64, device=s.device)
    m = s.detach().sum(dims, keepdim=True) - torch.inf if _empty(s, dims) else s.detach().amax(dims, keepdim=True)
    m = torch.maximum(m, sinks.detach())
    nothing = m == -torch.inf
    if empty == "zero":
        s, sinks, m = torch.where(nothing, 0.0, s), torch.where(nothing, 0.0, sinks), torch.where(nothing, 0.0, m)
    if function == "logsumexp":
        m = torch.where(m.isinf(), 0.0, m)  # inf - inf would be NaN; exp(inf - 0) and exp(-inf - 0) are right
    shifted = s - m
    return shifted, _sum(shifted.exp(), dims) + (sinks - m).exp(), m, nothing


def _unless(nothing: Tensor, empty: str, result: Tensor, value: float) -> Tensor:
    """``result``, with ``value`` in the rows where ``nothing`` is True if ``empty`` is "zero"."""
    return torch.where(nothing, value, result) if empty == "zero" else result


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over ``dims``, which are kept with size 1. Each row is first made contiguous: torch sums contiguous
    elements pairwise, but strided ones sequentially, whose error grows with the row's length (16 eps for 600 equal
    elements)."""
    if not x.dim():
        return x.clone()
    others = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*others, *dims).flatten(len(others)).contiguous()
    return rows.sum(-1).view([1 if d in dims else size for d, size in enumerate(x.shape)])


def _dims(x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """``dim`` as distinct, non-negative ints. A 0-d tensor has one dim here, as in torch."""
    rank = max(x.dim(), 1)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -rank <= d < rank:
            raise IndexError(f"dim {d} is out of range for a tensor of {x.dim()} dims: take {-rank} to {rank - 1}")
    wrapped = tuple(d % rank for d in dims)
    if not wrapped or len(set(wrapped)) < len(wrapped):
        raise RuntimeError(f"dim takes an int or several distinct ints, got {dim}")
    return wrapped


def _empty(x: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether there are no rows, or the rows are empty: torch raises an error for a maximum of no elements."""
    return any(x.size(d) == 0 for d in dims) if x.dim() else False
