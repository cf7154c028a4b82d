"""The cases of `onepass bench segments`: named ones, a sweep over the mean length, and random ones. Nothing here
imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

from onepass.tools.bench.cases import DIRECTIONS, ITEMSIZE, Case, Shape
from onepass.tools.bench.random_cases import Class, Drawn, draw, known_names, log_uniform, pick

SUITE = "segments"
DTYPES = ("float32", "bfloat16")
LENGTHS = ("random", "Zipf", "equal")  # cuts at random places; proportional to 1, 1/2, 1/3, ..., shuffled; all equal
KINDS = ("named", "sweep", "random")
SWEEP = f"{SUITE}/sweep"  # the direction is appended
CLASSES = tuple(f"{kind}-{direction}" for kind in KINDS for direction in DIRECTIONS)
MEAN_LENGTHS = (*(m * 10**e for e in range(5) for m in (1, 2, 5)), 100_000)
# The shape (items, and heads), the number of segments, and their lengths: the edges of a graph, with 8 and with 64
# heads, a graph with a few hubs, documents. On a CPU all are smaller.
NAMED: dict[str, tuple[tuple[Shape, int, str], ...]] = {
    "cuda": (
        ((20_000_000,), 1_000_000, "random"),
        ((4_000_000, 8), 200_000, "random"),
        ((4_000_000, 64), 200_000, "random"),
        ((20_000_000,), 1_000_000, "Zipf"),
        ((20_000_000,), 2_000, "equal"),
    ),
    "cpu": (
        ((4_000_000,), 200_000, "random"),
        ((500_000, 8), 25_000, "random"),
        ((100_000, 64), 5_000, "random"),
        ((4_000_000,), 200_000, "Zipf"),
        ((4_000_000,), 400, "equal"),
    ),
}
SWEEP_ITEMS = {"cuda": 20_000_000, "cpu": 2_000_000}
_OFFSET_BYTES = 8


@dataclass(frozen=True)
class SegmentCase(Case):
    """Segments of dim 0."""

    segments: int = 1
    lengths: str = "random"

    def bytes(self, dtype: str) -> int:
        """The tensors of the shape, and the offsets."""
        moves = 2 + (self.direction == "backward")
        return moves * prod(self.shape) * ITEMSIZE[dtype] + _OFFSET_BYTES * (self.segments + 1)


def make(
    seed: int, count: int, classes: Sequence[str], dtypes: Sequence[str], moves: tuple[float, float], kind: str
) -> list[Case]:
    """The cases for a device type, of the chosen classes. Raises ValueError for an unknown class."""
    cases: list[Case] = []
    for name in known_names(classes, CLASSES):
        of, _, direction = name.partition("-")
        if of == "random":
            drawn = {name: Class(_segments, direction=direction)}
            cases += draw(seed, count, (), dtypes or DTYPES, moves, SUITE, drawn, _name_case)
            continue
        named = of == "named"
        options: dict[str, Any] = {"direction": direction, "quick": ("cpu", "cuda") if named else ()}
        for shape, segments, lengths in NAMED[kind] if named else _sweep(SWEEP_ITEMS[kind]):
            options |= {"segments": segments, "lengths": lengths}
            options |= {} if named else {"name": f"mean length {shape[0] // segments}"}
            cases += [_name_case(f"{SUITE}/{name}", shape, **options, dtypes=(d,)) for d in dtypes or DTYPES]
    return cases


def mean_length(name: str, items: int) -> int:
    """The mean length of the segments of a case, read from its name.

    >>> mean_length("mean length 8", 1024), mean_length("1024 items, 16 segments, random", 1024)
    (8, 64)
    """
    segments = re.search(r"(\d+) segments", name)
    return items // int(segments[1]) if segments else int(name.rpartition(" ")[2])


def _sweep(items: int) -> list[tuple[Shape, int, str]]:
    return [((items,), items // mean, "random") for mean in MEAN_LENGTHS]


def _segments(rng: Random, elements: int) -> Drawn:
    """Random numbers of heads, segments and items, whose product of heads and items is limited by `elements`."""
    heads = pick(rng, ((), (), (2,), (3,), (8,), (log_uniform(rng, 2, 128),)))
    items = max(1, elements // prod(heads))
    mean = log_uniform(rng, 1, 100_000)
    return {"shape": (items, *heads), "segments": max(1, items // mean), "lengths": pick(rng, LENGTHS)}


def _name_case(suite: str, shape: Shape, *, name: str = "", **options: Any) -> SegmentCase:
    """A case that is named after its shape and its segments."""
    items = " x ".join(map(str, shape)) + " items" * (len(shape) == 1)
    name = name or f"{items}, {options['segments']} segments, {options['lengths']}"
    return SegmentCase(suite, name, shape, 0, **options)
