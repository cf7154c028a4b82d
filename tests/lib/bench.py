"""For tests of the benchmark: tiny cases, odd providers, rows made by hand, and a fixed clock and machine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from onepass.tools.bench import timing
from onepass.tools.bench.cases import SUITES, Case, Suite
from onepass.tools.bench.progress import Progress
from onepass.tools.bench.provider import Provider
from onepass.tools.bench.results import ENVIRONMENT, Results, Row
from onepass.tools.bench.runner import Runner
from onepass.tools.bench.timing import Stats

CPU = torch.device("cpu")
CASE = Case("tiny", "tiny 4x33", (4, 33))
MAPS = Case("tiny", "maps", (1, 5, 4, 4), dim=1)
TINY = timing.Budget(seconds=1e-4, min_samples=2, max_samples=4, warmup=0.0)
GPU = {**dict.fromkeys(ENVIRONMENT), "device": "H200", "device_type": "cuda", "onepass": "0.1.0", "date": "2026-11-21"}
US = {"copy": 10.0, "onepass": 12.5, "torch": 25.0, "naive": 50.0}  # the times of the fake clock


class Odd(Provider):
    """A provider that does what a test needs, and counts its calls."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor], name: str = "odd", **options: Any):
        self.name, self.label, self.f, self.calls = name, name, f, 0
        self.reason, self.takes = options.get("unsupported"), options.get("takes", 0)

    def unsupported(self, case: Case, dtype: str) -> str | None:
        return self.reason

    def workspace(self, case: Case, dtype: str) -> int:
        return self.takes

    def forward(self, case: Case, dtype: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.f(x)

        return call


class Log(Progress):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def retry(self, count: int) -> None:
        self.text.append(f"retry: {count}")

    def say(self, text: str) -> None:
        self.text.append(text)


def run(case: Case, *providers: Provider, dtype: str = "float32", **options: Any) -> tuple[dict[str, Row], list[str]]:
    """The rows by provider, and the messages."""
    log = Log()
    runner = Runner(CPU, providers, progress=log, budget=TINY, **options)
    runner.run([(case, dtype)])
    return {row.provider: row for row in runner.results.rows}, log.text


def row(median: float | None = 100.0, spread: float | None = 0.0, **fields: Any) -> Row:
    """A right row with quantiles `spread` below and above its median; None means no time or no quantiles."""
    shape = fields.pop("shape", [4, 100])
    made = Row("models", "a case", "softmax", shape, [], -1, "float32", "float32", "forward", "onepass", ok=True)
    made.median_us = median
    if median is not None and spread is not None:
        made.p20_us, made.p80_us = median - spread, median + spread
    return replace(made, **fields)


def bad(error: str | None = "wrong: error 0.5, allowed 1e-05", **fields: Any) -> Row:
    return row(None, None, ok=False, error=error, **fields)


def file(*rows: Row, **environment: Any) -> Results:
    return Results({**GPU, **environment}, list(rows))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def stats(us: float) -> Stats:
    return Stats(us, 0.9 * us, 1.1 * us, 100, 0.8 * us)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stats]:
    """A clock and a machine that never change, and a suite `tiny`. A test may change the times of the clock."""
    times = {name: stats(us) for name, us in US.items()}

    def alternate(calls: Mapping[str, Any], budget: timing.Budget) -> dict[str, Stats]:
        for call in calls.values():
            call()
        return {name: times.get(name, stats(30.0)) for name in calls}

    machine = {"device": "a CPU", "device_type": "cpu", "torch": "2.0", "threads": 2, "isa": "avx2", "load": 0.0}
    monkeypatch.setattr("onepass.tools.bench.runner.environment", lambda device: {**GPU, **machine})
    monkeypatch.setattr(timing, "alternate", alternate)
    small = Case("tiny", "small", (4, 33), quick=("cpu",))
    monkeypatch.setitem(SUITES, "tiny", Suite("tiny", "two small cases", (small, MAPS)))
    return times
