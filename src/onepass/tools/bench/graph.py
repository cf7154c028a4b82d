"""The clock of a launch within a CUDA graph: no host in it, and data that is not in the L2.

A graph makes the call on each of several buffers in turn. The buffers together exceed twice the L2, so that a buffer is
long gone from it when its turn comes again; the time is that of a replay over the launches in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from onepass.tools.bench.stats import summarise

__all__ = ["GraphClock", "buffers", "refusal", "turns"]

Call = Callable[[], object]

MOST = 8192  # buffers; more of them would be so small that a launch is all their time
LAUNCHES = 20  # in a graph at least, where the budget has room: its begin and end are then no part of the time
REPLAYS = (3, 20)


def buffers(l2: int, bytes_each: int) -> int:
    """How many buffers of this size exceed twice the L2 together; at least two, which then take turns.

    >>> buffers(50 << 20, 1 << 20), buffers(50 << 20, 2 << 30)
    (101, 2)
    """
    return max(2, 2 * l2 // max(bytes_each, 1) + 1)


def turns(count: int, each_us: float, seconds: float) -> int:
    """How often a graph goes through its `count` buffers: LAUNCHES launches in all, or fewer where a replay would take
    more than a quarter of `seconds`, and once at least.

    >>> turns(4, 10.0, 0.1), turns(1000, 2.0, 0.1), turns(2, 5000.0, 0.1), turns(2, 50000.0, 0.1)
    (5, 1, 2, 1)
    """
    room = int(seconds / 4 * 1e6 / max(count * each_us, 1e-3))
    return max(1, min(ceil(LAUNCHES / count), room))


def refusal(count: int, bytes_each: int, workspace: int, free: int) -> str | None:
    """Why `count` buffers of this size are not made, or None. `workspace` is what a call takes besides, `free` what
    there is.

    >>> refusal(101, 1 << 20, 1 << 20, 1 << 30), refusal(2, 2 << 30, 1 << 30, 6 << 30)
    (None, '2 buffers of 2048.0 MiB and their outputs do not fit')
    """
    if count > MOST:
        return f"{count} buffers of {bytes_each} bytes would be needed to leave the L2, more than {MOST}"
    if 2 * count * bytes_each + workspace > free:  # twice: a provider may allocate its own outputs
        return f"{count} buffers of {bytes_each / 2**20:.1f} MiB and their outputs do not fit"
    return None


class GraphClock:
    """Captures and replays on one GPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def time(self, calls: Sequence[Call], each_us: float, seconds: float) -> float:
        """Microseconds of a launch.

        Args:
            calls: the call on each of the buffers, as many as `buffers` says.
            each_us: what a call takes, about.
            seconds: of replaying.

        Raises what a call raises when it is captured, and RuntimeError where a replay does not write the output: the
        launch went past the capture, to a stream of the call's own. The current stream is then what it was.
        """
        home = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        first: list[Exception] = []
        try:
            side.wait_stream(home)
            with torch.cuda.stream(side):  # what a call makes once is made before the capture
                for call in calls[:3]:
                    call()
            home.wait_stream(side)
            torch.cuda.synchronize(self.device)
            rounds = turns(len(calls), each_us, seconds)
            # An output that the call allocates itself is kept until its buffer's turn comes again: so that outputs
            # rotate as the inputs do.
            kept: deque[object] = deque(maxlen=len(calls))
            try:
                with torch.cuda.graph(graph, stream=side):
                    try:
                        for call in [*calls] * rounds:
                            kept.append(call())
                    except Exception as error:
                        first.append(error)
                        raise
            except Exception as error:  # where a call spoilt the capture, its end raises too, and says less
                first.append(error)
            if first:
                raise first[0]
            _written(graph, kept[-1])
            return self._replay(graph, rounds * len(calls), seconds)
        finally:
            first.clear()  # the exception holds this frame: without a circle the buffers are free as soon as it is told
            if torch.cuda.current_stream(self.device) != home:  # a failed capture leaves its own stream behind
                torch.cuda.set_stream(home)
            torch.cuda.synchronize(self.device)
            graph.reset()

    def _replay(self, graph: torch.cuda.CUDAGraph, launches: int, seconds: float) -> float:
        """The median of replays one after the other: each finds the L2 as the one before left it, and the host is ahead
        of the GPU."""
        graph.replay()
        each = self._events(graph, 1)[0] * 1e-6
        least, most = REPLAYS
        count = max(least, min(most, int(seconds / max(each, 1e-9))))
        return summarise([us / launches for us in self._events(graph, count)]).median

    def _events(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Microseconds of each of `count` replays, after one that is not counted."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in pairwise(marks)]


def _written(graph: torch.cuda.CUDAGraph, out: object) -> None:
    if isinstance(out, Tensor) and out.is_floating_point():
        out.fill_(float("nan"))
        graph.replay()
        if bool(out.isnan().any()):
            raise RuntimeError("a replay of the graph does not write the output: the launch is not in it")
