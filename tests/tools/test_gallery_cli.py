"""`onepass gallery`: the list, the sources, and one rung checked and timed."""

import doctest
import importlib
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from onepass.reference import softmax
from onepass.tools.bench import results
from onepass.tools.cli import Commands
from onepass.tools.gallery import RUNGS, Rung
from onepass.tools.gallery.options import ABOUT

MODULE = importlib.import_module("onepass.tools.cli.gallery")  # the attribute of that name may be the command
TOP = Commands(commands={"gallery": MODULE.gallery})
LANGUAGES = {"naive": "Python", "triton-row": "Triton", "cpu-online": "C++", "cuda-warp": "CUDA", "cuda-auto": "Python"}
QUICK = ("--device", "cpu", "--alone")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(TOP, ("gallery", *arguments))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`terminal(width)` is what a terminal is given from then on; colours on demand."""

    def made(width: int, colours: str | None = None) -> io.StringIO:
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True, color_system=colours, highlight=False)
        monkeypatch.setattr(MODULE, "terminal", lambda: console)
        return file

    return made


@pytest.fixture
def rungs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rungs that are right, wrong, raise and are stopped; gives the launch parameters of the last call."""
    seen: dict[str, int] = {}
    module = types.ModuleType("onepass.tools.gallery.made")

    def right(x: torch.Tensor, out: torch.Tensor, **launch: int) -> torch.Tensor:
        seen.clear()
        seen.update(launch)
        return out.copy_(softmax(x, 1))

    def wrong(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(softmax(x, 1) * 1.01)

    def raises(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too many resources\nrequested")

    def stopped(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    module.refuses = lambda rows, n, dtype: f"takes rows of 64, got {n}" if n > 64 else None
    for f in (right, wrong, raises, stopped):
        setattr(module, f.__name__, f)
        options = ("num_warps", "block_size", "threads") if f is right else ()
        made = Rung(f.__name__, "naive.py", f"made:{f.__name__}", lambda device: None, options)
        monkeypatch.setitem(RUNGS, f.__name__, made)
    away = Rung("away", "naive.py", "made:right", lambda device: "the driver is on leave")
    monkeypatch.setitem(RUNGS, "away", away)
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.made", module)
    return seen


# The list


ON = {"naive": "CPU, GPU", "triton": "GPU", "cpu": "CPU", "cuda": "NVIDIA GPU"}  # by the first word of a name


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_the_list_on_a_pipe_has_a_line_for_each_rung_in_order(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert len(lines) == len(RUNGS) + 4
    for number, (line, rung) in enumerate(zip(lines, RUNGS.values(), strict=False), 1):
        assert line.split()[:2] == [str(number), rung.name]
        idea = rung.header.idea
        said = idea[: idea.index(".")] if ". " not in idea else idea[: idea.index(". ")]
        assert line.endswith(f"  {said}")
        assert f"  {ON[rung.name.partition('-')[0]]} " in line
    for name, language in LANGUAGES.items():
        assert re.search(rf"^ *\d+  {name} +{re.escape(language)} .* reads ", result.output, re.MULTILINE)
    assert re.match(r" 1  naive +Python +CPU, GPU +reads 5MN \+ 2M +writes 3MN \+ 2M +subtract", lines[0])
    assert "in brackets what comes from memory" in lines[-4]
    assert "TRITON_INTERPRET=1" in lines[-3]


def test_the_list_says_where_rungs_run_as_they_do() -> None:
    for rung in RUNGS.values():
        on_cpu = rung.unavailable(torch.device("cpu"))
        if "CPU" not in rung.runs_on:
            assert on_cpu is None or "GPU" in on_cpu or "TRITON_INTERPRET" in on_cpu
        elif rung.name not in ("naive-jit", "naive-compile"):  # those need TorchScript, a compiler
            assert on_cpu is None


@pytest.mark.parametrize("arguments", [("--json",), ("list", "--json")])
def test_the_list_as_json(arguments: tuple[str, ...]) -> None:
    found = json.loads(call(*arguments).stdout)
    assert [rung["name"] for rung in found] == list(RUNGS)
    assert found[0]["traffic"] == {"reads": [5, 2], "writes": [3, 2]}
    assert found[0]["idea"] == RUNGS["naive"].header.idea
    assert (found[3]["runs_on"], found[3]["launch_parameters"][0]) == ("GPU", "num_warps")


def test_traffic_that_a_cache_serves_is_in_brackets() -> None:
    lines = call().output.splitlines()
    for line, rung in zip(lines, RUNGS.values(), strict=False):
        cached = rung.header.cached
        reads = re.search(r"  reads (.*?)  +writes ", line)
        assert reads
        assert ("(" in reads[1]) == (cached is not None and cached.reads != rung.header.traffic.reads)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_list_fits_a_terminal(width: int, terminal: Any) -> None:
    file = terminal(width)
    assert call().exit_code == 0
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for rung in RUNGS.values():
        assert re.search(rf"^ +\d+ +{rung.name} ", text, re.MULTILINE)
    words = " ".join(text.split())
    assert "subtract each row's maximum" in words
    assert "NVIDIA GPU" in words


# The sources


@pytest.mark.parametrize("name", RUNGS)
def test_show_on_a_pipe_is_the_file(name: str) -> None:
    result = call("show", name)
    assert result.exit_code == 0
    assert result.output == RUNGS[name].source
    assert "Idea: " in result.output
    assert RUNGS[name].path.suffix in MODULE._LEXERS


def test_show_on_a_terminal_is_the_file_in_colours(terminal: Any) -> None:
    for name in ("naive", "cpu-online", "cuda-warp"):
        file = terminal(60, "standard")
        assert call("show", name).exit_code == 0
        text = file.getvalue()
        assert text.count("\x1b[") > 50
        assert re.sub(r"\x1b\[[\d;]*m", "", text).rstrip("\n") == RUNGS[name].source.rstrip("\n")


def test_show_says_where_the_file_is(terminal: Any) -> None:
    file = terminal(40, "standard")
    result = call("show", "naive", "--path")
    assert result.output == f"{RUNGS['naive'].path}\n"
    assert Path(result.output.strip()).is_file()
    assert file.getvalue() == ""


# One rung


def test_run_checks_and_times_a_rung_beside_torch(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    result = call("run", "naive", "20", "33", "--device", "cpu", "--dtype", "bf16", "--seed", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "naive: Python, naive.py" in result.output
    assert re.search(r"^naive is \d+\.\d\dx as fast as torch( \(disturbed\))?$", result.output, re.MULTILINE)
    assert result.output.splitlines()[-1] == f"results: {file}"
    kept = results.load(file)
    assert [row.provider for row in kept.rows] == ["copy", "naive", "torch"]
    assert all(row.ok and row.shape == [20, 33] and row.dtype == "bfloat16" for row in kept.rows)
    assert kept.environment["seed"] == 3
    assert "launch" not in kept.environment


def test_run_alone(rungs: Any) -> None:
    result = call("run", "right", "4", "8", *QUICK)
    assert result.exit_code == 0, result.output
    assert "torch us" not in result.output
    assert "as fast as" not in result.output
    assert rungs == {}


def test_launch_parameters_are_passed_and_kept(rungs: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    given = ("--num-warps", "8", "--block-size", "64", "--threads", "96")
    result = call("run", "right", "4", "8", *QUICK, *given, "--json", str(file))
    assert result.exit_code == 0, result.output
    launch = {"num_warps": 8, "block_size": 64, "threads": 96}
    assert rungs == launch
    assert results.load(file).environment["launch"] == {"right": launch}
    assert "num_warps 8, block_size 64, threads 96" in result.output


def test_every_launch_parameter_is_an_option() -> None:
    text = " ".join(call("run", "--help").output.split())
    for name, about in ABOUT.items():
        assert f"--{name.replace('_', '-')} N {about[0].upper()}{about[1:]}." in text
    for name in {option for rung in RUNGS.values() for option in rung.options}:
        assert f"--{name.replace('_', '-')} N " in text


@pytest.mark.parametrize(
    ("name", "said"), [("wrong", "wrong: wrong: error"), ("raises", "raised: RuntimeError: too many resources")]
)
def test_a_rung_that_is_wrong_or_raises_fails(name: str, said: str, rungs: Any) -> None:
    result = call("run", name, "4", "8", "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert "as fast as" not in result.output


def test_a_matrix_that_does_not_fit_is_told_and_fails(rungs: Any) -> None:
    result = call("run", "right", str(10**11), "64", *QUICK)
    assert result.exit_code == 1
    assert "skipped: needs 71525.7 GiB" in result.output


def test_a_run_that_is_broken_off(rungs: Any) -> None:
    result = call("run", "stopped", "4", "8", *QUICK)
    assert result.exit_code == 130
    assert "stopped" in result.output


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "a command": (("race",), "No such command 'race'"),
    "JSON of what has none": (("--json", "--", "show", "naive"), "--json before show is of the list"),
    "a rung to show": (("show", "navie"), "unknown rung 'navie': there are naive, naive-jit, "),
    "no rung to show": (("show",), "Missing argument 'NAME'"),
    "a rung to run": (("run", "navie", "4", "8"), "unknown rung 'navie': there are naive, naive-jit, "),
    "no shape": (("run", "naive", "4"), "Missing argument 'N'"),
    "no rows": (("run", "naive", "0", "8"), "Invalid value for 'M': 0 is not in the range x>=1"),
    "a row of no elements": (("run", "naive", "4", "0"), "Invalid value for 'N': 0 is not in the range x>=1"),
    "a size in words": (("run", "naive", "4", "many"), "Invalid value for 'N': 'many' is not a valid integer"),
    "a dtype": (("run", "naive", "4", "8", "--dtype", "int8"), "unknown dtype 'int8'"),
    "a dtype of none": (
        ("run", "naive", "4", "8", "--dtype", "f64"),
        "naive: the gallery takes float32, float16 and bflo",
    ),
    "a device": (("run", "naive", "4", "8", "--device", "tpu"), "unknown device 'tpu': take cpu, cuda or cuda:N"),
    "a seed": (("run", "naive", "4", "8", "--seed", "-1"), "0<=x<=2147483647"),
    "a rung for elsewhere": (("run", "away", "4", "8", *QUICK), "away cannot run on cpu: the driver is on leave"),
    "a row too long": (("run", "right", "4", "65", *QUICK), "right: takes rows of 64, got 65"),
    "a parameter of others": (
        ("run", "right", "4", "8", "--programs", "2", *QUICK),
        "right: got --programs; it takes --num-warps, --block-size, --threads",
    ),
    "a parameter of none": (("run", "naive", "4", "8", "--threads", "32"), "naive: got --threads; it takes no launch"),
    "a value": (
        ("run", "right", "4", "8", "--num-warps", "3", *QUICK),
        "right: --num-warps must be 1 to 32, a power of two; got 3",
    ),
    "a value in words": (("run", "right", "4", "8", "--threads", "all"), "'all' is not a valid integer"),
    "a results file": (("run", "naive", "4", "8", "--json", f"{__file__}/r.json"), "cannot be written"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_told_in_one_line_before_anything_runs(what: str, rungs: Any) -> None:
    arguments, message = WRONG[what]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("onepass: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert rungs == {}


@pytest.mark.gpu
def test_run_on_a_gpu_with_launch_parameters() -> None:
    for arguments in (("triton-row", "--num-warps", "8"), ("cuda-block", "--threads", "128")):
        result = call("run", arguments[0], "64", "1000", *arguments[1:], "--device", "cuda")
        assert result.exit_code == 0, result.output
        assert f"{arguments[0]} is " in result.output


def test_the_examples_run() -> None:
    done = doctest.testmod(MODULE)
    assert done.attempted >= 2
    assert not done.failed
