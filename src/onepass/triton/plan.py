"""Chooses the tier of a call and its launch numbers, as data. It needs neither a GPU nor triton."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

__all__ = ["Plan", "plan_backward", "plan_forward", "plan_scored"]

# Not tuned: these numbers follow from the registers that ptxas reports for sm_80, 90, 100 and 120 (2026-11), not from
# timings. The key is the bytes of the widest type of a call. Half types count as 4, because they are computed in
# float32.
#
# Row tier. Up to 256 columns, 128 threads (4 warps) share a tile of _SHORT elements, and a warp reads whole rows in
# 16-byte pieces. For longer rows, the tile has as many elements as the first key of _ROWS that covers the row, with
# that key's threads. Up to 1024 columns of float32 it is a single warp, so that no barrier is needed. Beyond that a
# thread has 32 elements (56 to 70 registers), or 16 of float64. A tile of twice the last width spills. Gradients hold
# two operands per element, so a thread has half as many elements.
_SHORT = {4: 2048, 8: 1024}
_ROWS = {
    4: {1024: 32, 2048: 64, 4096: 128, 8192: 256, 16384: 512, 32768: 1024},
    8: {512: 32, 2048: 128, 4096: 256, 8192: 512},
}
_SHORT_BACKWARD = {4: 1024, 8: 512}
_ROWS_BACKWARD = {
    4: {512: 32, 1024: 64, 2048: 128, 4096: 256, 8192: 512, 16384: 1024},
    8: {1024: 128, 2048: 256, 4096: 512},
}
# Online tier: threads, elements of a chunk per thread, and the most of them in one lane (1 more exp for every 4). 32
# elements in each of 1024 threads spill (bfloat16 at odd row lengths: 184 bytes). 512 threads of float64 spill too.
_ONLINE_THREADS = {4: 1024, 8: 256}
_ONLINE_ELEMENTS = 16
_ONLINE_ELEMENTS_BACKWARD = 8
_ONLINE_DEPTH = 4
# AMD counts the threads of a launch in 32 bits, NVIDIA its programs in 31 bits. Larger launches are split.
_MOST_THREADS = 2**32 - 1
_MOST_PROGRAMS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tier of a call and its launch numbers.

    ``tier``: "row" (the row stays on the chip: one read, one write) or "online" (streamed: two reads, one write).
    ``block``: columns of a program's tile, a power of two; the row tier needs ``block >= n``.
    ``rows``: rows of a program's tile (online: 1). ``depth``: elements that a lane merges at once (row tier: 1). An
    online chunk has ``depth * block`` elements. ``grid``: programs of one launch; more rows than ``grid * rows`` take
    several launches.
    """

    tier: str
    block: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int
    grid: int

    def as_dict(self) -> dict[str, int | str]:
        return dataclasses.asdict(self)

    def constants(self) -> dict[str, int]:
        """The compile-time arguments of the kernel."""
        if self.tier == "row":
            return {"ROWS": self.rows, "BLOCK": self.block}
        return {"DEPTH": self.depth, "LANES": self.block}

    def check(self, n: int) -> None:
        """Raise ValueError if this plan does not support rows of ``n`` elements."""
        for name in ("block", "rows", "depth", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"a plan's {name} must be a power of two, got {value}")
        if self.grid < 1:
            raise ValueError(f"a plan's grid must be at least 1, got {self.grid}")
        if self.tier == "row":
            if self.block < n or self.depth != 1:
                raise ValueError(f"the row tier needs block >= n = {n} and depth 1, got {self}")
        elif self.tier == "online":
            if self.rows != 1:
                raise ValueError(f"the online tier takes one row per program, got {self}")
        else:
            raise ValueError(f"a plan's tier must be 'row' or 'online', got {self.tier!r}")


def plan_forward(
    rows: int, n: int, in_dtype: torch.dtype, out_dtype: torch.dtype, device_properties: Any = None
) -> Plan:
    """The plan for ``rows`` rows of ``n`` elements, for every function.

    ``device_properties`` is the result of ``torch.cuda.get_device_properties``. Only its ``warp_size`` is used; without
    it the warp size is 32.

    >>> import torch
    >>> plan_forward(4096, 1000, torch.float32, torch.float32).tier
    'row'
    >>> plan_forward(8192, 151936, torch.bfloat16, torch.bfloat16).tier
    'online'
    """
    return _plan(False, rows, n, (in_dtype, out_dtype), getattr(device_properties, "warp_size", 32))


def plan_backward(rows: int, n: int, dtypes: tuple[torch.dtype, ...], device_properties: Any = None) -> Plan:
    """The plan for the gradients of ``rows`` rows of ``n`` elements, for every function.

    ``dtypes``: the dtypes of the saved tensor, of the upstream gradient, and of the input's gradient.

    >>> import torch
    >>> plan_backward(4096, 1000, (torch.float32, torch.float32, torch.float32)).tier
    'row'
    """
    return _plan(True, rows, n, dtypes, getattr(device_properties, "warp_size", 32))


def plan_scored(rows: int, n: int, dtypes: tuple[torch.dtype, ...], device_properties: Any = None) -> Plan:
    """The plan for a call with scores, forward or backward. It is that of a gradient, because both hold several
    operands per element. With all parts of a score at once the longest rows of the row tier spill up to 10 registers
    per thread.

    ``dtypes``: the dtypes of the operands and of the result, the input's first.
    """
    return plan_backward(rows, n, dtypes, device_properties)


@functools.lru_cache(maxsize=4096)
def _plan(backward: bool, rows: int, n: int, dtypes: tuple[torch.dtype, ...], warp: int) -> Plan:
    short, tiles, most_elements = (
        (_SHORT_BACKWARD, _ROWS_BACKWARD, _ONLINE_ELEMENTS_BACKWARD) if backward else (_SHORT, _ROWS, _ONLINE_ELEMENTS)
    )
    widest = 8 if max(dtype.itemsize for dtype in dtypes) == 8 else 4
    elements = short[widest] if n <= 256 else next((width for width in tiles[widest] if n <= width), None)
    if elements is not None:
        threads = 128 if n <= 256 else tiles[widest][elements]
        tier, depth, block = "row", 1, 1 << max(0, n - 1).bit_length()
        # Independent of the number of rows, so that a row's bits do not depend on other rows.
        tile_rows = elements // block
    else:
        # As many columns as the threads read at once, 16 bytes each. Then a lane lives in one thread.
        vector, threads = 16 // dtypes[0].itemsize, _ONLINE_THREADS[widest]
        tier, depth, block = "online", min(_ONLINE_DEPTH, most_elements // vector), threads * vector
        tile_rows = 1
    programs = -(-rows // tile_rows)
    num_warps = max(1, threads // warp)
    most = min(_MOST_PROGRAMS, _MOST_THREADS // (num_warps * warp))
    return Plan(tier, block, tile_rows, depth, num_warps, 1, max(1, min(programs, most)))
