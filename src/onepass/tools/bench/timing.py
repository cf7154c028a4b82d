"""The clocks. Three numbers that are never mixed, and the CPU's one; `docs/benchmark.md` says what each means.

alternate   CPU: wall clock of a call, the providers taking turns
cold        GPU: events around a call whose data is not in the L2 (what triton.testing.do_bench measures)
back_to_back  GPU: wall clock of a call in a row of calls, the host in it

The third number of a GPU, a launch within a CUDA graph, is `graph.py`'s.
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
    """How long to measure: seconds for a provider on a case, and the fewest and most samples.

    A call of a second or more is made three times at least, however few samples that is.
    """

    seconds: float
    least: int
    most: int
    warmup: float  # seconds

    def samples(self, seconds_each: float) -> int:
        least = min(self.least, max(3, int(10 * self.seconds / max(seconds_each, 1e-9))))
        return max(least, min(self.most, int(self.seconds / max(seconds_each, 1e-9))))

    def tries(self, seconds_each: float, most: int) -> int:
        """How many calls to find out with how long a call takes: `most`, or one where they would take as long as the
        measurement itself."""
        return most if most * seconds_each <= self.seconds else 1

    def bounded(self, seconds: float) -> Budget:
        """With `seconds` for each measurement, and no longer a warm-up than that."""
        return replace(self, seconds=seconds, warmup=min(self.warmup, seconds))


FULL = Budget(seconds=0.5, least=10, most=1000, warmup=0.1)
QUICK = Budget(seconds=0.12, least=3, most=200, warmup=0.02)


def schedule(counts: Mapping[str, int]) -> list[str]:
    """Whose turn it is, for as many turns as each name has in `counts`, each spread evenly over the whole time.

    With equal counts the names take turns, and the one that begins moves on by one each round, so that none always
    runs after the same neighbour and finds what that one left in the caches.

    >>> schedule({"a": 2, "b": 2, "c": 1})
    ['a', 'b', 'b', 'c', 'a']
    """
    names, most = list(counts), max(counts.values(), default=0)
    turns = []
    for round_ in range(most):
        due = [n for n in names if (round_ + 1) * counts[n] // most > round_ * counts[n] // most]
        first = round_ % len(due)
        turns += due[first:] + due[:first]
    return turns


def alternate(
    calls: Mapping[str, Call], budget: Budget, clock: Callable[[], int] = perf_counter_ns
) -> dict[str, Stats]:
    """Wall clock of each call on the CPU, in microseconds, the calls taking turns in one process."""
    each = {}
    for name, call in calls.items():
        call()  # pays for what is made once
        spent, each[name] = 0.0, float("inf")
        while not spent or spent < budget.warmup:
            start = clock()
            call()
            took = max(clock() - start, 1) * 1e-9
            spent, each[name] = spent + took, min(each[name], took)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in schedule({name: budget.samples(seconds) for name, seconds in each.items()}):
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
        # what is zeroed between calls: twice the L2, and at least what triton.testing.do_bench takes
        self.flush = torch.empty(max(2 * self.l2, 256 << 20) // 4, dtype=torch.int32, device=device)
        # Few, and used over and over: with new ones for each sample every other median was 0.6 us longer, for a copy as
        # for all others.
        self.pairs = [(_event(), _event()) for _ in range(8)]
        self.flush_us = sorted(self._pair(self.flush.zero_) for _ in range(5))[2]

    def spin_up(self, seconds: float = 0.3) -> None:
        """Keeps the GPU busy until its clocks are up: an idle H200 runs at 345 of 1980 MHz."""
        self._for(seconds, self.flush.zero_)

    def cold(self, call: Call, budget: Budget) -> Stats:
        """Microseconds on the GPU of a call that finds the L2 full of other data; the median of single calls.

        The flush is repeated until it takes twice as long as the host needs to enqueue the call: a GPU that waits for
        the host would be timed waiting. (On an H200 a flush takes 60 us, a launch through Triton 65 us of host time;
        with one flush a kernel of 2.3 us was seen to take 17 us.)
        """
        call()
        once = self._batch(call, 1) * 1e-6
        tries = budget.tries(once, 5)
        torch.cuda.synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(tries):
            call()
        host = (perf_counter_ns() - start) * 1e-3 / tries
        flushes = 1 + int(2 * host / self.flush_us) if host < 1e4 else 1  # a host that waits on the GPU needs no help
        each = summarise(self.events(call, tries, flushes)).median
        for _ in range(min(int(budget.warmup * 1e6 / max(each, 1.0)), budget.most)):
            call()
        return summarise(self.events(call, budget.samples(each * 1e-6), flushes))

    def back_to_back(self, call: Call, budget: Budget) -> float:
        """Microseconds of wall clock for a call among many made without waiting, the GPU waited for at the end.

        For small shapes that is the host's time, for large ones the kernel's. The data is as warm as the calls
        leave it. The median of 5 batches.
        """
        call()
        tries = budget.tries(self._batch(call, 1) * 1e-6, 10)
        each = self._batch(call, tries) * 1e-6
        count = max(budget.tries(each, 5), min(500, int(budget.seconds / 5 / each)))
        return summarise([self._batch(call, count) for _ in range(5)]).median

    def _batch(self, call: Call, count: int) -> float:
        torch.cuda.synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(count):
            call()
        torch.cuda.synchronize(self.device)
        return (perf_counter_ns() - start) * 1e-3 / count

    def events(self, call: Call, count: int, flushes: int) -> list[float]:
        """Microseconds between an event before and one after each of `count` calls, the L2 flushed before."""
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

    def _pair(self, call: Call) -> float:
        start, end = _event(), _event()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _for(self, seconds: float, call: Call) -> None:
        start = perf_counter_ns()
        while perf_counter_ns() - start < seconds * 1e9:
            call()
            torch.cuda.synchronize(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
