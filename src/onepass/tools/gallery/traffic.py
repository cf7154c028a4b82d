"""The predicted traffic: what each rung asks of memory for an M x N matrix, and how fast that lets it be.

The counts are those of the rungs' headers. The unit is the least: each element read once and written once, which is
what a copy moves. A rung limited by memory that moves 4 times the least reaches 1/4 of a copy's speed and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onepass.tools.gallery.rung import Traffic
from onepass.tools.gallery.rungs import RUNGS

__all__ = ["LEAST", "NAMES", "Prediction", "formula", "predict", "predict_onepass", "predictions"]

LEAST = Traffic(reads=(1, 0), writes=(1, 0))
NAMES = (*RUNGS, "onepass")

# Of the counts of a header, what is float32 whatever the dtype of the matrix. The naive rungs read `x` twice and write
# the result in the matrix's own dtype; `shifted` (read once), `numerator` (read twice), and the maximum and the sum of
# each row are float32. Left out: for half types the cast of the M maxima, a read and a write of M more.
_STEPS = Traffic(reads=(3, 2), writes=(2, 2))
_FLOAT32 = {"naive": _STEPS, "naive-jit": _STEPS}

_TWICE = Traffic(reads=(2, 0), writes=(1, 0))


@dataclass(frozen=True)
class Prediction:
    """What one contestant moves for a matrix of `rows` x `n`.

    traffic: the counts asked of memory. bytes: the same, in bytes. least: the bytes of reading once and writing once.
    cached_bytes: what is left of `bytes` while a cache serves the re-reads of a row; None where nothing is re-read.
    note: what else there is to say of it, in a sentence, or nothing.
    """

    name: str
    traffic: Traffic
    rows: int
    n: int
    bytes: int
    least: int
    cached_bytes: int | None = None
    note: str = ""

    @property
    def reads(self) -> int:
        """Elements read."""
        return self.traffic.elements(self.rows, self.n)[0]

    @property
    def writes(self) -> int:
        """Elements written."""
        return self.traffic.elements(self.rows, self.n)[1]

    @property
    def ratio(self) -> float:
        """The bytes in units of the least, which is the predicted time in units of a copy's."""
        return self.bytes / self.least

    @property
    def cached_ratio(self) -> float | None:
        """Likewise while a cache serves the re-reads."""
        return None if self.cached_bytes is None else self.cached_bytes / self.least

    def as_dict(self, gbs: float | None = None) -> dict[str, Any]:
        """For programs; with the microseconds that `gbs`, 1e9 bytes a second, would take, where it is given."""
        return {
            "reads": self.reads,
            "writes": self.writes,
            "reads_formula": formula(self.traffic.reads),
            "writes_formula": formula(self.traffic.writes),
            "bytes": self.bytes,
            "ratio": self.ratio,
            "copy_fraction": 1 / self.ratio,
            "us": None if gbs is None else self.bytes / gbs / 1e3,
            "cached_bytes": self.cached_bytes,
            "cached_ratio": self.cached_ratio,
            "cached_us": None if gbs is None or self.cached_bytes is None else self.cached_bytes / gbs / 1e3,
        }


def formula(count: tuple[int, int]) -> str:
    """A count of elements as the headers write it.

    >>> formula((5, 2)), formula((1, 0)), formula((0, 1))
    ('5MN + 2M', 'MN', 'M')
    """
    parts = [f"{'' if factor == 1 else factor}{of}" for factor, of in zip(count, ("MN", "M"), strict=True) if factor]
    return " + ".join(parts) or "0"


def _bytes(traffic: Traffic, wide: Traffic | None, rows: int, n: int, itemsize: int) -> int:
    elements = sum(traffic.elements(rows, n))
    float32 = 0 if wide is None else sum(wide.elements(rows, n))
    return (elements - float32) * itemsize + float32 * 4


def predict(
    name: str, traffic: Traffic, cached: Traffic | None, rows: int, n: int, dtype: torch.dtype, note: str = ""
) -> Prediction:
    """The prediction for one contestant from its counts.

    Args:
        name: of the contestant; the naive rungs hold float32 between their steps, whatever `dtype` is.
        traffic: elements asked of memory.
        cached: elements that reach it while a cache serves the re-reads, or None.
        rows, n: of the matrix, at least 1.
        dtype: of the matrix and of the result.
        note: kept as it is.

    >>> predict("three passes", Traffic((3, 0), (1, 0)), LEAST, 4, 8, torch.float32).ratio
    2.0
    """
    least = _bytes(LEAST, None, rows, n, dtype.itemsize)
    wide = _FLOAT32.get(name)
    cached_bytes = None if cached is None else _bytes(cached, wide, rows, n, dtype.itemsize)
    return Prediction(name, traffic, rows, n, _bytes(traffic, wide, rows, n, dtype.itemsize), least, cached_bytes, note)


def predict_onepass(rows: int, n: int, dtype: torch.dtype, device: str) -> Prediction:
    """The prediction for onepass itself, by the plan that it has for the matrix on `device`.

    Args:
        rows, n: of the matrix, at least 1.
        dtype: of the matrix and of the result.
        device: as `onepass.explain` takes it; it need not be here.

    Raises:
        ValueError, RuntimeError: as `onepass.explain` does.
    """
    import onepass

    plan = onepass.explain((rows, n), dtype=dtype, device=device, bandwidth=1.0)  # given, so that none is measured
    # The CPU engine cuts a long row into chunks and reads them again once the state of the row is known.
    chunks = plan.engine == "cpu" and plan.launch["route"] == "row_chunks"
    streams = plan.tier in ("twopass", "online") or chunks
    twice = f"; a row of {n} elements is read twice" if streams else ""
    traffic, cached = (_TWICE, LEAST) if streams else (LEAST, None)
    if again := int(plan.launch.get("read_again", 0)):
        twice = f"; {again} elements of a row, which do not fit the chip, are read twice"
        traffic, cached = Traffic((1, again), (1, 0)), LEAST
    note = f"onepass: {plan.engine} engine, tier {plan.tier}{twice}"
    return predict("onepass", traffic, cached, rows, n, dtype, note)


def predictions(
    rows: int, n: int, dtype: torch.dtype, device: str = "cpu", only: Sequence[str] = ()
) -> list[Prediction]:
    """The predictions for every rung in rising order, with `least` before them and onepass after them.

    No rung is run, so that each is predicted, whether it can run here and takes the shape or not.

    Args:
        rows, n: of the matrix, at least 1.
        dtype: of the matrix: float32, float16 or bfloat16.
        device: that onepass plans for.
        only: names of rungs, or "onepass"; all where it is empty. `least` always comes.

    Raises:
        ValueError: for an unknown name, with those there are; and as `predict_onepass` does.

    >>> [(p.name, p.ratio) for p in predictions(4096, 1024, torch.float32, only=["triton-row"])]
    [('least', 1.0), ('triton-row', 1.0)]
    """
    for name in only:
        if name not in NAMES:
            raise ValueError(f"unknown rung {name!r}: there are {', '.join(NAMES)}")
    made = [predict("least", LEAST, None, rows, n, dtype)]
    for rung in RUNGS.values():
        if not only or rung.name in only:
            note = ""
            if rung.name in _FLOAT32 and dtype.itemsize < 4:
                note = f"{rung.name}: all between the matrix and the result is float32"
            made.append(predict(rung.name, rung.header.traffic, rung.header.cached, rows, n, dtype, note))
    if not only or "onepass" in only:
        made.append(predict_onepass(rows, n, dtype, device))
    return made
