"""Random calls of the CPU engine through the Python functions, judged by the float64 definition.

    python scripts/fuzz_cpu.py --minutes 30 --seed 7
    python scripts/fuzz_cpu.py --seed 7 --call 1234        # one call of that run again
    ONEPASS_CPU_CAPABILITY=avx2 python scripts/fuzz_cpu.py # with this instruction set: baseline, avx2 or avx512

Shapes of rank 0 to 5, one dim or several; contiguous, permuted, expanded, sliced, offset and overlapping inputs; all
dtypes and `dtype=`; softmax, log_softmax, softmin, logsumexp, state and, every third call, gradients; fresh results,
`out=` of any layout, in place; -inf, inf, NaN, huge and subnormal values. The tolerances are those of
tests/lib/support.py. Each call is made with one thread and with 2 to 8, which must give the same bits; no element
beside `out` may change, nor an operand. Every failure is printed with the line that makes its call again. Ends with
status 1 if there is any, 2 for a wrong option.

With --guard operands and results lie in memory that ends, or begins, at a page that cannot be touched. Each call is
then printed before it is made, as an access to such a page ends the process. scripts/sanitize.py does this with an
engine under sanitizers, which do not look at masked vector accesses.
"""

import argparse
import ctypes
import math
import mmap
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass import native

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from lib.gradients import gradient
from lib.support import DTYPES, FUNCTIONS, INTEGERS, SOFTMAXES, assert_defined, assert_state

SIZES = [1, 1, 2, 3, 4, 5, 8, 16, 17, 33]
LENGTHS = [7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 781, 1000, 1023, 1024, 1025]
LENGTHS += [2047, 2048, 2049, 4095, 4096, 4097, 5003, 8193, 16385]
SPECIALS = [math.inf, -math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 88.7, -103.9, 709.8, 6e4, -6e4, 3e38, -3e38]
SPECIALS += [1e-40, -1e-40, 6e-8, 1e308, -1e308, 5e-324]
SMALL, LARGE, REACH = 6_000, 250_000, 1_000_000  # elements of a call; what several threads take; of its memory
POISON = 77.0


@dataclass(frozen=True)
class View:
    """How a tensor lies in a buffer of its own."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def reach(self) -> int:
        return self.offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def of(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.sizes, self.strides, self.offset)


def strided(rng: random.Random, sizes: Sequence[int], kind: str) -> View:
    """A view of these sizes: contiguous, permuted, sliced (gaps between elements), expanded, or overlapping."""
    order = list(range(len(sizes)))[::-1]  # from the innermost out
    if kind == "permuted" or (kind != "contiguous" and rng.random() < 0.4):
        rng.shuffle(order)
    strides, step = [0] * len(sizes), rng.choice([1, 1, 2, 3]) if kind == "sliced" else 1
    for d in order:
        strides[d] = step
        if kind == "sliced" and rng.random() < 0.4:
            strides[d] += rng.choice([1, 3, 8])
        if kind == "expanded" and rng.random() < 0.4:
            strides[d] = 0
        if kind == "overlapping":
            strides[d] = rng.choice([0, 1, step, max(step // 2, 1), 3])
        step = max(step, strides[d] * max(sizes[d], 1))
    return View(tuple(sizes), tuple(strides), rng.choice([0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 33]))


def draw_view(rng: random.Random, sizes: Sequence[int], kinds: Sequence[str], most: int) -> tuple[str, View]:
    """One of these kinds and a view of it that reaches over no more than `most` elements of memory."""
    while True:
        kind = rng.choice(kinds)
        view = strided(rng, sizes, kind)
        if view.reach() <= most:
            return kind, view


def sizes_of(rng: random.Random) -> list[int]:
    """Sizes of rank 0 to 5, one of them often long; seldom an empty one."""
    most = LARGE if rng.random() < 0.15 else SMALL
    sizes = [rng.choice(SIZES) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3, 4, 5]))]
    for _ in range(1 if most == SMALL else 2):
        if sizes and rng.random() < 0.8:
            sizes[rng.randrange(len(sizes))] = rng.choice([rng.choice(LENGTHS), rng.randint(1, 700)])
    if sizes and most == LARGE and rng.random() < 0.2:
        sizes = [1] * (len(sizes) - 1) + [rng.randint(50_000, LARGE)]
        rng.shuffle(sizes)
    while math.prod(sizes) > most:
        sizes[sizes.index(max(sizes))] //= 2
    if sizes and rng.random() < 0.03:
        sizes[rng.randrange(len(sizes))] = 0
    return sizes


def guarded(count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """Memory that ends, or begins, at a page that cannot be touched."""
    size, page = max(count, 1) * dtype.itemsize, mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (begin, begin + page + room):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    first = page + (room - size if at_end else 0)
    return torch.frombuffer(memory, dtype=dtype, count=max(count, 1), offset=first)[:count]


class Wrong(Exception):
    """What is wrong with a call."""


class Call:
    """Call number `number` of the run with `seed`: the same again whatever was called before it."""

    guard = False

    def __init__(self, seed: int, number: int):
        rng = self.rng = random.Random(f"{seed}/{number}")
        self.function = rng.choice([*FUNCTIONS, "softmax", "state"])
        sizes = sizes_of(rng)
        kinds = ["contiguous", "contiguous", "permuted", "sliced", "expanded", "overlapping"]
        self.kind, self.view = draw_view(rng, sizes, kinds, REACH)
        self.dtype = rng.choice(DTYPES) if rng.random() < 0.95 else rng.choice(INTEGERS)
        rank = max(len(sizes), 1)
        dims = rng.sample(range(rank), rng.choice([1, 1, 1, rng.randint(1, rank)]))
        dims = [d - rank if rng.random() < 0.5 else d for d in dims]
        self.dim: int | tuple[int, ...] = dims[0] if len(dims) == 1 and rng.random() < 0.8 else tuple(dims)
        fresh = torch.get_default_dtype() if self.dtype in INTEGERS else self.dtype
        self.given: torch.dtype | None = None
        if self.function in SOFTMAXES and (self.dtype in INTEGERS or rng.random() < 0.4):  # integers need one
            self.given = rng.choice(DTYPES)
        self.result = self.given or fresh
        self.keepdim = rng.random() < 0.5
        self.mode = rng.choice(["fresh", "fresh", "out", "in place"]) if self.function != "state" else "fresh"
        apart = self.kind not in ("expanded", "overlapping")
        if self.mode == "in place" and not (apart and self.function in SOFTMAXES and self.result == self.dtype):
            self.mode = "out"
        self.threads, self.engine = rng.randint(2, 8), rng.choice(["auto", "cpu"])
        self.values = rng.randrange(2**31)

    def __str__(self) -> str:
        types = f"{str(self.dtype)[6:]} -> {str(self.result)[6:]}"
        how = f"{self.mode}, {self.kind}, {self.threads} threads, engine {self.engine}"
        return f"{self.function} over {self.dim} of {self.view}, {types}, {how}"

    def lay(self, values: Tensor, view: View) -> Tensor:
        """The view of memory that has these values."""
        if self.guard:
            values = guarded(len(values), values.dtype, self.rng.random() < 0.7).copy_(values)
        return view.of(values)

    def input(self) -> Tensor:
        rng, generator = self.rng, torch.Generator().manual_seed(self.values)
        buffer = torch.randn(self.view.reach(), generator=generator, dtype=torch.float64)
        buffer = buffer * rng.choice([0.01, 1.0, 3.0, 30.0, 300.0]) + rng.choice([0.0, 0.0, 0.0, -500.0, 2500.0])
        if self.dtype in INTEGERS:
            return self.lay(buffer.clamp(0, 100).to(self.dtype), self.view)
        for _ in range(rng.randint(1, 4) if rng.random() < 0.4 else 0):
            step = rng.choice([1, 2, 7, 64, 10**6])
            buffer[rng.randrange(len(buffer)) :: step] = rng.choice(SPECIALS)
        return self.lay(buffer.to(self.dtype), self.view)

    def shape(self) -> list[int]:
        sizes = list(self.view.sizes)
        if self.function in SOFTMAXES or not sizes:
            return sizes
        dims = {d % len(sizes) for d in ((self.dim,) if isinstance(self.dim, int) else self.dim)}
        return [1 if d in dims else n for d, n in enumerate(sizes) if self.keepdim or d not in dims]

    def place(self) -> View:
        """How `out` lies: any layout whose elements are apart."""
        return draw_view(self.rng, self.shape(), ["contiguous", "permuted", "sliced"], 4 * REACH)[1]

    def make(self, x: Tensor, **options: Any) -> Any:
        if self.function in SOFTMAXES:
            return getattr(onepass, self.function)(x, self.dim, dtype=self.given, engine=self.engine, **options)
        return getattr(onepass, self.function)(x, self.dim, self.keepdim, engine=self.engine, **options)

    def check(self) -> int:
        """Make the call twice and judge it; gives the elements that went in. Raises Wrong."""
        x = self.input()
        place = self.place() if self.mode == "out" else None
        results = []
        before = x.clone()
        for threads in (1, self.threads):
            torch.set_num_threads(threads)
            results.append(self.once(x, place))
        y, again = results
        for a, b in zip(y, again, strict=True):
            self.demand(equal_bits(a, b), f"1 and {self.threads} threads give other bits")
        self.demand(equal_bits(x, before), "the input has changed")
        dims = self.dim if isinstance(self.dim, int) else tuple(self.dim)
        wide = x.to(torch.get_default_dtype()) if self.dtype in INTEGERS and self.given is None else x
        try:
            if self.function == "state":
                assert_state(onepass.State(*y), wide, dims, self.keepdim)
            else:
                self.demand(y[0].dtype == self.result, f"the result is {y[0].dtype}")
                self.demand(list(y[0].shape) == self.shape(), f"the result has shape {list(y[0].shape)}")
                assert_defined(self.function, y[0], wide.to(self.result), dims)
        except AssertionError as error:
            raise Wrong(str(error)) from None
        return x.numel()

    def once(self, x: Tensor, place: View | None) -> tuple[Tensor, ...]:
        if self.mode == "in place":
            target = self.lay(torch.full((self.view.reach(),), POISON, dtype=self.dtype), self.view).copy_(x)
            self.demand(self.make(target, out=target) is target, "in place: the result is not out itself")
            self.undisturbed(target, self.view)
            return (target,)
        if place is None:
            y = self.make(x)
            return (y.m, y.l) if self.function == "state" else (y,)
        target = self.lay(torch.full((place.reach(),), POISON, dtype=self.result), place)
        self.demand(self.make(x, out=target) is target, "the result is not out itself")
        self.undisturbed(target, place)
        return (target,)

    def undisturbed(self, y: Tensor, view: View) -> None:
        """No element of the memory of `y` that is none of its own has changed."""
        memory = y.as_strided((view.reach(),), (1,), y.storage_offset() - view.offset).clone()
        view.of(memory).fill_(POISON)
        self.demand(bool((memory == POISON).all()), "an element beside the result was written")

    def demand(self, true: bool, words: str) -> None:
        if not true:
            raise Wrong(words)


class Gradient(Call):
    """A gradient by the engine's own operators. `saved` is the function's result, of logsumexp its input."""

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
        if is_lse and not self.keepdim and self.mode == "grad":  # the gradient has fewer dims: refused
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
        """The result's gradient, what was saved, and a logsumexp that hardly any element of its row is above."""
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
        before = {name: t.clone() for name, t in given.items()}
        results = []
        for threads in (1, self.threads):
            torch.set_num_threads(threads)
            results.append(self.into(**given))
            if self.mode in given:
                given[self.mode].copy_(before[self.mode])
            for name, t in given.items():
                self.demand(equal_bits(t, before[name]), f"{name} has changed")
        self.demand(equal_bits(*results), f"1 and {self.threads} threads give other bits")
        self.judge(results[0], **given)
        return given["saved"].numel()

    def into(self, grad: Tensor, saved: Tensor, lse: Tensor | None = None) -> Tensor:
        """The gradient, made where the mode says."""
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

    def judge(self, dx: Tensor, grad: Tensor, saved: Tensor, lse: Tensor | None = None) -> None:
        """One rounding of the result, and a few of its terms in the type that they are computed in."""
        want, terms = gradient(self.function, grad, saved, self.dims, lse)
        y, g, got, kind = saved.double(), grad.double(), dx.double(), torch.finfo(dx.dtype)
        vanishes = torch.zeros_like(want, dtype=torch.bool)
        if lse is not None:
            d = y - lse.double()
            terms = terms * (1 + d.nan_to_num(0, 0, 0).abs())
            # An infinite gradient times an exponential that is 0 in float32 is NaN, as torch has it.
            vanishes = g.isinf() & (d < -100) if saved.dtype != torch.float64 else vanishes
        elif self.function == "log_softmax":
            terms = g.abs() + (terms - g.abs()) * (1 + y.nan_to_num(0, 0, 0).abs())
        inner = max(4e-16 if saved.dtype == torch.float64 else 1.2e-7, 2.0**-18 if dx.element_size() == 2 else 0)
        limit = kind.eps * want.abs() + 8 * inner * terms + 2 * max(kind.tiny * kind.eps, 1.2e-38)
        over = (want.abs() + limit >= kind.max) & got.isinf() & (got.sign() == want.sign())
        good = (got == want) | ((got - want).abs() <= limit) | over
        good = torch.where(want.isnan() | (vanishes & got.isnan()), got.isnan(), good)
        if not bool(good.all()):
            at = tuple((~good).nonzero()[0].tolist())
            self.demand(False, f"wrong, first at {at}: got {got[at].item()!r}, want {want[at].item()!r}")


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """The same elements to the sign of zero; any NaN is as good as another."""
    same = (a == b) & (a.signbit() == b.signbit()) | (a != a) & (b != b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


def judge(seed: int, number: int) -> tuple[int, str | None]:
    """The elements of a call, and what is wrong with it, if anything is. Every third is a gradient."""
    call = (Gradient if number % 3 == 2 else Call)(seed, number)
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
