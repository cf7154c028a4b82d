"""Derivatives in plain torch arithmetic, which is differentiable itself.

They are used if there is no fused operator: for the gradient of a state, for a device or an engine without fused
gradients, and for the derivatives of gradients. Half types are computed in float32.

In all of them `saved` has the tensors that the forward saved: (result), or (input, result) for a reduction. `to` is the
dtype of the returned tensor. A function is computed from the scores of its input, which reference.py defines: each
element times a constant (-1 for softmin). So a derivative in the input is that in the scores, times the same constant.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import onepass.reference as reference  # `from . import` calls __getattr__ of the package, which imports everything

from .validation import HALF_DTYPES, Spec

__all__ = ["gradient", "gradient_of_gradient", "gradient_tangent", "tangent", "unsqueeze_planes", "unsqueeze_reduced"]


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x


def _score(spec: Spec, x: Tensor) -> Tensor:
    return reference.score(spec.function, x)


def unsqueeze_reduced(reduced: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A reduced result with the reduced dims inserted again, of size 1."""
    if not keepdim:
        for dim in sorted(dims):
            reduced = reduced.unsqueeze(dim)
    return reduced


def unsqueeze_planes(planes: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A state with the reduced dims inserted again. Its first dim is that of the planes m and l, not of the input."""
    return unsqueeze_reduced(planes, [dim + 1 for dim in dims], keepdim)


def _weights(spec: Spec, saved: Sequence[Tensor]) -> Tensor:
    """The softmax, which a gradient of log_softmax or logsumexp is multiplied by."""
    if spec.function == "log_softmax":
        return _upcast(saved[0]).exp()
    x, lse = saved
    return (_score(spec, _upcast(x)) - _upcast(unsqueeze_reduced(lse, spec.dims, spec.keepdim))).exp()


def _state_derivatives(spec: Spec, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """For a state of scores x, m = amax(x) and l = sum(exp(x - m)): dm/dx, dl/dx at a constant m, and -dl/dm.

    dm/dx is shared evenly among equal maxima, as in torch.amax. For an infinite m 0 is subtracted in its place, so l
    does not depend on it.
    """
    x = _score(spec, _upcast(saved[0]))
    m, l = unsqueeze_planes(saved[1], spec.dims, spec.keepdim).unbind(0)
    infinite = m.isinf()
    top = (x == m).to(x.dtype)
    share = top / top.sum(spec.dims, keepdim=True).clamp(min=1)  # 0 in a row of NaN
    return share, (x - m.masked_fill(infinite, 0)).exp(), l.masked_fill(infinite, 0)


# Derivatives of a function --------------------------------------------------------------------------------------------


def gradient(spec: Spec, g: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Tensor:
    """The gradient of the input from the upstream gradient g."""
    function, dims, keepdim = spec.function, spec.dims, spec.keepdim
    if function == "logsumexp":
        dx = _upcast(unsqueeze_reduced(g, dims, keepdim)) * _weights(spec, saved)
    elif function == "state":
        share, weights, loss = _state_derivatives(spec, saved)
        gm, gl = unsqueeze_planes(g, dims, keepdim).unbind(0)
        dx = gl * weights + share * (gm - gl * loss)
    elif function == "log_softmax":
        g = _upcast(g)
        dx = g - _weights(spec, saved) * g.sum(dims, keepdim=True)
    else:
        g, y = _upcast(g), _upcast(saved[0])
        dx = y * (g - (g * y).sum(dims, keepdim=True))
    return _score(spec, dx).to(to).reshape(saved[0].shape)


def tangent(spec: Spec, t: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Tensor:
    """The tangent of the result from the tangent t of the input. Softmax and softmin use `backward` (autograd.py)."""
    t, dims = _score(spec, _upcast(t)), spec.dims
    if spec.function == "logsumexp":
        dy = (t * _weights(spec, saved)).sum(dims, keepdim=spec.keepdim)
        return dy.to(to).reshape(saved[1].shape)
    if spec.function == "state":
        share, weights, loss = _state_derivatives(spec, saved)
        dm = (t * share).sum(dims, keepdim=True)
        dl = (t * weights).sum(dims, keepdim=True) - dm * loss.reshape(dm.shape)
        return torch.stack((dm, dl)).reshape(saved[1].shape).to(to)
    return (t - (_weights(spec, saved) * t).sum(dims, keepdim=True)).to(to)


# Derivatives of a gradient --------------------------------------------------------------------------------------------
# A gradient dx is a function of the upstream gradient g and of the saved tensors. It is linear in g: its derivative in
# g is the engine's operator again (softmax, softmin), or the transpose.
#
#     softmax, softmin   dx = y (g - sum(g y))    log_softmax   dx = g - exp(y) sum(g)
#     logsumexp          dx = g exp(x - lse)
#
# x are the scores here. The gradient of the input is the score of dx.


def gradient_of_gradient(spec: Spec, v: Tensor, g: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of g and of each of `saved` from v, the gradient of dx. The gradient of g is None for softmax and
    softmin: there it is `backward` of v (autograd.py)."""
    dims, keepdim = spec.dims, spec.keepdim
    v, to = _score(spec, _upcast(v)), g.dtype  # the dtype of all results except the gradient of logsumexp's input
    if spec.function == "logsumexp":
        x, lse = saved
        weighted = v * _weights(spec, saved)
        dx = weighted * _upcast(unsqueeze_reduced(g, dims, keepdim))
        dg, dlse = (part.sum(dims, keepdim=keepdim).to(to).reshape(lse.shape) for part in (weighted, -dx))
        return dg, _score(spec, dx).to(x.dtype).reshape(x.shape), dlse
    g, y = _upcast(g), _upcast(saved[0])
    if spec.function == "log_softmax":
        weights = y.exp()
        dg = v - (v * weights).sum(dims, keepdim=True)
        return dg.to(to), (-weights * v * g.sum(dims, keepdim=True)).to(to)
    dy = v * (g - (g * y).sum(dims, keepdim=True)) - g * (v * y).sum(dims, keepdim=True)
    return None, dy.to(to)


def gradient_tangent(
    spec: Spec, g: Tensor, saved: Sequence[Tensor], tangents: Sequence[Tensor | None], to: torch.dtype
) -> Tensor | None:
    """The part of the tangent of dx that comes from the tangents of `saved`. The caller adds the part that comes from
    the tangent of g."""
    if all(t is None for t in tangents):
        return None
    dims, keepdim = spec.dims, spec.keepdim
    if spec.function == "logsumexp":
        tx, tlse = tangents
        dx = gradient(spec, g, saved, _upcast(g).dtype)
        change = 0 if tx is None else _score(spec, _upcast(tx))
        if tlse is not None:
            change = change - _upcast(unsqueeze_reduced(tlse, dims, keepdim))
        return (dx * change).to(to).reshape(saved[0].shape)
    assert tangents[0] is not None
    g, y, ty = _upcast(g), _upcast(saved[0]), _upcast(tangents[0])
    if spec.function == "log_softmax":
        dx = -y.exp() * ty * g.sum(dims, keepdim=True)
    else:
        dx = ty * (g - (g * y).sum(dims, keepdim=True)) - y * (g * ty).sum(dims, keepdim=True)
    return _score(spec, dx).to(to)
