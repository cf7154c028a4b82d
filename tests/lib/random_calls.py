"""The random calls of scripts/fuzz_cpu.py: the layouts of tensors, and the checks of a call of a function."""

import ctypes
import math
import mmap
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onepass

from .support import DTYPES, FUNCTIONS, INTEGERS, SOFTMAXES, assert_defined, assert_state

SIZES = [1, 1, 2, 3, 4, 5, 8, 16, 17, 33]
LENGTHS = [7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 781, 1000, 1023, 1024, 1025]
LENGTHS += [2047, 2048, 2049, 4095, 4096, 4097, 5003, 8193, 16385]
SPECIALS = [math.inf, -math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 88.7, -103.9, 709.8, 6e4, -6e4, 3e38, -3e38]
SPECIALS += [1e-40, -1e-40, 6e-8, 1e308, -1e308, 5e-324]
# The most elements of a small call, of a call that several threads share, and of the memory that a call spans.
SMALL, LARGE, REACH = 6_000, 250_000, 1_000_000
POISON = 77.0


@dataclass(frozen=True)
class View:
    """The sizes, strides and offset of a tensor in its buffer."""

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
    """A random kind and a view of that kind that spans at most `most` elements of memory."""
    while True:
        kind = rng.choice(kinds)
        view = strided(rng, sizes, kind)
        if view.reach() <= most:
            return kind, view


def sizes_of(rng: random.Random) -> list[int]:
    """Random sizes of rank 0 to 5. One of them is often long; rarely one is 0."""
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
    """A tensor whose memory ends, or begins, at a page that cannot be accessed."""
    size, page = max(count, 1) * dtype.itemsize, mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (begin, begin + page + room):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    first = page + (room - size if at_end else 0)
    return torch.frombuffer(memory, dtype=dtype, count=max(count, 1), offset=first)[:count]


class Wrong(Exception):
    """An error that says what is wrong with a call."""


class Call:
    """Call number `number` of the run with `seed`. It does not depend on earlier calls."""

    guard = False
    specials: Sequence[float] = SPECIALS

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
        """The view of a buffer with these values."""
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
            buffer[rng.randrange(len(buffer)) :: step] = rng.choice(self.specials)
        return self.lay(buffer.to(self.dtype), self.view)

    def shape(self) -> list[int]:
        sizes = list(self.view.sizes)
        if self.function in SOFTMAXES or not sizes:
            return sizes
        dims = {d % len(sizes) for d in ((self.dim,) if isinstance(self.dim, int) else self.dim)}
        return [1 if d in dims else n for d, n in enumerate(sizes) if self.keepdim or d not in dims]

    def place(self) -> View:
        """The layout of `out`: any without overlapping elements."""
        return draw_view(self.rng, self.shape(), ["contiguous", "permuted", "sliced"], 4 * REACH)[1]

    def make(self, x: Tensor, **options: Any) -> Any:
        if self.function in SOFTMAXES:
            return getattr(onepass, self.function)(x, self.dim, dtype=self.given, engine=self.engine, **options)
        return getattr(onepass, self.function)(x, self.dim, self.keepdim, engine=self.engine, **options)

    def operands(self) -> dict[str, Tensor]:
        return {"the input": self.input()}

    def check(self) -> int:
        """Makes the call twice and checks it. Returns the number of input elements. Raises Wrong."""
        given = self.operands()
        x, place = given["the input"], self.place() if self.mode == "out" else None
        y = self.with_threads(given, lambda: self.once(x, place))
        self.judge(given, y)
        return x.numel()

    def with_threads(self, given: Mapping[str, Tensor], make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """The result of `make`. Checks that one thread and several give the same bits, and that no operand changes."""
        before, results = {name: t.clone() for name, t in given.items()}, []
        for threads in (1, self.threads):
            torch.set_num_threads(threads)
            results.append(make())
            for name, t in given.items():
                self.demand(equal_bits(t, before[name]), f"{name} has changed")
        for a, b in zip(*results, strict=True):
            self.demand(equal_bits(a, b), f"1 and {self.threads} threads give other bits")
        return results[0]

    def judge(self, given: Mapping[str, Tensor], y: Sequence[Tensor]) -> None:
        x = given["the input"]
        dims = self.dim if isinstance(self.dim, int) else tuple(self.dim)
        wide = x.to(torch.get_default_dtype()) if self.dtype in INTEGERS and self.given is None else x
        try:
            if self.function == "state":
                assert_state(onepass.State(*y), wide, dims, self.keepdim)
            else:
                self.demand_form(y[0])
                assert_defined(self.function, y[0], wide.to(self.result), dims)
        except AssertionError as error:
            raise Wrong(str(error)) from None

    def demand_form(self, y: Tensor) -> None:
        self.demand(y.dtype == self.result, f"the result is {y.dtype}")
        self.demand(list(y.shape) == self.shape(), f"the result has shape {list(y.shape)}")

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
        """Checks that in the memory of `y` only elements of `y` have changed."""
        memory = y.as_strided((view.reach(),), (1,), y.storage_offset() - view.offset).clone()
        view.of(memory).fill_(POISON)
        self.demand(bool((memory == POISON).all()), "an element beside the result was written")

    def demand_near(
        self, name: str, got: Tensor, want: Tensor, limit: Tensor, may_be_nan: Tensor | None = None
    ) -> None:
        """Checks that `got` is `want` within `limit`, or infinite if `want` overflows its dtype."""
        y, most = got.double(), torch.finfo(got.dtype).max
        over = (want.abs() + limit >= most) & y.isinf() & (y.sign() == want.sign())
        good = (y == want) | ((y - want).abs() <= limit) | over
        if may_be_nan is not None:
            good |= may_be_nan & y.isnan()
        good = torch.where(want.isnan(), y.isnan(), good)
        if not bool(good.all()):
            at = tuple((~good).nonzero()[0].tolist())
            number = f"got {y[at].item()!r}, want {want[at].item()!r} within {limit[at].item():.3g}"
            self.demand(False, f"{name} is wrong, first at {at}: {number}")

    def demand(self, true: bool, words: str) -> None:
        if not true:
            raise Wrong(words)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are equal, also in the sign of zero. Any NaN equals any other."""
    same = (a == b) & (a.signbit() == b.signbit()) | (a != a) & (b != b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())
