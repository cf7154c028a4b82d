"""The suites `rows`, `few`, `columns` and `cpu`: what they hold, how many rows a dtype makes, what of them is run."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, run
from onepass.tools.bench.cases import DIRECTIONS, ITEMSIZE, Case
from onepass.tools.bench.check import WHOLE, Checker, reference_bytes
from onepass.tools.bench.command import Choices, select
from onepass.tools.bench.entrants import Naive, Onepass, Torch
from onepass.tools.bench.packages import Quack
from onepass.tools.bench.results import Row
from onepass.tools.bench.rungs import refusal
from onepass.tools.bench.suites import COLUMNS, CPU_FILL, FILL, REDUCED, ROWS
from onepass.tools.bench.table import lines
from onepass.tools.bench.work import copies, make
from onepass.tools.gallery import VARIANTS

CUDA = torch.device("cuda")
LENGTHS = [
    *(8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216),
    *(12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144),
]


def pairs(suite: str, device: torch.device = CUDA, **options: object) -> list[tuple[Case, str]]:
    return select(Choices(suites=(suite,), **options), device)[0]  # type: ignore[arg-type]


def test_rows_fills_a_gibibyte_at_every_length_and_dtype() -> None:
    assert list(ROWS) == LENGTHS
    every = pairs("rows")
    assert len(every) == 2 * (len(LENGTHS) + len(REDUCED))
    for function, lengths in (("softmax", LENGTHS), ("logsumexp", list(REDUCED))):
        for dtype in ("float32", "bfloat16"):
            own = [c for c, d in every if c.function == function and d == dtype]
            assert [c.row() for c in own] == lengths
            for case in own:
                size = case.row() * ITEMSIZE[dtype]
                assert case.rows() * size <= FILL < (case.rows() + 1) * size


@pytest.mark.parametrize(
    ("n", "dtype", "most", "rows"),
    [
        (8, "float32", None, 33554432),
        (8, "bfloat16", None, 67108864),
        (50257, "bfloat16", None, 10682),
        (50257, "float32", CPU_FILL, 41),
        (1 << 28, "float32", None, 1),
        (1 << 29, "float32", None, 1),  # at least one, however long
    ],
)
def test_rows_of_a_length(n: int, dtype: str, most: int | None, rows: int) -> None:
    case = Case("t", "t", (1, n), fill=FILL).at(dtype, most)
    assert case == Case("t", "t", (rows, n))
    assert case.at("float64") == case  # what has its rows keeps them
    assert CASE.at(dtype, most) == CASE


def test_dtypes_and_functions_asked_for_have_their_own_rows() -> None:
    half = pairs("rows", dtypes=("float16",))
    assert [c.shape for c, d in half if c.function == "softmax"] == [((FILL // 2) // n, n) for n in LENGTHS]
    reduced = pairs("rows", functions=("logsumexp",))
    assert [c.row() for c, d in reduced if d == "float32"] == LENGTHS  # once each, whatever the suite has twice
    assert {c.function for c, _ in reduced} == {"logsumexp"}
    assert len({(c.name, d) for c, d in reduced}) == len(reduced)
    assert [c.name for c, _ in pairs("rows", match="logsumexp")] == [f"logsumexp, N {n}" for n in REDUCED for _ in "ab"]


def test_few_has_its_shapes() -> None:
    found = {d: [c.shape for c, e in pairs("few") if e == d] for d in ("float32", "bfloat16")}
    shapes = [(1, 131072), (1, 1048576), (1, 4194304), (4, 1048576), (8, 128256), (32, 128256), (64, 151936)]
    shapes += [(1, 16777216), (4, 4194304)]
    assert found == {"float32": [*shapes, (1, 268435456)], "bfloat16": shapes}


def test_columns_has_its_points_forward_and_backward() -> None:
    for dtype in ("float32", "bfloat16"):
        own = [c for c, d in pairs("columns") if d == dtype]
        forward, backward = ([c for c in own if c.direction == direction] for direction in ("forward", "backward"))
        points = [(c.shape, c.dim, c.layout) for c in forward]
        assert points == list(COLUMNS) == [(c.shape, c.dim, c.layout) for c in backward]
        assert len(set(points)) == 17
        assert [f"softmax backward, {c.name}" for c in forward] == [c.name for c in backward]
        assert {c.layout for c in own} == {"", "channels_last", "transposed"}
        assert all(case.layout or case.dims() != (len(case.shape) - 1,) for case in own)
    assert [c.name for c, _ in pairs("columns", match="dims")] == [
        *["64x80x14x14, dims 2,3"] * 2,
        *["softmax backward, 64x80x14x14, dims 2,3"] * 2,
    ]
    one = pairs("columns", direction="backward")  # once each, whatever the suite has twice
    assert len(one) == len(pairs("columns")) / 2
    assert {c.direction for c, _ in one} == {"backward"}


TINY_COLUMNS: list[tuple[tuple[int, ...], Any, str, bool]] = [  # (shape, dim, layout, has torch a way to it?)
    ((2, 5, 3, 4), 1, "", True),
    ((2, 5, 3, 4), 1, "channels_last", True),
    ((2, 5, 3, 4), 3, "channels_last", True),
    ((3, 7, 5), -1, "transposed", True),
    ((7, 5), 0, "transposed", True),
    ((2, 5, 3, 4), (2, 3), "", True),
    ((2, 5, 3, 4), (-2, -1), "", True),
    ((2, 5, 3, 4), (1, 3), "", False),
    ((2, 5, 3, 4), (2, 3), "channels_last", False),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("shape", "dim", "layout", "torchs"), TINY_COLUMNS, ids=str)
def test_every_layout_is_right_and_timed(
    shape: tuple[int, ...], dim: Any, layout: str, torchs: bool, direction: str
) -> None:
    case = Case("t", "t", shape, dim, direction=direction, layout=layout)
    for dtype in ("float32", "bfloat16"):
        rows, said = run(case, Onepass(), Torch(), Naive(), dtype=dtype)
        assert not said
        assert all(row.ok for name, row in rows.items() if torchs or name != "torch")
        if not torchs:
            assert (rows["torch"].error or "").startswith("unsupported: torch's softmax takes one dim")


def test_tensors_lie_as_the_case_says() -> None:
    strides = {"": (60, 12, 4, 1), "channels_last": (60, 1, 20, 5), "transposed": (60, 12, 1, 3)}
    for layout, want in strides.items():
        case = Case("t", "t", (2, 5, 3, 4), 1, direction="backward", layout=layout)
        work = make(case, "float32", CPU, 0)
        for one in (work, *copies(work, 3)):
            assert one.out is not None
            assert one.grad is not None
            assert [t.stride() for t in (one.x, one.out, one.grad)] == [want] * 3
            assert torch.equal(one.x, work.x)
        reduced = make(replace(case, function="logsumexp"), "float32", CPU, 0)
        assert reduced.grad is not None
        assert reduced.grad.stride() == (12, 4, 1)


def test_the_peers_of_rows_take_no_other_layout() -> None:
    case = Case("t", "t", (8, 16), layout="transposed")
    assert refusal(VARIANTS["naive"], case, "float32") == "a variant takes only the last dim of a matrix"
    assert Quack().supports(case, "float32") == "QuACK takes the last dim of a matrix"


def test_cpu_has_its_shapes() -> None:
    rows = [(4096, 64), (4096, 781), (4096, 1024), (4096, 4096), (512, 8192), (64, 50257), (8, 151936)]
    rows += [(1, 1048576), (1, 16777216), (1048576, 16), (65536, 33)]
    other = [((16, 21, 256, 256), 1), ((64, 4096, 256), 1), ((1024, 4096), 0)]
    for dtype in ("float32", "bfloat16", "float16"):
        own = [c for c, d in pairs("cpu", CPU) if d == dtype]
        found = [(c.shape, c.dim) for c in own if c.function == "softmax"]
        assert found == [*((shape, -1) for shape in rows), *other]
        reduced = [(c.shape, c.dim) for c in own if c.function == "logsumexp"]
        assert len(reduced) >= 5
        assert set(reduced) < set(found)
        assert {c.direction for c in own} == {"forward"}
        assert len({c.name for c in own}) == len(own) == len(found) + len(reduced)
        for case in own:  # both sides of the race write into an output that is there
            assert Onepass().takes_out(case)
            assert Torch().takes_out(case)


def test_a_function_asked_for_takes_each_shape_once() -> None:
    for suite in ("rows", "cpu"):
        shapes = [(c.shape, c.dim, d) for c, d in pairs(suite, CPU, functions=("log_softmax",))]
        assert len(shapes) == len(set(shapes))
        assert len(shapes) == sum(c.function == "softmax" for c, _ in pairs(suite, CPU))


@pytest.mark.parametrize("suite", ["rows", "few", "columns", "cpu"])
def test_the_quick_form_on_a_cpu_is_small(suite: str) -> None:
    quick = pairs(suite, CPU, quick=True)
    assert 4 <= len(quick) <= 24
    assert {d for _, d in quick} == {"float32", "bfloat16", "float16"} - ({"float16"} if suite != "cpu" else set())
    assert max(prod(c.shape) * ITEMSIZE[d] for c, d in quick) <= 2 * CPU_FILL
    on_gpu = pairs(suite, CUDA, quick=True)
    assert {(c.name, d) for c, d in quick} <= {(c.name, d) for c, d in on_gpu}
    if suite == "rows":
        assert {c.rows() * c.row() * ITEMSIZE[d] for c, d in on_gpu if c.row() == 4096} == {FILL}


def test_two_suites_keep_their_equal_shapes() -> None:
    both = select(Choices(suites=("seeds", "powers")), CUDA)[0]
    assert len(both) == len(pairs("seeds")) + len(pairs("powers"))


def test_the_table_names_a_function_once() -> None:
    def name(case: str, function: str) -> str:
        return lines([Row("s", case, function, [2, 2], [], -1, "float32", "float32", "forward", "copy")])[0].case

    assert name("logsumexp, N 33", "logsumexp") == "logsumexp, N 33"
    assert name("N 33", "logsumexp") == "N 33, logsumexp"
    assert name("N 33", "softmax") == "N 33"


@pytest.mark.parametrize(
    ("suite", "curve"),
    [("rows", True), ("few", False), ("columns", False), ("cpu", False), ("seeds", True), ("models", False)],
)
@pytest.mark.parametrize("quick", [False, True])
def test_what_is_drawn_as_a_curve(suite: str, curve: bool, quick: bool) -> None:
    from onepass.tools.bench.figures import _rows
    from onepass.tools.bench.plot import _sweeps

    for dtype in ("float32", "bfloat16"):
        rows = [
            Row(suite, c.name, c.function, list(c.shape), [], c.dim, d, d, "forward", "copy", ok=True)
            for c, d in pairs(suite, CPU, quick=quick)
            if d == dtype and c.function == "softmax"
        ]
        if rows:
            assert _sweeps(rows) == curve
        if rows and suite == "rows":
            assert _rows(rows) == ("8 MiB of rows" if quick else "1 GiB of rows")


# Checks of large inputs


@pytest.mark.parametrize("suite", ["rows", "few", "columns", "cpu"])
def test_a_check_takes_little_memory_but_for_rows_longer_than_its_sample(suite: str) -> None:
    for case, dtype in pairs(suite):
        takes = reference_bytes(case)
        if 4 * case.row() <= WHOLE:
            assert takes <= 64 * 2 * WHOLE, case.name
        else:
            assert takes <= 64 * 4 * case.row(), case.name
        assert takes <= 16 << 30, (case.name, dtype)


@pytest.mark.parametrize("shape", [(7, 300), (40, 300), (3, 5000), (1, 5000)])
def test_the_memory_of_a_check_bounds_what_is_drawn(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.check.WHOLE", 2100)
    case = Case("t", "t", shape)
    checker = Checker(make(case, "float32", CPU, 0), seed=0)
    assert checker.expected.numel() <= reference_bytes(case) // 64 <= prod(shape)
    reduced = replace(case, function="logsumexp")
    assert reference_bytes(reduced) == reference_bytes(case)
