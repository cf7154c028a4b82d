"""`onepass profile`: its tables, its trace, and what it refuses."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from onepass.tools.bench.profile import Choices, contestants, run
from onepass.tools.bench.profile_table import OUTSIDE, Line
from onepass.tools.bench.profiler import Contestant, Profiler
from onepass.tools.bench.run import DeviceLost
from onepass.tools.cli import Commands
from onepass.tools.cli.profile import profile
from onepass.tools.gallery import VARIANTS, Variant

CPU = torch.device("cpu")
COMMANDS = Commands(commands={"profile": profile})
RULE = re.compile(r"^-{5,}(?:  -{5,})+ *$", re.MULTILINE)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(COMMANDS, ["profile", *arguments])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery that takes no time: a rung that runs, one that takes no long rows, one that is not to be had here."""
    rungs = {
        "naive": VARIANTS["naive"],
        "picky": Variant("picky", "naive.py", "naive:softmax", lambda device: None),
        "gone": Variant("gone", "naive.py", "naive:softmax", lambda device: "lives on the moon"),
    }
    monkeypatch.setattr("onepass.tools.gallery.variants.VARIANTS", rungs)
    monkeypatch.setattr("onepass.tools.bench.profile.VARIANTS", rungs)
    monkeypatch.setattr(Variant, "refuses", _refuses)


def _refuses(rung: Variant, rows: int, n: int, dtype: torch.dtype) -> str | None:
    return f"takes rows of up to 64, got {n}" if rung.name == "picky" and n > 64 else None


def sections(output: str) -> dict[str, str]:
    """torch's table of each contestant, by its heading's name."""
    parts = re.split(r"^(\S+): \S+ \S+ on \S+, .*$", output.partition("\neach number")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# The command


def test_tables_of_torch_and_of_ours_beside_a_rung(few: None) -> None:
    result = call("6", "40", "--with", "naive", "--device", "cpu", "--dtype", "bf16", "--calls", "3")
    assert result.exit_code == 0, result.output
    assert f"torch {torch.__version__}, on " in result.output.splitlines()[0]
    assert "\nonepass: 6x40 bfloat16 on cpu, 3 calls\n" in result.output
    tables = sections(result.output)
    assert list(tables) == ["torch", "onepass", "naive"]
    assert re.search(r"^ *aten::softmax .* 3 *$", tables["torch"], re.MULTILINE)
    assert re.search(r"^ *onepass::_softmax .* 3 *$", tables["onepass"], re.MULTILINE)
    assert "aten::amax" in tables["naive"]
    for name, table in tables.items():
        assert len(RULE.findall(table)) == 3, table
        assert re.search(rf"^ *{name} .* 3 *$", table, re.MULTILINE)  # the call itself
        assert "Self CPU time total: " in table
    assert "softmax" not in tables["naive"]
    beside = result.output.partition("\neach number")[2]
    assert re.search(r"^torch +2 +\S+ +1\.00 +\S", beside, re.MULTILINE), beside
    assert re.search(r"^onepass +1 +\S+ +\d+\.\d\d +\S", beside, re.MULTILINE), beside
    assert result.stderr == ""


def test_the_default_is_the_published_shape() -> None:
    result = call("--device", "cpu", "--rows", "1")
    assert result.exit_code == 0
    assert "\nonepass: 4096x4096 float32 on cpu, 1 call\n" in result.output
    assert [len(RULE.split(t)[2].strip().splitlines()) for t in sections(result.output).values()] == [1, 1]


def test_sorted_by_calls(few: None) -> None:
    result = call("6", "40", "--with", "naive", "--device", "cpu", "--sort", "count")
    counts = [int(row.split()[-1]) for row in RULE.split(sections(result.output)["naive"])[2].strip().splitlines()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 1


def test_all_takes_what_runs_and_tells_what_does_not(few: None) -> None:
    result = call("3x80", "--with", "all", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert list(sections(result.output)) == ["torch", "onepass", "naive"]
    assert "\n  without picky: takes rows of up to 64, got 80\n" in result.output
    assert "\n  without gone: cannot run on cpu: lives on the moon\n" in result.output
    assert list(sections(call("3", "64", "--with", "all,naive", "--device", "cpu").output))[2:] == ["naive", "picky"]


def test_all_is_the_whole_gallery() -> None:
    chosen, left_out = contestants(Choices(6, 40, CPU, names=("all",)))
    names = [contestant.name for contestant in chosen]
    assert names[:3] == ["torch", "onepass", "naive"]
    assert sorted([*names[2:], *left_out]) == sorted(VARIANTS)
    assert [name for name in VARIANTS if name in names] == names[2:]


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "one size": (("4096",), "M N takes two whole numbers of at least 1, got '4096'"),
    "three sizes": (("2", "3", "4"), "M N takes two whole numbers of at least 1, got '2 3 4'"),
    "no rows": (("0", "4"), "M N takes two whole numbers of at least 1, got '0 4'"),
    "sizes in words": (("many", "4"), "M N takes whole numbers, got 'many'"),
    "a rung": (("--with", "naive,nave"), "unknown variant 'nave': there are naive, picky, gone"),
    "a rung for elsewhere": (("--with", "gone"), "gone: cannot run on cpu: lives on the moon"),
    "a rung that takes no such shape": (("--with", "all,picky"), "picky: takes rows of up to 64, got 4096"),
    "a dtype": (("--dtype", "int8"), "unknown dtype 'int8'"),
    "a dtype that rungs do not take": (("--dtype", "f64"), "--dtype takes float32, bfloat16, float16, got 'f64'"),
    "a device": (("--device", "tpu9"), "unknown device 'tpu9': take cpu, cuda or cuda:N"),
    "a device that is not here": (("--device", "cuda:99"), "'cuda:99' is not here"),
    "calls": (("--calls", "0"), "x>=1"),
    "rows": (("--rows", "0"), "x>=1"),
    "a key": (("--sort", "name"), "'name' is not one of 'self_cpu_time_total', 'cpu_time_total',"),
    "a key of a GPU": (("--sort", "cuda_time_total"), "--sort cuda_time_total is of a GPU, and this runs on cpu"),
    "a trace in a file": (("--trace", f"{__file__}/t.json"), "cannot be written"),
    "a trace in the place of a folder": (("--trace", os.path.dirname(__file__)), "cannot be written"),
    "a trace in the place of a device": (("--trace", os.devnull), "cannot be written"),
    "more than there is memory": (("9999999", "9999999"), "9999999x9999999 float32 needs "),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_told_in_one_line_before_anything_runs(
    few: None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.tools.bench.profile.Profiler", None)
    arguments, message = WRONG[what]
    result = call(*(arguments if "--device" in arguments else (*arguments, "--device", "cpu")))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("onepass: ")
    assert message in result.stderr
    assert result.stdout == ""


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda x: torch.zeros_like(x), "wrong: error 1.0e+00 at row "),
        (lambda x: torch.softmax(x, -1)[:2], "wrong: shape (2, 40), torch.float32; it should be (6, 40)"),
        (lambda x: _raise(RuntimeError("no\nmore")), "raised: RuntimeError: no"),
    ],
)
def test_what_is_wrong_is_told_and_has_no_table(
    few: None, does: Any, said: str, warmup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.tools.gallery.naive.softmax", lambda x, out: does(x))
    result = call("6", "40", "--with", "naive", "--device", "cpu", *([] if warmup else ["--no-warmup"]))
    assert result.exit_code == 1, result.output
    assert sections(result.output)["naive"].strip().startswith(said)
    assert "aten::softmax" in sections(result.output)["torch"]
    assert not re.search(r"^naive ", result.output, re.MULTILINE)


def test_the_first_call_is_told() -> None:
    assert "on cpu, the first call\n" in call("6", "40", "--device", "cpu", "--no-warmup").output
    assert "on cpu, the first 2 calls\n" in call("6", "40", "--device", "cpu", "--no-warmup", "--calls", "2").output


# The trace


@pytest.mark.parametrize("name", ["t.json", "new/folder/t.json.gz"])
def test_the_trace_has_every_contestant(few: None, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    result = call("6", "40", "--with", "naive", "--device", "cpu", "--trace", str(file))
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"\ntrace: {file}\n")
    with gzip.open(file, "rt") if name.endswith("gz") else open(file) as opened:
        events = json.load(opened)["traceEvents"]
    names = [event.get("name") for event in events]
    at = [names.index(name) for name in ("torch", "onepass", "naive")]
    assert at == sorted(at)
    assert {"aten::softmax", "onepass::_softmax", "aten::amax"} <= set(names)


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", lambda self, path: None)
    result = call("6", "40", "--device", "cpu", "--trace", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("no trace: ")
    assert result.output.endswith("t.json: the profiler wrote nothing\n")
    assert "aten::softmax" in result.output


# What ends it early, and a GPU that is not here


def test_nothing_on_stderr_end_to_end() -> None:
    script = "import sys; from onepass.tools.cli.profile import profile; profile(['4', '9', '--device', 'cpu'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "onepass::_softmax" in done.stdout
    assert done.stderr == ""


def test_a_reader_that_has_seen_enough() -> None:
    script = "from onepass.tools.cli import Commands; from onepass.tools.cli.profile import profile; "
    script += "Commands(commands={'profile': profile}).main(['profile', '4', '9', '--device', 'cpu'])"
    done = subprocess.run(
        f"{sys.executable} -uc {shlex.quote(script)} | true", shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_lost_gpu_ends_with_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiled = Profiler.profiled

    def lost(self: Profiler, contestant: Contestant, sort: str, limit: int) -> Any:
        return profiled(self, contestant, sort, limit) if contestant.name == "torch" else _raise(DeviceLost("gone"))

    monkeypatch.setattr(Profiler, "profiled", lost)
    said: list[str] = []
    assert run(Choices(6, 40, CPU, trace=str(tmp_path / "t.json")), said.append) == 1
    assert "stopped: gone" in said
    assert re.search(r"^torch +2 ", said[-1], re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_a_gpu_whose_kernels_are_not_recorded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        logged = ("USDT:2026-11-21 06:44:04 1:1 a.cpp:1] start", "WARNING:2026-11-21 06:44:04 1:1 a.cpp:1] no CUPTI")

        def __init__(self, *of: Any) -> None: ...

        def profiled(self, contestant: Contestant, *of: Any) -> Any:
            return None, "a table", Line(contestant.name, 0.0, 0.0, "", 1.0, 20.0, OUTSIDE)

    monkeypatch.setattr("onepass.tools.bench.profile.Profiler", Blind)
    monkeypatch.setattr("onepass.tools.bench.profile.free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    said: list[str] = []
    assert run(Choices(6, 40, torch.device("cuda:0")), said.append) == 0
    assert said[0].endswith(", on NVIDIA H200")
    assert said[-1] == (
        "the profiler recorded no kernel where there is a 0: WARNING:2026-11-21 06:44:04 1:1 a.cpp:1] no CUPTI"
    )


# On a GPU


@pytest.mark.gpu
def test_gpu_tables_have_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    result = call("256", "1024", "--device", "cuda", "--with", "naive", "--calls", "2", "--trace", str(file))
    assert result.exit_code == 0, result.output
    tables = sections(result.output)
    assert list(tables) == ["torch", "onepass", "naive"]
    for table in tables.values():
        assert "Self CUDA" in table
        assert "Self CUDA time total: " in table
    assert "onepass_kernel" in tables["onepass"]
    assert "softmax" in tables["torch"].lower()
    beside = result.output.partition("\neach number")[2]
    assert re.search(r"^torch +1 +\S+ +\S+ +1\.00 +\S", beside, re.MULTILINE), beside
    assert re.search(r"^onepass +1 +\S+ +\S+ +\d+\.\d\d +onepass_kernel$", beside, re.MULTILINE), beside
    assert re.search(r"^naive +5 ", beside, re.MULTILINE), beside
    events = json.loads(file.read_text())["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert kernels.count("onepass_kernel") == 2
    assert len(kernels) == 2 * (1 + 1 + 5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "key", ["self_cuda_time_total", "cuda_time_total", "cuda_time", "self_cpu_time_total", "count"]
)
def test_gpu_sort_keys(key: str) -> None:
    result = call("8", "64", "--device", "cuda", "--sort", key, "--no-warmup")
    assert result.exit_code == 0, result.output
    assert "the first call" in result.output
