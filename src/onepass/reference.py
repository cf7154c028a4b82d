"""The definitions, in plain float64 PyTorch: the one oracle that every engine is compared with.

Nothing here calls torch's own softmax family, and nothing here is fast. Each function takes a tensor of any real
dtype, any layout and any device, and returns float64 on that device. Where a caller's ``dtype`` is to be tested,
round first: ``reference.softmax(x.to(dtype), dim)``. The functions are differentiable, to any order.

Special values (``m`` is a row's maximum): a row that holds a NaN gives NaN; a row of all ``-inf`` (``-inf - -inf``) or
with a ``+inf`` (``inf - inf``) gives NaN for the three softmaxes, while its logsumexp is ``m`` itself. An empty row
gives an empty result, and its logsumexp is ``log(0) = -inf``. A 0-d tensor is one row of one element. In a state it is
``l`` that a NaN goes to, and ``m`` is the maximum of the other elements.

Source: the shift by the maximum is the standard stable form, e.g. Blanchard, Higham and Higham, "Accurately computing
the log-sum-exp and softmax functions", IMA Journal of Numerical Analysis 41 (2021).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["log_softmax", "logsumexp", "score", "softmax", "softmin", "state"]


def score(function: str, x: Tensor) -> Tensor:
    """The score of each element of ``x``, a multiple of it: what ``function`` is computed of in place of ``x``.

    The other functions here take its parameters by keyword.

    >>> import torch
    >>> score("softmin", torch.tensor([1.0, 2.0]))
    tensor([-1., -2.])
    """
    return -x if function == "softmin" else x


def softmax(x: Tensor, dim: int | Sequence[int] = -1, **parameters: float) -> Tensor:
    """``exp(x - m) / sum(exp(x - m))`` over ``dim`` (an int, or several for one softmax over all of them).

    Returns float64 of the shape of ``x``.

    >>> import torch
    >>> softmax(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    >>> softmax(torch.zeros(2, 2), dim=(0, 1))
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    shifted, dims = _shifted("softmax", x, dim, parameters)
    e = shifted.exp()
    return e / _sum(e, dims)


def log_softmax(x: Tensor, dim: int | Sequence[int] = -1, **parameters: float) -> Tensor:
    """``(x - m) - log(sum(exp(x - m)))`` over ``dim``. Returns float64 of the shape of ``x``.

    >>> import torch
    >>> log_softmax(torch.tensor([1e4, 1e4]))
    tensor([-0.6931, -0.6931], dtype=torch.float64)
    """
    shifted, dims = _shifted("log_softmax", x, dim, parameters)
    return shifted - _sum(shifted.exp(), dims).log()


def softmin(x: Tensor, dim: int | Sequence[int] = -1, **parameters: float) -> Tensor:
    """``softmax(-x)`` over ``dim``, negated after the conversion. Returns float64 of the shape of ``x``.

    >>> import torch
    >>> softmin(torch.tensor([0.0, float("inf")]))
    tensor([1., 0.], dtype=torch.float64)
    """
    return softmax(score("softmin", x.to(torch.float64), **parameters), dim)


def logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False, **parameters: float) -> Tensor:
    """``m + log(sum(exp(x - m)))`` over ``dim``.

    Returns float64 of the shape of ``x`` without ``dim``, or with size 1 there if ``keepdim``.

    >>> import torch
    >>> logsumexp(torch.zeros(2, 1), dim=1)
    tensor([0., 0.], dtype=torch.float64)
    >>> logsumexp(torch.zeros(2, 0), dim=1)
    tensor([-inf, -inf], dtype=torch.float64)
    >>> logsumexp(torch.tensor([float("inf"), 1.0]), dim=0, keepdim=True)
    tensor([inf], dtype=torch.float64)
    """
    x = score("logsumexp", x.to(torch.float64), **parameters)
    dims = _dims(x, dim)
    if _empty(x, dims):
        return x.sum(dims, keepdim=keepdim).log()
    m = x.detach().amax(dims, keepdim=True)
    m = torch.where(m.isinf(), 0.0, m)  # inf - inf would be NaN, exp(inf - 0) and exp(-inf - 0) are what is meant
    result = m + _sum((x - m).exp(), dims).log()
    return result if keepdim else result.sum(dims)  # each of these dims has size 1 now


def state(
    x: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False, **parameters: float
) -> tuple[Tensor, Tensor]:
    """``m``, the maximum over ``dim``, and ``l = sum(exp(x - m))``, where an infinite ``m`` is not subtracted.

    Returns two float64 tensors of the shape of ``x`` without ``dim``, or with size 1 there if ``keepdim``. Where a
    maximum is there several times, its gradient is shared among them, as that of ``torch.amax``.

    >>> import torch
    >>> state(torch.tensor([0.0, 0.0, float("-inf")]))
    (tensor(0., dtype=torch.float64), tensor(2., dtype=torch.float64))
    >>> state(torch.zeros(0))
    (tensor(-inf, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    x = score("state", x.to(torch.float64), **parameters)
    dims = _dims(x, dim)
    if _empty(x, dims):
        total = x.sum(dims, keepdim=True)
        m = torch.full_like(total, -torch.inf)
    else:
        m = x.masked_fill(x.isnan(), -torch.inf).amax(dims, keepdim=True)
        total = _sum((x - m.masked_fill(m.isinf(), 0.0)).exp(), dims)
    return (m, total) if keepdim else (m.sum(dims), total.sum(dims))  # each of these dims has size 1 now


def _shifted(
    function: str, x: Tensor, dim: int | Sequence[int], parameters: dict[str, float]
) -> tuple[Tensor, tuple[int, ...]]:
    """The scores less their maximum. Detaching the maximum changes no derivative: the functions do not depend on it."""
    x = score(function, x.to(torch.float64), **parameters)
    dims = _dims(x, dim)
    return (x if _empty(x, dims) else x - x.detach().amax(dims, keepdim=True)), dims


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over ``dims``, which stay with size 1. A row's elements are first laid side by side: torch adds such ones
    pairwise, and others one after another, so that the error grows with the row's length (16 eps for 600 equal ones).
    """
    if not x.dim():
        return x.clone()
    others = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*others, *dims).flatten(len(others)).contiguous()
    return rows.sum(-1).view([1 if d in dims else size for d, size in enumerate(x.shape)])


def _dims(x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """``dim`` as distinct, non-negative ints; a 0-d tensor has the one dim that torch gives it."""
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
    """Whether there is no row, or nothing in the rows: torch has no maximum of nothing."""
    return any(x.size(d) == 0 for d in dims) if x.dim() else False
