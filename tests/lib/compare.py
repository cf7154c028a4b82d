"""Rows and files made by hand, for the tests of `onepass compare`."""

from dataclasses import replace
from typing import Any

from onepass.tools.bench.results import ENVIRONMENT, Results, Row

GPU = {**dict.fromkeys(ENVIRONMENT), "device": "H200", "device_type": "cuda", "onepass": "0.1.0", "date": "2026-11-21"}


def row(median: float | None = 100.0, spread: float | None = 0.0, **fields: Any) -> Row:
    """A row that is right and takes `median`, its quantiles `spread` below and above; None: no time, no quantiles."""
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
