"""The command line, in this process and end to end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import onepass
from lib.cli import call, command, tiny
from onepass.tools.bench import results
from onepass.tools.bench.cases import Case

__all__ = ["tiny"]


# Help


def test_onepass_alone_shows_its_commands() -> None:
    result = call()
    assert result.exit_code == 0
    for name in ("bench", "plot", "info", "explain"):
        assert re.search(rf"^  {name} ", result.output, re.MULTILINE)
    assert "..." not in result.output.replace("[ARGS]...", "")
    assert "..." not in call("gallery", "-h").output.replace("[ARGS]...", "")
    assert call("--help").output == result.output


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.output) == (0, f"onepass {onepass.__version__}\n")


# What a user gets wrong: one line, exit status 2

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "a command": (("brench",), "No such command 'brench'"),
    "an option": (("bench", "--fast"), "No such option"),
    "a suite": (("bench", "modles"), "unknown suite 'modles': there are seeds, powers, models"),
    "a provider": (("bench", "--only", "torhc"), "unknown provider 'torhc': there are onepass, onepass-cpu,"),
    "one of two providers": (("bench", "--skip", "torch,x"), "unknown provider 'x'"),
    "a provider for elsewhere": (("bench", "--only", "onepass-cuda", "--device", "cpu"), "cannot run on cpu"),
    "a dtype": (("bench", "--dtype", "int8"), "unknown dtype 'int8': take one of float64,"),
    "a function": (("bench", "--function", "softplus"), "unknown function 'softplus'"),
    "a direction": (("bench", "--direction", "up"), "'up' is not one of"),
    "a device": (("bench", "--device", "tpu9"), "unknown device 'tpu9': take cpu, cuda or cuda:N"),
    "a device without a clock": (("bench", "--device", "meta"), "no clock for 'meta'"),
    "a device that is not here": (("bench", "--device", "cuda:99"), "'cuda:99' is not here"),
    "threads": (("bench", "--threads", "0"), "x>=1"),
    "a case": (("bench", "--case", "nothing like it"), "no case of models has 'nothing like it' in its name"),
    "a results file in a file": (("bench", "--json", f"{__file__}/r.json"), "cannot be written"),
    "no file to plot": (("plot",), "Missing argument 'FILE...'"),
    "a file that is not there": (("plot", "/nowhere/r.json"), "/nowhere/r.json: No such file or directory"),
    "a file that is no results": (("plot", __file__), "not JSON (line 1: "),
    "no sizes": (("explain",), "Missing argument 'SIZES...'"),
    "sizes in words": (("explain", "many"), "SIZES takes whole numbers, got 'many'"),
    "a dim out of range": (("explain", "4", "8", "--dim", "2"), "onepass: dim must be in [-2, 1]"),
    "a dim in words": (("explain", "4", "8", "--dim", "last"), "--dim takes whole numbers, got 'last'"),
    "no dim": (("explain", "4", "8", "--dim", ","), "--dim takes whole numbers"),
    "a dtype to explain": (("explain", "4", "--dtype", "int3"), "unknown dtype 'int3'"),
    "an engine": (("explain", "4", "8", "--engine", "warp"), "'warp'"),
    "a function to explain": (("explain", "4", "8", "--function", "softplus"), "'softplus'"),
    "an unknown GPU": (
        ("explain", "4", "8", "--device", "h9000"),
        "got 'h9000'; known GPUs, which need not be here, are a100, h100, h200, b200, l4, rtx4090, mi300x; of another "
        "give --arch, --sm-count and --bandwidth",
    ),
    "a bandwidth": (("explain", "4", "8", "--bandwidth", "-1"), "x>0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_told_in_one_line(what: str) -> None:
    arguments, message = WRONG[what]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("onepass: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_a_results_file_with_nothing_timed_is_not_drawn(tiny: None, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert call("bench", "tiny", "--only", "torch", "--quick", "--device", "cpu", "--json", str(path)).exit_code == 0
    file = results.load(path)
    results.save(results.Results(file.environment, []), path)
    result = call("plot", str(path), "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "nothing to draw" in result.stderr


# bench


def test_list_has_every_provider_and_why_not(tiny: None) -> None:
    result = call("bench", "--list", "--device", "cpu")
    assert result.exit_code == 0
    for name in ("onepass", "torch", "torch-compile", "naive", "liger", "copy", "seeds", "powers", "models", "tiny"):
        assert re.search(rf"^  {name} ", result.output, re.MULTILINE), name
    assert re.search(r"^  onepass-cuda .* not here: serves no cpu tensors$", result.output, re.MULTILINE)


def test_bench_from_options_to_files(tiny: None, tmp_path: Path) -> None:
    file, folder = tmp_path / "out" / "r.json", tmp_path / "pictures"
    options = ("--device", "cpu", "--only", "torch,naive", "--only", "onepass", "--dtype", "f32,bf16", "--threads", "1")
    result = call("bench", "tiny", *options, "--quick", "--json", str(file), "--plot", str(folder))
    assert result.exit_code == 0, result.output
    assert "tiny: 1 of 2 cases (the quick form on cpu)" in result.output
    assert "[2/2] small, 4x33, bf16" in result.output
    last = result.output.splitlines()[-3:]
    assert last[:2] == [f"picture: {folder}/tiny-softmax-forward-{d}.png" for d in ("float32", "bfloat16")]
    assert last[2] == f"results: {file}"
    rows = results.load(file).rows
    assert [(r.dtype, r.provider) for r in rows] == [
        (d, p) for d in ("float32", "bfloat16") for p in ("copy", "onepass", "torch", "naive")
    ]
    assert all(r.ok and r.threads == 1 for r in rows)
    drawn = call("plot", str(file), "-o", str(tmp_path / "again"))
    assert drawn.exit_code == 0
    for path in map(Path, drawn.output.split()):
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.parametrize(("function", "direction"), [("logsumexp", "forward"), ("softmin", "backward")])
def test_bench_takes_a_function_and_a_direction(tiny: None, tmp_path: Path, function: str, direction: str) -> None:
    file = tmp_path / "r.json"
    options = ("--function", function, "--direction", direction, "--skip", "torch-compile", "--case", "MAP")
    result = call("bench", "tiny", *options, "--device", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "1 of 2 cases (those with 'MAP')" in result.output
    assert "results: " in result.output
    rows = results.load(file).rows
    assert {(r.function, r.direction, r.case) for r in rows} == {(function, direction, "maps")}
    assert {r.provider for r in rows} >= {"copy", "onepass", "torch", "naive"}


def test_a_wrong_onepass_fails_the_run(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepass, "softmax", lambda x, dim, out=None, **options: out.zero_())
    result = call("bench", "tiny", "--device", "cpu", "--quick", "--only", "onepass,torch")
    assert result.exit_code == 1
    assert "onepass: small, f32: wrong: error 1.0e+00" in result.output
    assert "results: not kept" in result.output


def test_a_run_that_is_broken_off_keeps_what_it_has(
    tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onepass.tools.bench import run

    real = run.make

    def make(case: Case, *arguments: Any) -> Any:
        if case.name == "maps":
            raise KeyboardInterrupt
        return real(case, *arguments)

    monkeypatch.setattr(run, "make", make)
    file = tmp_path / "r.json"
    result = call("bench", "tiny", "--device", "cpu", "--only", "torch", "--json", str(file))
    assert result.exit_code == 130
    assert "stopped" in result.output
    assert {r.case for r in results.load(file).rows} == {"small"}


# info, explain


def test_info_tells_the_engines_and_the_environment() -> None:
    result = call("info")
    assert result.exit_code == 0
    for name in ("onepass", "torch", "triton", "python", "CPU", "GPU", "cache"):
        assert re.search(rf"^{name} +\S", result.output, re.MULTILINE), name
    for name, reason in onepass.engines().items():
        said = re.search(rf"^  {name} +(.*)$", result.output, re.MULTILINE)
        assert said
        assert said[1] == ("ready" if reason is None else f"not here: {reason}")


def test_explain_of_a_device_that_is_not_here() -> None:
    arguments = ("8192", "151936", "--dtype", "bf16", "--dim", "-1", "--device", "h200")
    result = call("explain", *arguments)
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200" in result.output
    assert "4,270 GB/s" in result.output
    explained = json.loads(call("explain", *arguments, "--json").output)
    assert explained["engine"] == "cuda"
    assert explained["shape"] == [8192, 151936]
    assert explained["bytes"] == 2 * 8192 * 151936 * 2
    assert explained["copy_us"] == pytest.approx(explained["bytes"] / 4270e3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("64x50257", "--device", "cpu", "--bandwidth", "100"), {"engine": "cpu", "bandwidth_gbs": 100.0}),
        (("2", "3", "4", "--dim", "0,2", "--device", "cpu", "--bandwidth", "1"), {"dim": [0, 2], "shape": [2, 3, 4]}),
        (
            ("4", "8", "--dtype", "f16", "--out-dtype", "f32", "--device", "h200"),
            {"dtype": "float16", "out_dtype": "float32", "bytes": 4 * 8 * 6},
        ),
        (("4", "8", "--function", "logsumexp", "--device", "h200"), {"function": "logsumexp", "bytes": 4 * 9 * 4}),
    ],
)
def test_explain_takes_its_options(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    result = call("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    explained = json.loads(result.output)
    assert {name: explained[name] for name in expected} == expected


# End to end, in processes of their own


def test_bench_in_a_process_of_its_own(tmp_path: Path) -> None:
    arguments = ("bench", "models", "--case", "4K attention, 1 query", "--dtype", "f32", "--quick", "--device", "cpu")
    done = command(*arguments, "--json", "r.json", "--plot", "pictures", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "results: r.json"
    rows = results.load(tmp_path / "r.json").rows
    assert {r.provider for r in rows} == {"copy", "onepass", "torch", "naive"}
    if not all(r.disturbed for r in rows):
        assert (tmp_path / "pictures" / "models-softmax-forward-float32.png").stat().st_size > 5000


def test_a_traceback_is_never_an_answer() -> None:
    done = command("bench", "nope")
    assert done.returncode == 2
    known = "seeds, powers, models, rows, few, backward, columns, cpu, cpu-backward"
    assert done.stderr == f"onepass: unknown suite 'nope': there are {known}\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run([sys.executable, "-m", "onepass", "--help"], stdout=gone, stderr=subprocess.PIPE)
    assert done.stderr == b""
