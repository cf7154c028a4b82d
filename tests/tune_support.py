"""A GPU that is not there, and a meter that makes times up: the same for the same call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from onepass import native
from onepass.tune.candidates import FLAT, Candidate, Gpu, Plan
from onepass.tune.measure import Point

H200 = Gpu("NVIDIA H200", 90, 132, 227 * 1024 - 16 * 1024)
A100 = Gpu("NVIDIA A100", 80, 108, 163 * 1024 - 16 * 1024)
RTX = Gpu("NVIDIA RTX 4090", 89, 128, 99 * 1024 - 16 * 1024)
GPUS = (H200, A100, RTX, Gpu("a part of an H200", 90, 60, 211 * 1024), Gpu("NVIDIA B200", 100, 148, 211 * 1024))

BASE = native.tables(90, 132)["tables"]


@pytest.fixture
def tables_back() -> Iterator[None]:
    """The tables of an H200 are after the test what they were before."""
    before = native.tables(90, 132)
    yield
    native.set_tables(90, 132, **before)


def made_up(dtype: str, n: int, rows: int, tried: Sequence[Candidate], seed: int = 0) -> Point:
    """Times that depend on the plan, and on `seed`; flat is fast for rows of up to 600 elements."""
    times = {}
    for choice, plan in tried:
        rng = random.Random(f"{seed} {dtype} {n} {tuple(plan)}")
        us = 100 * (1 + rng.random())
        times[choice] = us * (0.4 if n <= 600 else 3) if choice.tier == FLAT else us
    return Point(dtype, n, rows, 90.0, times, {})


class FakeMeter:
    """Made-up times; raises `error` in place of measurement number `stop`."""

    def __init__(self, stop: int | None = None, error: type[BaseException] = KeyboardInterrupt, seed: int = 0):
        self.stop, self.error, self.seed = stop, error, seed
        self.prepared: list[tuple[str, Plan]] = []
        self.done: list[tuple[str, int]] = []

    def prepare(self, todo: Sequence[tuple[str, Plan]], report: Callable[[int, int], None]) -> None:
        self.prepared = list(todo)
        report(len(todo), len(todo))

    def measure(self, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Point:
        if len(self.done) == self.stop:
            raise self.error("stopped here")
        self.done.append((dtype, n))
        return made_up(dtype, n, rows, tried, self.seed)
