"""The clocks, the statistics of their samples (median, p20, p80), and the detection of disturbed times.

`docs/benchmark.md` says what each number means; they are never mixed:

alternate     CPU: wall clock of a call; the providers take turns
cold          GPU: events around a call whose data is not in the L2 (what triton.testing.do_bench measures)
back_to_back  GPU: wall clock per call of many calls in sequence, including the host
time_launch   GPU: a launch within a CUDA graph, whose data is not in the L2

A row is disturbed, by something else that used the machine, if its 80th percentile is more than twice its 20th. A case
is disturbed, with all its rows, if its copy is, or if the copy takes far longer than the copies of the run's other
cases allow. The time is compared, not GB/s: caches and launches make the GB/s of small copies differ tenfold in an
honest run, but a copy takes no longer than one of more bytes. (In the results files of this repository, of CPUs and an
H200, it takes up to 2.6 times as long.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import median
from time import perf_counter_ns

import torch
from torch import Tensor

from onepass.tools.bench.results import Row

Call = Callable[[], object]
MAX_SPREAD = 2.0
MAX_SLOWDOWN = 4.0
SIZE_RANGE = 8  # a smaller copy bounds the time of one of up to 8 times as many bytes
CACHE_SPEEDUP = 4.0  # how much faster than memory a cache is, which may have held the smaller copy only
MIN_SAMPLES = 5  # with fewer samples the two percentiles are single samples


@dataclass(frozen=True)
class Stats:
    """Microseconds."""

    median: float
    p20: float
    p80: float
    samples: int
    smallest: float


def summarise(samples: Sequence[float]) -> Stats:
    """The quantiles are interpolated linearly, as torch and NumPy do. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    values = torch.tensor(samples, dtype=torch.float64)  # statistics.quantiles can round below the smallest value
    p20, p80 = values.quantile(values.new_tensor([0.2, 0.8])).tolist()
    return Stats(median(samples), p20, p80, len(samples), min(samples))


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
    """The order of the turns, each name's spread evenly over the whole time: with equal counts they alternate.

    The first name of a round moves on by one each round, so that none always finds the same neighbour's data in the
    caches.

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
        # A few pairs of events are reused. With new events for each sample, every other median was 0.6 us longer, even
        # for a copy (H200, 2026-11-22).
        self.pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(8)]
        self.flush_us = sorted(self.events(self.flush.zero_, 5, 0))[2]

    def meet(self) -> None:
        """Enqueues a wait for the other GPUs of a run."""

    def slowest(self, times: list[float]) -> list[float]:
        """Each time, or the longest among those of the GPUs of a run."""
        return times

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
        count = budget.trial_calls(self.slowest([self._batch(call, 1)])[0] * 1e-6, 5)
        torch.cuda.synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(count):
            call()
        host = self.slowest([(perf_counter_ns() - start) * 1e-3 / count])[0]
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
                self.meet()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize(self.device)
            samples += [start.elapsed_time(end) * 1e3 for start, end in pairs]
        return self.slowest(samples)


# A launch within a CUDA graph, which excludes the host. The graph makes the call on each of several buffers in turn.
# They exceed twice the L2 together, so that a buffer has left it when its turn comes again.

MAX_BUFFERS = 8192  # with more buffers each is so small that the time is the launch alone
MIN_LAUNCHES = 20  # launches per graph if the budget allows, so that the graph's begin and end do not matter
REPLAYS = (3, 20)


def buffer_count(l2: int, bytes_each: int) -> int:
    """How many buffers of this size exceed twice the L2 together; at least two.

    >>> buffer_count(50 << 20, 1 << 20), buffer_count(50 << 20, 2 << 30)
    (101, 2)
    """
    return max(2, 2 * l2 // max(bytes_each, 1) + 1)


def rounds_per_graph(count: int, each_us: float, seconds: float) -> int:
    """How often a graph goes through its `count` buffers: for MIN_LAUNCHES launches in all, or fewer if a replay would
    take more than a quarter of `seconds`, and at least once.

    >>> [rounds_per_graph(*of, 0.1) for of in ((4, 10.0), (1000, 2.0), (2, 5000.0), (2, 50000.0))]
    [5, 1, 2, 1]
    """
    affordable = int(seconds / 4 * 1e6 / max(count * each_us, 1e-3))
    return max(1, min(ceil(MIN_LAUNCHES / count), affordable))


def cannot_capture(count: int, bytes_each: int, workspace: int, free: int) -> str | None:
    """Why `count` buffers of this size are not made, or None. `workspace` is what a call allocates besides its output.

    >>> cannot_capture(101, 1 << 20, 1 << 20, 1 << 30), cannot_capture(2, 2 << 30, 1 << 30, 6 << 30)
    (None, '2 buffers of 2048.0 MiB and their outputs do not fit')
    """
    if count > MAX_BUFFERS:
        return f"{count} buffers of {bytes_each} bytes would be needed to leave the L2, more than {MAX_BUFFERS}"
    if 2 * count * bytes_each + workspace > free:  # twice: a provider may allocate its own outputs
        return f"{count} buffers of {bytes_each / 2**20:.1f} MiB and their outputs do not fit"
    return None


def time_launch(device: torch.device, calls: Sequence[Call], each_us: float, seconds: float) -> float:
    """Microseconds per launch: the time of a replay, repeated for `seconds`, divided by the number of launches.

    `calls` is the call on each of the buffers; `each_us` its approximate time. Raises what a call raises during its
    capture, and RuntimeError if a replay does not write the output because the call launches on a stream of its own.
    The current stream is restored in any case.
    """
    home, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    errors: list[Exception] = []
    try:
        side.wait_stream(home)
        with torch.cuda.stream(side):  # one-time work of a call happens before the capture
            for call in calls[:3]:
                call()
        home.wait_stream(side)
        torch.cuda.synchronize(device)
        rounds = rounds_per_graph(len(calls), each_us, seconds)
        # An output that a call allocates is released when its buffer's turn comes again, so that outputs rotate as the
        # inputs do.
        outputs: deque[object] = deque(maxlen=len(calls))
        try:
            with torch.cuda.graph(graph, stream=side):
                try:
                    for call in [*calls] * rounds:
                        outputs.append(call())
                except Exception as error:
                    errors.append(error)
                    raise
        except Exception as error:  # the end of a spoilt capture raises too, with a less helpful message
            errors.append(error)
        if errors:
            raise errors[0]
        out = outputs[-1]
        if isinstance(out, Tensor) and out.is_floating_point():
            out.fill_(float("nan"))
        graph.replay()  # from now on each replay finds the L2 as the previous one left it, and the host is ahead
        if isinstance(out, Tensor) and bool(out.isnan().any()):
            raise RuntimeError("a replay of the graph does not write the output: the launch is not in it")
        each = _replay(device, graph, 1)[0] * 1e-6
        count = max(REPLAYS[0], min(REPLAYS[1], int(seconds / max(each, 1e-9))))
        return summarise([us / (rounds * len(calls)) for us in _replay(device, graph, count)]).median
    finally:
        errors.clear()  # breaks the cycle of exception and frame, so that the buffers are freed at once
        if torch.cuda.current_stream(device) != home:  # a failed capture leaves its own stream current
            torch.cuda.set_stream(home)
        torch.cuda.synchronize(device)
        graph.reset()


def _replay(device: torch.device, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Microseconds of each of `count` replays, after one that does not count."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e3 for start, end in pairwise(marks)]


# Disturbed times


def spread_reason(stats: Stats) -> str | None:
    """Why a row with these times is disturbed, or None.

    >>> spread_reason(Stats(20, 10, 26, 100, 9)), spread_reason(Stats(20, 19, 26, 100, 9))
    ('p80 is 2.6 times p20', None)
    """
    if stats.samples < MIN_SAMPLES or stats.p80 <= MAX_SPREAD * stats.p20:
        return None
    return f"p80 is {stats.p80 / stats.p20:.1f} times p20"


def slow_copies(rows: Sequence[Row]) -> dict[tuple[str, ...], str]:
    """The cases, by `Row.key`, whose copy takes more than MAX_SLOWDOWN times as long as the others allow, with reasons.

    The bound is the time of the fastest copy of at least as many bytes. A looser one, for the largest copies, follows
    from the slowest copy of fewer bytes, down to an eighth.
    """
    copies = [(row, row.bytes, row.median_us) for row in rows if row.provider == "copy" and row.ok and row.median_us]
    found: dict[tuple[str, ...], str] = {}
    for row, size, took in copies:
        others = [(bytes_, us) for other, bytes_, us in copies if other is not row]
        bounds = [us for bytes_, us in others if bytes_ >= size]
        smaller = [us * size / bytes_ for bytes_, us in others if size <= SIZE_RANGE * bytes_ < SIZE_RANGE * size]
        bounds += [CACHE_SPEEDUP * max(smaller)] if smaller else []
        if bounds and took > MAX_SLOWDOWN * min(bounds):
            found[row.key()] = f"its copy takes {took / min(bounds):.1f} times as long as other copies of the run allow"
    return found


def mark_disturbed(rows: Sequence[Row]) -> None:
    """Sets `disturbed` on every row of a case whose copy is disturbed."""
    copies = [row for row in rows if row.provider == "copy" and row.disturbed]
    reasons = {row.key(): f"of its copy {row.disturbed}" for row in copies} | slow_copies(rows)
    for row in rows:
        if row.ok and not row.disturbed:
            row.disturbed = reasons.get(row.key())
