"""Drawn shapes and lengths that move by one: what is drawn, how it is run, and what is said about it.

No test names a length that a seed draws.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from rich.console import Console

import onepass
from lib.bench import CPU, TINY, Odd, fake, file, row, run
from lib.transcript import assert_snapshot, call, session
from onepass.tools.bench import random_cases, results
from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.correctness import make_inputs
from onepass.tools.bench.plots import draw as draw_plots
from onepass.tools.bench.providers import Onepass, Torch
from onepass.tools.bench.random_report import show_classes, show_drops
from onepass.tools.bench.results import Row
from onepass.tools.bench.runner import Runner

__all__ = ["fake"]

SMALL = (1.0 * random_cases.MB, 2.0 * random_cases.MB)


def test_a_seed_draws_the_same_shapes_everywhere() -> None:
    cases = random_cases.draw(5, 20)
    assert crc32(repr([(c.suite, c.name, c.dtypes) for c in cases]).encode()) == 4261905375
    assert Counter(c.suite for c in cases) == {f"random/{name}": 20 for name in random_cases.CLASSES}
    assert len({(c.suite, c.name, c.dtypes) for c in cases}) == len(cases)
    for name in random_cases.CLASSES:  # neither the other classes nor the count changes what a class begins with
        assert random_cases.draw(5, 7, (name,)) == [c for c in cases if c.suite == f"random/{name}"][:7]
    assert not {c.name for c in random_cases.draw(6, 20, ("rows",))} & {c.name for c in cases}


def test_shapes_are_in_range() -> None:
    for case in random_cases.draw(1, 100):
        (dtype,) = case.dtypes
        assert dtype in random_cases.DTYPES
        assert 8 * random_cases.MB <= case.bytes(dtype) <= 640 * random_cases.MB
        kind = random_cases.CLASSES[case.suite.removeprefix("random/")]
        assert (case.direction, case.out_dtype, case.in_place) == (kind.direction, kind.out_dtype, kind.in_place)
        assert case.function in kind.functions
        if kind.out_dtype:
            assert ITEMSIZE[dtype] < ITEMSIZE[kind.out_dtype]
        if case.suite == "random/few-long-rows":
            assert case.rows() <= 64
            assert case.row() >= random_cases.LONG_ROW
        elif len(case.shape) == 2:
            assert 2 <= case.row() <= 300_000
        else:
            assert 2 <= case.shape[1] <= 20_000
            assert 2 <= case.shape[2] * (case.shape[3] if len(case.shape) == 4 else 1) <= 6_000
    drawn = random_cases.draw(1, 300, ("rows",), moves=(16 * random_cases.MB, 32 * random_cases.MB))
    assert all(16 * random_cases.MB <= c.bytes(c.dtypes[0]) <= 32 * random_cases.MB for c in drawn)
    # log-uniform: as many lengths in each of five equal parts of log(2) to log(300000), give or take
    fifths = Counter(int(5 * torch.tensor(c.row() / 2.0).log() / torch.tensor(150_001.0).log()) for c in drawn)
    assert all(35 <= fifths[i] <= 90 for i in range(5)), fifths
    assert {c.dtypes for c in random_cases.draw(1, 30, dtypes=("float16",))} == {("float16",)}
    assert random_cases.draw(1, 3, ("wider-output",), dtypes=("float32",)) == []


def test_strided_views_have_the_promised_layout() -> None:
    found = set()
    for case in random_cases.draw(2, 40, ("strided",), moves=SMALL):
        inputs = make_inputs(case, case.dtypes[0], CPU, 0)
        layout, _, order = case.layout.partition(" ")
        found.add(layout)
        for x in (inputs.x, inputs.out):
            assert x is not None
            assert tuple(x.shape) == case.shape
            if layout == "sliced":
                assert (x.stride(-1), x.stride(-2) % 2, x.stride(-2) > x.shape[-1]) == (1, 1, True)
                assert x.stride(0) == x.shape[1] * x.stride(1)
            elif layout == "channels_last":
                assert x.is_contiguous(memory_format=torch.channels_last)
            else:
                assert x.permute([int(d) for d in order.split(",")] if order else (0, 2, 1)).is_contiguous()
    assert found == {"transposed", "sliced", "permuted", "channels_last"}


@pytest.mark.parametrize("name", random_cases.CLASSES)
def test_each_class_is_right_and_only_its_kernels_are_timed(name: str) -> None:
    for case in random_cases.draw(3, 4, (name,), moves=SMALL):
        rows, said = run(case, Onepass(), Torch(), dtype=case.dtypes[0], kernels_only=True)
        assert not said
        for each in rows.values():
            assert (each.ok, each.call_us, each.disturbed, each.suite) == (True, None, None, f"random/{name}")


@pytest.mark.gpu
def test_each_class_is_right_on_a_gpu() -> None:
    runner = Runner(torch.device("cuda"), [Onepass(), Torch()], budget=TINY, kernels_only=True)
    rows = runner.run([(case, case.dtypes[0]) for case in random_cases.draw(3, 2, moves=SMALL)]).rows
    assert [(r.suite, r.case, r.provider, r.error) for r in rows if not r.ok] == []
    assert all(r.min_us and r.call_us is None and r.threads is None for r in rows)


def test_in_place_is_checked_in_place_on_data_that_is_restored() -> None:
    case = Case("t", "t", (6, 40), in_place=True)
    inputs = make_inputs(case, "float32", CPU, 0)
    assert inputs.out is inputs.x
    assert Torch().prepare(inputs)() is Onepass().prepare(inputs)() is inputs.x
    idle = Odd(lambda x: x)  # leaves what it finds, which must not be the result of the provider before it
    rows, _ = run(case, Torch(), idle, Onepass(), kernels_only=True)
    assert [name for name, each in rows.items() if each.ok] == ["copy", "torch", "onepass"]
    assert (rows["odd"].error or "").startswith("wrong: ")


def test_torch_compile_runs_on_as_many_points_as_asked() -> None:
    cases = random_cases.draw(1, 10)
    for count in (0, 1, 40, 100, 1000):
        chosen = [i for i, case in enumerate(random_cases.spread_compile(cases, count)) if not case.without]
        assert len(chosen) == min(count, 100)
        assert {i // 10 for i in chosen} == set(range(10)) or count < 10  # points of every class
    rows, _ = run(Case("t", "t", (4, 8), without=("odd",)), Odd(lambda x: x), Torch())
    assert [*rows] == ["copy", "torch"]


def test_lengths_move_by_one_around_powers_of_two_and_between_them() -> None:
    cases = random_cases.slide()
    for name, (axis, _, last) in random_cases.SERIES.items():
        own = [case for case in cases if case.suite == f"slide/{name}"]
        for dtype in ("float32", "bfloat16"):
            moved = [case.shape[axis] for case in own if case.dtypes == (dtype,)]
            assert moved == random_cases.lengths(last) == sorted(set(moved))
        assert all(200 * random_cases.MB < case.bytes(case.dtypes[0]) <= 256 * random_cases.MB for case in own)
    assert {255, 256, 257, 4095, 4096, 4097, 383, 384, 385} < set(random_cases.lengths(1 << 13))
    # The largest drop is to either side, and between neighbours only.
    assert random_cases.largest_drop({7: 1.0, 8: 0.9, 9: 0.45, 10: 0.5, 12: 0.01}) == (0.5, 8, 9)
    assert random_cases.largest_drop({7: 0.5, 8: 1.0}) == (0.5, 8, 7)
    assert random_cases.largest_drop({7: 0.5, 9: 1.0}) is None


# What is said


def made(suite: str, shape: list[int], ours: float, other: float, limit: float = 80.0, **fields: Any) -> list[Row]:
    """The rows of a point: the limit, onepass, and torch."""
    times = {"copy": limit, "onepass": ours, "torch": other}
    about = {"suite": suite, "case": "x".join(map(str, shape)), "shape": shape, **fields}
    return [row(us, provider=name, min_us=us / 2, **about) for name, us in times.items()]


def text(*parts: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False, markup=False, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def test_classes_are_summed_up_large_shapes_by_fractions_and_small_ones_by_microseconds() -> None:
    rows = [r for i in range(1, 8) for r in made("random/rows", [i, 4], 80 + 10 * i, 120.0, bytes=64 * random_cases.MB)]
    rows += [r for i in (1, 2) for r in made("random/rows", [i, 5], 80 + 2 * i, 80.0, bytes=63 * random_cases.MB)]
    rows += made(
        "random/logsumexp", [3, 4], 100.0, 400.0, function="logsumexp", dtype="bfloat16", bytes=100 * random_cases.MB
    )
    rows += made("random/logsumexp", [9, 4], 1.0, 4.0, bytes=100 * random_cases.MB, disturbed="so")
    on_cpu = [*made("random/rows", [2, 3], 100.0, 90.0, threads=1, bytes=8 * random_cases.MB)]
    assert_snapshot("random-classes", text(*show_classes(rows)) + "\n" + text(*show_classes(on_cpu)))
    assert show_classes(made("models", [1, 2], 1.0, 2.0)) == []


def test_each_series_names_its_largest_drop(tmp_path: Path) -> None:
    ours = {254: 90.0, 255: 90.0, 256: 80.0, 257: 160.0, 258: 100.0}
    rows = [r for n, us in ours.items() for r in made("slide/rows", [1, n], us, 100.0)]
    rows += [r for n, us in ours.items() for r in made("slide/other-dim-n", [1, n, 9], us + n, 100.0, dtype="bfloat16")]
    assert show_drops(rows) == [
        "slide/rows f32, 5 lengths: largest drop between neighbours 50%, from 256 (1.00 of the limit) to 257 (0.50)",
        "slide/other-dim-n bf16>f32, 5 lengths: largest drop between neighbours 19%, "
        "from 256 (0.24 of the limit) to 257 (0.19)",
    ]
    rows += [*made("random/rows", [4, 8], 100.0, 200.0), *made("random/strided", [4, 8], 90.0, 120.0, dtype="bfloat16")]
    names = sorted(path.name for path in draw_plots([file(*rows)], tmp_path) if path.suffix == ".png")
    assert names == [
        "random.png",
        "slide-other-dim-n-softmax-forward-bfloat16-to-float32.png",
        "slide-rows-softmax-forward-float32.png",
    ]


SHAPE = r"\d+(x\d+)+"


def test_the_commands_print_their_transcript(fake: Any, tmp_path: Path) -> None:
    drawn = "bench random --seed 3 --count 1 --classes rows,in-place,gradient-rows,wider-output --mb 1 2 --device cpu"
    slid = "bench slide --classes other-dim-n --dtype f32 --mb 1 2 --filter x6x --device cpu --only onepass"
    errors = (
        "bench random --classes columns --device cpu",
        "bench slide --classes strided --device cpu",
        "bench random --mb 8 9 --device cpu",
        "bench random --function softmin --device cpu",
    )
    assert_snapshot("bench-random", session(drawn, slid, *errors, hide=SHAPE))
    assert call(*drawn.split(), "--json", str(tmp_path / "r.json")).exit_code == 0
    saved = results.load(tmp_path / "r.json")
    assert (saved.environment["count"], saved.environment["mb"], saved.environment["seed"]) == (1, [1.0, 2.0], 3)
    assert {r.provider for r in saved.rows} == {"copy", "onepass", "torch"}
    assert all(r.min_us and r.call_us is None for r in saved.rows)


def test_a_wrong_result_fails_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        onepass, "softmax", lambda x, dim, out=None, **options: torch.softmax(x, dim, out=out).mul_(1.01)
    )
    printed = session("bench random --count 1 --classes rows,in-place,logsumexp --mb 1 2 --device cpu --dtype f32")
    assert len(re.findall(r"onepass +wrong: error 1\.0e-02", printed)) == 2
    assert printed.endswith("exit status 1\n")
