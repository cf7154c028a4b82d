"""Random calls of losses: cross-entropy with its arguments, log-probabilities and entropies, and their gradients."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import onepass

from .random_calls import LARGE, REACH, Call, draw_view
from .support import DTYPES, accumulator

LAYOUTS = ["contiguous", "contiguous", "permuted", "sliced", "expanded"]
INPUT = "the input"
SPECIALS = [-torch.inf, -torch.inf, 88.7, -103.9, 6e4, -6e4, 0.0]
LEAST = 1.2e-38  # exponentials below it are 0


class Loss(Call):
    """A loss of logits, and for most calls its gradient."""

    def __init__(self, seed: int, number: int):
        rng = self.rng = random.Random(f"{seed}/{number}")
        self.function = rng.choice(["cross_entropy", "cross_entropy", "log_prob"])
        self.dtype, most = rng.choice(DTYPES), rng.choice([300, 6000, LARGE])
        classes = min(rng.choice([1, 2, 3, 7, 16, 31, 64, 100, 257, 1000, rng.randint(1, 3000), 50257]), most)
        rows = max(1, rng.choice([1, most // classes, rng.randint(1, 1 + most // classes)]))
        inner = rng.choice([(), (), (), (rng.randint(1, 9),), (3, 5)])
        for size in inner:
            rows = max(1, rows // size)
        self.sizes = [rows, classes, *inner] if rng.random() < 0.95 else [classes]
        self.axis = 1 if len(self.sizes) > 1 else 0
        self.kind, self.view = draw_view(rng, self.sizes, LAYOUTS, REACH)
        self.softcap, self.has_gradient = rng.choice([None, None, 30.0, 2.0]), rng.random() < 0.8
        self.threads, self.values = rng.randint(2, 8), rng.randrange(2**31)
        self.options: dict[str, Any] = {}
        if self.function == "cross_entropy":
            self.options = {"reduction": rng.choice(["mean", "sum", "none"]), "softcap": self.softcap}
            self.options["label_smoothing"] = rng.choice([0.0, 0.0, 0.1, 1.0])
            self.options["z_loss"] = rng.choice([0.0, 0.0, 0.01])
            self.options["ignore_index"] = rng.choice([-100, rng.randrange(classes)])
        self.has_weight = self.function == "cross_entropy" and rng.random() < 0.3
        self.temperature = rng.choice([None, 0.7, 3.0]) if self.function == "log_prob" else None

    def __str__(self) -> str:
        given = {**self.options, "temperature": self.temperature, "weight": self.has_weight}
        return f"{self.function} of {self.view}, {str(self.dtype)[6:]}, {given}, {self.threads} threads"

    def operands(self) -> dict[str, Tensor]:
        rng, make = self.rng, torch.Generator().manual_seed(self.values)
        x = torch.randn(self.view.reach(), generator=make, dtype=torch.float64) * rng.choice([0.01, 1.0, 5.0, 40.0])
        for _ in range(rng.randint(1, 3) if rng.random() < 0.25 else 0):
            x[rng.randrange(len(x)) :: rng.choice([7, 64, 10**6])] = rng.choice(SPECIALS)
        rows = [size for d, size in enumerate(self.sizes) if d != self.axis]
        self.target = torch.randint(0, self.sizes[self.axis], rows, generator=make)
        if (ignored := self.options.get("ignore_index")) is not None:
            self.target = self.target.masked_fill(torch.rand(rows, generator=make) < 0.2, ignored)
        given = {INPUT: self.lay(x.to(self.dtype), self.view)}
        if self.has_weight:
            given["the weight"] = (torch.rand(self.sizes[self.axis], generator=make) + 0.1).to(self.dtype)
        return given

    def check(self) -> int:
        given = self.operands()
        leaf = given[INPUT].detach().requires_grad_(self.has_gradient)
        index = self.target.unsqueeze(self.axis)

        def call() -> Sequence[Tensor]:
            if self.function == "cross_entropy":
                loss, lse = onepass.cross_entropy(
                    leaf, self.target, given.get("the weight"), **self.options, return_lse=True, engine="cpu"
                )
                return [loss, lse]
            more: dict[str, Any] = {"temperature": self.temperature, "return_entropy": True, "engine": "cpu"}
            log_p, entropy = onepass.log_prob(leaf, index, self.axis, **more)
            return [log_p.squeeze(self.axis), entropy.squeeze(self.axis) if entropy.dim() == leaf.dim() else entropy]

        results = self.with_threads(given, call)
        scores, wide = self.defined_scores(given[INPUT])
        want, limits, weights = self.defined(scores, given.get("the weight"))
        names = ("the loss", "the logsumexp") if self.function == "cross_entropy" else ("log p", "the entropy")
        for name, y, right, limit in zip(names, results, want, limits, strict=True):
            eps = torch.finfo(y.dtype)
            self.demand_near(name, y.detach(), right.detach(), eps.eps * right.detach().abs() + limit + 2 * eps.tiny)
        if self.has_gradient:
            g = [torch.randn(y.shape, generator=torch.Generator().manual_seed(self.values + 1)).to(y) for y in results]
            if self.options:  # an ignored row has no gradient
                g[1].masked_fill_(self.target == self.options["ignore_index"], 0)
            (dx,) = self.with_threads(given, lambda: torch.autograd.grad(results, leaf, g, retain_graph=True))
            (right,) = torch.autograd.grad(want, wide, [t.double() for t in g])
            if self.options:
                is_ignored = (self.target == self.options["ignore_index"]).unsqueeze(self.axis)
                right = right.masked_fill(is_ignored, 0)
            self.judge_gradient(dx, right, scores.detach(), g, weights)
        return given[INPUT].numel()

    def defined_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(scores in float64 with the classes last, the input that they are computed from)."""
        wide = x.detach().double().requires_grad_()
        s = wide / self.temperature if self.temperature else wide
        s = self.softcap * torch.tanh(s / self.softcap) if self.options and self.softcap else s
        return s.movedim(self.axis, -1), wide

    def defined(self, scores: Tensor, weight: Tensor | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """(results, their allowed errors, the weight of each row)."""
        eps = 64 * torch.finfo(accumulator(self.dtype)).eps
        size = scores.detach().masked_fill(~scores.isfinite(), 0).abs().amax(-1)
        lse = scores.logsumexp(-1)
        lse = torch.where(scores.amax(-1) == -torch.inf, torch.nan, lse)  # as the loss of a row without a score
        log_p = scores - lse.unsqueeze(-1)
        classes = scores.shape[-1]
        kept = self.target != self.options.get("ignore_index", -1 - classes)
        own = log_p.gather(-1, self.target.clamp(0).unsqueeze(-1)).squeeze(-1)
        of_lse = eps * (1 + size)
        if not self.options:
            p = log_p.exp()
            entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)
            return [own, entropy], [of_lse, of_lse * (1 + entropy.detach().abs())], torch.ones_like(size)
        smoothing, z = self.options["label_smoothing"], self.options["z_loss"]
        of_class = torch.ones(classes, dtype=torch.float64) if weight is None else weight.double()
        w = of_class[self.target.clamp(0)] * kept
        loss = -(1 - smoothing) * w * own
        if smoothing:
            loss = loss - smoothing / classes * (of_class * log_p).sum(-1)
        loss = torch.where(kept, loss + z * lse * lse if z else loss, 0)
        share = w + smoothing * of_class.mean() + 2 * z * lse.detach().abs().nan_to_num(0, 0, 0)
        limit = of_lse * share * kept
        reduction = self.options["reduction"]
        if reduction == "none":
            return [loss, lse], [limit, of_lse], share
        total = w.sum() if reduction == "mean" else 1
        limit = limit + eps * loss.detach().abs().nan_to_num(0, 0, 0)
        return [loss.sum() / total, lse], [limit.sum() / total, of_lse], share / total

    def judge_gradient(self, dx: Tensor, want: Tensor, scores: Tensor, g: Sequence[Tensor], share: Tensor) -> None:
        """Terms must be as exact as the logarithm of a probability. A row's gradient includes that of its logsumexp."""
        eps, out = 128 * torch.finfo(accumulator(self.dtype)).eps, torch.finfo(self.dtype)
        size = scores.masked_fill(~scores.isfinite(), 0).abs().amax(-1)
        p = scores.softmax(-1)
        one = torch.nn.functional.one_hot(self.target.clamp(0), p.shape[-1]).double()
        of_row = sum(t.double().abs().expand_as(size) for t in g)
        rest = self.options.get("label_smoothing", 0.0) / p.shape[-1] if self.options else p * size.unsqueeze(-1)
        terms = (of_row * (share + 1) * (1 + size)).unsqueeze(-1) * (p + one + rest)
        terms = terms.movedim(-1, self.axis) / (self.temperature or 1)
        least = 2 * max(out.tiny, LEAST) * (1 + float(of_row.max()) * (1 + float(size.max())))
        self.demand_near("the gradient", dx, want, out.eps * want.abs() + eps * terms.nan_to_num(0, 0, 0) + least)
