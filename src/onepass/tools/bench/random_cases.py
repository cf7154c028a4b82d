"""Cases made from the options: random shapes drawn from a seed, and series in which a length grows by one. Nothing here
imports torch.

`onepass bench random` draws `random/CLASS` suites, whose lengths nobody has tuned for. `onepass bench slide` makes
`slide/SERIES` suites, which show a sudden loss of speed between two neighbouring lengths. `onepass bench scores`
(score_cases.py) draws arguments too, and `onepass bench segments` (segment_cases.py) draws lengths of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from random import Random
from typing import Any
from zlib import crc32

from onepass.tools.bench.cases import CPU_DTYPES, ITEMSIZE, Case, name_case

ABOUT = {
    "random": "shapes drawn by --seed, --count per class (--classes), which move as much as --mb says",
    "slide": "one length moves by one around powers of two and between them (--classes chooses the series)",
    "losses": "cross-entropy, and log-probabilities with the entropy, forward and with the backward",
    "segments": "rows of unequal length: named, a sweep of the mean length, and --count per random class (--classes)",
    "sharded": "rows split over --ranks GPUs, or processes of a CPU: functions, odd sizes, single phases (--classes)",
    "scores": "scale, bias, mask, windows, softcap and sink: named cases, and --count per random class (--classes)",
}
MB = 1_000_000
SLIDE_BYTES = 256 * MB  # the bytes that a case of `slide` moves at most
LONG_ROW = 1 << 16  # the least length of "few long rows"
DTYPES, SLIDE_DTYPES = CPU_DTYPES, ("float32", "bfloat16")
_QUICK = ("cpu", "cuda")

Drawn = dict[str, Any]  # the shape, and optionally dim, layout, scores and direction


def log_uniform(rng: Random, low: int, high: int) -> int:
    """A whole number from `low` to `high`, log-uniform."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def pick(rng: Random, items: Sequence[Any]) -> Any:
    return items[int(len(items) * rng.random())]


def _rows(rng: Random, elements: int) -> Drawn:
    n = log_uniform(rng, 2, 300_000)
    return {"shape": (max(1, elements // n), n)}


def _few_long_rows(rng: Random, elements: int) -> Drawn:
    m = log_uniform(rng, 1, max(1, min(64, elements // LONG_ROW)))
    return {"shape": (m, elements // m)}


def _other_dim(rng: Random, elements: int) -> Drawn:
    n, b = log_uniform(rng, 2, 20_000), log_uniform(rng, 2, 6_000)
    return {"shape": (max(1, elements // (n * b)), n, b), "dim": 1}


def _strided(rng: Random, elements: int) -> Drawn:
    a, n, b = _other_dim(rng, elements)["shape"]
    layout = pick(rng, ("transposed", "sliced", "permuted", "channels_last"))
    if layout == "channels_last":
        height = isqrt(b)
        return {"shape": (a, n, height, b // height), "dim": pick(rng, (1, 3)), "layout": layout}
    if layout == "permuted":
        layout += " " + pick(rng, ("1,0,2", "1,2,0", "2,0,1", "2,1,0"))
    return {"shape": (a, n, b), "dim": pick(rng, (1, 2)), "layout": layout}


@dataclass(frozen=True)
class Class:
    """A class of random cases. A draw gives the shape, one of `functions`, and the options of the case."""

    shape: Callable[[Random, int], Drawn]
    functions: tuple[str, ...] = ("softmax",)
    direction: str = "forward"
    out_dtype: str | None = None
    in_place: bool = False


_WITH_LOG = ("softmax", "log_softmax")
CLASSES = {
    "rows": Class(_rows),
    "few-long-rows": Class(_few_long_rows),
    "other-dim": Class(_other_dim),
    "strided": Class(_strided),
    "logsumexp": Class(_rows, ("logsumexp",)),
    "log-softmax": Class(_rows, ("log_softmax",)),
    "gradient-rows": Class(_rows, _WITH_LOG, "backward"),
    "gradient-other-dim": Class(_other_dim, _WITH_LOG, "backward"),
    "in-place": Class(_rows, in_place=True),
    "wider-output": Class(_rows, out_dtype="float32"),
}


def draw(
    seed: int,
    count: int,
    classes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    moves: tuple[float, float] = (8 * MB, 640 * MB),
    suite: str = "random",
    known: dict[str, Class] = CLASSES,
    make: Callable[..., Case] = name_case,
) -> list[Case]:
    """`count` cases of each class, one dtype each. Each moves between `moves[0]` and `moves[1]` bytes.

    The cases of a class do not depend on the other classes, and the first cases do not depend on `count`. Raises
    ValueError for an unknown class.
    """
    cases: list[Case] = []
    least, most = moves
    for name in known_names(classes, known):
        of, rng = known[name], Random(crc32(f"{seed}/{name}".encode()))
        fitting = [d for d in dtypes or DTYPES if not of.out_dtype or ITEMSIZE[d] < ITEMSIZE[of.out_dtype]]
        found: dict[tuple[str, str], Case] = {}
        while fitting and len(found) < count:
            dtype, size = pick(rng, fitting), least * (most / least) ** rng.random()
            options = {"function": pick(rng, of.functions), "direction": of.direction, "out_dtype": of.out_dtype}
            drawn = of.shape(rng, int(size / _bytes_per_element(dtype, **options)))
            options |= {"dtypes": (dtype,), "quick": _QUICK, "in_place": of.in_place}
            case = make(f"{suite}/{name}", **options | drawn)
            if least <= case.bytes(dtype) <= most:
                found.setdefault((case.name, dtype), case)
        cases += found.values()
    return cases


def _bytes_per_element(dtype: str, **options: Any) -> int:
    """The bytes that a case moves for each element of a long row."""
    return Case("", "", (1, 1 << 20), **options).bytes(dtype) >> 20


def known_names(names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown class {name!r}: there are {', '.join(known)}")
    return names or [*known]


def spread_compile(cases: Sequence[Case], count: int, compiled: tuple[str, ...] = ("torch-compile",)) -> list[Case]:
    """The cases, of which only `count`, evenly spread, run with torch.compile."""

    def chosen(i: int) -> bool:
        return (i + 1) * count // len(cases) > i * count // len(cases)

    return [case if chosen(i) else replace(case, without=compiled) for i, case in enumerate(cases)]


# Series in which a length grows by one

# For each series: the dim whose length grows, the shape (dim 0 is chosen to fill the bytes), and the last power of two.
SERIES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "rows": (1, (0, 0), 1 << 18),
    "other-dim-n": (1, (0, 0, 100), 1 << 13),
    "other-dim-b": (2, (0, 100, 0), 1 << 13),
}


def lengths(last: int) -> list[int]:
    """Five neighbours around each power of two from 8 to `last`, and three around the middle between two of them.

    >>> lengths(16)
    [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    """
    powers = [1 << i for i in range(3, last.bit_length())]
    around = [p + i for p in powers for i in range(-2, 3)]
    between = [3 * p // 2 + i for p in powers[:-1] for i in (-1, 0, 1)]
    return sorted({*around, *between})


def slide(series: Sequence[str] = (), dtypes: Sequence[str] = (), most: int = SLIDE_BYTES) -> list[Case]:
    """The cases of each series and dtype, from the shortest length to the longest, which move about `most` bytes.

    Raises ValueError for an unknown series.
    """
    cases = []
    for name in known_names(series, SERIES):
        axis, template, last = SERIES[name]
        for dtype in dtypes or SLIDE_DTYPES:
            for length in lengths(last):
                shape = [*template]
                shape[axis] = length
                shape[0] = max(1, most // (prod(shape[1:]) * _bytes_per_element(dtype)))
                dim = -1 if len(shape) == 2 else 1
                cases.append(name_case(f"slide/{name}", tuple(shape), dim, dtypes=(dtype,), quick=_QUICK))
    return cases


def moved_length(suite: str, shape: Sequence[int]) -> int:
    """The length that grows in the series of a `slide/` suite, in one case."""
    return shape[SERIES[suite.removeprefix("slide/")][0]]


def largest_drop(fractions: dict[int, float]) -> tuple[float, int, int] | None:
    """The largest loss of speed from a length to a neighbour, longer or shorter by one: (loss, from, to).

    >>> largest_drop({255: 0.9, 256: 1.0, 257: 0.75, 300: 0.1})
    (0.25, 256, 257)
    """
    pairs = [
        (1 - fractions[to] / fractions[at], at, to) for at in fractions for to in (at - 1, at + 1) if to in fractions
    ]
    return max(pairs, default=None)
