"""Tiny cases and odd providers, for the tests of the benchmark."""

from collections.abc import Callable
from typing import Any

import torch

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.entrants import Onepass, Torch
from onepass.tools.bench.providers import Provider
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.run import Runner

CPU = torch.device("cpu")
TINY = timing.Budget(seconds=1e-4, least=2, most=4, warmup=0.0)
CASE = Case("tiny", "tiny 4x33", (4, 33))


class Odd(Provider):
    """A provider that does what a test needs; it counts its calls."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor], name: str = "odd", **reasons: Any):
        self.name, self.label, self.f, self.calls = name, name, f, 0
        self.unsupported, self.takes = reasons.get("unsupported"), reasons.get("takes", 0)

    def supports(self, case: Case, dtype: str) -> str | None:
        return self.unsupported

    def workspace(self, case: Case, dtype: str) -> int:
        return self.takes

    def function(self, case: Case, dtype: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.f(x)

        return call


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def case(self, case: Case, dtype: str) -> None: ...
    def again(self, count: int) -> None:
        self.said.append(f"again: {count}")

    def status(self, text: str) -> None: ...
    def rows(self, rows: Any) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


def run(case: Case, *providers: Provider, dtype: str = "float32", **options: Any) -> tuple[dict[str, Row], list[str]]:
    log = Log()
    runner = Runner(CPU, providers, reporter=log, budget=TINY, **options)
    runner.run([(case, dtype)])
    return {row.provider: row for row in runner.results.rows}, log.said


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "one element off": lambda x: torch.softmax(x, -1).index_fill(0, torch.tensor([3]), 0.5),
    "NaN in one place": lambda x: torch.softmax(x, -1).masked_fill(torch.arange(33) == 32, float("nan")),
    "drops the last element": lambda x: torch.cat([torch.softmax(x[:, :-1], -1), torch.zeros(4, 1)], 1),
    "half precision": lambda x: torch.softmax(x.bfloat16(), -1).float(),
    "wrong shape": lambda x: torch.softmax(x, -1)[:2],
    "wrong dtype": lambda x: torch.softmax(x, -1).double(),
}


def measured() -> Results:
    """A real run: two cases, two dtypes, one of the providers wrong."""
    runner = Runner(CPU, [Onepass(), Torch(), Odd(WRONG["zeros"])], budget=TINY)
    cases = [CASE, Case("tiny", "maps", (1, 5, 4, 4), dim=1)]
    return runner.run([(case, dtype) for case in cases for dtype in ("float32", "bfloat16")])
