"""The clock of a launch within a CUDA graph: it excludes the host and finds no data in the L2.

A graph makes the call on each of several buffers in turn. The buffers together exceed twice the L2, so that a buffer
has left it when its turn comes again. The time is that of a replay divided by the number of launches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from onepass.tools.bench.stats import summarise

Call = Callable[[], object]

MAX_BUFFERS = 8192  # with more buffers each is so small that the time is the launch alone
MIN_LAUNCHES = 20  # per graph where the budget allows, so that its begin and end do not count
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
    """Why `count` buffers of this size are not made, or None. `workspace` is what a call allocates besides its output,
    `free` the memory that is left.

    >>> cannot_capture(101, 1 << 20, 1 << 20, 1 << 30), cannot_capture(2, 2 << 30, 1 << 30, 6 << 30)
    (None, '2 buffers of 2048.0 MiB and their outputs do not fit')
    """
    if count > MAX_BUFFERS:
        return f"{count} buffers of {bytes_each} bytes would be needed to leave the L2, more than {MAX_BUFFERS}"
    if 2 * count * bytes_each + workspace > free:  # twice: a provider may allocate its own outputs
        return f"{count} buffers of {bytes_each / 2**20:.1f} MiB and their outputs do not fit"
    return None


def time_launch(device: torch.device, calls: Sequence[Call], each_us: float, seconds: float) -> float:
    """Microseconds per launch, replayed for `seconds`.

    `calls` is the call on each of the buffers, as many as `buffer_count` says; `each_us` its approximate time.

    Raises what a call raises during its capture, and RuntimeError if a replay does not write the output because the
    call launches on a stream of its own. The current stream is restored in any case.
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
        _check_output_is_written(graph, outputs[-1])
        # Each of consecutive replays finds the L2 as the previous one left it, and the host is ahead.
        graph.replay()
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


def _check_output_is_written(graph: torch.cuda.CUDAGraph, out: object) -> None:
    if isinstance(out, Tensor) and out.is_floating_point():
        out.fill_(float("nan"))
        graph.replay()
        if bool(out.isnan().any()):
            raise RuntimeError("a replay of the graph does not write the output: the launch is not in it")
