"""From times to entries: whatever the times, each length is served within 1% of its best, by a sound table."""

import functools
import random
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib.support import slow
from lib.tune import BASE, GPUS, H200, made_up
from onepass import native
from onepass.tables import ANY, NAMES, check_tables
from onepass.tools.tune.candidates import STAGED, Choice, candidates
from onepass.tools.tune.sizes import COLUMN_LENGTHS, FUNCTIONS, LENGTHS, is_columns, is_odd, shapes
from onepass.tools.tune.table import build, entries, is_few, spliced, staged_pays
from onepass.tools.tune.timing import Measurement

A, B, C = Choice(0, 8, 0, 1, 0), Choice(0, 16, 0, 1, 0), Choice(2, 0, 32, 1, 0)
F = Choice(STAGED, 4, 0, 1, 0)
ROWS = NAMES[:8]  # the tables of rows


def point(n: int, times: dict[Choice, float]) -> Measurement:
    return Measurement("softmax", "float32", n, 1000, 1.0, 1.0, times)


def look_up(table: list[list[int]], n: int) -> list[int]:
    return next(entry for entry in table if n <= entry[0])


every = functools.cache(candidates)


def sweep(gpu, lengths=LENGTHS, seed=0, functions=FUNCTIONS[:2]) -> list[Measurement]:
    found = []
    for function, (dtype, size) in product(functions, (("float32", 4), ("bfloat16", 2))):
        for n in COLUMN_LENGTHS if is_columns(function) else lengths:
            for shape in shapes(function, n, size, 256):
                found.append(made_up(function, dtype, n, shape, every(function, n, shape, size, gpu), seed))
    return found


@pytest.mark.parametrize(
    ("times", "table"),
    [  # Neighbours share what is within 1% of the best of each, and of that the fastest.
        ({100: {A: 1.0, B: 1.009}, 200: {A: 1.02, B: 1.0}, 400: {A: 1.02, B: 1.0}}, [[400, *B]]),
        ({100: {A: 1.0, B: 1.011}, 200: {A: 1.02, B: 1.0}, 400: {A: 1.02, B: 1.0}}, [[141, *A], [400, *B]]),
        ({100: {A: 1.0, B: 1.005, C: 1.009}, 200: {A: 1.009, B: 1.001, C: 1.0}}, [[200, *B]]),
    ],
)
def test_neighbours_share_an_entry(times, table):
    assert entries([point(n, us) for n, us in times.items()], lambda _, n: 1000) == table


def test_a_limit_is_the_geometric_middle_or_what_the_entry_holds():
    points = [point(1000, {A: 1.0, B: 2.0}), point(4000, {A: 2.0, B: 1.0})]
    assert entries(points, lambda _, n: 5000)[0][0] == 2000
    assert entries(points, lambda _, n: n + 200)[0][0] == 1200
    assert entries(points, lambda _, n: 900)[0][0] == 1000  # it has been measured there
    assert entries([point(8, {A: 1.0, B: 2.0}), point(9, {A: 2.0, B: 1.0})], lambda _, n: 5000) == [[8, *A], [9, *B]]


def test_a_limit_is_no_longer_than_what_takes_as_many_threads():
    few, more = Choice(2, 0, 16, 1, 0), Choice(2, 0, 24, 1, 0)  # 6144 floats: 384 threads; beyond, 416
    points = [point(6144, {few: 1.0, more: 2.0}), point(7168, {few: 2.0, more: 1.0})]
    table = [tuple(entry) for entry in build(points, BASE, H200)["write_f32"]]
    assert (6144, *few) in table
    assert look_up(table, 6145)[1:] == more
    points[0] = point(6100, {few: 1.0, more: 2.0})
    assert (6141, *few) in [tuple(entry) for entry in build(points, BASE, H200)["write_f32"]]  # within a vector


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ([(1, 2), (1, 2), (2, 1), (2, 1)], 2),
        ([(1, 2), (1.1, 1), (1, 2), (2, 1)], 3),  # a small loss on the way
        ([(2, 1), (2, 1)], 0),
        ([(1, 2), (1, 2)], 2),
        ([(1, 1), (1, 1)], 0),
        ([(1.01, 1), (1, 3), (5, 1), (1, 3)], 2),  # a great one is not made good
        ([(1, 2), (None, 1), (1, 9)], 1),  # it cannot run
        ([], 0),
    ],
)
def test_flat_pays_up_to_a_length(times, cut):
    points = [point(2 * i + 3, {F: flat, A: other} if flat else {A: other}) for i, (flat, other) in enumerate(times)]
    assert staged_pays(points) == cut


def test_splicing_keeps_what_was_not_measured():
    base = [[10, *A], [100, *B], [ANY, *C]]
    assert spliced(base, [[40, *C]], 20) == [[10, *A], [19, *B], [40, *C], [100, *B], [ANY, *C]]
    assert spliced(base, [[40, *B]], 20) == [[10, *A], [100, *B], [ANY, *C]]
    assert spliced(base, [[ANY, *A]], 1) == [[ANY, *A]]
    flat = [[40, *F], [ANY, -1, 0, 0, 1, 0]]
    more = Choice(STAGED, 8, 0, 1, 0)
    assert spliced(flat, [[90, *more]], 60, gap=False) == [[40, *F], [90, *more], [ANY, -1, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("gpu", "seed"), [(gpu, seed) if gpu is H200 and not seed else slow(gpu, seed) for gpu in GPUS for seed in range(3)]
)
def test_every_measured_length_is_served_within_1_percent_of_its_best(gpu, seed):
    measured = sweep(gpu, seed=seed, functions=FUNCTIONS if seed == 0 else FUNCTIONS[:2])
    tables = build(measured, BASE, gpu)
    check_tables(tables)
    native.set_tables("a GPU", "a test", tables)  # the engine finds them sound
    assert native.tables("a GPU") == {"origin": "a test", "tables": tables}
    by_staged = 0
    for p in measured:
        size = 4 if p.dtype == "float32" else 2
        odd = is_odd(p.n, size) and not is_columns(p.function)
        choice = Choice(*look_up(tables[f"unaligned_f{8 * size}"], p.n)[1:]) if odd else None
        if choice is not None and choice.tier == STAGED:
            if p.function == "logsumexp":
                continue  # goes with softmax
            by_staged += 1
            best = min(us for c, us in p.times.items() if c.tier == STAGED)
        else:
            kind = "few_rows" if is_few(p) else {"softmax": "write", "logsumexp": "reduce"}.get(p.function, p.function)
            choice = Choice(*look_up(tables[f"{kind}_f{8 * size}"], p.n)[1:])
            best = min(us for c, us in p.times.items() if c.tier != STAGED)
        assert p.times[choice] <= 1.01 * best
    assert by_staged > 20
    for name in NAMES[8:]:
        assert tables[name][-1] == BASE[name][-1], "longer columns go over the chip"
        assert (tables[name] == BASE[name]) == (seed > 0)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(LENGTHS), min_size=1, max_size=8), st.integers(0, 9))
@example({2, 3, 125, 8195}, 0)  # the planner takes more threads for 765 elements than the entry has
def test_any_choice_of_lengths_makes_a_sound_table(lengths, seed):
    """And beside what was measured the table is what it was."""
    tables = build(sweep(H200, sorted(lengths), seed), BASE, H200)
    check_tables(tables)
    native.set_tables("a GPU", "a test", tables)
    for name in ("write_f32", "write_f16", "reduce_f32", "reduce_f16"):
        for n in random.Random(seed).sample(range(1, 2**21), 200):
            if n < min(lengths) or n > max(lengths):
                assert look_up(tables[name], n)[1:] == look_up(BASE[name], n)[1:]


@pytest.mark.parametrize(
    ("keep", "changed"),
    [
        (lambda p: p.dtype == "bfloat16", ["write_f16", "reduce_f16", "unaligned_f16", "few_rows_f16"]),
        (lambda p: p.function == "logsumexp", ["reduce_f32", "reduce_f16"]),
        (lambda p: p.function == "softmax", [name for name in ROWS if not name.startswith("reduce")]),
    ],
)
def test_what_is_not_measured_leaves_its_tables_alone(keep, changed):
    tables = build([p for p in sweep(H200) if keep(p)], BASE, H200)
    assert [name for name in NAMES if tables[name] != BASE[name]] == changed


def test_the_only_measurement_of_a_length_is_of_few_rows_and_of_many():
    """As many rows as the input holds may be those that few rows are measured with."""
    few, many = Choice(2, 0, 16, 1, 0), Choice(2, 0, 24, 1, 0)
    points = [
        Measurement("softmax", "float32", 4096, rows, 1.0, 1.0, {best: 1.0}) for rows, best in ((4096, few), (9, many))
    ]
    tables = build(points, BASE, H200)
    assert (look_up(tables["few_rows_f32"], 4096)[1:], look_up(tables["write_f32"], 4096)[1:]) == ([*few], [*many])
    tables = build(points[:1], BASE, H200)
    assert look_up(tables["few_rows_f32"], 4096)[1:] == look_up(tables["write_f32"], 4096)[1:] == [*few]


def test_odd_lengths_that_the_tier_flat_has_are_not_in_the_table_of_reductions():
    """As in that of rows: else an entry would be chosen by a length that it does not serve."""
    flat, slow = [[100, *F], [ANY, -1, 0, 0, 1, 0]], [[ANY, *A]]
    base = {**BASE, "unaligned_f32": flat, "reduce_f32": slow}
    lengths = {33: A, 64: B, 125: C}  # 33 is served by the tier staged
    points = [Measurement("logsumexp", "float32", n, 1000, 1.0, 1.0, {best: 1.0}) for n, best in lengths.items()]
    table = build(points, base, H200)["reduce_f32"]
    assert look_up(table, 33)[1:] == list(A)  # of the base: nothing was measured for rows so short
    assert table == [[63, *A], [89, *B], [125, *C], [ANY, *A]]
