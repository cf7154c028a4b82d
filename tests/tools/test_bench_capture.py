"""The clock of a CUDA graph: how many buffers and launches, and a capture's steps on a stand-in for CUDA."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from lib.bench import CPU
from onepass.tools.bench import graph
from onepass.tools.bench.graph import GraphClock, buffers, refusal, turns
from onepass.tools.bench.suites import SUITES

L2 = 60 << 20
GIB = 1 << 30


# How many


@pytest.mark.parametrize("size", [1, 511, 1 << 12, 1 << 20, L2 - 1, L2, 2 * L2 - 1, 2 * L2, 2 * L2 + 1, 2 * GIB])
def test_buffers_exceed_twice_the_l2_and_are_no_more_than_that_takes(size: int) -> None:
    count = buffers(L2, size)
    assert count >= 2
    assert count * size > 2 * L2
    assert count == 2 or (count - 1) * size <= 2 * L2


@pytest.mark.parametrize("count", [2, 3, 19, 20, 21, 5000])
@pytest.mark.parametrize("each_us", [0.0, 1.5, 600.0, 1e5])
def test_a_graph_has_as_many_launches_as_buffers_or_a_multiple(count: int, each_us: float) -> None:
    rounds = turns(count, each_us, 0.1)
    assert rounds >= 1
    assert rounds == 1 or rounds * count * each_us <= 0.1 / 4 * 1e6
    assert rounds * count < count + graph.LAUNCHES
    if count * 20 * each_us < 0.1 / 4 * 1e6:
        assert rounds * count >= graph.LAUNCHES


def test_what_is_not_captured_is_told() -> None:
    assert refusal(2, 2 * GIB, 4 * GIB, 12 * GIB) is None
    assert refusal(2, 2 * GIB, 4 * GIB + 1, 12 * GIB) == "2 buffers of 2048.0 MiB and their outputs do not fit"
    count = buffers(L2, 100)
    assert (
        refusal(count, 100, 0, GIB) == f"{count} buffers of 100 bytes would be needed to leave the L2, more than 8192"
    )


@pytest.mark.parametrize("suite", ["models", "rows", "few"])
def test_every_case_of_the_suites_can_be_captured_on_an_h200(suite: str) -> None:
    for case in SUITES[suite].cases:
        for dtype in case.dtypes:
            size = case.at(dtype).bytes(dtype)
            assert refusal(buffers(L2, size), size, size, 100 * GIB) is None, case.name


# The capture


class FakeCuda:
    """As much of torch.cuda as a capture takes: streams by name, a graph that keeps its launches, events that cost."""

    def __init__(self, patch: pytest.MonkeyPatch, us: float = 8.0):
        self.log: list[str] = []
        self.now, self.us, self.stream_now, self.capturing = 0.0, us, "home", False
        self.resets = 0
        self.writes: list[Callable[[], object]] = []  # what a replay does
        fake = self

        class Stream:
            def __init__(self, name: str = "side"):
                self.name = name

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.name == self.name

            def wait_stream(self, other: Any) -> None:
                fake.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def __init__(self) -> None:
                self.launches = 0

            def replay(self) -> None:
                assert fake.stream_now == "home"
                fake.now += self.launches * fake.us
                for write in fake.writes:
                    write()

            def reset(self) -> None:
                fake.resets += 1

        class Event:
            def __init__(self, enable_timing: bool):
                self.at = 0.0

            def record(self) -> None:
                self.at = fake.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) / 1e3

        @contextmanager
        def stream(to: Any) -> Iterator[None]:
            before, fake.stream_now = fake.stream_now, to.name
            yield
            fake.stream_now = before

        @contextmanager
        def capture(made: Any, stream: Any) -> Iterator[None]:
            """Like torch's: where the body raises, its end raises too and the stream stays."""
            fake.stream_now, fake.capturing, begin = stream.name, True, len(fake.log)
            try:
                yield
            except Exception:
                fake.capturing = False
                raise RuntimeError("previous error during capture") from None
            fake.stream_now, fake.capturing = "home", False
            made.launches = len(fake.log) - begin

        parts: dict[str, Any] = {
            "current_stream": lambda device: Stream(fake.stream_now),
            "set_stream": lambda to: setattr(fake, "stream_now", to.name),
            "Stream": lambda device: Stream(),
            "CUDAGraph": Graph,
            "Event": Event,
            "stream": stream,
            "graph": capture,
            "synchronize": lambda device: None,
        }
        for name, part in parts.items():
            patch.setattr(torch.cuda, name, part)

    def calls(self, count: int) -> list[Callable[[], object]]:
        def call(i: int) -> Callable[[], object]:
            return lambda: self.log.append(f"{i} on {self.stream_now}{' captured' * self.capturing}")

        return [call(i) for i in range(count)]


def test_a_capture_warms_up_on_the_side_and_goes_through_all_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    got = GraphClock(CPU).time(cuda.calls(8), each_us=8.0, seconds=0.1)
    assert got == pytest.approx(8.0)
    warm = ["side waits for home", "0 on side", "1 on side", "2 on side", "home waits for side"]
    assert cuda.log == warm + [f"{i} on side captured" for i in range(8)] * 3
    assert (cuda.stream_now, cuda.resets) == ("home", 1)


def test_a_long_call_is_captured_once_a_buffer_and_replayed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, us=70e3)
    assert GraphClock(CPU).time(cuda.calls(2), each_us=70e3, seconds=0.1) == pytest.approx(70e3)
    assert len([line for line in cuda.log if "captured" in line]) == 2
    assert cuda.now == 7 * 2 * 70e3  # the replays: one, then two, then one and three that count


def test_outputs_are_kept_for_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that a call allocates lies in the way of the next ones until its buffer's turn comes again."""
    cuda, alive, most = FakeCuda(monkeypatch), [0], [0]

    class Output:
        def __init__(self) -> None:
            cuda.log.append("call")
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    GraphClock(CPU).time([Output] * 5, each_us=8.0, seconds=0.1)
    assert most[0] in (5, 6)
    assert alive[0] == 0


def test_a_failed_capture_says_what_the_call_said_and_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def waits() -> None:
        if cuda.capturing:
            raise ValueError("waits for the GPU")

    with pytest.raises(ValueError, match="waits for the GPU"):
        GraphClock(CPU).time([waits] * 4, each_us=1.0, seconds=0.1)
    assert (cuda.stream_now, cuda.resets) == ("home", 1)


@pytest.mark.parametrize("writes", [True, False])
def test_a_launch_past_the_capture_is_found(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider with a stream of its own: its graph is empty, and would be the fastest of all."""
    cuda, out = FakeCuda(monkeypatch), torch.zeros(4)

    def call() -> torch.Tensor:
        cuda.log.append("call")
        return out

    if writes:
        cuda.writes.append(lambda: out.fill_(1.0))
        assert GraphClock(CPU).time([call] * 2, each_us=8.0, seconds=0.1) == pytest.approx(8.0)
        return
    with pytest.raises(RuntimeError, match="does not write the output"):
        GraphClock(CPU).time([call] * 2, each_us=8.0, seconds=0.1)
    assert (cuda.stream_now, cuda.resets) == ("home", 1)


def test_a_failed_capture_lets_go_of_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, buffer = FakeCuda(monkeypatch), torch.zeros(4)
    alive = weakref.ref(buffer)

    def call(x: torch.Tensor = buffer) -> torch.Tensor:
        if cuda.capturing:
            raise ValueError("waits for the GPU")
        return x

    gc.disable()
    try:
        with suppress(ValueError):
            GraphClock(CPU).time([call] * 2, each_us=1.0, seconds=0.1)
        del call, buffer
        assert alive() is None
    finally:
        gc.enable()
