"""Gradients of what was saved: on a CPU by one fused operator, where no gradient of the gradient is asked for.

Everywhere else by plain arithmetic, which is differentiable itself, so that second order comes with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from . import native  # noqa: F401  (loads the operators)

__all__ = ["backward", "expand", "expand_planes", "tangent"]


_NUMBERS = {"softmax": 0, "log_softmax": 1, "softmin": 2}  # of functions, as the operator takes them
_FAMILY = torch.ops.onepass._softmax_backward.default._handle
_LOGSUMEXP = torch.ops.onepass._logsumexp_backward.default._handle
_call_boxed = torch._C._dispatch_call_boxed  # straight into the dispatcher, as plain.py has it
_KINDS = (Tensor, torch.nn.Parameter)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def expand(reduced: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A reduced result with its reduced dims back, of size 1."""
    if not keepdim:
        for dim in sorted(dims):
            reduced = reduced.unsqueeze(dim)
    return reduced


def expand_planes(planes: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The same of a state, whose first dim is none of the input's."""
    return expand(planes, [dim + 1 for dim in dims], keepdim)


def _weights(function: str, saved: Sequence[Tensor], dims: Sequence[int], keepdim: bool) -> Tensor:
    """The softmax that a gradient of log_softmax or logsumexp is weighted with."""
    if function == "log_softmax":
        return _wide(saved[0]).exp()
    x, lse = saved
    return (_wide(x) - _wide(expand(lse, dims, keepdim))).exp()


def _parts(saved: Sequence[Tensor], dims: list[int], keepdim: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a state, m = amax(x) and l = sum(exp(x - m)): dm/dx, dl/dx with m held, and what l loses as m grows.

    dm/dx is shared evenly among equal maxima, as torch.amax shares it. An infinite m is not subtracted (0 is), so l
    does not depend on it.
    """
    x = _wide(saved[0])
    m, l = expand_planes(saved[1], dims, keepdim).unbind(0)  # noqa: E741
    infinite = m.isinf()
    top = (x == m).to(x.dtype)
    share = top / top.sum(dims, keepdim=True).clamp(min=1)  # 0 in a row of NaN
    return share, (x - m.masked_fill(infinite, 0)).exp(), l.masked_fill(infinite, 0)


def _plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Is this a tensor of CPU memory that the operator can read, and nothing else?"""
    return (
        type(t) in _KINDS
        and t.is_cpu
        and t.dtype is dtype
        and t.layout is torch.strided
        and not is_legacy_batchedtensor(t)
    )


def _fuses(g: Tensor, saved: Sequence[Tensor]) -> bool:
    dtype = g.dtype
    if not _plain(g, dtype) or torch.compiler.is_compiling():
        return False
    records = torch.is_grad_enabled()
    if records and g.requires_grad:
        return False
    for t in saved:
        if not _plain(t, dtype) or (records and t.requires_grad):
            return False
    return forward_ad._current_level < 0 and peek_interpreter_stack() is None


def backward(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype
) -> Tensor:
    """The input's gradient, of dtype `to`, from the result's; `saved` is the input if the function reduces, and the
    result."""
    if function != "state" and _fuses(g, saved):
        dx: Tensor
        if function == "logsumexp":
            dx = _call_boxed(_LOGSUMEXP, g, *saved, dims, keepdim)
        else:
            dx = _call_boxed(_FAMILY, g, saved[0], _NUMBERS[function], dims, to)
        return dx
    if function == "logsumexp":
        return (_wide(expand(g, dims, keepdim)) * _weights(function, saved, dims, keepdim)).to(to)
    if function == "state":
        share, weights, loss = _parts(saved, dims, keepdim)
        gm, gl = expand_planes(g, dims, keepdim).unbind(0)
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
    """The result's tangent, of dtype `to`, from the input's."""
    t = _wide(t)
    if function == "logsumexp":
        return (t * _weights(function, saved, dims, keepdim)).sum(dims, keepdim=keepdim).to(to)
    if function == "state":
        share, weights, loss = _parts(saved, dims, keepdim)
        dm = (t * share).sum(dims, keepdim=True)
        dl = (t * weights).sum(dims, keepdim=True) - dm * loss.reshape(dm.shape)
        return torch.stack((dm, dl)).reshape(saved[1].shape).to(to)
    if function == "log_softmax":
        return (t - (_weights(function, saved, dims, keepdim) * t).sum(dims, keepdim=True)).to(to)
    y = _wide(saved[0])
    dy = y * (t - (t * y).sum(dims, keepdim=True))
    return (dy if function == "softmax" else -dy).to(to)
