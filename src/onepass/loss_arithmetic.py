"""The losses and divergences in torch arithmetic, for calls that no kernel takes.

csrc/core/loss_problem.h and divergence_problem.h define the terms of rows. This file is also used for derivatives of a
higher order and for function transforms: it is written with onepass's own log_softmax and logsumexp.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import call as call_plain
from .scored import _accumulator
from .validation import Spec


class LossSpec(NamedTuple):
    """The arguments of the operators except the tensors (csrc/core/loss_problem.h)."""

    dim: int  # the dim of the classes, from 0 up
    factor: float = 1.0  # the scores are factor * input
    softcap: float = 0.0  # 0 is none
    spread: bool = False  # whether there is a term for label smoothing: the sum of -log p over all classes
    entropy: bool = False
    is_cross: bool = False
    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    wide: bool = False  # whether the loss of a cross-entropy has the accumulator's dtype
    engine: str = "native"

    def planes(self, picks: int) -> int:
        return 3 if self.is_cross else 2 + self.spread + self.entropy + picks


class DivergenceSpec(NamedTuple):
    """The arguments of the operators except the tensors (csrc/core/divergence_problem.h)."""

    dim: int  # the dim of the classes, from 0 up
    is_kl: bool
    factor: float = 1.0  # the scores are factor * input
    softcap: float = 0.0  # 0 is none
    smoothing: float = 0.0
    engine: str = "native"


# One tensor -----------------------------------------------------------------------------------------------------------


_SERIAL = 32768  # the most elements that torch sums on one thread


def ordered_sum(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all elements. On a CPU, many elements are first summed in parts of a fixed size. The parts of torch's
    own sum depend on the number of threads, and so do its bits."""
    t = t.flatten()
    while t.is_cpu and not torch.compiler.is_compiling() and t.numel() > _SERIAL:
        t = torch.nn.functional.pad(t, (0, -t.numel() % 1024)).view(-1, 1024).sum(1, dtype=dtype)
    return t.sum(dtype=dtype)


def scores_and_log_p(x: Tensor, scale: Tensor | None, spec: Any) -> tuple[Tensor, Tensor]:
    """The scores and the log-probabilities, (rows, classes)."""
    s = _scores(x, scale, spec)
    return s, call_plain(s, Spec("log_softmax", [1], None, False, spec.engine))


def in_rows(x: Tensor, dim: int) -> Tensor:
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _scores(x: Tensor, scale: Tensor | None, spec: Any) -> Tensor:
    s = in_rows(x, spec.dim).to(_accumulator(x.dtype, x.dtype))
    if spec.factor != 1:
        s = s * spec.factor
    if scale is not None:
        s = s * scale.unsqueeze(-1)
    return spec.softcap * (s / spec.softcap).tanh() if spec.softcap else s


def _weighted(t: Tensor, weight: Tensor | None) -> Tensor:
    return t if weight is None else t * weight.to(t.dtype)


def _terms_of_lse(s: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
    """m and log l of scores, (rows, classes)."""
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((len(s), 1), -math.inf)
    log_l = call_plain(s - m, Spec("logsumexp", [1], None, False, spec.engine))
    return m.squeeze(-1), log_l.masked_fill(m.squeeze(-1).isinf(), math.nan)


def terms_arithmetic(
    x: Tensor, index: Tensor | None, weight: Tensor | None, scale: Tensor | None, spec: LossSpec
) -> Tensor:
    """`onepass::loss_terms` in torch arithmetic."""
    s, log_p = scores_and_log_p(x, scale, spec)
    planes = [*_terms_of_lse(s, spec)]
    if spec.spread:
        planes.append(-_weighted(log_p, weight).sum(-1))
    if spec.entropy:
        planes.append(-(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1))
    if index is not None:
        planes += (-log_p.gather(-1, index)).unbind(-1)
    return torch.stack(planes)


def terms_backward_arithmetic(
    grads: Tensor,
    x: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    spec: LossSpec,
    terms: Tensor | None = None,
) -> Tensor:
    """`onepass::loss_terms_backward` in torch arithmetic. With `terms`, m and log l are taken from them; they may be
    the terms of longer rows, of which the input is a part."""
    if terms is None:
        s, log_p = scores_and_log_p(x, scale, spec)
    else:
        s = _scores(x, scale, spec)
        log_p = s - terms[0].unsqueeze(-1) - terms[1].unsqueeze(-1)
    p = log_p.exp()
    of_p, *others = grads[1:].unsqueeze(-1)
    ds = of_p * p
    if spec.spread:
        g = others.pop(0)
        ones = torch.ones_like(p) if weight is None else weight.to(p.dtype).expand_as(p)
        ds = ds + g * (p * ones.sum(-1, keepdim=True) - ones)
    if spec.entropy:
        g = others.pop(0)
        log_p = log_p.masked_fill(log_p == -math.inf, 0)
        ds = ds - g * p * (log_p - (p * log_p).sum(-1, keepdim=True))
    if index is not None:
        g = torch.cat(others, -1)
        ds = ds + p * g.sum(-1, keepdim=True)
        ds = ds.scatter_add(-1, index, -g)
    if spec.softcap:
        ds = ds * (1 - (s / spec.softcap).square())
    if scale is not None:
        ds = ds * scale.unsqueeze(-1)
    rows = [size for d, size in enumerate(x.shape) if d != spec.dim]
    return (ds * spec.factor).reshape(*rows, x.shape[spec.dim]).movedim(-1, spec.dim).to(x.dtype)


def loss_dtype(x: Tensor, spec: LossSpec) -> torch.dtype:
    return _accumulator(x.dtype, x.dtype) if spec.wide else x.dtype


def _as_terms(spec: LossSpec) -> LossSpec:
    """The spec of the terms from which a cross-entropy is computed."""
    return spec._replace(is_cross=False)


def weight_of(index: Tensor, weight: Tensor | None, wide: torch.dtype, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(classes of rows, weights of these classes), both 0 for ignored rows."""
    counts = index != spec.ignore_index
    safe = index.masked_fill(~counts, 0)
    own = torch.ones_like(index, dtype=wide) if weight is None else weight.to(wide)[safe]
    return safe, own.masked_fill(~counts, 0)


def cross_arithmetic(
    x: Tensor, index: Tensor, weight: Tensor | None, reduction: str, spec: LossSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """`onepass::cross_entropy` in torch arithmetic."""
    safe, own = weight_of(index, weight, _accumulator(x.dtype, x.dtype), spec)
    m, log_l, *spread, nll = terms_arithmetic(x, safe.unsqueeze(-1), weight, None, _as_terms(spec))
    losses = (1 - spec.smoothing) * own * nll
    if spread:
        losses = losses + spec.smoothing / x.shape[spec.dim] * spread[0]
    if spec.z_loss:
        losses = losses + spec.z_loss * (m + log_l).square()
    losses = losses.masked_fill(index == spec.ignore_index, 0)
    total = own.sum()
    result = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / total
    total = total.detach() if reduction != "none" else total.new_empty(0)
    return result.to(loss_dtype(x, spec)), torch.stack((m, log_l, losses)), total


def cross_backward_arithmetic(
    grad: Tensor,
    grad_terms: Tensor | None,
    total: Tensor,
    x: Tensor,
    index: Tensor,
    weight: Tensor | None,
    reduction: str,
    spec: LossSpec,
) -> Tensor:
    """`onepass::cross_entropy_backward` in torch arithmetic."""
    wide = _accumulator(x.dtype, x.dtype)
    safe, own = weight_of(index, weight, wide, spec)
    g = grad.to(wide) / total if reduction == "mean" else grad.to(wide)
    g = g.expand_as(own).masked_fill(index == spec.ignore_index, 0)
    terms = _as_terms(spec)
    of_lse = torch.zeros_like(own) if grad_terms is None else grad_terms[1]
    if spec.z_loss:
        lse = call_plain(_scores(x, None, spec), Spec("logsumexp", [1], None, False, spec.engine))
        of_lse = of_lse + 2 * spec.z_loss * g * lse
    of_lse = of_lse.masked_fill(index == spec.ignore_index, 0)
    of_spread = [g * (spec.smoothing / x.shape[spec.dim])] if terms.spread else []
    grads = torch.stack((torch.zeros_like(own), of_lse, *of_spread, g * own * (1 - spec.smoothing)))
    dx = terms_backward_arithmetic(grads, x, safe.unsqueeze(-1), weight, None, terms)
    shape = list(x.shape)
    shape[spec.dim] = 1
    return dx.masked_fill((index == spec.ignore_index).reshape(shape), 0)


# Two tensors ----------------------------------------------------------------------------------------------------------


def _shares(y: Tensor, weight: Tensor | None, spec: DivergenceSpec) -> tuple[Tensor, Tensor]:
    """(weighted, smoothed target probabilities, (rows, classes); the factor of each class's target probability)."""
    wide, n = _accumulator(y.dtype, y.dtype), y.shape[spec.dim]
    t = in_rows(y, spec.dim).to(wide)
    own = torch.ones(n, dtype=wide, device=y.device) if weight is None else weight.to(wide)
    return ((1 - spec.smoothing) * t + spec.smoothing / max(n, 1)) * own, (1 - spec.smoothing) * own


def divergence_arithmetic(x: Tensor, y: Tensor, weight: Tensor | None, spec: DivergenceSpec) -> Tensor:
    """`onepass::divergence_terms` in torch arithmetic."""
    s, log_p = scores_and_log_p(x, None, spec)
    if not spec.is_kl:
        share, _ = _shares(y, weight, spec)
        return torch.stack((*_terms_of_lse(s, spec), -(share * log_p).sum(-1), share.sum(-1)))
    r, log_q = scores_and_log_p(y, None, spec)
    p = log_p.exp()
    apart = (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)
    return torch.stack((*_terms_of_lse(s, spec), apart, *_terms_of_lse(r, spec)))


def divergence_backward_arithmetic(
    grads: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, spec: DivergenceSpec
) -> tuple[Tensor, Tensor]:
    """`onepass::divergence_terms_backward` in torch arithmetic: the gradients of both tensors."""
    s, log_p = scores_and_log_p(x, None, spec)
    p, g = log_p.exp(), grads[2].unsqueeze(-1)
    if spec.is_kl:
        log_q = scores_and_log_p(y, None, spec)[1]
        ratio = (log_p - log_q).masked_fill(p == 0, 0)
        dx = (g * p * (ratio - (p * ratio).sum(-1, keepdim=True))).masked_fill(p == 0, 0)
        dy = g * (log_q.exp() - p)
    else:
        share, of_share = _shares(y, weight, spec)
        dx = p * (g * share.sum(-1, keepdim=True) + grads[1].unsqueeze(-1)) - g * share
        dx = dx * (1 - (s / spec.softcap).square()) if spec.softcap else dx
        dy = -of_share * g * log_p
    rows = [size for d, size in enumerate(x.shape) if d != spec.dim]

    def placed(of_rows: Tensor, factor: float) -> Tensor:
        return (of_rows * factor).reshape(*rows, x.shape[spec.dim]).movedim(-1, spec.dim).to(x.dtype)

    return placed(dx, spec.factor), placed(dy, spec.factor if spec.is_kl else 1)
