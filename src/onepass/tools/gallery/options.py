"""The launch parameters of the rungs: what each does, and which values it takes.

num_warps    Triton: warps of a program, so that 32 * num_warps threads share a row. More threads hold a longer row in
             registers; fewer leave less to merge. A power of two.
num_stages   Triton: how many rows (chunks) of a loop are in flight at once, each buffered in shared memory while the
             one before is computed. Without a loop it does nothing.
num_ctas     Triton: thread blocks of a cluster that share one program, compute capability 9.0 and later.
maxnreg      Triton and CUDA: the most registers of a thread. Fewer let more threads be resident; too few spill.
block_size   Triton: elements of the tile, a power of two; a row's tile must cover the row.
programs     Triton, persistent: programs of the launch.
threads      CUDA: threads of a block, a multiple of 32.
blocks       CUDA: blocks of the launch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ABOUT", "check"]

# name -> (least, most, what else it must be)
_TAKEN = {
    "num_warps": (1, 32, "a power of two"),
    "num_stages": (1, 16, ""),
    "num_ctas": (1, 16, "a power of two"),
    "maxnreg": (16, 255, ""),
    "block_size": (1, 1 << 20, "a power of two"),
    "programs": (1, 2**31 - 1, ""),
    "threads": (32, 1024, "a multiple of 32"),
    "blocks": (1, 2**31 - 1, ""),
}
_MUST = {
    "": lambda value: True,
    "a power of two": lambda value: value & (value - 1) == 0,
    "a multiple of 32": lambda value: value % 32 == 0,
}
ABOUT = {
    "num_warps": "warps of a Triton program",
    "num_stages": "rows or chunks in flight in a Triton loop",
    "num_ctas": "thread blocks of a cluster that share a Triton program",
    "maxnreg": "the most registers of a thread",
    "block_size": "elements of a Triton program's tile",
    "programs": "programs of the persistent launch",
    "threads": "threads of a CUDA block",
    "blocks": "blocks of the CUDA launch",
}


def check(what: str, name: str, value: Any) -> None:
    """Raises TypeError or ValueError for a value that the parameter does not take.

    >>> check("threads", "threads", 100)
    Traceback (most recent call last):
        ...
    ValueError: threads must be 32 to 1024, a multiple of 32; got 100
    """
    least, most, must = _TAKEN[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {type(value).__name__} {value!r}")
    if not least <= value <= most or not _MUST[must](value):
        raise ValueError(f"{what} must be {least} to {most}{', ' + must if must else ''}; got {value}")
