"""Predicts the memory traffic of each variant for an M x N matrix, and how fast that lets it be.

The counts come from the headers of the variants. The unit is the minimum, which reads and writes each element once, as
a copy does. If memory is the limit, a variant that moves 4 times the minimum reaches 1/4 of a copy's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onepass.tools.gallery.variants import VARIANTS, Count, Traffic

if TYPE_CHECKING:
    from onepass import Explanation

__all__ = ["FLOAT32", "MINIMUM", "Prediction", "predict", "predict_all"]

MINIMUM = Traffic(Count(1), Count(1))
# The part of a header's counts that is float32 whatever the dtype of the matrix is. The naive variants read `x` twice
# and write the result in the dtype of the matrix; `shifted` (read once), `numerator` (read twice), and the maximum and
# the sum of each row are float32. The cast of the M maxima of a 2-byte dtype, M reads and M writes, is not counted.
FLOAT32 = dict.fromkeys(("naive", "naive-jit"), Traffic(Count(3, 2), Count(2, 2)))


@dataclass(frozen=True)
class Prediction:
    """The traffic of one contestant for a matrix: elements and bytes, all that it asks of memory.

    ratio: the bytes in units of the minimum, which is also the time in units of a copy's time. us: the microseconds
    that the bytes take, None if no bandwidth is known. cached: the part that remains while a cache serves the repeated
    reads; None if nothing is read twice.
    """

    reads: int
    writes: int
    reads_formula: str
    writes_formula: str
    bytes: int
    ratio: float
    copy_fraction: float
    us: float | None
    cached_bytes: int | None
    cached_ratio: float | None
    cached_us: float | None


def predict(
    traffic: Traffic,
    cached: Traffic | None,
    rows: int,
    n: int,
    dtype: torch.dtype,
    gbs: float | None = None,
    float32: Traffic | None = None,
) -> Prediction:
    """The prediction for one contestant: `gbs` is the bandwidth of a copy, in 1e9 bytes per second, and `float32` the
    part of its traffic that is float32 whatever the dtype of the matrix is.

    >>> predict(Traffic(Count(3), Count(1)), MINIMUM, 4, 8, torch.float32).ratio
    2.0
    """
    minimum = 2 * rows * n * dtype.itemsize
    wider = float32.elements(rows, n) * (4 - dtype.itemsize) if float32 else 0
    moved = traffic.elements(rows, n) * dtype.itemsize + wider
    from_memory = cached.elements(rows, n) * dtype.itemsize if cached else None
    return Prediction(
        reads=traffic.reads.of(rows, n),
        writes=traffic.writes.of(rows, n),
        reads_formula=str(traffic.reads),
        writes_formula=str(traffic.writes),
        bytes=moved,
        ratio=moved / minimum,
        copy_fraction=minimum / moved,
        us=moved / gbs / 1e3 if gbs else None,
        cached_bytes=from_memory,
        cached_ratio=from_memory / minimum if from_memory else None,
        cached_us=from_memory / gbs / 1e3 if gbs and from_memory else None,
    )


def predict_all(plan: Explanation, only: Sequence[str] = (), gbs: float | None = None) -> dict[str, Prediction]:
    """The predictions for "minimum", every variant of rows in order, and "onepass" by its plan; or for those of `only`.

    No variant is run, so that it is predicted even if it cannot run here or does not take the shape. Those that run on
    the device of the plan have a time if `gbs` is given. Raises ValueError for an unknown name.

    >>> import onepass
    >>> {name: p.ratio for name, p in predict_all(onepass.explain((4096, 1024), device="h200"), ["triton-row"]).items()}
    {'minimum': 1.0, 'triton-row': 1.0}
    """
    of_rows = {name: variant for name, variant in VARIANTS.items() if variant.computes == "rows"}
    known = (*of_rows, "onepass")
    for name in only:
        if name not in known:
            raise ValueError(f"unknown variant {name!r}: there are {', '.join(known)}")
    (rows, n), dtype = plan.shape, getattr(torch, plan.dtype)
    kind = "CPU" if plan.device == "cpu" else "GPU"
    found = {"minimum": predict(MINIMUM, None, rows, n, dtype, gbs)}
    for name, variant in of_rows.items():
        header, here = variant.header, gbs if kind in variant.runs_on else None
        found[name] = predict(header.traffic, header.cached, rows, n, dtype, here, FLOAT32.get(name))
    # The CPU engine cuts a long row into chunks and reads them again once the state of the row is known.
    twice = plan.tier in ("twopass", "online") or plan.launch.get("route") == "row_chunks"
    reads = Count(2) if twice else Count(1, int(plan.launch.get("read_again", 0)))
    cached = None if reads == Count(1) else MINIMUM
    found["onepass"] = predict(Traffic(reads, Count(1)), cached, rows, n, dtype, gbs)
    return {name: p for name, p in found.items() if not only or name in (*only, "minimum")}
