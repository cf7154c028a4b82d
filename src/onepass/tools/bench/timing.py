"""The clocks. `docs/benchmark.md` says what each number means; they are never mixed.

alternate     CPU: wall clock of a call; the providers take turns
cold          GPU: events around a call whose data is not in the L2 (what triton.testing.do_bench measures)
back_to_back  GPU: wall clock per call of many calls in sequence, including the host

`graph.py` has the third number of a GPU, a launch within a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from onepass.tools.bench.stats import Stats, summarise

Call = Callable[[], object]


@dataclass(frozen=True)
class Budget:
    """How long to measure: seconds per provider and case, the minimum and maximum number of samples, warm-up seconds.

    A call of a second or more is made at least three times, even if `min_samples` is larger.
    """

    seconds: float
    min_samples: int
    max_samples: int
    warmup: float

    def samples(self, call_seconds: float) -> int:
        affordable = self.seconds / max(call_seconds, 1e-9)
        return max(min(self.min_samples, max(3, int(10 * affordable))), min(self.max_samples, int(affordable)))

    def trial_calls(self, call_seconds: float, count: int) -> int:
        """How many calls estimate the time of a call: `count`, or one if they would take as long as the measurement."""
        return count if count * call_seconds <= self.seconds else 1

    def limit(self, seconds: float) -> Budget:
        """The same budget with `seconds` per measurement and a warm-up that is not longer."""
        return replace(self, seconds=seconds, warmup=min(self.warmup, seconds))


FULL = Budget(seconds=0.5, min_samples=10, max_samples=1000, warmup=0.1)
QUICK = Budget(seconds=0.12, min_samples=3, max_samples=200, warmup=0.02)


def schedule(counts: Mapping[str, int]) -> list[str]:
    """The order of the turns: each name has `counts[name]` turns, spread evenly over the whole time.

    With equal counts the names alternate. The first name of a round moves on by one each round, so that none always
    runs after the same neighbour and finds that neighbour's data in the caches.

    >>> schedule({"a": 2, "b": 2, "c": 1})
    ['a', 'b', 'b', 'c', 'a']
    """
    names, rounds = list(counts), max(counts.values(), default=0)
    turns = []
    for i in range(rounds):
        due = [n for n in names if (i + 1) * counts[n] // rounds > i * counts[n] // rounds]
        turns += due[i % len(due) :] + due[: i % len(due)]
    return turns


def alternate(
    calls: Mapping[str, Call], budget: Budget, clock: Callable[[], int] = perf_counter_ns
) -> dict[str, Stats]:
    """The wall clock of each call on the CPU, in microseconds. The calls take turns in one process."""
    fastest = {}
    for name, call in calls.items():
        call()  # the first call includes one-time work
        spent, fastest[name] = 0.0, float("inf")
        while not spent or spent < budget.warmup:
            start = clock()
            call()
            took = max(clock() - start, 1) * 1e-9
            spent, fastest[name] = spent + took, min(fastest[name], took)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in schedule({name: budget.samples(seconds) for name, seconds in fastest.items()}):
        call = calls[name]
        start = clock()
        call()
        samples[name].append((clock() - start) * 1e-3)
    return {name: summarise(values) for name, values in samples.items()}


class Cuda:
    """The clocks of one GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size
        # The buffer that is zeroed between calls: twice the L2, and at least as large as triton.testing.do_bench's
        self.flush = torch.empty(max(2 * self.l2, 256 << 20) // 4, dtype=torch.int32, device=device)
        # A few pairs of events are reused. With new ones for each sample, every other median was 0.6 us longer, that
        # of a copy too (H200, 2026-11-22).
        self.pairs = [(_event(), _event()) for _ in range(8)]
        self.flush_us = sorted(self.events(self.flush.zero_, 5, 0))[2]

    def spin_up(self, seconds: float = 0.3) -> None:
        """Keeps the GPU busy until its clock rate is up: an idle H200 runs at 345 of 1980 MHz."""
        start = perf_counter_ns()
        while perf_counter_ns() - start < seconds * 1e9:
            self.flush.zero_()
            torch.cuda.synchronize(self.device)

    def cold(self, call: Call, budget: Budget) -> Stats:
        """Microseconds on the GPU of a single call that finds other data in the L2.

        The flush is repeated until it takes twice as long as the host needs to enqueue the call; otherwise the time
        would include a GPU that waits for the host. (On an H200 a flush takes 60 us and a launch through Triton 65 us
        of host time; with one flush, a kernel of 2.3 us appeared to take 17 us.)
        """
        call()
        count = budget.trial_calls(self._batch(call, 1) * 1e-6, 5)
        torch.cuda.synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(count):
            call()
        host = (perf_counter_ns() - start) * 1e-3 / count
        flushes = 1 + int(2 * host / self.flush_us) if host < 1e4 else 1  # above 10 ms the host waits for the GPU
        each = summarise(self.events(call, count, flushes)).median
        for _ in range(min(int(budget.warmup * 1e6 / max(each, 1.0)), budget.max_samples)):
            call()
        return summarise(self.events(call, budget.samples(each * 1e-6), flushes))

    def back_to_back(self, call: Call, budget: Budget) -> float:
        """Microseconds of wall clock per call of many calls that do not wait; the GPU is waited for at the end.

        For small shapes this is the host's time, for large ones the kernel's. The caches are as warm as the calls
        leave them. The result is the median of 5 batches.
        """
        call()
        count = budget.trial_calls(self._batch(call, 1) * 1e-6, 10)
        each = self._batch(call, count) * 1e-6
        count = max(budget.trial_calls(each, 5), min(500, int(budget.seconds / 5 / each)))
        return summarise([self._batch(call, count) for _ in range(5)]).median

    def _batch(self, call: Call, count: int) -> float:
        torch.cuda.synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(count):
            call()
        torch.cuda.synchronize(self.device)
        return (perf_counter_ns() - start) * 1e-3 / count

    def events(self, call: Call, count: int, flushes: int) -> list[float]:
        """Microseconds between an event before and one after each of `count` calls, with the L2 flushed before."""
        samples: list[float] = []
        while len(samples) < count:
            pairs = self.pairs[: count - len(samples)]
            for start, end in pairs:
                for _ in range(flushes):
                    self.flush.zero_()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize(self.device)
            samples += [start.elapsed_time(end) * 1e3 for start, end in pairs]
        return samples


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
