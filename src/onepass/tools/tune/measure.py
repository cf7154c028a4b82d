"""Checks and times candidates on a GPU: each is compared with the float64 definition, then timed beside a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from onepass import native, reference
from onepass.tools.bench.stats import summarise
from onepass.tools.bench.timing import Cuda
from onepass.tools.tune import columns
from onepass.tools.tune.candidates import FLAT, Candidate, Choice, Gpu, Kernel, Plan
from onepass.tools.tune.compile import compile_all

Progress = Callable[[int, int], None]  # (done, of how many)
FUNCTIONS = ("softmax", "logsumexp")  # of those that write rows, and of those that only read them
ALL = FUNCTIONS + columns.FUNCTIONS
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the largest error, relative to each element
QUICK = 2  # calls of the first look at a plan
CLOSE, MOST = 1.1, 24  # plans within so much of the fastest at that look, and so many, are measured in full
SMALL = 2**27  # bytes: inputs of fewer are timed more often
SPIKE = 20.0  # in rows that are compared: an element that is left out shows in their logsumexp


class WrongResultError(RuntimeError):
    """A candidate's result is not the function's."""


@dataclass(frozen=True)
class Point:
    """What was measured of a function for one length: microseconds of a copy of the input (for a gradient: of adding
    two), of the plan in use, and of each choice that was not far behind; and why others were refused."""

    function: str
    dtype: str
    n: int
    rows: int
    copy_us: float
    auto_us: float
    times: dict[Choice, float]
    refused: dict[str, int] = field(default_factory=dict)  # reason -> plans

    @cached_property
    def best(self) -> float:
        return min(self.times.values())

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """For JSON: the fastest `most` choices, or all, each as (tier, lanes, values, split, shelf, microseconds)."""
        times = sorted(self.times.items(), key=lambda item: (item[1], item[0]))[:most]
        fields = {key: getattr(self, key) for key in ("function", "dtype", "n", "rows", "copy_us", "auto_us")}
        return {**fields, "times": [[*choice, us] for choice, us in times], "refused": self.refused}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Point":
        """The inverse of `as_dict`; KeyError, TypeError or ValueError where it is none."""
        times = {}
        for *choice, us in given["times"]:
            if len(choice) != 5 or not all(type(number) is int for number in choice) or not us > 0:
                raise ValueError(f"a time is five whole numbers and microseconds, got {[*choice, us]}")
            times[Choice(*choice)] = float(us)
        if not times:
            raise ValueError("a length without a time")
        if given["function"] not in ALL:
            raise ValueError(f"a function is one of {', '.join(ALL)}, got {given['function']!r}")
        copy_us, auto_us = float(given["copy_us"]), float(given["auto_us"])
        n, rows, refused = int(given["n"]), int(given["rows"]), dict(given["refused"])
        return cls(str(given["function"]), str(given["dtype"]), n, rows, copy_us, auto_us, times, refused)


def check(result: Tensor, expected: Tensor, what: str, least: float = 0.0) -> None:
    """Compare rows with the float64 definition.

    Args:
        least: elements nearer to 0 may be off by as much as this one.

    Raises:
        WrongResultError: an element is off by more than the bound of its dtype, or was not written.

    >>> check(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5], dtype=torch.float64), "a plan")
    """
    limits = torch.finfo(result.dtype)
    bound = BOUNDS[str(result.dtype).removeprefix("torch.")]
    allowed = bound * expected.abs().clamp(min=least) + limits.smallest_normal * limits.eps
    worst = ((result.double() - expected).abs() / allowed).max().item()
    if not worst <= 1:
        raise WrongResultError(f"{what} is wrong: an error of {worst * bound:.1e}, {bound:.0e} is allowed")


Launch = Callable[[Plan | None, Tensor], None]
Time = Callable[[Callable[[], object], int], float]


def race(
    what: str,
    y: Tensor,
    tried: Sequence[Candidate],
    launch: Launch,
    verify: Callable[[str], None],
    time: Time,
    settle: Callable[[], None],
    repeats: int,
) -> tuple[dict[Choice, float], dict[str, int]]:
    """Check each plan once and look how fast it is; time those in full that are not far behind.

    Args:
        what: is measured, in words.
        launch: writes into its last argument by a plan, or the one in use; RuntimeError where that is refused.
        verify: compares parts of `y` with the definition; takes what it is, in words.
        time: microseconds of a call, the median of so many.
        settle: waits for the GPU, and raises if an error was no refusal, but the GPU that fails.

    Returns:
        The time of each choice, and why others were refused: reason -> plans.

    Raises:
        WrongResultError: a plan's result is wrong. RuntimeError: none could be launched, or the GPU fails.
    """
    looks: dict[Plan, float] = {}
    refused: dict[str, int] = {}
    for plan in dict.fromkeys(candidate.plan for candidate in tried):
        y.fill_(torch.nan)
        try:
            launch(plan, y)
        except RuntimeError as error:
            settle()
            reason = str(error).removeprefix("onepass: ").partition("\n")[0]
            refused[reason] = refused.get(reason, 0) + 1
            continue
        words = f"{what} by plan {tuple(plan)}"
        verify(words)
        if not y.sum(dtype=torch.float32).isfinite():
            raise WrongResultError(f"{words} is wrong: not every element was written")
        looks[plan] = time(partial(launch, plan, y), min(QUICK, repeats))
    if not looks:
        raise RuntimeError(f"no plan for {what} can be launched: {'; '.join(refused) or 'none tried'}")
    plans = {plan: time(partial(launch, plan, y), repeats) for plan in close(looks)}
    return {choice: plans[plan] for choice, plan in tried if plan in plans}, refused


def measure(
    function: str,
    x: Tensor,
    tried: Sequence[Candidate],
    launch: Callable[[Tensor, Plan | None, Tensor], None],
    time: Time,
    settle: Callable[[], None],
    repeats: int = 15,
) -> Point:
    """`race` over the rows of `x`: `function` is "softmax" or "logsumexp", for which some elements of `x` are written
    over."""
    rows, n = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    reduces = function == "logsumexp"
    sample = sorted({*torch.randint(rows, (16 if n < 2**20 else 2,)).tolist(), 0, rows - 1})
    if reduces:
        places = [0, n - 1, *torch.randint(n, (len(sample),)).tolist()][: len(sample)]
        x[sample, places] = SPIKE
    expected = getattr(reference, function)(x[sample], 1)
    copied = torch.empty_like(x)
    copy_us = time(lambda: copied.copy_(x), repeats)
    y = x.new_empty(rows) if reduces else copied
    auto_us = time(lambda: launch(x, None, y), repeats)

    def verify(what: str) -> None:
        check(y[sample], expected, what, 1.0 if reduces else 0.0)

    def by(plan: Plan | None, y: Tensor) -> None:
        launch(x, plan, y)

    times, refused = race(f"{function} of {rows}x{n} {dtype}", y, tried, by, verify, time, settle, repeats)
    return Point(function, dtype, n, rows, copy_us, auto_us, times, refused)


def measure_columns(
    x: Tensor,
    grad: Tensor | None,
    tried: Sequence[Candidate],
    launch: Launch,
    time: Time,
    settle: Callable[[], None],
    repeats: int = 15,
) -> Point:
    """`race` over the middle dim of `x`: softmax, or where there is `grad` its gradient, `x` being the result."""
    outer, n, inner = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    count = 16 if n < 2**14 else 4
    at = [0, *torch.randint(outer, (count,)).tolist(), outer - 1]
    beside = [0, *torch.randint(inner, (count,)).tolist(), inner - 1]
    saved = x[at, :, beside].double()
    if grad is None:
        expected = reference.softmax(saved, 1)
    else:
        g = grad[at, :, beside].double()
        expected = saved * (g - (saved * g).sum(1, keepdim=True))
    y = torch.empty_like(x)
    copy_us = time(lambda: y.copy_(x) if grad is None else torch.add(x, grad, out=y), repeats)
    auto_us = time(lambda: launch(None, y), repeats)

    def verify(what: str) -> None:
        check(y[at, :, beside], expected, what, 0.0 if grad is None else saved.max().item())

    function = "columns" if grad is None else "column_gradients"
    what = f"{function} of {outer}x{n}x{inner} {dtype}"
    times, refused = race(what, y, tried, launch, verify, time, settle, repeats)
    return Point(function, dtype, n, outer * inner, copy_us, auto_us, times, refused)


def close(looks: dict[Plan, float]) -> list[Plan]:
    """Of plans and their times at a first look those to be timed in full: of the tier flat, and of the others.

    >>> plan = Plan(0, 1, 128, 4, 4, 1, 0)
    >>> looks = {plan: 1.0, plan._replace(lanes=2): 1.05, plan._replace(lanes=4): 1.2, plan._replace(tier=1): 3.0}
    >>> [(p.tier, p.lanes) for p in close(looks)]
    [(0, 1), (0, 2), (1, 1)]
    """
    found: list[Plan] = []
    for is_flat in (False, True):  # which are in tables of their own
        kind = sorted((us, plan) for plan, us in looks.items() if (plan.tier == FLAT) == is_flat)
        found += [plan for us, plan in kind[:MOST] if us <= CLOSE * kind[0][0]]
    return found


class CudaMeter:
    """Measures on the current CUDA device."""

    def __init__(self, gpu: Gpu, repeats: int, mib: int):
        self.gpu, self.repeats, self.mib = gpu, repeats, mib
        self.clock = Cuda(torch.device("cuda", torch.cuda.current_device()))
        self._drawn = torch.empty(0, device="cuda")

    def prepare(self, todo: Sequence[Kernel], report: Progress) -> None:
        """Compile all kernels into the disk cache."""
        compile_all(todo, self.gpu.compute, report)

    def measure(self, function: str, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Point:
        """`measure`, or `measure_columns`, on an input of this size."""
        type_ = getattr(torch, dtype)
        # A call of some microseconds now takes a tenth more and now less.
        times = 5 if rows * n * type_.itemsize < SMALL else 1

        def time(call: Callable[[], object], repeats: int) -> float:
            call()
            return summarise(self.clock.events(call, times * repeats, 1)).median

        if function in columns.FUNCTIONS:
            return self._columns(function, type_, n, time, tried)
        number = native.FUNCTIONS.index(function)
        out = getattr(torch.ops.onepass, function).out

        def launch(x: Tensor, plan: Plan | None, y: Tensor) -> None:
            if plan is None:
                out(x, [1], out=y)
            else:
                torch.ops.onepass._softmax_with_plan(x, number, [1], False, list(plan), y)

        x = self._input(type_, rows * n).view(rows, n)
        return measure(function, x, tried, launch, time, torch.cuda.synchronize, self.repeats)

    def _columns(self, function: str, dtype: torch.dtype, n: int, time: Time, tried: Sequence[Candidate]) -> Point:
        outer, inner = columns.shape_of(n, dtype.itemsize, self.mib)
        drawn = self._input(dtype, columns.operands(function) * outer * n * inner).view(-1, outer, n, inner)
        grad = drawn[1] if len(drawn) > 1 else None
        x = drawn[0] if grad is None else drawn[0].abs().div_(n)  # as large as what softmax gives

        def launch(plan: Plan | None, y: Tensor) -> None:
            ops = torch.ops.onepass
            if grad is None and plan is None:
                ops.softmax.out(x, [1], out=y)
            elif grad is None:
                ops._softmax_with_plan(x, 0, [1], False, list(plan or ()), y)
            elif plan is None:
                ops._softmax_backward.out(grad, x, 0, [1], out=y)
            else:
                ops._softmax_backward_with_plan(grad, x, None, 0, [1], list(plan), y)

        return measure_columns(x, grad, tried, launch, time, torch.cuda.synchronize, self.repeats)

    def _input(self, dtype: torch.dtype, count: int) -> Tensor:
        """So many random elements, the first of those that were drawn for all lengths."""
        if self._drawn.dtype != dtype or self._drawn.numel() < count:
            self._drawn = torch.empty(0, device="cuda")  # not both at once
            whole = max(count, self.mib * 2**20 // dtype.itemsize)
            self._drawn = torch.randn(whole, device="cuda", dtype=dtype)
        return self._drawn[:count]
