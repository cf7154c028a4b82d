"""Predicts the memory traffic of each variant for an M x N matrix, and how fast that lets it be.

The counts come from the headers of the variants. The unit is the minimum, which reads and writes each element once, as
a copy does. If memory is the limit, a variant that moves 4 times the minimum reaches 1/4 of a copy's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onepass.tools.gallery.variants import VARIANTS, Traffic, format_count

__all__ = ["MINIMUM", "NAMES", "Prediction", "predict", "predict_all", "predict_onepass"]

MINIMUM = Traffic(reads=(1, 0), writes=(1, 0))
NAMES = (*VARIANTS, "onepass")

# The part of a header's counts that is float32 whatever the dtype of the matrix is. The naive variants read `x` twice
# and write the result in the dtype of the matrix; `shifted` (read once), `numerator` (read twice), and the maximum and
# the sum of each row are float32. The cast of the M maxima of a 2-byte dtype, M reads and M writes, is not counted.
_FLOAT32 = dict.fromkeys(("naive", "naive-jit"), Traffic(reads=(3, 2), writes=(2, 2)))


@dataclass(frozen=True)
class Prediction:
    """The traffic of one contestant for a matrix of `rows` x `n`.

    bytes: all bytes that it asks of memory. minimum: the bytes of reading once and writing once.
    cached_bytes: the part of `bytes` that remains while a cache serves repeated reads; None if nothing is read twice.
    note: a sentence that belongs below the table, or nothing.
    """

    name: str
    traffic: Traffic
    rows: int
    n: int
    bytes: int
    minimum: int
    cached_bytes: int | None = None
    note: str = ""

    @property
    def reads(self) -> int:
        return self.traffic.elements(self.rows, self.n)[0]

    @property
    def writes(self) -> int:
        return self.traffic.elements(self.rows, self.n)[1]

    @property
    def ratio(self) -> float:
        """The bytes in units of the minimum, which is also the predicted time in units of a copy's time."""
        return self.bytes / self.minimum

    @property
    def cached_ratio(self) -> float | None:
        return None if self.cached_bytes is None else self.cached_bytes / self.minimum

    def as_dict(self, gbs: float | None = None) -> dict[str, Any]:
        """For JSON; with `gbs`, 1e9 bytes per second, also the microseconds that the bytes take."""
        return {
            "reads": self.reads,
            "writes": self.writes,
            "reads_formula": format_count(self.traffic.reads),
            "writes_formula": format_count(self.traffic.writes),
            "bytes": self.bytes,
            "ratio": self.ratio,
            "copy_fraction": 1 / self.ratio,
            "us": None if gbs is None else self.bytes / gbs / 1e3,
            "cached_bytes": self.cached_bytes,
            "cached_ratio": self.cached_ratio,
            "cached_us": None if gbs is None or self.cached_bytes is None else self.cached_bytes / gbs / 1e3,
        }


def predict(
    name: str, traffic: Traffic, cached: Traffic | None, rows: int, n: int, dtype: torch.dtype, note: str = ""
) -> Prediction:
    """The prediction for one contestant.

    Args:
        name: of the contestant; the naive variants compute in float32, whatever `dtype` is.
        traffic: elements asked of memory.
        cached: elements that reach memory while a cache serves repeated reads, or None.
        rows, n: of the matrix, at least 1.
        dtype: of the matrix and of the result.

    >>> predict("three passes", Traffic((3, 0), (1, 0)), MINIMUM, 4, 8, torch.float32).ratio
    2.0
    """
    float32 = sum(_FLOAT32[name].elements(rows, n)) if name in _FLOAT32 else 0

    def count_bytes(of: Traffic) -> int:
        return (sum(of.elements(rows, n)) - float32) * dtype.itemsize + float32 * 4

    minimum = 2 * rows * n * dtype.itemsize
    cached_bytes = None if cached is None else count_bytes(cached)
    return Prediction(name, traffic, rows, n, count_bytes(traffic), minimum, cached_bytes, note)


def predict_onepass(rows: int, n: int, dtype: torch.dtype, device: str) -> Prediction:
    """The prediction for onepass itself, from its plan for the matrix on `device`, as `onepass.explain` takes it.

    Raises ValueError and RuntimeError as `onepass.explain` does.
    """
    import onepass

    plan = onepass.explain(
        (rows, n), dtype=dtype, device=device, bandwidth=1.0
    )  # with a number, so that none is measured
    # The CPU engine cuts a long row into chunks and reads them again once the state of the row is known.
    chunked = plan.engine == "cpu" and plan.launch["route"] == "row_chunks"
    traffic, cached, twice = MINIMUM, None, ""
    if plan.tier in ("twopass", "online") or chunked:
        traffic, cached, twice = Traffic((2, 0), (1, 0)), MINIMUM, f"; a row of {n} elements is read twice"
    if again := int(plan.launch.get("read_again", 0)):
        twice = f"; {again} elements of a row do not fit on the chip and are read twice"
        traffic, cached = Traffic((1, again), (1, 0)), MINIMUM
    note = f"onepass: {plan.engine} engine, tier {plan.tier}{twice}"
    return predict("onepass", traffic, cached, rows, n, dtype, note)


def predict_all(
    rows: int, n: int, dtype: torch.dtype, device: str = "cpu", only: Sequence[str] = ()
) -> list[Prediction]:
    """The predictions for `minimum`, every variant in order, and onepass.

    No variant is run, so that it is predicted even if it cannot run here or does not take the shape.

    Args:
        rows, n: of the matrix, at least 1.
        dtype: of the matrix: float32, float16 or bfloat16.
        device: of onepass's plan.
        only: names of variants, or "onepass"; empty for all. `minimum` always comes first.

    Raises:
        ValueError: for an unknown name, with the known ones; and as `predict_onepass` does.

    >>> [(p.name, p.ratio) for p in predict_all(4096, 1024, torch.float32, only=["triton-row"])]
    [('minimum', 1.0), ('triton-row', 1.0)]
    """
    for name in only:
        if name not in NAMES:
            raise ValueError(f"unknown variant {name!r}: there are {', '.join(NAMES)}")
    found = [predict("minimum", MINIMUM, None, rows, n, dtype)]
    for name, variant in VARIANTS.items():
        if not only or name in only:
            note = f"{name}: all steps between the matrix and the result are float32"
            note = note if name in _FLOAT32 and dtype.itemsize < 4 else ""
            found.append(predict(name, variant.header.traffic, variant.header.cached, rows, n, dtype, note))
    if not only or "onepass" in only:
        found.append(predict_onepass(rows, n, dtype, device))
    return found
