"""The butterfly exchange of a warp, lane by lane: what `__shfl_xor_sync` gives each lane, and what a merge makes of it.

With mask m, a lane reads from the lane whose number differs in the bit m. Masks from half the lanes down to 1 exchange
halves, then the halves of those, down to neighbours; after the last one every lane has merged the values of all.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["OPS", "butterfly", "sentence"]

OPS = ("max", "sum", "id")


def butterfly(values: Sequence[int], op: str) -> list[tuple[int, list[int]]]:
    """(mask, the value of each lane after the exchange with that mask), from the widest mask to 1.

    `values` are the lanes' own at the start: 2, 4, 8, 16 or 32 of them. With `max` and `sum` a lane merges what it
    receives into what it has; with `id` it only receives, and each exchange is of the values at the start.

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
    held, steps, mask = list(values), [], lanes // 2
    while mask:
        received = [held[lane ^ mask] for lane in range(lanes)]
        if op == "id":
            steps.append((mask, received))
        else:
            held = [max(a, b) if op == "max" else a + b for a, b in zip(held, received, strict=True)]
            steps.append((mask, held))
        mask //= 2
    return steps


def sentence(values: Sequence[int], op: str) -> str:
    """What `butterfly(values, op)` has done.

    >>> sentence([0, 1, 2, 3], "sum")
    'After 2 exchanges all 4 lanes hold 6, the sum.'
    """
    steps = butterfly(values, op)
    lanes, count = len(values), f"{len(steps)} exchange{'s' if len(steps) > 1 else ''}"
    if op == "id":
        halves = f"with mask {steps[0][0]} the halves swap, " if len(steps) > 1 else ""
        return f"Each lane has read the value of lane ^ mask: {halves}with mask 1 the neighbours swap."
    return f"After {count} all {lanes} lanes hold {steps[-1][1][0]}, the {'largest' if op == 'max' else 'sum'}."
