"""The clocks: statistics, turns, the capture of CUDA graphs on a stand-in for CUDA, and disturbed times."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from functools import partial
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, TINY, Log, Odd, row, run, softmax, stats
from onepass.tools.bench import timing
from onepass.tools.bench.cases import SUITES, Case
from onepass.tools.bench.providers import Naive, Onepass, Torch
from onepass.tools.bench.results import Row
from onepass.tools.bench.runner import Runner

L2, GIB = 60 << 20, 1 << 30


def test_statistics_of_known_data() -> None:
    assert timing.summarise([float(v) for v in range(100, -1, -1)]) == timing.Stats(50.0, 20.0, 80.0, 101, 0.0)
    assert timing.summarise([7.0]) == timing.Stats(7.0, 7.0, 7.0, 1, 7.0)
    assert timing.summarise([0.801] * 9) == timing.Stats(
        0.801, 0.801, 0.801, 9, 0.801
    )  # no rounding outside the samples
    values = torch.rand(37, dtype=torch.float64).tolist()
    fifths = quantiles(values, n=5, method="inclusive")
    assert astuple(timing.summarise(values)) == pytest.approx((median(values), fifths[0], fifths[3], 37, min(values)))
    with pytest.raises(ValueError, match="no samples"):
        timing.summarise([])


@pytest.mark.parametrize("counts", [{"a": 6, "b": 6, "c": 6}, {"a": 9, "b": 3, "c": 1}, {"a": 5, "b": 2}, {"a": 1}])
def test_turns_alternate(counts: dict[str, int]) -> None:
    turns = timing.schedule(counts)
    assert {name: turns.count(name) for name in counts} == counts
    if len(set(counts.values())) == 1:  # each round has everyone once, and each round another one first
        parts = [turns[i : i + len(counts)] for i in range(0, len(turns), len(counts))]
        assert all(set(part) == set(counts) for part in parts)
        assert len({part[0] for part in parts}) == min(len(parts), len(counts))
    for name in counts:  # nobody is done in the first half
        assert max(i for i, n in enumerate(turns) if n == name) >= len(turns) // 2


def test_the_clock_alternates_the_calls_and_does_not_count_the_first() -> None:
    now, log = [0], []

    def call(name: str, cost: int) -> Callable[[], None]:
        def f() -> None:
            now[0] += cost * (10 if name not in log else 1)
            log.append(name)

        return f

    budget = timing.Budget(seconds=1.0, min_samples=3, max_samples=5, warmup=0.0)
    got = timing.alternate({"a": call("a", 2000), "b": call("b", 5000)}, budget, clock=lambda: now[0])
    assert got == {"a": timing.Stats(2.0, 2.0, 2.0, 5, 2.0), "b": timing.Stats(5.0, 5.0, 5.0, 5, 5.0)}
    assert log[4:] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]


def test_the_budget_bounds_the_samples() -> None:
    budget = timing.Budget(seconds=1.0, min_samples=10, max_samples=100, warmup=0.0)
    assert [budget.samples(s) for s in (60.0, 2.0, 1.0, 0.05, 1e-6, 0.0)] == [3, 5, 10, 20, 100, 100]
    assert [budget.trial_calls(s, 5) for s in (60.0, 1.0, 0.21, 0.2, 1e-6)] == [1, 1, 1, 5, 5]
    assert [timing.FULL.limit(s) for s in (0.02, 0.1, 2.0)] == [
        replace(timing.FULL, seconds=s, warmup=w) for s, w in ((0.02, 0.02), (0.1, 0.1), (2.0, 0.1))
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cpu_times_calls_into_an_output_and_calls_that_allocate(direction: str) -> None:
    budget = timing.Budget(seconds=0.002, min_samples=2, max_samples=3, warmup=0.001)
    case = Case("t", "t", (6, 40), direction=direction)
    rows = Runner(CPU, [Onepass(), Torch()], budget=budget).run([(case, "float32")]).rows
    assert [row.provider for row in rows] == ["copy", "onepass", "torch"]
    assert all(row.ok and row.call_us and row.median_us != row.call_us for row in rows)


# A launch in a CUDA graph


@pytest.mark.parametrize("size", [1, 511, 1 << 12, 1 << 20, L2 - 1, L2, 2 * L2 - 1, 2 * L2, 2 * L2 + 1, 2 * GIB])
def test_the_buffers_just_exceed_twice_the_l2(size: int) -> None:
    count = timing.buffer_count(L2, size)
    assert count >= 2
    assert count * size > 2 * L2
    assert count == 2 or (count - 1) * size <= 2 * L2


@pytest.mark.parametrize("count", [2, 3, 19, 20, 21, 5000])
@pytest.mark.parametrize("each_us", [0.0, 1.5, 600.0, 1e5])
def test_a_graph_goes_through_all_buffers_once_or_repeatedly(count: int, each_us: float) -> None:
    rounds = timing.rounds_per_graph(count, each_us, 0.1)
    assert rounds >= 1
    assert rounds == 1 or rounds * count * each_us <= 0.1 / 4 * 1e6
    assert rounds * count < count + timing.MIN_LAUNCHES
    assert rounds * count >= timing.MIN_LAUNCHES or count * 20 * each_us >= 0.1 / 4 * 1e6


def test_every_case_of_the_gpu_suites_can_be_captured_on_an_h200() -> None:
    assert timing.cannot_capture(2, 2 * GIB, 4 * GIB, 12 * GIB) is None
    assert (
        timing.cannot_capture(2, 2 * GIB, 4 * GIB + 1, 12 * GIB)
        == "2 buffers of 2048.0 MiB and their outputs do not fit"
    )
    assert (timing.cannot_capture(1258292, 100, 0, GIB) or "").endswith(
        "would be needed to leave the L2, more than 8192"
    )
    for suite in ("models", "row-lengths", "few-long-rows"):
        for case, dtype in [(c, d) for c in SUITES[suite].cases for d in c.dtypes]:
            size = case.at(dtype).bytes(dtype)
            assert timing.cannot_capture(timing.buffer_count(L2, size), size, size, 100 * GIB) is None, case.name


class FakeCuda:
    """As much of torch.cuda as a capture takes: two streams, a graph that keeps its launches, events that cost."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.log: list[str] = []
        self.now, self.us, self.at, self.capturing, self.resets = 0.0, 8.0, "home", False, 0
        self.replayed: Callable[[], object] = lambda: None  # what a replay does
        waits = lambda name: lambda other: self.log.append(f"{name} waits for {other.name}")  # noqa: E731
        streams = {name: SimpleNamespace(name=name, wait_stream=waits(name)) for name in ("home", "side")}
        parts: dict[str, Any] = {
            "current_stream": lambda device: streams[self.at],
            "set_stream": lambda to: setattr(self, "at", to.name),
            "Stream": lambda device: streams["side"],
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay, reset=self.reset),
            "Event": self.event,
            "stream": self.on,
            "graph": self.capture,
            "synchronize": lambda device: None,
        }
        for name, part in parts.items():
            patch.setattr(torch.cuda, name, part)

    def replay(self) -> None:
        assert self.at == "home"
        self.now += self.launches * self.us
        self.replayed()

    def reset(self) -> None:
        self.resets += 1

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(elapsed_time=lambda end: (end.at - made.at) / 1e3)
        made.record = lambda: setattr(made, "at", self.now)
        return made

    @contextmanager
    def on(self, to: Any) -> Iterator[None]:
        before, self.at = self.at, to.name
        yield
        self.at = before

    @contextmanager
    def capture(self, of: Any, stream: Any) -> Iterator[None]:
        """As in torch: if the body raises, its end raises too and the stream stays."""
        self.at, self.capturing, begin = stream.name, True, len(self.log)
        try:
            yield
        except Exception:
            self.capturing = False
            raise RuntimeError("previous error during capture") from None
        self.at, self.capturing, self.launches = "home", False, len(self.log) - begin

    def calls(self, count: int) -> list[Callable[[], object]]:
        note = lambda i: self.log.append(f"{i} on {self.at}{' captured' * self.capturing}")  # noqa: E731
        return [partial(note, i) for i in range(count)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_capture_warms_up_on_the_side_and_goes_through_all_buffers(cuda: FakeCuda) -> None:
    assert timing.time_launch(CPU, cuda.calls(8), each_us=8.0, seconds=0.1) == pytest.approx(8.0)
    warm = ["side waits for home", "0 on side", "1 on side", "2 on side", "home waits for side"]
    assert cuda.log == warm + [f"{i} on side captured" for i in range(8)] * 3
    assert (cuda.at, cuda.resets) == ("home", 1)
    cuda.log, cuda.us, cuda.now = [], 70e3, 0.0  # a long call is captured once per buffer and replayed seldom
    assert timing.time_launch(CPU, cuda.calls(2), each_us=70e3, seconds=0.1) == pytest.approx(70e3)
    assert len([line for line in cuda.log if "captured" in line]) == 2
    assert cuda.now == 7 * 2 * 70e3  # the replays: one, then two, then one and the three that count


def test_an_allocated_output_lives_until_the_turn_of_its_buffer_comes_again(cuda: FakeCuda) -> None:
    class Output:
        def __init__(self) -> None:
            cuda.log.append("call")
            alive.add(self)
            most.append(len(alive))

    alive: weakref.WeakSet[Output] = weakref.WeakSet()
    most: list[int] = []
    timing.time_launch(CPU, [Output] * 5, each_us=8.0, seconds=0.1)
    assert max(most) in (5, 6)
    assert not alive


def test_the_l2_is_flushed_before_the_clock_of_each_call_starts(cuda: FakeCuda) -> None:
    def spend(name: str, us: float) -> None:
        cuda.log.append(name)
        cuda.now += us

    clock = object.__new__(timing.Cuda)
    clock.device, clock.flush = CPU, SimpleNamespace(zero_=partial(spend, "flush", 100.0))  # type: ignore[assignment]
    clock.pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(2)]
    assert clock.events(partial(spend, "call", 7.0), 3, 2) == pytest.approx([7.0] * 3)
    assert cuda.log == ["flush", "flush", "call"] * 3


def test_a_failed_capture_says_what_the_call_said_restores_the_stream_and_frees_the_buffers(cuda: FakeCuda) -> None:
    buffer = torch.zeros(4)
    alive = weakref.ref(buffer)

    def call(x: torch.Tensor = buffer) -> torch.Tensor:
        if cuda.capturing:
            raise ValueError("waits for the GPU")
        return x

    gc.disable()
    try:
        with pytest.raises(ValueError, match="waits for the GPU"):
            timing.time_launch(CPU, [call] * 2, each_us=1.0, seconds=0.1)
        del call, buffer
        assert alive() is None
    finally:
        gc.enable()
    assert (cuda.at, cuda.resets) == ("home", 1)


@pytest.mark.parametrize("writes", [True, False])
def test_a_launch_outside_the_capture_is_found(writes: bool, cuda: FakeCuda) -> None:
    """The graph of a provider with its own stream is empty, and would be the fastest of all."""
    out = torch.zeros(4)

    def call() -> torch.Tensor:
        cuda.log.append("call")
        return out

    cuda.replayed = lambda: out.fill_(1.0) if writes else None
    missing = pytest.raises(RuntimeError, match="does not write the output")
    with nullcontext() if writes else missing:
        assert timing.time_launch(CPU, [call] * 2, each_us=8.0, seconds=0.1) == pytest.approx(8.0)
    assert (cuda.at, cuda.resets) == ("home", 1)


def call_for(us: Any) -> Any:
    """A clock that calls once and shows `us`."""
    return lambda call, budget: (call(), us)[1]


# The clocks of a GPU, without one: a call takes 10 us, and 12 us with the host.
CLOCKS = SimpleNamespace(l2=L2, cold=call_for(stats(10.0)), back_to_back=call_for(12.0))


LARGE = Case("t", "large", (64, 8192))  # 2 MiB each way: 31 buffers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Row]]:
    """Runs a case on the CPU as on a GPU."""

    def run_case(case: Case, *providers: Any, free: int = GIB, graph: bool = True, **options: Any) -> dict[str, Row]:
        def time(device: torch.device, calls: Any, each_us: float, seconds: float) -> float:
            assert len(calls) == timing.buffer_count(L2, case.bytes("float32"))
            for call in calls:
                call()
            return 5.0

        monkeypatch.setattr("onepass.tools.bench.timing.time_launch", time)
        runner = Runner(CPU, providers, budget=TINY, free=lambda: free, graph=graph, **options)
        monkeypatch.setattr(runner, "clocks", CLOCKS)
        runner.run([(case, "float32")])
        return {row.provider: row for row in runner.results.rows}

    return run_case


def test_a_run_with_graphs_has_a_time_or_a_reason_for_each(gpu: Any) -> None:
    class Fragile(Odd):
        prepared = 0

        def prepare(self, inputs: Any) -> Any:
            self.prepared += 1
            if self.prepared > 1:  # the first is for the check and the clocks
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().prepare(inputs)

    def times(**rows: Row) -> dict[str, Any]:
        return {name: (r.ok, r.median_us, r.call_us, r.graph_us, r.graph_error) for name, r in rows.items()}

    refused = "RuntimeError: operation not permitted when stream is capturing"
    assert times(**gpu(LARGE, Onepass(), Fragile(softmax), Odd(torch.zeros_like, name="zeros"))) == {
        "copy": (True, 10.0, 12.0, 5.0, None),
        "onepass": (True, 10.0, 12.0, 5.0, None),
        "odd": (True, 10.0, 12.0, None, refused),
        "zeros": (False, None, None, None, None),
    }
    assert times(**gpu(LARGE, graph=False)) == {"copy": (True, 10.0, 12.0, None, None)}
    full = gpu(LARGE, Torch(), free=160 << 20)["torch"]
    assert (full.ok, full.graph_error) == (True, "31 buffers of 4.0 MiB and their outputs do not fit")
    assert "buffers of 1056 bytes would be needed" in (gpu(CASE, Torch())["torch"].graph_error or "")


def test_kernels_alone_and_results_in_place(gpu: Any) -> None:
    for each in gpu(replace(LARGE, in_place=True), Onepass(), Torch(), kernels_only=True).values():
        assert (each.ok, each.median_us, each.min_us, each.call_us, each.graph_us) == (True, 10.0, 8.0, None, None)
        assert each.graph_error == "in place, a replay would read what the one before it wrote"


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_only_a_logsumexp_is_compared_with_a_copy_of_its_input(function: str, direction: str, gpu: Any) -> None:
    case = replace(LARGE, function=function, direction=direction)
    compared = function == "logsumexp" and direction == "forward"
    assert gpu(case, Torch(), graph=False)["torch"].input_copy_us == (10.0 if compared else None)
    for each in run(case, Torch())[0].values():  # and with the clock of the CPU
        assert each.ok
        assert (each.input_copy_us is not None and each.input_copy_us > 0) == compared


# Disturbed times


def copy(case: str, size: int, us: float, **fields: Any) -> Row:
    return row(us, provider="copy", case=case, bytes=size, **fields)


@pytest.mark.parametrize(
    ("case", "us", "times"),
    [
        ("1 MB", 399, None),  # up to four times the 100 us of 4 MB
        ("1 MB", 7921, "79.2"),
        ("4 MB", 1000, None),  # 16 MB take more; 1 MB was in a cache, and took a twelfth of a quarter
        ("4 MB", 6500, "20.3"),
        ("64 MB", 4 * 4 * 6400, None),  # four copies of 16 MB take 6400 us
        ("64 MB", 104960, "4.1"),
    ],
)
def test_a_copy_is_judged_by_those_of_the_other_cases(case: str, us: float, times: str | None) -> None:
    ladder = {"1 MB": 20.0, "4 MB": 100.0, "16 MB": 1600.0, "64 MB": 8000.0, case: us}
    rows = [copy(name, int(name.split()[0]) * 10**6, float(time)) for name, time in ladder.items()]
    found = {key[1]: reason for key, reason in timing.slow_copies(rows).items()}
    reason = f"its copy takes {times} times as long as other copies of the run allow"
    assert found == ({case: reason} if times else {})


def test_equal_sizes_and_single_cases_are_judged_too() -> None:
    assert timing.slow_copies([copy("alone", 1000, 1e6)]) == {}
    same = [copy(name, 1000, us) for name, us in (("a", 10.0), ("b", 10.0 * timing.MAX_SLOWDOWN + 1), ("c", 11.0))]
    assert [key[1] for key in timing.slow_copies(same)] == ["b"]
    rows = [row(10.0), copy("a case", 800, 10.0, disturbed="p80 is 3.0 times p20"), row(10.0, case="other")]
    timing.mark_disturbed(rows)  # a disturbed copy marks its case
    assert [r.disturbed for r in rows] == ["of its copy p80 is 3.0 times p20", "p80 is 3.0 times p20", None]


QUIET, NOISY = timing.Stats(10.0, 9.0, 11.0, 100, 8.0), timing.Stats(10.0, 9.0, 27.0, 100, 8.0)
SLOW = {"copy": timing.Stats(1000.0, 990.0, 1010.0, 100, 980.0)}
ALL = ("copy", "torch", "naive")


@pytest.mark.parametrize(
    ("script", "messages", "marked"),
    [
        ([], [], {}),
        ([{}, {"torch": NOISY}, {}, {"torch": QUIET}], ["retry: 1"], {}),
        ([{}, {"torch": NOISY}, {}, {"torch": NOISY}], ["retry: 1"], {("middle", "torch"): "p80 is 3.0 times p20"}),
        ([SLOW, {}, {}, SLOW], ["retry: 1"], {("small", name): "its copy takes 100.0 times" for name in ALL}),
        ([{"torch": timing.Stats(10.0, 9.0, 27.0, 4, 8.0)}], [], {}),  # too few samples for a spread
        ([{"torch": NOISY}, {}, KeyboardInterrupt], [], {("small", "torch"): "p80 is 3.0 times p20"}),
    ],
)
def test_what_is_disturbed_is_timed_again_and_then_marked(
    script: list[Any], messages: list[str], marked: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`script` is what the clock shows for each case in turn."""
    turns, asked = iter(script), [0]

    def alternate(calls: Any, budget: Any) -> dict[str, timing.Stats]:
        asked[0] += 1
        if asked[0] % 2 == 0:  # the calls that allocate
            return dict.fromkeys(calls, QUIET)
        times = next(turns, {})
        if times is KeyboardInterrupt:
            raise KeyboardInterrupt
        return {name: times.get(name, QUIET) for name in calls}

    monkeypatch.setattr(timing, "alternate", alternate)
    log = Log()
    cases = [(Case("t", name, (4, n)), "float32") for name, n in (("small", 8), ("middle", 16), ("large", 32))]
    runner = Runner(CPU, [Torch(), Naive()], progress=log, budget=replace(TINY, min_samples=5, max_samples=5))
    with suppress(KeyboardInterrupt):
        runner.run(cases)
    assert log.text == messages
    rows = runner.results.rows
    found = {(r.case, r.provider): r.disturbed for r in rows if r.disturbed}
    assert found.keys() == marked.keys()
    assert all((found[key] or "").startswith(reason) for key, reason in marked.items())
    names = ("small", "middle", "large")[: 2 if KeyboardInterrupt in script else 3]
    assert [(r.case, r.provider) for r in rows] == [(case, name) for case in names for name in ALL]


@pytest.mark.gpu
def test_the_clocks_of_a_gpu_and_a_call_that_cannot_be_captured() -> None:
    def wait(x: torch.Tensor) -> torch.Tensor:
        y = softmax(x)
        float(y[0, 0])  # reads a value, which a capture does not permit
        return y

    before = torch.cuda.current_stream()
    runner = Runner(torch.device("cuda"), [Odd(wait), Onepass(), Torch()], budget=TINY, graph=True)
    for dtype in ("float32", "bfloat16"):
        runner.run([(Case("tiny", "64x4096", (64, 4096)), dtype)])
    assert len(runner.results.rows) == 8
    for each in runner.results.rows:
        assert each.ok, each.error
        times = [each.median_us, each.call_us] + ([each.graph_us] if each.provider != "odd" else [])
        assert all(us is not None and 0 < us < 1e5 for us in times), each.graph_error
        assert each.provider != "odd" or "captur" in (each.graph_error or "")
    assert torch.cuda.current_stream() == before
    assert runner.results.environment["driver"]


@pytest.mark.gpu
def test_memory_is_released_between_cases() -> None:
    cases = [(Case("t", f"N {n}", (1, n), fill=1 << 28).at("float32"), "float32") for n in (1000, 1025, 4096)]
    runner = Runner(torch.device("cuda"), [Onepass(), Torch()], budget=TINY, graph=True)
    seen = []
    for pair in cases:
        assert all(row.ok for row in runner.run([pair]).rows)
        seen.append(torch.cuda.memory_reserved())
    assert max(seen) - min(seen) < 64 << 20
    assert max(seen) < 4 << 30  # buffers that flush the L2 cache, and those of the graphs
