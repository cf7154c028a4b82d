"""Random calls over segments: rows of unequal length, heads, orders, scale and bias, and gradients by autograd."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

import onepass

from .random_calls import REACH, Call, draw_view
from .random_scores import Scored
from .support import DTYPES, accumulator

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
LAYOUTS = ["contiguous", "contiguous", "permuted", "sliced"]
INPUT = "the input"
MOST = 40_000  # elements
LEAST = 1.2e-38  # exponentials below it are 0
HEADS = ((), (), (2,), (3,), (8,), (16,), (64,), (130,), (3, 5))


def defined(function: str, row: Tensor) -> Tensor:
    """The function over dim 0 in float64. torch's own sums a long row sequentially and is less exact than onepass."""
    top = row.amax(0)
    if function == "logsumexp":
        base = torch.where(top.isfinite(), top, 0)
        return base + (row - base).exp().sum(0).log()
    d = row - top
    return d.exp() / d.exp().sum(0) if function == "softmax" else d - d.exp().sum(0).log()


class Segmented(Call):
    """A function of the segments of one dim, and for most calls its gradient."""

    def __init__(self, seed: int, number: int):
        rng = self.rng = random.Random(f"{seed}/{number}")
        self.function, self.dtype = rng.choice(FUNCTIONS), rng.choice(DTYPES)
        heads, most = rng.choice(HEADS), rng.choice([200, 3000, MOST])
        room, self.lengths = most // math.prod(heads), list[int]()
        longest = rng.choice([3, 12, 70, 1 + room])
        while sum(self.lengths) < room and len(self.lengths) < 400:
            self.lengths.append(rng.choice([0, rng.randrange(longest), int(2 ** rng.uniform(0, math.log2(longest)))]))
        if rng.random() < 0.03:
            self.lengths = [0] * rng.randrange(3)
        self.axis = rng.randint(0, len(heads))
        sizes = [*heads[: self.axis], sum(self.lengths), *heads[self.axis :]]
        self.kind, self.view = draw_view(rng, sizes, [*LAYOUTS, "expanded"], REACH)
        self.scale, self.has_bias = rng.choice([1.0, 1.0, 0.5, -2.0]), rng.random() < 0.2
        self.is_shuffled, self.has_gradient = rng.random() < 0.25, rng.random() < 0.8
        self.indices, self.grad_kind = rng.choice([torch.int32, torch.int64]), rng.choice(LAYOUTS)
        self.threads, self.values = rng.randint(2, 8), rng.randrange(2**31)

    def __str__(self) -> str:
        more = ", ".join(name for name in ("has_bias", "is_shuffled", "has_gradient") if getattr(self, name))
        lengths = f"{self.lengths[:20]}{'...' * (len(self.lengths) > 20)}"
        of = f"{self.view}, {str(self.dtype)[6:]}, {str(self.indices)[6:]}, scale {self.scale}, {more}"
        return f"segment_{self.function} over dim {self.axis} of {of}, {self.threads} threads, lengths {lengths}"

    def operands(self) -> dict[str, Tensor]:
        rng, make = self.rng, torch.Generator().manual_seed(self.values)
        x = torch.randn(self.view.reach(), generator=make, dtype=torch.float64) * rng.choice([0.01, 1.0, 5.0, 80.0])
        for _ in range(rng.randint(1, 3) if len(x) and rng.random() < 0.3 else 0):
            x[rng.randrange(len(x)) :: rng.choice([2, 7, 64, 10**6])] = rng.choice(Scored.specials)
        given = {INPUT: self.lay(x.to(self.dtype), self.view)}
        if self.has_bias:
            given["the bias"] = torch.randn(given[INPUT].shape, generator=make, dtype=torch.float64).to(self.dtype)
        index = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
        if self.is_shuffled:
            index = index[torch.randperm(len(index), generator=make)]
        self.index = index.to(self.indices)
        return given

    def check(self) -> int:
        given = self.operands()
        leaf, bias = given[INPUT].detach().requires_grad_(self.has_gradient), given.get("the bias")
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).to(self.indices)
        segments = onepass.Segments(self.index, len(self.lengths)) if self.is_shuffled else offsets

        def call() -> Sequence[Tensor]:
            function = getattr(onepass, f"segment_{self.function}")
            return [function(leaf, segments, self.axis, scale=self.scale, bias=bias, engine="cpu")]

        (y,) = self.with_threads(given, call)
        places = [(self.index == s).nonzero().flatten() for s in range(len(self.lengths))]
        scores = given[INPUT].double() * self.scale + (0 if bias is None else bias.double())
        self.judge_forward(scores.movedim(self.axis, 0), y.detach().movedim(self.axis, 0), places)
        if self.has_gradient:
            view = draw_view(self.rng, list(y.shape), [self.grad_kind], 4 * REACH)[1]
            values = torch.randn(view.reach(), generator=torch.Generator().manual_seed(self.values + 1))
            g = self.lay(values.to(y.dtype), view)
            (dx,) = self.with_threads(
                {**given, "the gradient": g}, lambda: torch.autograd.grad(y, leaf, g, retain_graph=True)
            )
            self.judge_gradient(*(t.movedim(self.axis, 0) for t in (scores, y.detach(), g, dx)), places)
        return given[INPUT].numel()

    def judge_forward(self, scores: Tensor, y: Tensor, places: Sequence[Tensor]) -> None:
        eps, out = torch.finfo(accumulator(self.dtype)).eps, torch.finfo(self.dtype)
        want, size = torch.empty_like(y, dtype=torch.float64), torch.empty_like(y, dtype=torch.float64)
        for s, at in enumerate(places):
            row, of = scores[at], s if self.function == "logsumexp" else at
            if self.function == "logsumexp" and not len(at):
                want[s], size[s] = -math.inf, 0
                continue
            if len(at):
                want[of] = defined(self.function, row)
                size[of] = row.masked_fill(~row.isfinite(), 0).abs().amax(0)
        of_scores = 16 * eps * (1 + size) * (want if self.function == "softmax" else 1)
        limit = out.eps * want.abs().nan_to_num(0, 0, 0) + of_scores.nan_to_num(0) + max(out.tiny, LEAST)
        self.demand_near("the result", y, want, limit)

    def judge_gradient(self, scores: Tensor, y: Tensor, g: Tensor, dx: Tensor, places: Sequence[Tensor]) -> None:
        """Checks the gradient from the rounded result. For logsumexp the unrounded result is saved."""
        eps, out = 128 * torch.finfo(accumulator(self.dtype)).eps, torch.finfo(self.dtype)
        want, limit = torch.empty_like(scores), torch.empty_like(scores)
        y, g = y.double(), g.double()
        for s, at in enumerate(places):
            if not len(at):
                continue
            if self.function == "logsumexp":
                p = scores[at] - defined("logsumexp", scores[at])
                want[at] = g[s] * p.exp()
                size = scores[at].masked_fill(~scores[at].isfinite(), 0).abs()
                limit[at] = eps * want[at].abs() * (1 + size.amax(0)) + LEAST * g[s].abs()
            elif self.function == "softmax":
                want[at] = y[at] * (g[at] - (y[at] * g[at]).sum(0))
                limit[at] = eps * y[at] * (g[at].abs() + (y[at] * g[at].abs()).sum(0))
            else:
                p = y[at].exp()
                want[at] = g[at] - p * g[at].sum(0)
                limit[at] = eps * (g[at].abs() + p * (1 + y[at].abs().nan_to_num(0, 0, 0)) * g[at].abs().sum(0))
        want, limit = want * self.scale, limit * abs(self.scale)
        limit = (out.eps * want.abs() + limit).nan_to_num(0, 0, 0) + 2 * max(out.tiny, LEAST)
        self.demand_near("the gradient", dx, want, limit)
