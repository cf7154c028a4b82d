"""Checks and times candidates on a GPU: each is compared with the float64 definition, then timed beside a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from onepass import native, reference
from onepass._kernel_compiler import Kernel, compile_all
from onepass.tools.bench.stats import summarise
from onepass.tools.bench.timing import Cuda
from onepass.tools.tune import columns
from onepass.tools.tune.candidates import STAGED, Candidate, Choice, Gpu, Plan
from onepass.tools.tune.candidates import Kernel as PlannedKernel

Progress = Callable[[int, int], None]  # (done, total)
FUNCTIONS = ("softmax", "logsumexp")  # they stand for the functions that write rows, and for those that only read them
ALL = FUNCTIONS + columns.FUNCTIONS
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the largest error, relative to each element
TRIAL_CALLS = 2  # calls of the first look at a plan
CLOSE, MAX_PLANS = 1.1, 24  # after the first look, at most 24 plans within 10% of the fastest are timed in full
SMALL = 2**27  # bytes: smaller inputs are timed more often
SPIKE = 20.0  # in rows that are compared: if this element is left out, the logsumexp shows it


class WrongResultError(RuntimeError):
    """The result of a candidate is wrong."""


@dataclass(frozen=True)
class Measurement:
    """The times of a function for one length, in microseconds: of a copy of the input (for a gradient: of adding two
    tensors), of the plan in use, and of each choice that is close to the fastest; and why other plans were refused."""

    function: str
    dtype: str
    n: int
    rows: int
    copy_us: float
    auto_us: float
    times: dict[Choice, float]
    refused: dict[str, int] = field(default_factory=dict)  # reason -> number of plans

    @cached_property
    def best(self) -> float:
        return min(self.times.values())

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """For JSON: the fastest `most` choices, or all, each as (*choice, microseconds)."""
        times = sorted(self.times.items(), key=lambda item: (item[1], item[0]))[:most]
        fields = {key: getattr(self, key) for key in ("function", "dtype", "n", "rows", "copy_us", "auto_us")}
        return {**fields, "times": [[*choice, us] for choice, us in times], "refused": self.refused}


def check_result(result: Tensor, expected: Tensor, what: str, least: float = 0.0) -> None:
    """Compare rows with the float64 definition.

    Args:
        least: elements nearer to 0 may be off by as much as this one.

    Raises:
        WrongResultError: an element is off by more than the bound of its dtype, or was not written.

    >>> check_result(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5], dtype=torch.float64), "a plan")
    """
    limits = torch.finfo(result.dtype)
    bound = BOUNDS[str(result.dtype).removeprefix("torch.")]
    allowed = bound * expected.abs().clamp(min=least) + limits.smallest_normal * limits.eps
    worst = ((result.double() - expected).abs() / allowed).max().item()
    if not worst <= 1:
        raise WrongResultError(f"{what} is wrong: an error of {worst * bound:.1e}, {bound:.0e} is allowed")


Launch = Callable[[Plan | None, Tensor], None]
Time = Callable[[Callable[[], object], int], float]


def time_plans(
    what: str,
    y: Tensor,
    tried: Sequence[Candidate],
    launch: Launch,
    verify: Callable[[str], None],
    time: Time,
    synchronize: Callable[[], None],
    repeats: int,
) -> tuple[dict[Choice, float], dict[str, int]]:
    """Check each plan once and look how fast it is; then time those in full that are close to the fastest.

    Args:
        what: the call, in words.
        launch: writes into its last argument by a plan, or by the one in use; RuntimeError if the plan is refused.
        verify: compares parts of `y` with the definition; takes a description of the plan.
        time: the median microseconds of so many calls.
        synchronize: waits for the GPU, and raises if the error of a launch was not a refusal but a failing GPU.

    Returns:
        The time of each choice, and the reasons of refusals: reason -> number of plans.

    Raises:
        WrongResultError: the result of a plan is wrong. RuntimeError: no plan could be launched, or the GPU fails.
    """
    first: dict[Plan, float] = {}
    refused: dict[str, int] = {}
    for plan in dict.fromkeys(candidate.plan for candidate in tried):
        y.fill_(torch.nan)
        try:
            launch(plan, y)
        except RuntimeError as error:
            synchronize()
            reason = str(error).removeprefix("onepass: ").partition("\n")[0]
            refused[reason] = refused.get(reason, 0) + 1
            continue
        words = f"{what} by plan {tuple(plan)}"
        verify(words)
        if not y.sum(dtype=torch.float32).isfinite():
            raise WrongResultError(f"{words} is wrong: not every element was written")
        first[plan] = time(partial(launch, plan, y), min(TRIAL_CALLS, repeats))
    if not first:
        raise RuntimeError(f"no plan for {what} can be launched: {'; '.join(refused) or 'none tried'}")
    plans = {plan: time(partial(launch, plan, y), repeats) for plan in select_fast(first)}
    return {choice: plans[plan] for choice, plan in tried if plan in plans}, refused


def select_fast(times: dict[Plan, float]) -> list[Plan]:
    """The plans that are timed in full after the first look, separately for the tier staged, which has its own tables.

    >>> plan = Plan(0, 1, 128, 4, 4, 1, 0)
    >>> slower, slow, staged = (Plan(*v, *plan[2:]) for v in ((0, 2), (0, 4), (1, 1)))
    >>> [p[:2] for p in select_fast({plan: 1.0, slower: 1.05, slow: 1.2, staged: 3.0})]
    [(0, 1), (0, 2), (1, 1)]
    """
    found: list[Plan] = []
    for is_staged in (False, True):
        group = sorted((us, plan) for plan, us in times.items() if (plan.tier == STAGED) == is_staged)
        found += [plan for us, plan in group[:MAX_PLANS] if us <= CLOSE * group[0][0]]
    return found


def measure_rows(
    function: str,
    x: Tensor,
    tried: Sequence[Candidate],
    launch: Callable[[Tensor, Plan | None, Tensor], None],
    time: Time,
    synchronize: Callable[[], None],
    repeats: int = 15,
) -> Measurement:
    """`time_plans` over the rows of `x`: `function` is "softmax", or "logsumexp", which overwrites elements of `x`."""
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
        check_result(y[sample], expected, what, 1.0 if reduces else 0.0)

    what = f"{function} of {rows}x{n} {dtype}"
    times, refused = time_plans(what, y, tried, partial(launch, x), verify, time, synchronize, repeats)
    return Measurement(function, dtype, n, rows, copy_us, auto_us, times, refused)


def measure_columns(
    x: Tensor,
    grad: Tensor | None,
    tried: Sequence[Candidate],
    launch: Launch,
    time: Time,
    synchronize: Callable[[], None],
    repeats: int = 15,
) -> Measurement:
    """`time_plans` over the middle dim of `x`: softmax, or with `grad` its gradient, where `x` is the result."""
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
        check_result(y[at, :, beside], expected, what, 0.0 if grad is None else saved.max().item())

    function = columns.FUNCTIONS[grad is not None]
    what = f"{function} of {outer}x{n}x{inner} {dtype}"
    times, refused = time_plans(what, y, tried, launch, verify, time, synchronize, repeats)
    return Measurement(function, dtype, n, outer * inner, copy_us, auto_us, times, refused)


class CudaTimer:
    """Measures on the current CUDA device."""

    def __init__(self, gpu: Gpu, repeats: int, size_mib: int):
        self.gpu, self.repeats, self.size_mib = gpu, repeats, size_mib
        self.clock = Cuda(torch.device("cuda", torch.cuda.current_device()))
        self._random = torch.empty(0, device="cuda")

    def prepare(self, todo: Sequence[PlannedKernel], report: Progress) -> None:
        """Compile all kernels into the disk cache. Those that do not compile fail later, at their first call."""
        try:
            native.status("cache")
        except RuntimeError:
            return
        report(0, len(todo))
        for done, _ in enumerate(compile_all(to_compile(todo), self.gpu.compute, ignore_errors=True), 1):
            report(done, len(todo))

    def measure(self, function: str, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Measurement:
        """`measure_rows`, or `measure_columns`, on an input of this size."""
        type_ = getattr(torch, dtype)
        # The times of calls of some microseconds vary by a tenth.
        times = 5 if rows * n * type_.itemsize < SMALL else 1

        def time(call: Callable[[], object], repeats: int) -> float:
            call()
            return summarise(self.clock.events(call, times * repeats, 1)).median

        if function in columns.FUNCTIONS:
            return self._measure_columns(function, type_, n, time, tried)
        number = native.FUNCTIONS.index(function)
        out = getattr(torch.ops.onepass, function).out

        def launch(x: Tensor, plan: Plan | None, y: Tensor) -> None:
            if plan is None:
                out(x, [1], out=y)
            else:
                torch.ops.onepass._softmax_with_plan(x, number, [1], False, list(plan), y)

        x = self._input(type_, rows * n).view(rows, n)
        return measure_rows(function, x, tried, launch, time, torch.cuda.synchronize, self.repeats)

    def _measure_columns(
        self, function: str, dtype: torch.dtype, n: int, time: Time, tried: Sequence[Candidate]
    ) -> Measurement:
        outer, inner = columns.shape_of(n, dtype.itemsize, self.size_mib)
        operands = self._input(dtype, columns.operands(function) * outer * n * inner).view(-1, outer, n, inner)
        grad = operands[1] if len(operands) > 1 else None
        x = operands[0] if grad is None else operands[0].abs().div_(n)  # of the size of softmax results

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
        """So many random elements, the first of those that serve all lengths."""
        if self._random.dtype != dtype or self._random.numel() < count:
            self._random = torch.empty(0, device="cuda")  # frees the old ones first
            whole = max(count, self.size_mib * 2**20 // dtype.itemsize)
            self._random = torch.randn(whole, device="cuda", dtype=dtype)
        return self._random[:count]


def to_compile(todo: Sequence[PlannedKernel]) -> list[Kernel]:
    """The kernels of plans as the compiler takes them."""
    found = []
    for function, dtype, plan in todo:
        name, which = columns.kernel_of(function)
        type_ = getattr(torch, dtype)
        found.append(Kernel(name, type_, type_, which, tuple(plan)))
    return found
