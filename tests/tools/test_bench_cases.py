"""The suites and the tensors of their cases."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU
from lib.transcript import assert_snapshot
from onepass.tools.bench.cases import (
    CPU_FILL,
    DIRECTIONS,
    FILL,
    FUNCTIONS,
    ITEMSIZE,
    ROW_LENGTHS,
    SUITES,
    Case,
    dtype_name,
)
from onepass.tools.bench.cli_run import Options, select_cases
from onepass.tools.bench.correctness import SAMPLE, make_inputs, reference_bytes, replicate
from onepass.tools.bench.results import Row
from onepass.tools.bench.styles import is_sweep, rows_text

CUDA = torch.device("cuda")


def pairs(suite: str, device: torch.device = CUDA, **options: Any) -> list[tuple[Case, str]]:
    return select_cases(Options(suites=(suite,), **options), device)[0]


def test_the_suites_have_their_shapes() -> None:
    """A line per suite, function, direction and list of dtypes."""
    lines: dict[str, list[str]] = {}
    for suite in SUITES.values():
        for case in suite.cases:
            dtypes = ",".join(case.dtypes).replace("float", "f").replace("b", "b")
            shape = "x".join(map(str, case.shape[case.fill > 0 :])) + f"/{case.dim}" * (case.dim != -1)
            shape += f" {case.layout}" if case.layout else ""
            lines.setdefault(f"{suite.name} {case.function} {case.direction} {dtypes}", []).append(shape)
    assert_snapshot("suites", "".join(f"{name}: {', '.join(shapes)}\n" for name, shapes in lines.items()))


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_names_each_case_once_and_runs_some_cases_with_quick(suite: str) -> None:
    cases = SUITES[suite].cases
    assert len({c.name for c in cases}) == len(cases)
    assert all(c.suite == suite and c.function in FUNCTIONS and set(c.dtypes) <= set(ITEMSIZE) for c in cases)
    on_cpu, on_gpu = (pairs(suite, device, quick=True) for device in (CPU, CUDA))
    assert 0 < len(on_cpu) <= len(on_gpu) <= len(pairs(suite))
    assert {(c.name, d) for c, d in on_cpu} <= {(c.name, d) for c, d in on_gpu}
    if suite in ("row-lengths", "few-long-rows", "columns", "cpu"):
        assert len(on_cpu) <= 24
        assert max(prod(c.shape) * ITEMSIZE[d] for c, d in on_cpu) <= 2 * CPU_FILL
        for case, dtype in pairs(suite):  # a check takes little memory unless a row is longer than its sample
            takes = reference_bytes(case)
            assert takes <= 64 * (2 * SAMPLE if 4 * case.row() <= SAMPLE else 4 * case.row()), case.name
            assert takes <= 16 << 30, (case.name, dtype)


def test_row_lengths_fills_a_gibibyte_at_every_length_and_dtype() -> None:
    for case, dtype in [*pairs("row-lengths"), *pairs("row-lengths", dtypes=("float16",))]:
        size = case.row() * ITEMSIZE[dtype]
        assert case.rows() * size <= FILL < (case.rows() + 1) * size
    assert Case("t", "t", (1, 1 << 29), fill=FILL).at("float32") == Case("t", "t", (1, 1 << 29))  # at least one row
    assert Case("t", "t", (1, 50257), fill=FILL).at("float32", CPU_FILL).shape == (41, 50257)
    assert CASE.at("float32", 8) == CASE


def test_a_chosen_function_or_direction_runs_each_shape_once() -> None:
    chosen = pairs("row-lengths", functions=("logsumexp",))
    assert [c.row() for c, d in chosen if d == "float32"] == list(ROW_LENGTHS)
    assert len({(c.name, d) for c, d in chosen}) == len(chosen)
    shapes = [(c.shape, c.dim, d) for c, d in pairs("cpu", CPU, functions=("log_softmax",))]
    assert len(set(shapes)) == len(shapes) == sum(c.function == "softmax" for c, _ in pairs("cpu", CPU))
    backward = pairs("columns", direction="backward")
    assert (2 * len(backward), {c.direction for c, _ in backward}) == (len(pairs("columns")), {"backward"})
    both = select_cases(Options(suites=("tutorial", "powers-of-two")), CUDA)[0]
    assert len(both) == len(pairs("tutorial")) + len(pairs("powers-of-two"))
    assert [c.name for c, _ in pairs("columns", pattern="DIMS")][::2] == [
        "64x80x14x14, dims 2,3",
        "softmax backward, 64x80x14x14, dims 2,3",
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_sweeps_are_drawn_as_curves(quick: bool) -> None:
    for suite in ("row-lengths", "few-long-rows", "columns", "cpu", "tutorial", "models"):
        for dtype in ("float32", "bfloat16"):
            cases = [c for c, d in pairs(suite, CPU, quick=quick) if d == dtype and c.function == "softmax"]
            rows = [
                Row(suite, c.name, c.function, list(c.shape), [], c.dim, dtype, dtype, "forward", "copy") for c in cases
            ]
            assert not rows or is_sweep(rows) == (suite in ("row-lengths", "tutorial"))
            assert suite != "row-lengths" or rows_text(rows) == ("8 MiB of rows" if quick else "1 GiB of rows")


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "f32", 2 * 6 * 4),
        ({"out_dtype": "float32"}, "torch.half", 6 * 2 + 6 * 4),
        ({"function": "logsumexp"}, "BF16", 6 * 2 + 2 * 2),
        ({"direction": "backward"}, "float64", 3 * 6 * 8),
        ({"direction": "backward", "function": "logsumexp"}, "float32", 2 * 6 * 4 + 2 * 2 * 4),
    ],
)
def test_bytes_are_read_once_and_written_once(options: dict[str, Any], dtype: str, expected: int) -> None:
    assert Case("t", "t", (2, 3), **options).bytes(dtype_name(dtype)) == expected


def test_data_depends_on_the_seed_and_the_case_only() -> None:
    of = (("a", 3), ("a", 3), ("a", 4), ("b", 3))
    first, again, *others = (make_inputs(replace(CASE, name=name), "float32", CPU, seed).x for name, seed in of)
    assert torch.equal(first, again)
    assert not any(torch.equal(first, other) for other in others)
    assert 0.5 < float(first.std()) < 1.5


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("", (60, 12, 4, 1)),
        ("channels_last", (60, 1, 20, 5)),
        ("transposed", (60, 12, 1, 3)),
        ("permuted 2,0,3,1", (20, 1, 40, 5)),
        ("sliced", (75, 15, 5, 1)),
    ],
)
def test_tensors_and_their_copies_have_the_layout_of_the_case(layout: str, strides: tuple[int, ...]) -> None:
    case = Case("t", "t", (2, 5, 3, 4), 1, direction=DIRECTIONS[1], layout=layout)
    inputs = make_inputs(case, "float32", CPU, 0)
    copies = replicate(inputs, 3)
    for one in (inputs, *copies):
        assert one.out is not None
        assert one.grad is not None
        assert [t.stride() for t in (one.x, one.out, one.grad)] == [strides] * 3
        assert torch.equal(one.x, inputs.x)
    starts = {one.x.data_ptr() - copies[0].x.data_ptr() for one in copies}
    assert len(starts) == 3
    assert {start % 512 for start in starts} == {0}
    reduced = make_inputs(replace(case, function="logsumexp"), "float32", CPU, 0)
    assert reduced.grad is not None
    assert reduced.grad.stride() == (12, 4, 1)
