"""Random calls of the CPU engine through the Python functions, judged by the float64 definition.

    python scripts/fuzz_cpu.py --minutes 30 --seed 7
    python scripts/fuzz_cpu.py --seed 7 --call 1234        # one call of that run again
    ONEPASS_CPU_CAPABILITY=avx2 python scripts/fuzz_cpu.py # with this instruction set: baseline, avx2 or avx512

Shapes of rank 0 to 5, one dim or several; contiguous, permuted, expanded, sliced, offset and overlapping inputs; all
dtypes and `dtype=`; softmax, log_softmax, softmin, logsumexp and state; fresh results, `out=` of any layout, in place;
-inf, inf, NaN, huge and subnormal values. Of five calls one is a gradient, one has scores (tests/lib/random_scores.py),
one is over segments (tests/lib/random_segments.py) and one is a loss (tests/lib/random_losses.py). The tolerances are
those of tests/lib/support.py. Each call is made with one thread and with 2 to 8, which must give the same bits; no
element beside `out` may change, nor an operand.
Every failure is printed with the line that makes its call again. Ends with status 1 if there is any, 2 for a wrong
option.

With --guard operands and results lie in memory that ends, or begins, at a page that cannot be touched. Each call is
then printed before it is made, as an access to such a page ends the process. scripts/sanitize.py does this with an
engine under sanitizers, which do not look at masked vector accesses.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from onepass import native

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from lib.gradients import gradient
from lib.random_calls import POISON, REACH, Call, View, Wrong, draw_view, sizes_of
from lib.random_losses import Loss
from lib.random_scores import Scored
from lib.random_segments import Segmented
from lib.support import DTYPES, FUNCTIONS


class Gradient(Call):
    """A gradient by the engine's own operators. `saved` is the function's result, or for logsumexp its input."""

    def __init__(self, seed: int, number: int):
        rng = self.rng = random.Random(f"{seed}/{number}")
        self.function, self.threads = rng.choice(FUNCTIONS), rng.randint(2, 8)
        sizes = sizes_of(rng)
        while 0 in sizes:
            sizes = sizes_of(rng)
        rank = max(len(sizes), 1)
        self.dims = sorted(rng.sample(range(rank), rng.choice([1, 1, 1, rng.randint(1, rank)])))
        self.saved_type, self.keepdim = rng.choice(DTYPES), rng.random() < 0.5
        is_lse, is_half = self.function == "logsumexp", self.saved_type.itemsize == 2
        self.grad_type = torch.float32 if is_lse and is_half and rng.random() < 0.5 else self.saved_type
        self.dx_type = self.saved_type if is_lse or rng.random() < 0.5 else rng.choice(DTYPES)
        of_rows = [1 if d in self.dims else size for d, size in enumerate(sizes)] if is_lse else sizes
        self.dx, self.saved, self.lse = self.draw(sizes), self.draw(sizes, True), self.draw(of_rows)
        self.grad = self.draw(of_rows, True)
        if not is_lse and rng.random() < 0.3:
            self.grad = self.dx
        if not is_lse and rng.random() < 0.3:
            self.saved = self.dx
        if not is_lse and rng.random() < 0.2:  # one value per row, or everywhere
            gone = self.dims if rng.random() < 0.5 else range(rank)
            strides = tuple(0 if d in gone else s for d, s in enumerate(self.grad.strides))
            self.grad = replace(self.grad, strides=strides)
        self.mode = rng.choice(["out", "out", "saved", "grad"])
        alike = {"saved": (self.saved, self.saved_type), "grad": (self.grad, self.grad_type)}
        if self.mode != "out" and (self.dx, self.dx_type) != alike[self.mode]:
            self.mode = "out"
        if is_lse and not self.keepdim and self.mode == "grad":  # not allowed: the gradient has fewer dims
            self.mode = "out"
        self.values = rng.randrange(2**31)

    def draw(self, sizes: Sequence[int], overlaps: bool = False) -> View:
        kinds = ["contiguous", "contiguous", "permuted", "sliced", *(["expanded"] if overlaps else [])]
        return draw_view(self.rng, sizes, kinds, 4 * REACH)[1]

    def __str__(self) -> str:
        types = f"saved {self.saved_type}, gradient {self.grad_type} -> {self.dx_type}"
        views = f"dx {self.dx}, saved {self.saved}, gradient {self.grad}, logsumexp {self.lse}"
        return (
            f"gradient of {self.function} over {self.dims}, {types}, {views}, into {self.mode}, {self.threads} threads"
        )

    def normal(self, count: int, mean: float, deviation: float, specials: Sequence[float]) -> Tensor:
        values = torch.randn(count, dtype=torch.float64) * deviation + mean
        for _ in range(self.rng.randint(1, 3) if self.rng.random() < 0.25 else 0):
            values[self.rng.randrange(count) :: self.rng.choice([1, 2, 7, 64, 10**6])] = self.rng.choice(specials)
        return values

    def operands(self) -> dict[str, Tensor]:
        """The upstream gradient, the saved tensor, and for logsumexp a result that no element of its row exceeds
        much."""
        rng, inf, nan, count = self.rng, math.inf, math.nan, self.saved.reach()
        torch.manual_seed(self.values)
        mean, deviation = rng.choice([0, 0, 1]), rng.choice([0, 0.01, 1, 100])
        g = self.normal(self.grad.reach(), mean, deviation, [inf, -inf, nan, 0, 6e4])
        if self.function == "log_softmax":
            y = self.normal(count, -8, rng.choice([0, 1, 4]), [-inf, -0.0, nan, -40])
            y = torch.where(y > 0, -0.25, y)
        elif self.function != "logsumexp":
            n = math.prod(self.dx.sizes[d] for d in self.dims if self.dx.sizes)
            y = self.normal(count, 0, 1 / n, [0, 1, nan, 1e-40, 0.5]).abs()
        else:
            y = self.normal(count, rng.choice([0, -300, 700]), rng.choice([0, 1, 5]), [-inf, inf, nan, 0])
        made = {"grad": self.lay(g.to(self.grad_type), self.grad), "saved": self.lay(y.to(self.saved_type), self.saved)}
        if self.function == "logsumexp":
            x, lse = made["saved"].double(), self.lay(torch.empty(self.lse.reach(), dtype=self.grad_type), self.lse)
            lse.copy_(x.logsumexp(self.dims, keepdim=True))
            made["lse"] = lse.copy_(torch.where(x.amax(self.dims, keepdim=True) > lse, lse + lse.abs() / 64, lse))
        return made

    def check(self) -> int:
        given = self.operands()
        before = given[self.mode].clone() if self.mode in given else None

        def make() -> list[Tensor]:
            dx = self.into(**given)
            if before is not None:
                given[self.mode].copy_(before)
            return [dx]

        (dx,) = self.with_threads(given, make)
        self.judge_gradient(dx, **given)
        return given["saved"].numel()

    def into(self, grad: Tensor, saved: Tensor, lse: Tensor | None = None) -> Tensor:
        """The gradient, written to the place that the mode says."""
        into = {"grad": grad, "saved": saved}.get(self.mode)
        dx = self.lay(torch.full((self.dx.reach(),), POISON, dtype=self.dx_type), self.dx) if into is None else into
        if lse is None:
            number = native.FUNCTIONS.index(self.function)
            torch.ops.onepass._softmax_backward.out(grad, saved, number, self.dims, out=dx)
        else:
            if not self.keepdim and lse.dim():
                grad, lse = (self.without_reduced(t) for t in (grad, lse))
            torch.ops.onepass._logsumexp_backward.out(grad, saved, lse, self.dims, self.keepdim, out=dx)
        if into is None:
            self.undisturbed(dx, self.dx)
        return dx.clone()

    def without_reduced(self, t: Tensor) -> Tensor:
        for d in reversed(self.dims):
            t = t.squeeze(d)
        return t

    def judge_gradient(self, dx: Tensor, grad: Tensor, saved: Tensor, lse: Tensor | None = None) -> None:
        """Allows one rounding of the result, and a few roundings of its terms in the accumulator's dtype."""
        want, terms = gradient(self.function, grad, saved, self.dims, lse)
        y, g, kind = saved.double(), grad.double(), torch.finfo(dx.dtype)
        vanishes = torch.zeros_like(want, dtype=torch.bool)
        if lse is not None:
            d = y - lse.double()
            terms = terms * (1 + d.nan_to_num(0, 0, 0).abs())
            # An infinite gradient times an exponential that is 0 in float32 is NaN, as in torch.
            vanishes = g.isinf() & (d < -100) if saved.dtype != torch.float64 else vanishes
        elif self.function == "log_softmax":
            terms = g.abs() + (terms - g.abs()) * (1 + y.nan_to_num(0, 0, 0).abs())
        inner = max(4e-16 if saved.dtype == torch.float64 else 1.2e-7, 2.0**-18 if dx.element_size() == 2 else 0)
        limit = kind.eps * want.abs() + 8 * inner * terms + 2 * max(kind.tiny * kind.eps, 1.2e-38)
        self.demand_near("the gradient", dx, want, limit, vanishes)


KINDS = (Call, Scored, Gradient, Segmented, Loss)


def judge(seed: int, number: int) -> tuple[int, str | None]:
    """(number of elements of a call, what is wrong with it or None)."""
    call = KINDS[number % len(KINDS)](seed, number)
    if Call.guard:
        print(f"call {number} of seed {seed}: {call}", flush=True)
    try:
        return call.check(), None
    except Wrong as error:
        words = str(error)
    except Exception as error:
        words = f"raised {type(error).__name__}: {error}"
    isa = native.status("isa")
    again = f"ONEPASS_CPU_CAPABILITY={isa} python scripts/fuzz_cpu.py --seed {seed} --call {number}"
    return 0, f"{call}: {words}\n  again: {again}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="make this call of the run alone")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures (default 20)")
    parser.add_argument("--guard", action="store_true", help="tensors end at pages that cannot be touched")
    given = parser.parse_args(arguments)
    Call.guard = given.guard
    if not given.minutes > 0 or given.most < 1 or (given.call is not None and given.call < 0):
        parser.error("--minutes is above 0, --most at least 1, --call at least 0")
    isa, asked = native.status("isa"), os.environ.get("ONEPASS_CPU_CAPABILITY")
    if asked and asked != isa:
        parser.error(f"ONEPASS_CPU_CAPABILITY={asked}, but the engine takes {isa} here")
    begin, threads, calls, elements, failures = time.monotonic(), torch.get_num_threads(), 0, 0, 0
    try:
        while failures < given.most and (calls == 0 or time.monotonic() - begin < 60 * given.minutes):
            size, words = judge(given.seed, calls if given.call is None else given.call)
            calls, elements = calls + 1, elements + size
            if words:
                failures += 1
                print(words, flush=True)
            if given.call is not None:
                break
    except KeyboardInterrupt:
        print("stopped")
    finally:
        torch.set_num_threads(threads)
    took = time.monotonic() - begin
    print(f"{isa}, seed {given.seed}: {calls:,} calls of {elements:,} elements in {took:.1f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
