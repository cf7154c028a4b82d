"""The cases of `onepass bench scores`: named cases from practice, and random ones. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from random import Random
from typing import Any

from onepass.tools.bench.cases import Case, Shape, name_case
from onepass.tools.bench.random_cases import Class, Drawn, draw, known_names, log_uniform, pick

SUITE = "scores"
MOVES = {"cuda": (16.0, 320.0), "cpu": (2.0, 32.0)}  # MB, by the device type: what a drawn case moves
FIXED = ("forward", "backward")
# Batch, heads, queries and keys of attention, and a vocabulary
SIZES = {"cuda": (8, 32, 1024, 128256), "cpu": (2, 8, 512, 32064)}


def make(
    seed: int, count: int, classes: Sequence[str], dtypes: Sequence[str], moves: tuple[float, float], kind: str
) -> tuple[list[Case], list[Case]]:
    """The named cases for a device type, and the drawn ones, of the chosen classes. Raises ValueError for an unknown
    class."""
    chosen = known_names(classes, [*FIXED, *CLASSES])
    named = [case for case in fixed(*SIZES[kind], dtypes) if case.suite.removeprefix(f"{SUITE}/") in chosen]
    drawn = [name for name in chosen if name in CLASSES]
    return named, draw(seed, count, drawn, dtypes, moves, SUITE, CLASSES) if drawn else []


def fixed(batch: int, heads: int, length: int, vocabulary: int, dtypes: Sequence[str] = ()) -> list[Case]:
    """The named cases."""
    cases = []

    def add(shape: Shape, dim: int = -1, dtype: str = "bfloat16", backward: bool = False, **scores: Any) -> None:
        grads = scores.pop("grads", ())
        for direction in FIXED[: 1 + backward]:
            options: dict[str, Any] = {"direction": direction, "grads": grads if direction == "backward" else ()}
            options |= {"dtypes": tuple(dtypes) or (dtype,), "quick": ("cpu", "cuda"), "scores": tuple(scores.items())}
            cases.append(name_case(f"{SUITE}/{direction}", shape, dim, **options))

    x, mask = (batch, heads, length, length), (batch, 1, length, length)
    add(x, backward=True)
    add(x, scale=0.125, backward=True)
    add(x, scale=0.125, mask=mask, backward=True)
    add(x, scale=0.125, bias=(1, heads, length, length), backward=True)
    add(x, bias=(1, heads, length, length), grads=("bias",), backward=True)
    add(x, causal=True, backward=True)
    add(x, window=(length // 4, 0))
    add(x, alibi=(heads,))
    add(x, softcap=50.0, backward=True)
    add(x, sink=(heads, 1, 1), backward=True)
    add((8 * batch, vocabulary), dtype="float32", scale=(8 * batch, 1), backward=True)
    odd = 2 * length - 1
    add((2 * batch, heads // 2, odd, odd), scale=0.125, mask=(2 * batch, 1, odd, odd), backward=True)
    add((8 * batch, heads, 1, 8 * length), causal=True, offset=6 * length - 1)
    add(x, 1, mask=(batch, heads, 1, length))
    return sorted(cases, key=lambda case: FIXED.index(case.direction))


def _attention(rng: Random, elements: int, other_dim: bool = False) -> Drawn:
    """A shape of two to four dims, and at least one of the arguments, each of which broadcasts along some of the dims.

    Every row has an element that is not masked out: masks keep the first element of each row and are not combined with
    windows, and windows are drawn so that each query has a key.
    """
    rank = pick(rng, (2, 3, 4))
    queries, keys = sorted((log_uniform(rng, 1, 4096), log_uniform(rng, 8, 16384)))
    inner = {2: (log_uniform(rng, 8, 200_000),), 3: (queries, keys), 4: (log_uniform(rng, 1, 64), queries, keys)}[rank]
    shape = (max(1, elements // prod(inner)), *inner)
    dim = pick(rng, [d for d in range(rank - 1) if shape[d] > 1] or [rank - 1]) if other_dim else rank - 1

    def some(row: int) -> Shape:
        """The shape with some of its dims set to size 1. `row` is the size of the reduced dim."""
        return tuple(row if d == dim else pick(rng, (1, size)) for d, size in enumerate(shape))

    def happens(share: float) -> bool:
        return rng.random() < share

    scores: dict[str, Any] = {}
    has_positions = not other_dim and shape[-2] <= shape[-1]
    while not scores:
        if happens(0.5):
            scores["scale"] = pick(rng, (0.125, some(1)))
        if happens(0.5):
            scores["bias"] = some(shape[dim])
        if happens(0.5):
            scores["mask"] = some(shape[dim])
        if has_positions and happens(0.5):
            if "mask" not in scores and happens(0.5):
                scores["window"] = (log_uniform(rng, 1, shape[-1]), pick(rng, (0, None)))
            else:
                scores["causal"] = True
            if happens(0.5):
                scores["offset"] = int((shape[-1] - shape[-2] + 1) * rng.random())
        if has_positions and rank > 2 and happens(0.25):
            scores["alibi"] = tuple(pick(rng, (1, size)) for size in shape[:-2])
        if happens(0.25):
            scores["softcap"] = pick(rng, (20.0, 50.0))
        if happens(0.25):
            scores["sink"] = pick(rng, (0.0, some(1)))
    drawn: Drawn = {"shape": shape, "dim": -1 if dim == rank - 1 else dim, "scores": tuple(scores.items())}
    return drawn | {"direction": pick(rng, FIXED)} if other_dim else drawn


CLASSES = {
    "random-forward": Class(_attention),
    "random-backward": Class(_attention, direction="backward"),
    "random-other-dim": Class(partial(_attention, other_dim=True)),  # in both directions
}
