"""Which kernels warming up takes: no more than so many, and those of every call and gradient, over rows and over other
dims."""

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch

from lib.support import slow, thin, thin_product, thin_tuples
from lib.warmup import (
    BF16,
    F16,
    F32,
    F64,
    FAMILY,
    TYPES,
    addresses_of,
    column_kernel,
    compiled_in,
    plan_of,
    plan_of_call,
    random_plans,
)
from onepass import native
from onepass.validation import reduces_to

FORWARD, BACKWARD, BROADCAST = native.PASSES
MOST = 320  # kernels of one function for a pair of types: 50 s of compiling at worst in one process
MOST_OF_GRADIENTS = 250
MOST_OF_COLUMNS = {FORWARD: 2000, BACKWARD: 1500, BROADCAST: 1800}


def kernels(function: str, types: tuple, arch: int, lengths: Any = (), which: str = FORWARD, *dims: bool) -> dict:
    return native.kernels_to_warm(function, *types, -1, arch, lengths, which, *dims)


def functions_of(which: str, x_type: torch.dtype, y_type: torch.dtype) -> tuple[str, ...]:
    given, result = (x_type, y_type) if which == FORWARD else (y_type, x_type)
    both = which != BROADCAST and reduces_to("logsumexp", given, result)
    return ("softmax", "logsumexp") if both else ("softmax",)


@pytest.mark.parametrize("arch", [slow(80), 90, slow(100), slow(120)])
@pytest.mark.parametrize(("x_type", "y_type"), thin_tuples(TYPES, 6), ids=lambda t: str(t)[6:])
def test_the_number_of_kernels_is_bounded(x_type, y_type, arch):
    types, back = (x_type, y_type), (y_type, x_type)
    for function in FAMILY:
        assert 10 < len(kernels(function, types, arch)) <= MOST
        counts = [len(kernels(function, back, arch, (), which)) for which in (BACKWARD, BROADCAST)]
        assert 10 < counts[1] < counts[0]
        assert sum(counts) < MOST_OF_GRADIENTS
    if reduces_to("logsumexp", x_type, y_type):
        assert 10 < len(kernels("logsumexp", types, arch)) <= MOST * 3 // 4
        assert 10 < len(kernels("logsumexp", back, arch, (), BACKWARD)) < MOST_OF_GRADIENTS // 3
        assert not kernels("logsumexp", back, arch, (), BROADCAST)


# By length: the most kernels of gradients, each with values and broadcast.
NARROW = {1: (9, 0), 2: (2, 1), 33: (4, 1), 128: (4, 1), 4096: (4, 1), 50257: (12, 4), 2**22: (4, 2)}


@pytest.mark.parametrize("n", thin(NARROW, 2))
def test_lengths_narrow_it_down(n):
    """Rows of one element have no kernel for a broadcast gradient, and are columns side by side."""
    kinds = ("softmax", (BF16, BF16), 90)
    for which, bound in zip(native.PASSES, (24, *NARROW[n]), strict=True):
        some = kernels(*kinds, [n], which)
        assert min(bound, 1) <= len(some) == len(set(some)) <= bound
    assert len(kernels(*kinds, [n])) < len(kernels(*kinds, [n, 128, 128256, 1000])) < len(set(kernels(*kinds)))
    assert 8 <= len(of_columns(kernels(*kinds, [n], FORWARD, True))) <= 560


EACH = [(arch, *types, which) for arch in (90, 80) for types in TYPES for which in native.PASSES]


@pytest.mark.parametrize(
    ("arch", "x_type", "y_type", "which"),  # each pair of types by one pass in turn
    [each if k % 3 == k // 3 % 3 and each[0] == 90 else slow(*each) for k, each in enumerate(EACH)],
    ids=lambda t: str(t).removeprefix("torch."),
)
def test_every_length_is_covered(arch, x_type, y_type, which):
    rng = random.Random(0)
    for function in functions_of(which, x_type, y_type):
        known = kernels(function, (x_type, y_type), arch, (), which)
        for bits in (10, 14, 18, 22, 34):
            lengths = [int(2 ** rng.uniform(0, bits)) for _ in range(1000)]
            assert kernels(function, (x_type, y_type), arch, lengths, which).keys() <= known.keys()


@pytest.mark.parametrize("arch", [slow(80), 90, slow(100)])
@thin_product(
    2,
    types=((F32, F32), (BF16, BF16), (F32, BF16), (F64, F64)),
    kind=(("softmax", BACKWARD), ("softmax", BROADCAST), ("logsumexp", BACKWARD)),
)
def test_gradients_of_any_rows_and_views_are_covered(types, kind, arch):
    (x_type, dx_type), (function, which) = types, kind
    rng = random.Random(0)
    known = kernels(function, (x_type, dx_type), arch, (), which)
    compiled = {compiled_in(plan_of(plan)) for plan in known.values()}
    assert len(compiled) == len(known)
    for _ in range(2000):
        n, rows = int(2 ** rng.uniform(1, 28)) if rng.random() < 0.9 else 1, int(2 ** rng.uniform(0, 20))
        if n == 1 and which == BROADCAST:  # it is contiguous
            continue
        lse = function == "logsumexp"
        at = rng.randrange(8) * (dx_type if lse else x_type).itemsize
        one_for_all = n == 1 and rng.random() < 0.5  # then rows have one element of the result's gradient together
        addresses = (0, at, 0, 0) if lse else (0, 0, at, 0)
        given = BROADCAST if one_for_all else which
        plan = plan_of_call(function, given, (x_type, dx_type), arch, [rows, n], [1], addresses)
        assert compiled_in(plan) in compiled, (rows, n, at, plan)


@thin_product(3, function=["softmax", "logsumexp"], types=[(F32, F32), (BF16, BF16)])
def test_any_number_of_rows_is_covered(function, types):
    rng = random.Random(1)
    compiled = {compiled_in(plan_of(plan)) for plan in kernels(function, types, 90).values()}
    for _ in range(2000):
        n, rows = int(2 ** rng.uniform(1, 22)), int(2 ** rng.uniform(0, 18))
        plan = plan_of_call(function, FORWARD, types, 90, [rows, n], [1], (0, 0))
        assert compiled_in(plan) in compiled, (rows, n, plan)


def of_columns(kernels: dict) -> set[tuple]:
    return {column_kernel(plan) for plan in map(plan_of, kernels.values()) if plan["tier"].startswith("columns")}


CASES = [(*types, 90) for types in TYPES] + [(BF16, BF16, arch) for arch in (80, 100)]
CASES_AND_LENGTHS = thin_tuples(
    ((which, *case, n) for case in CASES for n in (21, 1000, 30000) for which in native.PASSES), 4
)
CASES_AND_LENGTHS += [slow(which, *case, None) for case in CASES for which in native.PASSES if case != (F16, F16, 90)]


@pytest.mark.parametrize(
    ("which", "x_type", "y_type", "arch", "n"), CASES_AND_LENGTHS, ids=lambda t: str(t).removeprefix("torch.")
)
def test_any_call_over_other_dims_is_covered(which, x_type, y_type, arch, n):
    """Whatever its length, and where lengths are named: others do not make up for what the walk of one leaves out."""
    for function in functions_of(which, x_type, y_type):
        check_other_dims(function, which, (x_type, y_type), arch, n)


def check_other_dims(function: str, which: str, types: tuple, arch: int, n: int | None) -> set[tuple]:
    compiled, seen = of_columns(kernels(function, types, arch, [n] if n else (), which, True)), set()
    for plan in random_plans(700 if n else 2500, n, function, which, types, arch):
        assert column_kernel(plan) in compiled, plan
        seen.add(column_kernel(plan))
    if n is None:
        assert 10 < len(compiled) <= MOST_OF_COLUMNS[which]
        assert len(seen) > len(compiled) // 6, "so many of them are asked for"
    return compiled


@pytest.mark.slow
def test_any_length_of_any_call_over_other_dims_is_covered():
    """One walk over all lengths, which takes ten seconds, has the kernels of each."""
    kinds = ("softmax", (BF16, BF16), 90)
    every = check_other_dims("softmax", FORWARD, (BF16, BF16), 90, None)
    for n in NARROW:
        assert of_columns(kernels(*kinds, [n], FORWARD, True)) <= every


NUMBERS_OF_TILES = [  # blocks of the chip share tiles, or there are tiles for all
    ("softmax", FORWARD, (BF16, BF16), 90, [3, 30000, 550], [1]),
    ("softmax", BROADCAST, (BF16, BF16), 90, [3, 30000, 550], [1]),
    ("softmax", BACKWARD, (BF16, BF16), 90, [7, 30000, 345], [1]),
    ("softmax", FORWARD, (BF16, BF16), 90, [5, 60000, 16], [1]),
    ("softmax", FORWARD, (BF16, F32), 80, [58, 7, 3, 101], [0, 2]),
    ("logsumexp", BACKWARD, (F32, F32), 90, [156, 20017, 248], [1]),
    ("logsumexp", BACKWARD, (BF16, BF16), 90, [14, 5852, 79, 2], [1, 3]),
]
WIDE_AND_NARROW_TILES = [  # where there are many, and few
    ("softmax", which, (F32, F32), 90, [outer, n, inner], [1], addresses_of("softmax", which, (F32, F32), inner % 3))
    for which, n, outer in itertools.product((FORWARD, BROADCAST), (2049, 3000, 4096), (1, 40, 397))
    for inner in (*range(2, 80), 196, 1092, 1500)
]


def test_tiles_are_covered():
    known = functools.cache(lambda kind, which, n: of_columns(kernels(*kind, [n], which, True)))
    for function, which, types, arch, sizes, dims, *addresses in NUMBERS_OF_TILES + WIDE_AND_NARROW_TILES:
        plan = plan_of_call(function, which, types, arch, sizes, dims, *addresses)
        assert addresses or plan["tier"].startswith("columns-")
        n = math.prod(sizes[i] for i in dims)
        assert column_kernel(plan) in known((function, types, arch), which, n), plan


@pytest.mark.parametrize("which", native.PASSES)
def test_rows_are_there_beside_them(which):
    rows, both = (kernels("softmax", (BF16, BF16), 90, [2, 1000], which, dims) for dims in (False, True))
    assert rows.keys() < both.keys()
    assert not of_columns(rows)
