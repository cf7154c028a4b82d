"""Checks and times candidates on a GPU: each is compared with the float64 definition, then timed beside a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from onepass import native, reference
from onepass._kernel_compiler import Kernel, compile_all
from onepass.tools.bench.timing import Cuda, summarise
from onepass.tools.tune.candidates import STAGED, Candidate, Choice, Gpu, Plan
from onepass.tools.tune.sizes import KERNELS, is_columns

Progress = Callable[[int, int], None]  # (done, total)
Time = Callable[[Callable[[], object], int], float]  # (call, number of calls) -> the median, in microseconds
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the largest error, relative to each element
TRIAL_CALLS = 2  # calls of the first look at a plan
CLOSE, MAX_PLANS = 1.1, 24  # after the first look, at most 24 plans within 10% of the fastest are timed in full
SMALL = 2**27  # bytes: smaller inputs are timed more often
SPIKE = 20.0  # an element of the compared rows: if a kernel skips it, the logsumexp is visibly wrong


class WrongResultError(RuntimeError):
    """The result of a candidate is wrong."""


@dataclass(frozen=True)
class Measurement:
    """The times of a function for one length, in microseconds: the time of a copy of the input (for a gradient, of an
    addition of two tensors), of the plan in use, and of each choice that is close to the fastest. Also the reasons why
    other plans were refused."""

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
    """Raises WrongResultError if an element differs from the float64 definition by more than the bound of its dtype, or
    was not written. Elements nearer to 0 than `least` may differ as much as an element of the size `least`.

    >>> check_result(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5], dtype=torch.float64), "a plan")
    """
    limits = torch.finfo(result.dtype)
    bound = BOUNDS[str(result.dtype).removeprefix("torch.")]
    allowed = bound * expected.abs().clamp(min=least) + limits.smallest_normal * limits.eps
    worst = ((result.double() - expected).abs() / allowed).max().item()
    if not worst <= 1:
        raise WrongResultError(f"{what} is wrong: an error of {worst * bound:.1e}, {bound:.0e} is allowed")


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


def measure(
    function: str,
    x: Tensor,
    grad: Tensor | None,
    tried: Sequence[Candidate],
    launch: Callable[[Plan | None, Tensor], None],
    time: Time,
    synchronize: Callable[[], None],
    repeats: int = 15,
) -> Measurement:
    """Check each plan and time it roughly. Then time the plans in full that are close to the fastest.

    Args:
        function: "softmax" or "logsumexp" of the rows of `x` (rows, n), which overwrites elements of it for the latter;
            "columns" or "columns_backward" over the middle dim of `x` (tensors, n, columns side by side).
        x, grad: the operands; of columns_backward `x` is the result of the forward and `grad` the gradient of it.
        launch: writes into its last argument with a plan, or with the one in use. RuntimeError if the plan is refused.
        time: (call, number of calls) -> the median in microseconds.
        synchronize: waits for the GPU, and raises an error if a launch failed because of the GPU, not by a refusal.

    Raises:
        WrongResultError: the result of a plan is wrong. RuntimeError: no plan could be launched, or the GPU fails.
    """
    outer, n = x.shape[:2]
    inner = x[0, 0].numel()
    reduces = function == "logsumexp"

    def sample(of: Tensor) -> Tensor:
        return of.view(outer, -1, inner)[at, :, beside]

    count = 16 if n < 2**20 else 2
    at = [0, *torch.randint(outer, (count,)).tolist(), outer - 1]
    beside = [0, *torch.randint(inner, (count,)).tolist(), inner - 1]
    if reduces:
        x[at, [0, *torch.randint(n, (count,)).tolist(), n - 1]] = SPIKE
    operand, least = sample(x).double(), 1.0 if reduces else 0.0
    if grad is None:
        expected = (reference.logsumexp if reduces else reference.softmax)(operand, 1)
    else:
        g, least = sample(grad).double(), operand.max().item()
        expected = operand * (g - (operand * g).sum(1, keepdim=True))
    copied = torch.empty_like(x)
    copy_us = time(lambda: copied.copy_(x) if grad is None else torch.add(x, grad, out=copied), repeats)
    y = x.new_empty(outer) if reduces else copied
    auto_us = time(partial(launch, None, y), repeats)
    dtype = str(x.dtype).removeprefix("torch.")
    what = f"{function} of {'x'.join(map(str, x.shape))} {dtype}"
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
        check_result(sample(y), expected.view(len(at), -1), words, least)
        if not y.sum(dtype=torch.float32).isfinite():
            raise WrongResultError(f"{words} is wrong: not every element was written")
        first[plan] = time(partial(launch, plan, y), min(TRIAL_CALLS, repeats))
    if not first:
        raise RuntimeError(f"no plan for {what} can be launched: {'; '.join(refused) or 'none tried'}")
    plans = {plan: time(partial(launch, plan, y), repeats) for plan in select_fast(first)}
    times = {choice: plans[plan] for choice, plan in tried if plan in plans}
    return Measurement(function, dtype, n, outer * inner, copy_us, auto_us, times, refused)


class CudaTimer:
    """Measures on the current CUDA device."""

    def __init__(self, gpu: Gpu, repeats: int):
        self.gpu, self.repeats = gpu, repeats
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.clock = Cuda(self.device)

    def prepare(self, todo: Sequence[Kernel], report: Progress) -> None:
        """Compile all kernels into the disk cache. Those that do not compile fail later, at their first call."""
        try:
            native.status("cache")
        except RuntimeError:
            return
        report(0, len(todo))
        for done, _ in enumerate(compile_all(todo, self.gpu.compute, ignore_errors=True), 1):
            report(done, len(todo))

    def measure(
        self, function: str, dtype: str, n: int, shape: tuple[int, int], tried: Sequence[Candidate]
    ) -> Measurement:
        """`measure` on an input of this shape (`sizes.shapes`)."""
        type_, (name, which) = getattr(torch, dtype), KERNELS[function]
        ops = torch.ops.onepass
        out, number = getattr(ops, name).out, native.FUNCTIONS.index(name)
        sizes = (shape[0], n, shape[1]) if is_columns(function) else (shape[0], n)
        x, grad = torch.randn(sizes, dtype=type_, device=self.device), None
        if which == "backward":
            grad = torch.randn_like(x)
            x.abs_().div_(n)  # about as large as softmax results
        times = 5 if x.nbytes < SMALL else 1  # the times of short calls (a few microseconds) vary by a tenth

        def time(call: Callable[[], object], repeats: int) -> float:
            call()
            return summarise(self.clock.events(call, times * repeats, 1)).median

        def launch(plan: Plan | None, y: Tensor) -> None:
            if grad is None and plan is None:
                out(x, [1], out=y)
            elif grad is None:
                ops._softmax_with_plan(x, number, [1], False, list(plan or ()), y)
            elif plan is None:
                ops._softmax_backward.out(grad, x, 0, [1], out=y)
            else:
                ops._softmax_backward_with_plan(grad, x, None, 0, [1], list(plan), y)

        return measure(function, x, grad, tried, launch, time, torch.cuda.synchronize, self.repeats)
