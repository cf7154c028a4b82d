"""Checks and times candidates on a GPU: each is compared with the float64 definition, then timed beside a copy."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.tune.candidates import Candidate, Choice, Gpu, Plan
from onepass.tune.compile import compile_all

Progress = Callable[[int, int], None]  # (done, of how many)
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the largest error, relative to each element


class WrongResultError(RuntimeError):
    """A candidate's result is not softmax."""


@dataclass(frozen=True)
class Point:
    """What was measured for one length: microseconds of a copy and of each choice, and why others were refused."""

    dtype: str
    n: int
    rows: int
    copy_us: float
    times: dict[Choice, float]
    refused: dict[str, int]  # reason -> plans

    @property
    def best(self) -> float:
        return min(self.times.values())

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """For JSON: the fastest `most` choices, or all, each as (tier, lanes, values, split, shelf, microseconds)."""
        times = sorted(self.times.items(), key=lambda item: (item[1], item[0]))[:most]
        fields = {"dtype": self.dtype, "n": self.n, "rows": self.rows, "copy_us": self.copy_us}
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
        n, rows, refused = int(given["n"]), int(given["rows"]), dict(given["refused"])
        return cls(str(given["dtype"]), n, rows, float(given["copy_us"]), times, refused)


def check(result: Tensor, expected: Tensor, what: str) -> None:
    """Compare rows with the float64 definition.

    Raises:
        WrongResultError: an element is off by more than the bound of its dtype, or was not written.

    >>> check(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5], dtype=torch.float64), "a plan")
    """
    limits = torch.finfo(result.dtype)
    bound = BOUNDS[str(result.dtype).removeprefix("torch.")]
    error = (result.double() - expected).abs() / (bound * expected + limits.smallest_normal * limits.eps)
    worst = error.max().item()
    if not worst <= 1:
        raise WrongResultError(f"{what} is wrong: an error of {worst * bound:.1e}, {bound:.0e} is allowed")


def time_us(call: Callable[[], object], repeats: int, flush: Tensor | None) -> float:
    """Microseconds on the GPU of a call, the median of `repeats`; `flush` is zeroed before each."""
    call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        if flush is not None:
            flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def measure(
    x: Tensor,
    tried: Sequence[Candidate],
    launch: Callable[[Tensor, Plan, Tensor], None],
    time: Callable[[Callable[[], object]], float],
    settle: Callable[[], None],
) -> Point:
    """Check each plan once over the rows of `x`, and time it.

    Args:
        launch: writes the softmax of its first argument by a plan into its last; RuntimeError where that is refused.
        time: microseconds of a call.
        settle: waits for the GPU, and raises if an error was no refusal, but the GPU that fails.

    Raises:
        WrongResultError: a plan's result is wrong. RuntimeError: none could be launched, or the GPU fails.
    """
    y = torch.empty_like(x)
    rows, n = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    sample = sorted({*torch.randint(rows, (16 if n < 2**20 else 2,)).tolist(), 0, rows - 1})
    expected = reference.softmax(x[sample], 1)
    copy_us = time(lambda: y.copy_(x))
    plans: dict[Plan, float] = {}
    refused: dict[str, int] = {}
    for plan in dict.fromkeys(candidate.plan for candidate in tried):
        y.fill_(torch.nan)
        try:
            launch(x, plan, y)
        except RuntimeError as error:
            settle()
            reason = str(error).removeprefix("onepass: ").partition("\n")[0]
            refused[reason] = refused.get(reason, 0) + 1
            continue
        what = f"{rows}x{n} {dtype} by plan {tuple(plan)}"
        check(y[sample], expected, what)
        if y.isnan().any():
            raise WrongResultError(f"{what} is wrong: not every element was written")

        def again(plan: Plan = plan) -> None:
            launch(x, plan, y)

        plans[plan] = time(again)
    if not plans:
        raise RuntimeError(f"no plan for {rows}x{n} {dtype} can be launched: {'; '.join(refused) or 'none tried'}")
    times = {choice: plans[plan] for choice, plan in tried if plan in plans}
    return Point(dtype, n, rows, copy_us, times, refused)


class CudaMeter:
    """Measures on the current CUDA device."""

    def __init__(self, gpu: Gpu, repeats: int, mib: int):
        self.gpu, self.repeats = gpu, repeats
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        # Inputs that would stay in the L2 find it full of other data, as those of 256 MiB do by themselves.
        self.flush = torch.empty(2 * l2, dtype=torch.int8, device="cuda") if mib * 2**20 < 4 * l2 else None

    def prepare(self, todo: Sequence[tuple[str, Plan]], report: Progress) -> None:
        """Compile all kernels into the disk cache."""
        compile_all(todo, self.gpu.compute, report)

    def measure(self, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Point:
        """`measure` on an input of this size."""
        x = torch.randn(rows, n, device="cuda", dtype=getattr(torch, dtype))
        return measure(x, tried, _forced, lambda call: time_us(call, self.repeats, self.flush), torch.cuda.synchronize)


def _forced(x: Tensor, plan: Plan, y: Tensor) -> None:
    torch.ops.onepass._forced(x, 0, [1], False, list(plan), y)
