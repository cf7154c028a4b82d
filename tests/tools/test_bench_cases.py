"""The suites and the tensors of their cases."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from lib.bench import CASE, CPU
from onepass.tools.bench.cases import DIRECTIONS, FUNCTIONS, ITEMSIZE, Case, dtype_name
from onepass.tools.bench.cli_run import Options, select_cases
from onepass.tools.bench.correctness import SAMPLE, reference_bytes
from onepass.tools.bench.inputs import make_inputs, replicate
from onepass.tools.bench.plots import is_sweep, rows_text
from onepass.tools.bench.results import Row
from onepass.tools.bench.suites import CPU_FILL, FILL, ROW_LENGTHS, SUITES

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
    assert_expected_inline(
        "".join(f"{name}: {', '.join(shapes)}\n" for name, shapes in lines.items()),
        """\
tutorial softmax forward f32: 4096x256, 4096x384, 4096x512, 4096x640, 4096x768, 4096x896, 4096x1024, 4096x1152, 4096x1280, 4096x1408, 4096x1536, 4096x1664, 4096x1792, 4096x1920, 4096x2048, 4096x2176, 4096x2304, 4096x2432, 4096x2560, 4096x2688, 4096x2816, 4096x2944, 4096x3072, 4096x3200, 4096x3328, 4096x3456, 4096x3584, 4096x3712, 4096x3840, 4096x3968, 4096x4096, 4096x4224, 4096x4352, 4096x4480, 4096x4608, 4096x4736, 4096x4864, 4096x4992, 4096x5120, 4096x5248, 4096x5376, 4096x5504, 4096x5632, 4096x5760, 4096x5888, 4096x6016, 4096x6144, 4096x6272, 4096x6400, 4096x6528, 4096x6656, 4096x6784, 4096x6912, 4096x7040, 4096x7168, 4096x7296, 4096x7424, 4096x7552, 4096x7680, 4096x7808, 4096x7936, 4096x8064, 4096x8192, 4096x8320, 4096x8448, 4096x8576, 4096x8704, 4096x8832, 4096x8960, 4096x9088, 4096x9216, 4096x9344, 4096x9472, 4096x9600, 4096x9728, 4096x9856, 4096x9984, 4096x10112, 4096x10240, 4096x10368, 4096x10496, 4096x10624, 4096x10752, 4096x10880, 4096x11008, 4096x11136, 4096x11264, 4096x11392, 4096x11520, 4096x11648, 4096x11776, 4096x11904, 4096x12032, 4096x12160, 4096x12288, 4096x12416, 4096x12544, 4096x12672
powers-of-two softmax forward f32: 4096x256, 4096x1024, 4096x4096, 4096x16384, 4096x65536, 4096x262144
models softmax forward bf16,f32: 1x50257, 8x50257, 64x50257, 1024x50257, 1x128256, 8x128256, 64x128256, 1024x128256, 1x151936, 8x151936, 64x151936, 1024x151936, 1x262144, 8x262144, 64x262144, 1024x262144, 8x12x197x197, 32x1x1024, 32x128x1024, 32x1x4096, 32x128x4096, 32x1x32768, 32x128x32768, 8192x8, 8192x128, 8192x256, 1x21x512x512/1, 16x21x512x512/1, 1x19x512x512/1, 16x19x512x512/1
row-lengths softmax forward f32,bf16: 8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216, 12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144
row-lengths logsumexp forward f32,bf16: 33, 256, 1024, 4096, 32768, 50257, 131072
few-long-rows softmax forward f32,bf16: 1x131072, 1x1048576, 1x4194304, 4x1048576, 8x128256, 32x128256, 64x151936, 1x16777216, 4x4194304
few-long-rows softmax forward f32: 1x268435456
backward softmax backward f32: 4096x1024, 4096x2048, 4096x4096, 4096x8192, 4096x16384, 4096x32768, 4096x65536, 4096x131072
backward softmax backward bf16: 32768x256, 32768x512, 32768x1024, 32768x2048, 32768x4096, 32768x8192, 8192x32001, 8192x50257, 8192x50304, 8192x128256, 8192x151936
backward softmax backward f32,bf16: 2097152x64, 8388608x16, 1x131072, 1x1048576, 1x4194304, 4x1048576, 8x128256, 32x128256
backward log_softmax backward f32: 4096x1024, 4096x2048, 4096x4096, 4096x8192, 4096x16384, 4096x32768, 4096x65536, 4096x131072
backward log_softmax backward bf16: 32768x256, 32768x512, 32768x1024, 32768x2048, 32768x4096, 32768x8192, 8192x32001, 8192x50257, 8192x50304, 8192x128256, 8192x151936
backward log_softmax backward f32,bf16: 2097152x64, 8388608x16, 1x131072, 1x1048576, 1x4194304, 4x1048576, 8x128256, 32x128256
columns softmax forward f32,bf16: 16x21x512x512/1, 3x19x1024x2048/1, 64x1000x14x14/1, 256x1000x7x7/1, 8x4096x4096/1, 4096x4096/0, 16384x16384/0, 64x32x64x64x4/1, 256x256x256/0, 32x12x512x512/2, 128x197x768/1, 32x256x56x56/1 channels_last, 32x256x56x56/3 channels_last, 8192x8192 transposed, 64x80x14x14/(2, 3), 2x131072x16/1, 1048576x8/0
columns softmax backward f32,bf16: 16x21x512x512/1, 3x19x1024x2048/1, 64x1000x14x14/1, 256x1000x7x7/1, 8x4096x4096/1, 4096x4096/0, 16384x16384/0, 64x32x64x64x4/1, 256x256x256/0, 32x12x512x512/2, 128x197x768/1, 32x256x56x56/1 channels_last, 32x256x56x56/3 channels_last, 8192x8192 transposed, 64x80x14x14/(2, 3), 2x131072x16/1, 1048576x8/0
cpu softmax forward f32,bf16,f16: 4096x64, 4096x781, 4096x1024, 4096x4096, 512x8192, 64x50257, 8x151936, 1x1048576, 1x16777216, 1048576x16, 65536x33, 16x21x256x256/1, 64x4096x256/1, 1024x4096/0
cpu logsumexp forward f32,bf16,f16: 4096x781, 4096x4096, 64x50257, 1x16777216, 1048576x16, 1024x4096/0
cpu-backward softmax backward f32,bf16,f16: 4096x64, 4096x781, 4096x1024, 4096x4096, 512x8192, 64x50257, 8x151936, 1x1048576, 1x16777216, 1048576x16, 65536x33, 16x21x256x256/1, 64x4096x256/1, 1024x4096/0
cpu-backward log_softmax backward f32,bf16,f16: 4096x64, 4096x781, 4096x1024, 4096x4096, 512x8192, 64x50257, 8x151936, 1x1048576, 1x16777216, 1048576x16, 65536x33, 16x21x256x256/1, 64x4096x256/1, 1024x4096/0
cpu-backward logsumexp backward f32,bf16,f16: 4096x781, 4096x4096, 64x50257, 1x16777216, 1048576x16, 1024x4096/0
""",  # noqa: E501
    )


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
        ({}, "float32", 2 * 6 * 4),
        ({"out_dtype": "float32"}, "float16", 6 * 2 + 6 * 4),
        ({"function": "logsumexp"}, "bfloat16", 6 * 2 + 2 * 2),
        ({"direction": "backward"}, "float64", 3 * 6 * 8),
        ({"direction": "backward", "function": "logsumexp"}, "float32", 2 * 6 * 4 + 2 * 2 * 4),
    ],
)
def test_bytes_are_read_once_and_written_once(options: dict[str, Any], dtype: str, expected: int) -> None:
    assert Case("t", "t", (2, 3), **options).bytes(dtype) == expected


def test_names_of_dtypes() -> None:
    assert [dtype_name(t) for t in ("f32", "BF16", "torch.half", "float64")] == [
        *("float32", "bfloat16", "float16", "float64")
    ]
    with pytest.raises(ValueError, match=r"'int8'.*float32.*bf16"):
        dtype_name("int8")


@pytest.mark.parametrize("suite", ["row-lengths", "few-long-rows", "columns", "cpu"])
def test_a_check_takes_little_memory_unless_a_row_is_longer_than_its_sample(suite: str) -> None:
    for case, dtype in pairs(suite):
        takes = reference_bytes(case)
        assert takes <= 64 * (2 * SAMPLE if 4 * case.row() <= SAMPLE else 4 * case.row()), case.name
        assert takes <= 16 << 30, (case.name, dtype)


def test_data_depends_on_the_seed_and_the_case_only() -> None:
    first = make_inputs(CASE, "float32", CPU, 3).x
    assert torch.equal(first, make_inputs(CASE, "float32", CPU, 3).x)
    assert not torch.equal(first, make_inputs(CASE, "float32", CPU, 4).x)
    assert not torch.equal(first, make_inputs(replace(CASE, name="other"), "float32", CPU, 3).x)
    assert 0.5 < float(first.std()) < 1.5


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("", (60, 12, 4, 1)), ("channels_last", (60, 1, 20, 5)), ("transposed", (60, 12, 1, 3))],
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
