"""Derivatives in plain torch arithmetic, which is differentiable itself.

What has no fused operator is made of it: the gradient of a state, a device or an engine whose gradients are not fused,
and the derivatives of gradients. Half types are computed in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gradient", "gradient_of_gradient", "gradient_tangent", "tangent", "unsqueeze_planes", "unsqueeze_reduced"]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unsqueeze_reduced(reduced: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A reduced result with its reduced dims back, of size 1."""
    if not keepdim:
        for dim in sorted(dims):
            reduced = reduced.unsqueeze(dim)
    return reduced


def unsqueeze_planes(planes: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The same of a state, whose first dim is none of the input's."""
    return unsqueeze_reduced(planes, [dim + 1 for dim in dims], keepdim)


def _weights(function: str, saved: Sequence[Tensor], dims: Sequence[int], keepdim: bool) -> Tensor:
    """The softmax that a gradient of log_softmax or logsumexp is weighted with."""
    if function == "log_softmax":
        return _wide(saved[0]).exp()
    x, lse = saved
    return (_wide(x) - _wide(unsqueeze_reduced(lse, dims, keepdim))).exp()


def _parts(saved: Sequence[Tensor], dims: list[int], keepdim: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a state, m = amax(x) and l = sum(exp(x - m)): dm/dx, dl/dx with m held, and what l loses as m grows.

    dm/dx is shared evenly among equal maxima, as torch.amax shares it. An infinite m is not subtracted (0 is), so l
    does not depend on it.
    """
    x = _wide(saved[0])
    m, l = unsqueeze_planes(saved[1], dims, keepdim).unbind(0)  # noqa: E741
    infinite = m.isinf()
    top = (x == m).to(x.dtype)
    share = top / top.sum(dims, keepdim=True).clamp(min=1)  # 0 in a row of NaN
    return share, (x - m.masked_fill(infinite, 0)).exp(), l.masked_fill(infinite, 0)


# Of a function ------------------------------------------------------------------------------------------------------
# `saved` is the input if the function reduces, and the result; `to` the dtype of what is given.


def gradient(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype
) -> Tensor:
    """The input's gradient from the result's."""
    if function == "logsumexp":
        dx = _wide(unsqueeze_reduced(g, dims, keepdim)) * _weights(function, saved, dims, keepdim)
        return dx.to(to).reshape(saved[0].shape)
    if function == "state":
        share, weights, loss = _parts(saved, dims, keepdim)
        gm, gl = unsqueeze_planes(g, dims, keepdim).unbind(0)
        return (gl * weights + share * (gm - gl * loss)).to(to).reshape(saved[0].shape)
    g = _wide(g)
    if function == "log_softmax":
        return (g - _weights(function, saved, dims, keepdim) * g.sum(dims, keepdim=True)).to(to)
    y = _wide(saved[0])
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    return (dx if function == "softmax" else -dx).to(to)


def tangent(
    function: str, t: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype
) -> Tensor:
    """The tangent of a result that is no softmax, from the input's; softmax's is its gradient (autograd.py)."""
    t = _wide(t)
    if function == "logsumexp":
        dy = (t * _weights(function, saved, dims, keepdim)).sum(dims, keepdim=keepdim)
        return dy.to(to).reshape(saved[1].shape)
    if function == "state":
        share, weights, loss = _parts(saved, dims, keepdim)
        dm = (t * share).sum(dims, keepdim=True)
        dl = (t * weights).sum(dims, keepdim=True) - dm * loss.reshape(dm.shape)
        return torch.stack((dm, dl)).reshape(saved[1].shape).to(to)
    return (t - (_weights(function, saved, dims, keepdim) * t).sum(dims, keepdim=True)).to(to)


# Of a gradient ------------------------------------------------------------------------------------------------------
# A gradient dx is a function of the result's gradient g and of what was saved. In g it is linear: its derivative in g
# is the engine's operator again (softmax, softmin), or its transpose.
#
#     softmax, softmin   dx = +-y (g - sum(g y))    log_softmax   dx = g - exp(y) sum(g)
#     logsumexp          dx = g exp(x - lse)


def gradient_of_gradient(
    function: str, v: Tensor, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool
) -> tuple[Tensor | None, ...]:
    """What reaches g and each of `saved` from v, the gradient of dx. None for softmax's g: it is softmax's gradient
    of v."""
    v, to = _wide(v), g.dtype  # that of all of them, but of logsumexp's input
    if function == "logsumexp":
        x, lse = saved
        weighted = v * _weights(function, saved, dims, keepdim)
        dx = weighted * _wide(unsqueeze_reduced(g, dims, keepdim))
        dg, dlse = (part.sum(dims, keepdim=keepdim).to(to).reshape(lse.shape) for part in (weighted, -dx))
        return dg, dx.to(x.dtype).reshape(x.shape), dlse
    g, y = _wide(g), _wide(saved[0])
    if function == "log_softmax":
        weights = y.exp()
        dg = v - (v * weights).sum(dims, keepdim=True)
        return dg.to(to), (-weights * v * g.sum(dims, keepdim=True)).to(to)
    dy = v * (g - (g * y).sum(dims, keepdim=True)) - g * (v * y).sum(dims, keepdim=True)
    return None, (dy if function == "softmax" else -dy).to(to)


def gradient_tangent(
    function: str,
    g: Tensor,
    saved: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    dims: list[int],
    keepdim: bool,
    to: torch.dtype,
) -> Tensor | None:
    """The tangent of dx from those of `saved`; what comes from g's is to be added."""
    if all(t is None for t in tangents):
        return None
    if function == "logsumexp":
        tx, tlse = tangents
        dx = gradient(function, g, saved, dims, keepdim, _wide(g).dtype)
        change = 0 if tx is None else _wide(tx)
        if tlse is not None:
            change = change - _wide(unsqueeze_reduced(tlse, dims, keepdim))
        return (dx * change).to(to).reshape(saved[0].shape)
    assert tangents[0] is not None
    g, y, ty = _wide(g), _wide(saved[0]), _wide(tangents[0])
    if function == "log_softmax":
        return (-y.exp() * ty * g.sum(dims, keepdim=True)).to(to)
    dx = ty * (g - (g * y).sum(dims, keepdim=True)) - y * (g * ty).sum(dims, keepdim=True)
    return (dx if function == "softmax" else -dx).to(to)
