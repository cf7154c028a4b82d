"""`onepass traffic`: what it takes and prints. No GPU is needed; one test asks for one."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from onepass.tools.cli import Commands
from onepass.tools.cli.traffic import traffic
from onepass.tools.gallery import RUNGS, ncu
from onepass.tools.gallery.ncu import Counted, Kernel, Measured, NcuError
from onepass.tools.gallery.traffic_report import Place

M, N = 4096, 781
MN = M * N
COMMAND = sys.modules["onepass.tools.cli.traffic"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(Commands(commands={"traffic": traffic}), ["traffic", *arguments])


def test_traffic_without_a_gpu_predicts() -> None:
    result = call("4096", "781", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("4096 x 781 float32 on a CPU\n")
    names = [line.split()[0] for line in result.stdout.split("\n\n")[1].splitlines()]
    assert names == ["rung", names[1], "least", *RUNGS, "onepass"]
    assert "MB" not in result.stdout
    assert "not measured" not in result.stdout
    assert result.stderr == ""


def test_traffic_as_json() -> None:
    result = call("4096x781", "--dtype", "bf16", "--only", "naive,onepass", "--device", "h200", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["rows"], data["n"], data["dtype"], data["device"]) == (M, N, "bfloat16", "NVIDIA H200")
    assert data["bandwidth_gbs"] == 4270.0
    assert data["least_bytes"] == 4 * MN
    assert [line["name"] for line in data["lines"]] == ["least", "naive", "onepass"]
    naive = data["lines"][1]["predicted"]
    assert (naive["reads_formula"], naive["writes_formula"]) == ("5MN + 2M", "3MN + 2M")
    assert naive["bytes"] == 83_238_912
    assert naive["us"] == pytest.approx(83_238_912 / 4270e3)
    assert naive["copy_fraction"] == pytest.approx(1 / naive["ratio"])
    assert all(line["measured"] is None for line in data["lines"])
    assert (data["ncu"], data["not_measured"], data["left_out"]) == (None, None, {})


def test_a_given_bandwidth_is_taken() -> None:
    result = call("8", "8", "--only", "naive", "--device", "cpu", "--bandwidth", "0.512")
    assert "where a copy reaches 0.512 GB/s (as given)" in result.stdout
    assert re.search(r"^least .* 1\.0$", result.stdout, re.MULTILINE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU; nothing is run on it."""
    monkeypatch.setattr(COMMAND, "_place", lambda name: Place("h200", "NVIDIA H200", torch.device("cuda", 2)))
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/opt/ncu")


def test_measured_beside_predicted(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(*arguments: Any) -> Measured:
        asked.append(arguments)
        return Measured({"naive": Counted((Kernel("k", 7 * MN, MN),))}, {"onepass": "raised: out of luck"})

    monkeypatch.setattr(ncu, "measure", measure)
    arguments = ("4096", "781", "--dtype", "f16", "--only", "naive,onepass")
    data = json.loads(call(*arguments, "--json").stdout)
    assert asked == [("/opt/ncu", ["copy", "naive", "onepass"], M, N, "float16", 2)]
    assert [line["name"] for line in data["lines"]] == ["least", "copy", "naive", "onepass"]
    assert data["lines"][2]["measured"] == {
        "read_bytes": 7 * MN,
        "written_bytes": MN,
        "ratio": 2.0,
        "kernels": [{"name": "k", "read": 7 * MN, "written": MN}],
    }
    assert data["left_out"] == {"onepass": "raised: out of luck"}
    text = call(*arguments).stdout
    assert "measured ratio" in text
    assert "not measured: onepass: raised: out of luck" in text
    call(*arguments, "--no-measure")
    assert len(asked) == 2


def test_torch_is_measured_where_all_are_asked_for(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "measure", lambda path, names, *rest: Measured({name: Counted(()) for name in names}))
    data = json.loads(call("8", "8", "--json").stdout)
    assert [line["name"] for line in data["lines"]] == ["least", "copy", *RUNGS, "torch", "onepass"]
    assert data["lines"][-2]["predicted"] is None


@pytest.mark.parametrize("why", ["counters", "no ncu"])
def test_what_cannot_be_measured_is_still_predicted(gpu: None, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def measure(*arguments: Any) -> Measured:
        raise NcuError("this user may not read the GPU's counters")

    monkeypatch.setattr(ncu, "measure", measure)
    if why == "no ncu":
        monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    result = call("8", "8", "--only", "naive")
    assert result.exit_code == 0
    assert re.search(r"^naive ", result.stdout, re.MULTILINE)
    assert "MB" not in result.stdout
    said = "this user may not read the GPU's counters" if why == "counters" else "no ncu (Nsight Compute) on the PATH"
    assert f"not measured: {said}" in result.stdout


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "Missing argument 'M N'"),
    "one size": (("4096",), "takes the two sizes of a matrix, M N, got 4096"),
    "three sizes": (("2x3", "4"), "takes the two sizes of a matrix, M N, got 2x3 4"),
    "words": (("many", "rows"), "M N takes whole numbers, got 'many'"),
    "a fraction": (("8", "1.5"), "M N takes whole numbers, got '1.5'"),
    "no rows": (("0", "8"), "M and N must be at least 1, with at most 2**60 elements; got 0 x 8"),
    "too many": (("1" + 12 * "0", "1" + 12 * "0"), "at most 2**60 elements"),
    "a rung": (("8", "8", "--only", "nave"), "unknown rung 'nave': there are naive, naive-jit,"),
    "a dtype": (("8", "8", "--dtype", "int8"), "unknown dtype 'int8'"),
    "a dtype of no rung": (("8", "8", "--dtype", "f64"), "the rungs take float32, float16, bfloat16, got float64"),
    "a device": (("8", "8", "--device", "h9000"), "unknown device 'h9000': take cpu, cuda, cuda:N, or a known GPU: a1"),
    "a device of no rung": (("8", "8", "--device", "meta"), "unknown device 'meta'"),
    "a device that is not here": (("8", "8", "--device", "cuda:99"), "device 'cuda:99' is not here: there are"),
    "a bandwidth": (("8", "8", "--bandwidth", "-1"), "x>0"),
    "no end of bandwidth": (("8", "8", "--bandwidth", "inf"), "--bandwidth takes GB/s, got inf"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_told_in_one_line(what: str) -> None:
    arguments, message = WRONG[what]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.gpu
def test_a_gpu_gives_the_time_of_a_copy() -> None:
    result = call("64", "1000", "--only", "naive", "--no-measure", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["device"] == torch.cuda.get_device_name()
    assert 10 < data["bandwidth_gbs"] < 50_000
    assert data["lines"][1]["predicted"]["us"] > 0
    assert data["lines"][1]["measured"] is None
