"""`onepass traffic`: the predictions, the table and the command."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from expecttest import assert_expected_inline

import onepass
from lib.transcript import errors, transcript
from onepass.tools.cli import cli
from onepass.tools.gallery import VARIANTS, Traffic, ncu
from onepass.tools.gallery import traffic as model
from onepass.tools.gallery.ncu import Counts, Kernel, Measurement, NcuError
from onepass.tools.gallery.traffic import MINIMUM, predict, predict_all
from onepass.tools.gallery.traffic_table import Report, Target, format_report
from onepass.tools.gallery.variants import format_count

M, N = 4096, 781
MN = M * N

# Predictions -----------------------------------------------------------------------------------------------------


def test_naive_moves_four_times_the_minimum_in_float32() -> None:
    line = predict_all(M, N, torch.float32, only=["naive"])[1]
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M) == (16_003_072, 9_605_120)
    assert line.bytes == 4 * (8 * MN + 4 * M) == 102_432_768
    assert line.minimum == 25_591_808
    assert line.ratio == pytest.approx(4 + 2 / N)
    assert (line.cached_bytes, line.note) == (None, "")


@pytest.mark.parametrize("name", ["naive", "naive-jit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_naive_computes_2_byte_dtypes_in_float32(name: str, dtype: torch.dtype) -> None:
    line = predict_all(M, N, dtype, only=[name])[1]
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M)
    reads = 2 * (2 * MN) + 4 * (3 * MN + 2 * M)  # x twice; shifted, numerator twice, maximum, denominator
    writes = 2 * MN + 4 * (2 * MN + 2 * M)  # the result; shifted, numerator, maximum, denominator
    assert line.bytes == reads + writes == 83_238_912
    assert line.minimum == 4 * MN
    assert line.ratio == pytest.approx(6.5 + 4 / N)
    assert "float32" in line.note


def test_the_float32_part_of_a_naive_variant_is_part_of_its_header() -> None:
    for name, float32 in model._FLOAT32.items():
        traffic = VARIANTS[name].header.traffic
        for total, part in ((traffic.reads, float32.reads), (traffic.writes, float32.writes)):
            assert all(a >= b for a, b in zip(total, part, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_reads_have_a_second_prediction_for_the_caches(dtype: torch.dtype) -> None:
    line = predict("three passes", Traffic((3, 0), (1, 0)), MINIMUM, M, N, dtype)
    assert (line.ratio, line.cached_ratio) == (2.0, 1.0)
    assert line.cached_bytes == 2 * MN * dtype.itemsize == line.minimum


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_predicted_by_its_header(name: str) -> None:
    minimum, line = predict_all(3, 100_000, torch.float32, only=[name])  # longer rows than some of them take
    header = VARIANTS[name].header
    assert minimum.name == "minimum"
    assert (line.reads, line.writes) == header.traffic.elements(3, 100_000)
    assert line.bytes == 4 * (line.reads + line.writes)
    assert line.ratio == pytest.approx(header.traffic.ratio(3, 100_000))
    assert (line.cached_ratio is None) == (header.cached is None)
    text = f"reads {format_count(header.traffic.reads)}, writes {format_count(header.traffic.writes)}"
    assert text in header.traffic_text


def test_the_order_and_the_names() -> None:
    assert [line.name for line in predict_all(8, 8, torch.float32)] == ["minimum", *VARIANTS, "onepass"]
    some = predict_all(8, 8, torch.float32, only=["onepass", "naive"])
    assert [line.name for line in some] == ["minimum", "naive", "onepass"]
    with pytest.raises(ValueError, match=r"unknown variant 'nave': there are naive, .*, onepass$"):
        predict_all(8, 8, torch.float32, only=["nave"])


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
def test_onepass_is_predicted_by_its_plan(shape: tuple[int, int], device: str, twice: bool) -> None:
    line = predict_all(*shape, torch.float32, device, ["onepass"])[1]
    plan = onepass.explain(shape, device=device, bandwidth=1.0)
    assert line.minimum == plan.bytes
    assert line.bytes == plan.bytes * (1.5 if twice else 1)
    assert line.cached_bytes == (plan.bytes if twice else None)
    assert ("read twice" in line.note) == twice
    if device == "h200":
        assert (plan.tier == "twopass") == twice


def test_elements_that_do_not_fit_on_the_chip_are_read_twice() -> None:
    plan = onepass.explain((2, 16 << 20), device="h200", bandwidth=1.0)
    again = plan.launch["read_again"]
    assert (plan.tier, again > 0) == ("grid", True)
    line = predict_all(2, 16 << 20, torch.float32, "h200", ["onepass"])[1]
    assert line.bytes == plan.bytes + 2 * 4 * again
    assert (line.cached_bytes, f"{again} elements" in line.note) == (plan.bytes, True)
    assert "read_again" not in onepass.explain((1, 1 << 20), device="h200").launch


# The table -------------------------------------------------------------------------------------------------------


def measured_report(rows: int = M, n: int = N) -> Report:
    predicted = predict_all(rows, n, torch.float32, "h200", ["naive", "cpu-online", "onepass"])
    target = Target("h200", "NVIDIA H200", None, 1000.0, "as given")
    report = Report(target, rows, n, "float32", [(p.name, p) for p in predicted])
    report.lines = report.lines_to_measure(with_torch=True)
    counts = {
        "copy": Counts((Kernel("mul", 12_795_904, 0),)),
        "naive": Counts((Kernel("a", 40_000_000, 20_000_000), Kernel("b", 24_000_000, 18_383_232))),
        "torch": Counts((Kernel("c", None, 5),)),
        "onepass": Counts(()),
    }
    report.measured = Measurement(counts, {"cpu-online": "runs only on the CPU"})
    return report


def test_measured_numbers_and_the_notes() -> None:
    assert_expected_inline(
        format_report(measured_report(), 110),
        """\
4096 x 781 float32 on NVIDIA H200, where a copy reaches 1,000 GB/s (as given)

variant          reads     writes        bytes   ratio    of a    us     MB       MB  measured
                                                          copy         read  written     ratio
----------  ----------  ---------  -----------  ------  ------  ----  -----  -------  --------
minimum      3,198,976  3,198,976   25,591,808    1.00    1.00  25.6
                    MN         MN
copy         3,198,976  3,198,976   25,591,808    1.00    1.00  25.6  12.80     0.00      0.50
                    MN         MN
naive       16,003,072  9,605,120  102,432,768    4.00    0.25   102  64.00    38.38      4.00
              5MN + 2M   3MN + 2M
cpu-online   6,397,952  3,198,976   38,387,712    1.50    0.67
                   2MN         MN               (1.00)  (1.00)
torch                                                                   n/a     0.00
onepass      3,198,976  3,198,976   25,591,808    1.00    1.00  25.6    n/a      n/a
                    MN         MN

reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's
of a copy: the highest speed that it can reach, in units of a copy's
in brackets: from memory, while the rows in flight stay in the caches
us: at a copy's bandwidth; empty for a variant that does not run on this kind of device
not measured: cpu-online: runs only on the CPU
n/a: ncu saw no kernel of onepass
MB: 1e6 bytes between the GPU and its DRAM, counted by ncu. It empties the caches before each kernel, so that
a variant of several kernels reads everything anew. Data that is still in the L2 when a kernel ends is not
counted as written. The copy, y = x * 1, checks the counters""",
    )


def test_a_narrow_terminal_has_formulas_below_the_numbers() -> None:
    text = format_report(measured_report(), 80)
    assert_expected_inline(
        text.partition("reads,")[0],
        """\
4096 x 781 float32 on NVIDIA H200, where a copy reaches 1,000 GB/s (as given)

variant          reads     writes        bytes   ratio    of a    us
                                                          copy
----------  ----------  ---------  -----------  ------  ------  ----
minimum      3,198,976  3,198,976   25,591,808    1.00    1.00  25.6
                    MN         MN
copy         3,198,976  3,198,976   25,591,808    1.00    1.00  25.6
                    MN         MN
naive       16,003,072  9,605,120  102,432,768    4.00    0.25   102
              5MN + 2M   3MN + 2M
cpu-online   6,397,952  3,198,976   38,387,712    1.50    0.67
                   2MN         MN               (1.00)  (1.00)
torch
onepass      3,198,976  3,198,976   25,591,808    1.00    1.00  25.6
                    MN         MN

variant        MB       MB  measured
             read  written     ratio
----------  -----  -------  --------
minimum
copy        12.80     0.00      0.50
naive       64.00    38.38      4.00
cpu-online
torch         n/a     0.00
onepass       n/a      n/a

""",
    )


@pytest.mark.parametrize("width", [200, 120, 80])
def test_a_terminal_of_any_width_shows_every_number(width: int) -> None:
    text = format_report(measured_report(), width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("16,003,072", "5MN + 2M", "102,432,768", "(1.00)", "4.00", "64.00", "38.38", "cpu-online"):
        assert part in text, part


def test_numbers_that_have_no_room_leave_their_formulas() -> None:
    text = format_report(measured_report(65536, 262144), 80)
    assert "549,756,862,464" in text  # naive's bytes
    assert "85,899,476,992" not in text  # its reads
    assert "5MN + 2M" in text
    assert "64.00" in text


def test_colours_change_no_character() -> None:
    for width in (200, 80):
        coloured = format_report(measured_report(), width, colours=True)
        assert coloured.count("\x1b[") > 50
        lines = [line.rstrip() for line in click.unstyle(coloured).splitlines()]
        assert lines == [line.rstrip() for line in format_report(measured_report(), width).splitlines()]


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_without_a_gpu() -> None:
    text = transcript(
        "traffic 4096 781 --device cpu",
        "traffic 4096x781 --dtype bf16 --only naive,onepass --device h200",
        "traffic 8 8 --only naive --device cpu --bandwidth 0.512",
    )
    assert_expected_inline(
        text,
        """\
$ onepass traffic 4096 781 --device cpu
4096 x 781 float32 on a CPU

variant                 reads              writes                 bytes  ratio         of a copy
-----------------  -------------------  ------------------  -----------  ------------  ----------------
minimum             3,198,976 MN        3,198,976 MN         25,591,808   1.00              1.00
naive              16,003,072 5MN + 2M  9,605,120 3MN + 2M  102,432,768   4.00              0.25
naive-jit          16,003,072 5MN + 2M  9,605,120 3MN + 2M  102,432,768   4.00              0.25
naive-compile       3,198,976 MN        3,198,976 MN         25,591,808   1.00              1.00
triton-row          3,198,976 MN        3,198,976 MN         25,591,808   1.00              1.00
triton-persistent   3,198,976 MN        3,198,976 MN         25,591,808   1.00              1.00
triton-online       6,397,952 2MN       3,198,976 MN         38,387,712   1.50 (1.00)       0.67 (1.00)
cpu-threepass       9,596,928 3MN       3,198,976 MN         51,183,616   2.00 (1.00)       0.50 (1.00)
cpu-online          6,397,952 2MN       3,198,976 MN         38,387,712   1.50 (1.00)       0.67 (1.00)
cuda-warp           9,596,928 3MN       3,198,976 MN         51,183,616   2.00 (1.00)       0.50 (1.00)
cuda-block          9,596,928 3MN       3,198,976 MN         51,183,616   2.00 (1.00)       0.50 (1.00)
cuda-online         6,397,952 2MN       3,198,976 MN         38,387,712   1.50 (1.00)       0.67 (1.00)
cuda-auto           9,596,928 3MN       3,198,976 MN         51,183,616   2.00 (1.00)       0.50 (1.00)
onepass             3,198,976 MN        3,198,976 MN         25,591,808   1.00              1.00

reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's
of a copy: the highest speed that it can reach, in units of a copy's
in brackets: from memory, while the rows in flight stay in the caches
onepass: cpu engine, tier rows
$ onepass traffic 4096x781 --dtype bf16 --only naive,onepass --device h200
4096 x 781 bfloat16 on NVIDIA H200, where a copy reaches 4,270 GB/s (measured 2026-11)

variant       reads              writes                bytes  ratio  of a copy    us
-------  -------------------  ------------------  ----------  -----  ---------  ----
minimum   3,198,976 MN        3,198,976 MN        12,795,904   1.00       1.00   3.0
naive    16,003,072 5MN + 2M  9,605,120 3MN + 2M  83,238,912   6.51       0.15  19.5
onepass   3,198,976 MN        3,198,976 MN        12,795,904   1.00       1.00   3.0

reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's
of a copy: the highest speed that it can reach, in units of a copy's
us: at a copy's bandwidth; empty for a variant that does not run on this kind of device
naive: all steps between the matrix and the result are float32
onepass: cuda engine, tier staged
$ onepass traffic 8 8 --only naive --device cpu --bandwidth 0.512
8 x 8 float32 on a CPU, where a copy reaches 0.512 GB/s (as given)

variant  reads           writes           bytes  ratio  of a copy   us
-------  --------------  ---------------  -----  -----  ---------  ---
minimum     64 MN            64 MN          512   1.00       1.00  1.0
naive      336 5MN + 2M     208 3MN + 2M  2,176   4.25       0.24  4.2

reads, writes: elements. ratio: bytes in units of the minimum, hence the time in units of a copy's
of a copy: the highest speed that it can reach, in units of a copy's
us: at a copy's bandwidth; empty for a variant that does not run on this kind of device
""",
    )


def read_json(command: str) -> Any:
    return json.loads(CliRunner().invoke(cli, ["traffic", *command.split(), "--json"]).stdout)


def test_the_command_as_json() -> None:
    data = read_json("4096x781 --dtype bf16 --only naive,onepass --device h200")
    assert (data["rows"], data["n"], data["dtype"], data["device"]) == (M, N, "bfloat16", "NVIDIA H200")
    assert (data["bandwidth_gbs"], data["minimum_bytes"]) == (4270.0, 4 * MN)
    assert [line["name"] for line in data["lines"]] == ["minimum", "naive", "onepass"]
    naive = data["lines"][1]["predicted"]
    assert (naive["reads_formula"], naive["writes_formula"]) == ("5MN + 2M", "3MN + 2M")
    assert naive["bytes"] == 83_238_912
    assert naive["us"] == pytest.approx(83_238_912 / 4270e3)
    assert naive["copy_fraction"] == pytest.approx(1 / naive["ratio"])
    assert all(line["measured"] is None for line in data["lines"])
    assert (data["ncu"], data["not_measured"], data["left_out"]) == (None, None, {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes that a GPU is here; nothing is run on it."""
    target = Target("h200", "NVIDIA H200", torch.device("cuda", 2))
    monkeypatch.setattr(sys.modules["onepass.tools.cli.traffic"], "_target", lambda name: target)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/opt/ncu")


def test_a_measurement(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(*arguments: Any) -> Measurement:
        asked.append(arguments)
        return Measurement({"naive": Counts((Kernel("k", 7 * MN, MN),))}, {"onepass": "raised: out of luck"})

    monkeypatch.setattr(ncu, "measure", measure)
    command = "4096 781 --dtype f16 --only naive,onepass"
    data = read_json(command)
    assert asked == [("/opt/ncu", ["copy", "naive", "onepass"], M, N, "float16", 2)]
    assert [line["name"] for line in data["lines"]] == ["minimum", "copy", "naive", "onepass"]
    assert data["lines"][2]["measured"] == {
        "read_bytes": 7 * MN,
        "written_bytes": MN,
        "ratio": 2.0,
        "kernels": [{"name": "k", "read": 7 * MN, "written": MN}],
    }
    assert data["left_out"] == {"onepass": "raised: out of luck"}
    text = transcript(f"traffic {command}")
    assert "MB written" in text
    assert "not measured: onepass: raised: out of luck" in text
    transcript(f"traffic {command} --no-measure")
    assert len(asked) == 2


def test_torch_is_measured_if_all_are_asked_for(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "measure", lambda path, names, *rest: Measurement({name: Counts(()) for name in names}))
    data = read_json("8 8")
    assert [line["name"] for line in data["lines"]] == ["minimum", "copy", *VARIANTS, "torch", "onepass"]
    assert data["lines"][-2]["predicted"] is None


@pytest.mark.parametrize("has_ncu", [True, False])
def test_a_failed_measurement_leaves_the_prediction(gpu: None, monkeypatch: pytest.MonkeyPatch, has_ncu: bool) -> None:
    def measure(*arguments: Any) -> Measurement:
        raise NcuError("this user may not read the GPU's counters")

    monkeypatch.setattr(ncu, "measure", measure)
    if not has_ncu:
        monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    text = transcript("traffic 8 8 --only naive")
    assert "\nnaive " in text
    assert "MB" not in text
    assert "exit status" not in text
    reason = "this user may not read the GPU's counters" if has_ncu else "no ncu (Nsight Compute) on the PATH"
    assert f"not measured: {reason}" in text


def test_wrong_input_is_one_line() -> None:
    text = errors(
        "traffic",
        "traffic 4096",
        "traffic 2x3 4",
        "traffic many rows",
        "traffic 8 1.5",
        "traffic 0 8",
        "traffic 1000000000000 1000000000000",
        "traffic 8 8 --only nave",
        "traffic 8 8 --dtype int8",
        "traffic 8 8 --dtype f64",
        "traffic 8 8 --device h9000",
        "traffic 8 8 --device meta",
        "traffic 8 8 --bandwidth -1",
        "traffic 8 8 --bandwidth inf",
    )
    assert_expected_inline(
        text,
        """\
traffic
  Missing argument 'M N'.
traffic 4096
  takes the two sizes of a matrix, M N, got 4096
traffic 2x3 4
  takes the two sizes of a matrix, M N, got 2x3 4
traffic many rows
  Invalid value: M N takes whole numbers, got 'many'
traffic 8 1.5
  Invalid value: M N takes whole numbers, got '1.5'
traffic 0 8
  M and N must be at least 1, with at most 2**60 elements; got 0 x 8
traffic 1000000000000 1000000000000
  M and N must be at least 1, with at most 2**60 elements; got 1000000000000 x 1000000000000
traffic 8 8 --only nave
  unknown variant 'nave': there are naive, naive-jit, naive-compile, triton-row, triton-persistent, triton-online,
    cpu-threepass, cpu-online, cuda-warp, cuda-block, cuda-online, cuda-auto, onepass
traffic 8 8 --dtype int8
  unknown dtype 'int8': take one of float64, float32, bfloat16, float16, f64, f32, bf16, f16
traffic 8 8 --dtype f64
  the variants take float32, float16, bfloat16, got float64
traffic 8 8 --device h9000
  unknown device 'h9000': take cpu, cuda, cuda:N, or a known GPU: a100, h100, h200, b200, l4, rtx4090, mi300x
traffic 8 8 --device meta
  unknown device 'meta': take cpu, cuda, cuda:N, or a known GPU: a100, h100, h200, b200, l4, rtx4090, mi300x
traffic 8 8 --bandwidth -1
  Invalid value for '--bandwidth': -1.0 is not in the range x>0.
traffic 8 8 --bandwidth inf
  --bandwidth takes GB/s, got inf
""",
    )
    assert "device 'cuda:99' is not here: there are" in errors("traffic 8 8 --device cuda:99")


@pytest.mark.gpu
def test_a_gpu_gives_the_time_of_a_copy() -> None:
    data = read_json("64 1000 --only naive --no-measure")
    assert data["device"] == torch.cuda.get_device_name()
    assert 10 < data["bandwidth_gbs"] < 50_000
    assert data["lines"][1]["predicted"]["us"] > 0
    assert data["lines"][1]["measured"] is None
