"""The predicted traffic of the rungs, and its table."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

import onepass
from onepass.tools.gallery import RUNGS, Traffic
from onepass.tools.gallery import traffic as model
from onepass.tools.gallery.ncu import Counted, Kernel, Measured
from onepass.tools.gallery.traffic import LEAST, predict, predictions
from onepass.tools.gallery.traffic_report import Place, Report, columns, draw, notes, plain

M, N = 4096, 781
MN = M * N


# The prediction


def test_naive_moves_four_times_the_least_in_float32() -> None:
    line = predictions(M, N, torch.float32, only=["naive"])[1]
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M) == (16_003_072, 9_605_120)
    assert line.bytes == 4 * (8 * MN + 4 * M) == 102_432_768
    assert line.least == 25_591_808
    assert line.ratio == pytest.approx(4 + 2 / N)
    assert line.cached_bytes is None
    assert line.note == ""


@pytest.mark.parametrize("name", ["naive", "naive-jit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_naive_holds_float32_between_half_types(name: str, dtype: torch.dtype) -> None:
    line = predictions(M, N, dtype, only=[name])[1]
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M)
    reads = 2 * (2 * MN) + 4 * (3 * MN + 2 * M)  # x twice; shifted, numerator twice, maximum, denominator
    writes = 2 * MN + 4 * (2 * MN + 2 * M)  # the result; shifted, numerator, maximum, denominator
    assert line.bytes == reads + writes == 83_238_912
    assert line.least == 4 * MN
    assert line.ratio == pytest.approx(6.5 + 4 / N)
    assert "float32" in line.note


def test_what_is_float32_in_a_naive_rung_is_part_of_its_header() -> None:
    for name, wide in model._FLOAT32.items():
        traffic = RUNGS[name].header.traffic
        for all_of, part in ((traffic.reads, wide.reads), (traffic.writes, wide.writes)):
            assert all(a >= b for a, b in zip(all_of, part, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rereads_have_a_second_prediction_for_the_caches(dtype: torch.dtype) -> None:
    line = predict("three passes", Traffic((3, 0), (1, 0)), LEAST, M, N, dtype)
    assert (line.ratio, line.cached_ratio) == (2.0, 1.0)
    assert line.cached_bytes == 2 * MN * dtype.itemsize == line.least


@pytest.mark.parametrize(
    ("count", "text"), [((5, 2), "5MN + 2M"), ((1, 0), "MN"), ((0, 1), "M"), ((2, 1), "2MN + M"), ((0, 0), "0")]
)
def test_formula(count: tuple[int, int], text: str) -> None:
    assert model.formula(count) == text


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_predicted_by_its_header(name: str) -> None:
    least, line = predictions(3, 100_000, torch.float32, only=[name])  # more than some of them take
    header = RUNGS[name].header
    assert least.name == "least"
    assert (line.reads, line.writes) == header.traffic.elements(3, 100_000)
    assert line.bytes == 4 * (line.reads + line.writes)
    assert line.ratio == pytest.approx(header.traffic.ratio(3, 100_000))
    assert (line.cached_ratio is None) == (header.cached is None)
    assert f"reads {model.formula(header.traffic.reads)}, writes {model.formula(header.traffic.writes)}" in (
        header.traffic_text
    )


def test_the_rungs_come_in_their_order_between_least_and_onepass() -> None:
    assert [line.name for line in predictions(8, 8, torch.float32)] == ["least", *RUNGS, "onepass"]
    assert [line.name for line in predictions(8, 8, torch.float32, only=["onepass", "naive"])] == [
        "least",
        "naive",
        "onepass",
    ]


def test_an_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown rung 'nave': there are naive, .*, onepass$"):
        predictions(8, 8, torch.float32, only=["nave"])


@pytest.mark.parametrize(
    ("shape", "device", "twice"),
    [
        ((4096, 781), "h200", False),
        ((64, 200_000), "h200", False),
        ((64, 2049), "cpu", False),
        ((3, 65536), "cpu", False),
        ((3, 65537), "cpu", True),
    ],
)
def test_onepass_by_its_plan(shape: tuple[int, int], device: str, twice: bool) -> None:
    line = predictions(*shape, torch.float32, device, ["onepass"])[1]
    plan = onepass.explain(shape, device=device, bandwidth=1.0)
    assert line.least == plan.bytes
    assert line.bytes == plan.bytes * (1.5 if twice else 1)
    assert line.cached_bytes == (plan.bytes if twice else None)
    assert ("read twice" in line.note) == twice
    if device == "h200":
        assert (plan.tier == "twopass") == twice


def test_what_does_not_fit_the_chip_is_read_twice() -> None:
    plan = onepass.explain((2, 16 << 20), device="h200", bandwidth=1.0)
    again = plan.launch["read_again"]
    assert (plan.tier, again > 0) == ("grid", True)
    line = predictions(2, 16 << 20, torch.float32, "h200", ["onepass"])[1]
    assert line.bytes == plan.bytes + 2 * 4 * again
    assert (line.cached_bytes, f"{again} elements" in line.note) == (plan.bytes, True)
    assert "read_again" not in onepass.explain((1, 1 << 20), device="h200").launch


# The table


def report(gbs: float | None = None, dtype: torch.dtype = torch.float32) -> Report:
    only = ["naive", "cpu-online", "onepass"]
    lines = [(p.name, p) for p in predictions(M, N, dtype, "h200", only)]
    return Report(Place("h200", "NVIDIA H200", None, gbs, "as given"), M, N, "float32", lines)


def measured(gbs: float | None = None) -> Report:
    made = report(gbs)
    made.lines = made.with_copy(torch=True)
    naive = Counted((Kernel("a", 40_000_000, 20_000_000), Kernel("b", 24_000_000, 18_383_232)))
    copy = Counted((Kernel("mul", 12_795_904, 0),))
    blind = Counted((Kernel("c", None, 5),))
    made.measured = Measured(
        {"copy": copy, "naive": naive, "torch": blind, "onepass": Counted(())},
        {"cpu-online": "runs on the CPU alone"},
    )
    return made


def test_the_plain_table_has_numbers_and_formulas() -> None:
    text = plain(columns(report(1000.0)))
    assert text.isascii()
    head, rule, least, naive, online, _ = text.splitlines()
    assert head.split() == ["rung", "reads", "writes", "bytes", "ratio", "of", "a", "copy", "us"]
    assert set(rule) == {"-", " "}
    assert least.split() == ["least", "3,198,976", "MN", "3,198,976", "MN", "25,591,808", "1.00", "1.00", "25.6"]
    assert re.fullmatch(
        r"naive +16,003,072 5MN \+ 2M +9,605,120 3MN \+ 2M +102,432,768 +4.00 +0.25 +102", naive.rstrip()
    )
    # twice read, and no time: it does not run on a GPU
    assert re.fullmatch(r"cpu-online +6,397,952 2MN +3,198,976 MN +38,387,712 +1.50 \(1.00\) +0.67 \(1.00\)", online)


def test_no_bandwidth_no_time_and_no_counters_no_columns() -> None:
    assert [c.head for c in columns(report())] == ["rung", "reads", "writes", "bytes", "ratio", "of a copy"]
    assert not any("MB" in note or "us:" in note for note in notes(report()))


def test_measured_columns_stand_beside_the_predicted() -> None:
    made = measured(1000.0)
    found = {c.head: dict(zip([name for name, _ in made.lines], c.cells, strict=True)) for c in columns(made)}
    assert list(found)[-3:] == ["MB read", "MB written", "measured ratio"]
    assert [name for name, _ in made.lines] == ["least", "copy", "naive", "cpu-online", "torch", "onepass"]
    assert found["MB read"] == dict(
        zip(found["rung"], ["", "12.80", "64.00", "", "n/a", "n/a"], strict=True)
    )  # onepass: no kernel was seen
    assert found["MB written"]["naive"] == "38.38"
    assert found["measured ratio"] == dict(zip(found["rung"], ["", "0.50", "4.00", "", "", ""], strict=True))
    assert found["reads"]["torch"] == found["ratio"]["torch"] == ""
    said = "\n".join(notes(made))
    assert "not measured: cpu-online: runs on the CPU alone" in said
    assert "n/a: ncu saw no kernel of onepass" in said
    assert "empties the caches before each kernel" in said
    assert "still in the L2 when a kernel ends is not counted as written" in said


@pytest.mark.parametrize("width", [200, 120, 80])
def test_a_terminal_of_any_width_loses_no_number(width: int) -> None:
    file = io.StringIO()
    draw(measured(1000.0), Console(file=file, width=width, highlight=False))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for part in ("16,003,072", "5MN + 2M", "102,432,768", "(1.00)", "4.00", "64.00", "38.38", "cpu-online"):
        assert part in text, part


def test_a_narrow_terminal_keeps_the_formulas() -> None:
    file = io.StringIO()
    made = measured(1000.0)
    made.lines = [(p.name, p) for p in predictions(65536, 262144, torch.float32, "h200", ["naive", "cpu-online"])]
    draw(made, Console(file=file, width=80, highlight=False))
    assert re.search(r"^naive +5MN \+ 2M +3MN \+ 2M +549,756,862,464 +4.00 ", file.getvalue(), re.MULTILINE)
    assert "85,899,476,992" not in file.getvalue()  # the number of elements read has no room
