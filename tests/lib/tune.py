"""For tests of the tuner: GPUs that are not in this machine, and a timer that makes up times, equal for equal calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from onepass import native
from onepass._kernel_compiler import Kernel
from onepass.tools.tune.candidates import STAGED, Candidate, Gpu
from onepass.tools.tune.timing import Measurement

H200 = Gpu("NVIDIA H200", 90, 132, 227 * 1024)
A100 = Gpu("NVIDIA A100", 80, 108, 163 * 1024)
RTX = Gpu("NVIDIA RTX 4090", 89, 128, 99 * 1024)
GPUS = (H200, A100, RTX, Gpu("a part of an H200", 90, 60, 227 * 1024), Gpu("NVIDIA B200", 100, 148, 227 * 1024))

BASE = native.tables("NVIDIA H200")["tables"]


@pytest.fixture
def tables_back() -> Iterator[None]:
    """Restores the tables of an H200 after the test."""
    before = native.tables(H200.name)
    yield
    native.set_tables(H200.name, **before)


def made_up(
    function: str, dtype: str, n: int, shape: tuple[int, int], tried: Sequence[Candidate], seed: int = 0
) -> Measurement:
    """Made-up times that depend on the plan and on `seed`. The tier staged is fast for rows of up to 600 elements."""
    times = {}
    for choice, plan in tried:
        us = 100 * (1 + zlib.crc32(f"{seed} {function} {dtype} {n} {tuple(plan)}".encode()) / 2**32)
        times[choice] = us * (0.4 if n <= 600 else 3) if choice.tier == STAGED else us
    return Measurement(function, dtype, n, shape[0] * shape[1], 90.0, 120.0, times)


class FakeTimer:
    """Makes up times. Raises `error` in place of measurement number `stop`."""

    def __init__(self, stop: int | None = None, error: type[BaseException] = KeyboardInterrupt, seed: int = 0):
        self.stop, self.error, self.seed = stop, error, seed
        self.prepared: list[Kernel] = []
        self.done: list[tuple[str, str, int, tuple[int, int]]] = []

    def prepare(self, todo: Sequence[Kernel], report: Callable[[int, int], None]) -> None:
        self.prepared = list(todo)
        report(len(todo), len(todo))

    def measure(self, function: str, dtype: str, n: int, shape: Any, tried: Sequence[Candidate]) -> Measurement:
        if len(self.done) == self.stop:
            raise self.error("stopped here")
        self.done.append((function, dtype, n, shape))
        return made_up(function, dtype, n, shape, tried, self.seed)
