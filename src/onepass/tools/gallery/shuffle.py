"""The butterfly exchange of a warp: the value that `__shfl_xor_sync` gives each lane, and the result of merging it.

With mask m, a lane reads from the lane whose number differs in bit m. The masks go from half the number of lanes down
to 1: first the two half-warps exchange values, then the quarters, at last neighbours. After the last exchange
every lane has merged the values of all lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["OPS", "butterfly", "summary"]

OPS = ("max", "sum", "id")


def butterfly(values: Sequence[int], op: str) -> list[tuple[int, list[int]]]:
    """(mask, the value of each lane after the exchange with that mask), from the largest mask to 1.

    `values` are the values of 2, 4, 8, 16 or 32 lanes at the start. With `max` and `sum` a lane merges the value that
    it receives into its own. With `id` it only receives, and each exchange is of the values at the start.

    Raises ValueError for another number of lanes or another op.

    >>> butterfly([0, 1, 2, 3], "max")
    [(2, [2, 3, 2, 3]), (1, [3, 3, 3, 3])]
    >>> butterfly([0, 1, 2, 3], "sum")
    [(2, [2, 4, 2, 4]), (1, [6, 6, 6, 6])]
    >>> butterfly([0, 1, 2, 3], "id")
    [(2, [2, 3, 0, 1]), (1, [1, 0, 3, 2])]
    """
    lanes = len(values)
    if lanes not in (2, 4, 8, 16, 32):
        raise ValueError(f"a butterfly takes 2, 4, 8, 16 or 32 lanes, got {lanes}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    current, steps, mask = list(values), [], lanes // 2
    while mask:
        received = [current[lane ^ mask] for lane in range(lanes)]
        if op == "id":
            steps.append((mask, received))
        else:
            current = [max(a, b) if op == "max" else a + b for a, b in zip(current, received, strict=True)]
            steps.append((mask, current))
        mask //= 2
    return steps


def summary(values: Sequence[int], op: str) -> str:
    """A sentence about the result of `butterfly(values, op)`.

    >>> summary([0, 1, 2, 3], "sum")
    'After 2 exchanges all 4 lanes hold 6, the sum.'
    """
    steps = butterfly(values, op)
    if op == "id":
        first = f"with mask {steps[0][0]} lower and upper lanes swap, " if len(steps) > 1 else ""
        return f"Each lane has read the value of lane ^ mask: {first}with mask 1 neighbours swap."
    count = f"{len(steps)} exchange{'s' if len(steps) > 1 else ''}"
    return f"After {count} all {len(values)} lanes hold {steps[-1][1][0]}, the {'largest' if op == 'max' else 'sum'}."
