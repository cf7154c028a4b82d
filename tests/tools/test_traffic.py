"""`onepass traffic`: the predictions, the table and the command."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

import onepass
from lib.transcript import call, replay, session
from onepass.tools.gallery import VARIANTS, ncu
from onepass.tools.gallery.ncu import Counts, Kernel, Measurement, NcuError
from onepass.tools.gallery.traffic import FLOAT32, MINIMUM, Prediction, predict, predict_all
from onepass.tools.gallery.variants import Count, Traffic

M, N = 4096, 781
MN = M * N


def predicted(name: str, rows: int, n: int, dtype: torch.dtype = torch.float32, device: str = "h200") -> Prediction:
    return predict_all(onepass.explain((rows, n), dtype=dtype, device=device, bandwidth=1.0), [name])[name]


# Predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_naive_computes_in_float32(name: str, dtype: torch.dtype) -> None:
    line = predicted(name, M, N, dtype)
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M) == (16_003_072, 9_605_120)
    size = dtype.itemsize
    reads = size * (2 * MN) + 4 * (3 * MN + 2 * M)  # x twice; shifted, numerator twice, maximum, denominator
    writes = size * MN + 4 * (2 * MN + 2 * M)  # the result; shifted, numerator, maximum, denominator
    assert line.bytes == reads + writes == (102_432_768 if size == 4 else 83_238_912)
    assert line.ratio == 1 / line.copy_fraction == pytest.approx(4 + 2 / N if size == 4 else 6.5 + 4 / N)
    assert line.cached_bytes is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_reads_have_a_second_prediction_for_the_caches(dtype: torch.dtype) -> None:
    line = predict(Traffic(Count(3), Count(1)), MINIMUM, M, N, dtype, gbs=100.0)
    assert (line.ratio, line.cached_ratio) == (2.0, 1.0)
    assert line.cached_bytes == 2 * MN * dtype.itemsize
    assert (line.us, line.cached_us) == pytest.approx((line.bytes / 1e5, line.cached_bytes / 1e5))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_predicted_by_its_header(name: str) -> None:
    line, header = predicted(name, 3, 100_000), VARIANTS[name].header  # longer rows than some of them take
    assert line.bytes == 4 * (line.reads + line.writes) == 4 * header.traffic.elements(3, 100_000)
    assert line.ratio == line.bytes / (2 * 4 * 300_000)
    assert (line.cached_ratio is None) == (header.cached is None)
    assert f"reads {line.reads_formula}, writes {line.writes_formula}" in header.traffic_text


def test_the_order_and_the_names() -> None:
    plan = onepass.explain((8, 8), device="h200")
    assert list(predict_all(plan)) == ["minimum", *VARIANTS, "onepass"]
    assert list(predict_all(plan, ["onepass", "naive"])) == ["minimum", "naive", "onepass"]


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
    line, plan = predicted("onepass", *shape, device=device), onepass.explain(shape, device=device, bandwidth=1.0)
    assert line.bytes == plan.bytes * (1.5 if twice else 1)
    assert line.cached_bytes == (plan.bytes if twice else None)
    assert device == "cpu" or (plan.tier == "twopass") == twice


def test_elements_that_do_not_fit_on_the_chip_are_read_twice() -> None:
    plan = onepass.explain((2, 16 << 20), device="h200", bandwidth=1.0)
    again = plan.launch["read_again"]
    assert (plan.tier, again > 0) == ("grid", True)
    line = predicted("onepass", 2, 16 << 20)
    assert (line.bytes, line.cached_bytes) == (plan.bytes + 2 * 4 * again, plan.bytes)
    assert line.reads_formula == f"MN + {again}M"
    assert "read_again" not in onepass.explain((1, 1 << 20), device="h200").launch


# The command -----------------------------------------------------------------------------------------------------


def test_commands_print_their_transcript() -> None:
    replay("traffic")


def read_json(command: str) -> Any:
    return json.loads(call("traffic", *command.split(), "--json").stdout)


def test_the_command_as_json() -> None:
    data = read_json("4096x781 --dtype bf16 --only naive,onepass --device h200")
    assert (data["rows"], data["n"], data["dtype"], data["device"]) == (M, N, "bfloat16", "NVIDIA H200")
    assert (data["bandwidth_gbs"], data["minimum_bytes"]) == (4270.0, 4 * MN)
    assert [line["name"] for line in data["lines"]] == ["minimum", "naive", "onepass"]
    naive = data["lines"][1]["predicted"]
    assert (naive["reads_formula"], naive["writes_formula"]) == ("5MN + 2M", "3MN + 2M")
    assert naive["bytes"] == 83_238_912
    assert naive["us"] == pytest.approx(83_238_912 / 4270e3)
    assert all(line["measured"] is None for line in data["lines"])
    assert (data["ncu"], data["not_measured"], data["left_out"]) == (None, None, {})


COUNTS = {
    "copy": Counts((Kernel("mul", 12_795_904, 0),)),
    "naive": Counts((Kernel("a", 40_000_000, 20_000_000), Kernel("b", 24_000_000, 18_383_232))),
    "torch": Counts((Kernel("c", None, 5),)),
    "onepass": Counts(()),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command believes that GPU 2 is here, and that ncu counts on it; gives the arguments of the measurements."""
    asked: list[Any] = []

    def measure(*arguments: Any) -> Measurement:
        asked.append(arguments)
        counts = {name: COUNTS[name] for name in arguments[1] if name in COUNTS}
        return Measurement(counts, {name: "runs only on the CPU" for name in arguments[1] if name not in COUNTS})

    def explain(x: Any, device: Any, **options: Any) -> Any:
        return real(x, device="h200" if isinstance(device, torch.device) else device, **options)

    real = onepass.explain
    monkeypatch.setattr("onepass.explain", explain)
    monkeypatch.setattr("onepass.tools.bench.cli_run.parse_device", lambda name: torch.device("cuda", 2))
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/opt/ncu")
    monkeypatch.setattr(ncu, "measure", measure)
    return asked


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives what a command prints on a terminal of a width."""

    def run(width: int, command: str) -> str:
        screen = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        monkeypatch.setattr("onepass.tools.terminal.console", lambda: screen)
        session(command)
        return screen.file.getvalue()

    return run


def test_measured_numbers_and_their_notes(gpu: list[Any]) -> None:
    replay("traffic-measured")
    names = ["copy", "naive", "cpu-online", "onepass"]
    assert gpu == [("/opt/ncu", names, M, N, "float16", 2), ("/opt/ncu", ["copy", "onepass"], M, N, "float32", 2)]
    data = read_json("4096 781 --only naive,cpu-online --device cuda:2")
    assert data["lines"][2]["measured"] == {
        "read_bytes": 64_000_000,
        "written_bytes": 38_383_232,
        "ratio": pytest.approx(4.0, rel=1e-3),
        "kernels": [
            {"name": "a", "read": 40_000_000, "written": 20_000_000},
            {"name": "b", "read": 24_000_000, "written": 18_383_232},
        ],
    }
    assert data["left_out"] == {"cpu-online": "runs only on the CPU"}


def test_torch_is_measured_if_all_are_asked_for(gpu: list[Any]) -> None:
    data = read_json("8 8")
    assert [line["name"] for line in data["lines"]] == ["minimum", "copy", *VARIANTS, "torch", "onepass"]
    assert data["lines"][-2]["predicted"] is None


@pytest.mark.parametrize("has_ncu", [True, False])
def test_a_failed_measurement_leaves_the_prediction(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, has_ncu: bool
) -> None:
    def measure(*arguments: Any) -> Measurement:
        raise NcuError("this user may not read the GPU's counters")

    monkeypatch.setattr(ncu, "measure", measure)
    if not has_ncu:
        monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    text = session("traffic 8 8 --only naive")
    assert "\nnaive " in text
    assert "MB" not in text
    assert "exit status" not in text
    reason = "this user may not read the GPU's counters" if has_ncu else "no ncu (Nsight Compute) on the PATH"
    assert f"not measured: {reason}" in text


@pytest.mark.parametrize("width", [200, 120, 80])
def test_a_terminal_of_any_width_shows_every_number(width: int, gpu: list[Any], on_terminal: Any) -> None:
    text = on_terminal(width, "traffic 4096 781")
    assert max(map(len, text.splitlines())) <= width
    for part in ("16,003,072", "5MN + 2M", "102,432,768", "(1.00)", "4.00", "64.00", "38.38", "cpu-online", "n/a"):
        assert part in text, part


def test_numbers_that_have_no_room_leave_their_formulas(gpu: list[Any], on_terminal: Any) -> None:
    text = on_terminal(80, "traffic 65536 262144")
    for part in ("549,756,862,464", "5MN + 2M", "64.00"):  # the first is naive's bytes
        assert part in text
    assert "85,899,476,992" not in text  # its reads


@pytest.mark.gpu
def test_a_gpu_gives_the_time_of_a_copy() -> None:
    data = read_json("64 1000 --only naive --no-measure")
    assert data["device"] == torch.cuda.get_device_name()
    assert 10 < data["bandwidth_gbs"] < 50_000
    assert data["lines"][1]["predicted"]["us"] > 0
    assert data["lines"][1]["measured"] is None
