"""The command line: what a user sees, what a user gets wrong, what needs no torch, and `--json`."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
import torch

import onepass
from lib.bench import fake, file
from lib.paths import RESULTS
from lib.scripts import Forks, run_python
from lib.transcript import call, command, replay, session
from onepass.tools.bench import cli_run, results, timing
from onepass.tools.bench.providers import Torch
from onepass.tools.cli import cli

__all__ = ["fake"]

PACKAGE = Path(onepass.__file__).parent
FEW = str(RESULTS / "few-h200-2026-11-28.json")
H200 = ("--device", "h200")


# bench and plot


@pytest.mark.parametrize("transcript", ["bench", "bench-list", "bench-disturbed", "errors"])
def test_commands_print_their_transcripts(transcript: str, fake: Any) -> None:
    if transcript == "bench-disturbed":
        fake["torch"] = timing.Stats(25.0, 10.0, 30.0, 100, 9.0)
    replay(transcript)


def test_bench_writes_files_and_plots(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results.save(file(), "empty.json")
    replay("bench-files")
    rows = results.load("out/r.json").rows
    names = ("copy", "torch", "naive")
    assert [(r.dtype, r.provider, r.ok) for r in rows] == [(d, p, True) for d in ("float32", "bfloat16") for p in names]
    drawn = sorted(Path("plots").iterdir())
    assert [path.read_bytes() for path in drawn] == [path.read_bytes() for path in sorted(Path("again").iterdir())]
    assert len(drawn) == 4


def test_a_wrong_onepass_fails_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepass, "softmax", lambda x, dim, out=None, **options: out.zero_())
    text = session("bench tiny --device cpu --quick --only onepass,torch")
    assert "    onepass           wrong: error 1.0e+00 at row" in text
    assert text.endswith("results: not saved (--json FILE saves them)\nexit status 1\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    from onepass.tools.bench import runner

    real = runner.make_inputs

    def make_inputs(case: Any, *arguments: Any) -> Any:
        if case.name == "maps":
            signal.raise_signal(number)
        return real(case, *arguments)

    monkeypatch.setattr(runner, "make_inputs", make_inputs)
    file = tmp_path / "r.json"
    text = session(f"bench tiny --device cpu --only torch --json {file}")
    assert "stopped: what was measured so far is kept\n" in text
    assert text.endswith("exit status 130\n")
    assert {r.case for r in results.load(file).rows} == {"small"}


def test_options_reach_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Mock(side_effect=click.UsageError("no more"))
    monkeypatch.setattr(cli_run, "Runner", runner)
    monkeypatch.setattr(cli_run, "parse_device", lambda name: torch.device(name or "cpu"))
    monkeypatch.setattr(cli_run, "select_providers", lambda *rest: ([Torch()], {}))
    for options, budget, graph in (
        ("", timing.FULL, False),
        ("--quick", timing.QUICK, False),
        ("--seconds 2.5", timing.FULL.limit(2.5), False),
        ("--quick --seconds 0.01", timing.QUICK.limit(0.01), False),
        ("--graph --device cuda", timing.FULL, True),
    ):
        assert call("bench", "tiny", *options.split()).exit_code == 2
        given = runner.call_args.kwargs
        assert (given["budget"], given["graph"]) == (budget, graph)


def test_an_error_is_one_line_and_a_reader_that_goes_away_is_none() -> None:
    done = command("bench", "nope")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("onepass: unknown suite 'nope': there are tutorial, ")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run([sys.executable, "-m", "onepass", "--help"], stdout=gone, stderr=subprocess.PIPE)
    assert done.stderr == b""


def test_help_and_version() -> None:
    result = call()
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.partition("Commands:\n")[2].splitlines()] == sorted(cli.commands)
    assert "..." not in result.output.replace("[ARGS]...", "")
    assert "..." not in call("gallery", "-h").output.replace("[ARGS]...", "")
    assert call("--help").output == result.output
    assert session("--version") == f"$ onepass --version\nonepass {onepass.__version__}\n"


def test_info_shows_the_engines_and_the_environment() -> None:
    result = call("info")
    assert result.exit_code == 0
    for name in ("onepass", "torch", "triton", "python", "CPU", "GPU", "cache"):
        assert re.search(rf"^{name} +\S", result.output, re.MULTILINE), name
    for name, reason in onepass.engines().items():
        assert f"  {name:<7} {'ready' if reason is None else f'not available: {reason}'}\n" in result.output


def test_info_says_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.triton import launch

    monkeypatch.setattr(launch, "_reason", launch._reason.__wrapped__)
    monkeypatch.setattr(launch, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    missing = "  triton  not available: triton is not installed: pip install 'onepass[gpu]' brings it\n"
    assert missing in call("info").output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "8192 151936 --dtype bf16 --dim -1 --device h200",
            {"engine": "cuda", "shape": [8192, 151936], "bytes": 4978638848, "copy_us": 4978638848 / 4270e3},
        ),
        ("64x50257 --device cpu --bandwidth 100", {"engine": "cpu", "bandwidth_gbs": 100.0}),
        ("2 3 4 --dim 0,2 --device cpu --bandwidth 1", {"dim": [0, 2], "shape": [2, 3, 4]}),
        ("4 8 --dtype f16 --out-dtype f32 --device h200", {"dtype": "float16", "out_dtype": "float32", "bytes": 192}),
        ("4 8 --function logsumexp --device h200", {"function": "logsumexp", "bytes": 4 * 9 * 4}),
        ("4 8 --function cross_entropy --options softcap,probabilities --device h200", {"dim": [1], "tier": "rows"}),
        ("9 8 --function segment_softmax --segments 3 --device h200", {"dim": [0], "bytes": 9 * 8 * 8 + 4 * 8}),
    ],
)
def test_explain_takes_its_options(arguments: str, expected: dict[str, Any]) -> None:
    explained = json.loads(call("explain", *arguments.split(), "--json").output)
    assert {name: explained[name] for name in expected} == expected
    shown = call("explain", *arguments.split()).output
    assert ("NVIDIA H200" in shown) == ("4,270 GB/s" in shown) == ("h200" in arguments)


SAME = {
    **{name: (name,) for name in ("info", "gallery")},
    "explain": ("explain", "4", "8", *H200),
    "traffic": ("traffic", "4", "8", *H200, "--only", "naive"),
    "compare": ("compare", FEW, FEW),
    "tune --show": ("tune", "--show", *H200),
    "bench --list": ("bench", "--list", "--device", "cpu"),
}
MEASURED = {
    "bench": ("bench", "tiny", "--quick", "--device", "cpu", "--only", "torch"),
    "gallery run": ("gallery", "run", "cpu-online", "4", "8", "--device", "cpu"),
    "profile": ("profile", "4", "8", "--device", "cpu"),
}


@pytest.mark.parametrize("what", SAME)
def test_json_is_all_that_is_printed_or_goes_into_a_file(what: str, tmp_path: Path) -> None:
    def steady(text: str) -> str:
        return re.sub(r'"(date|load)": [^,]*', "", text)

    file = tmp_path / "new" / "r.json"
    alone, beside, without = (call(*SAME[what], *more) for more in (("--json",), ("--json", str(file)), ()))
    assert (alone.exit_code, beside.exit_code, without.exit_code) == (0, 0, 0)
    assert json.loads(alone.stdout)
    assert steady(file.read_text()) == steady(alone.stdout)
    assert beside.stdout == without.stdout
    assert not without.stdout.startswith(("{", "["))


@pytest.mark.parametrize("what", MEASURED)
def test_with_json_a_measurement_prints_the_rest_on_stderr(what: str, fake: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    alone, beside = (call(*MEASURED[what], "--json", *more) for more in ((), (str(file),)))
    assert (alone.exit_code, beside.exit_code, beside.stderr) == (0, 0, ""), alone.output
    printed, written = json.loads(alone.stdout), json.loads(file.read_text())
    assert printed.keys() == written.keys()
    assert "onepass 0.1.0, torch" in alone.stderr
    assert "onepass 0.1.0, torch" in beside.stdout
    if what == "profile":
        assert ([line["name"] for line in printed["lines"]], printed["n"]) == (["torch", "onepass"], 8)
    else:
        assert results.parse(printed).rows[0].provider == "copy"


# In processes of their own


def test_bench_in_a_process_of_its_own(tmp_path: Path) -> None:
    arguments = ("bench", "models", "--filter", "4K attention, 1 query", "--dtype", "f32", "--quick", "--device", "cpu")
    done = command(*arguments, "--seconds", "0.02", "--json", "r.json", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout.isascii(), "\x1b" in done.stdout) == (0, "", True, False)
    assert done.stdout.splitlines()[-1] == "results: r.json"
    assert {r.provider for r in results.load(tmp_path / "r.json").rows} == {"copy", "onepass", "torch", "naive"}


LIGHT = [
    *([], ["--help"], ["--version"], *([name, "-h"] for name in cli.commands), ["gallery", "run", "-h"], ["gallery"]),
    *(["gallery", "--json"], ["gallery", "list"], ["gallery", "show", "cuda-online"], ["gallery", "shuffle"]),
    *(["gallery", "reduce"], ["gallery", "mistakes"], ["gallery", "mistakes", "race", "--answer"]),
    *(["explain", "--fast"], ["compare", "-h"], ["compare", FEW, FEW]),  # the last may import rich
]
HEAVY = {"torch", "rich", "matplotlib", "numpy", "onepass.native"}


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    code = f"""
import sys, onepass_launcher
from onepass.tools.cli import cli
from click.testing import CliRunner
for arguments in {LIGHT!r}:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == (2 if "--fast" in arguments else 0), result.output
    heavy = {HEAVY!r} - {{"rich"}} if "compare" in arguments else {HEAVY!r}
    assert not heavy & set(sys.modules), arguments
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5  # 0.5 s of processor time


SCRIPT = "import sys; import onepass_launcher; sys.argv[0] = 'onepass'; onepass_launcher.main()"
REGISTERED = "import onepass, torch; print(torch.ops.onepass.softmax, onepass.explain.__name__, onepass.nn.__name__)"


def test_the_console_script_loads_the_library_only_when_needed() -> None:
    entry = (PACKAGE.parent.parent / "pyproject.toml").read_text()
    assert 'onepass = "onepass_launcher:main"' in entry
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {SCRIPT}"
    for arguments, last in ((("--version",), "False"), (("explain", "8", "8", *H200), "True")):
        done = run_python("-c", code, *arguments)
        assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", last)


def test_the_library_imports_no_tools() -> None:
    """test_torch_modes.py has what is in memory after it."""
    sources = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "tools" not in p.parents and p.name != "__main__.py"]
    assert [p for p in sources if "onepass.tools" in p.read_text() or "from .tools" in p.read_text()] == []


def test_everyone_else_has_the_operators_at_once(processes: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/__main__.py", "onepass_user.py"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else REGISTERED)
    started = sys.executable, "-m", "mine", "onepass"
    done = subprocess.run(started, capture_output=True, text=True, cwd=tmp_path)
    (by_code,), (by_script,) = (processes.run(tmp_path, code) for code in (REGISTERED, "import onepass_user"))
    for out, errors in ((done.stdout, done.stderr), by_code[1:], by_script[1:]):
        assert (errors, out) == ("", "onepass.softmax explain onepass.nn\n")


def test_a_name_loads_all_names_whatever_was_imported_before() -> None:
    """All names of the package are there after its modules were imported one by one."""
    code = """
import onepass_launcher, sys
import onepass
assert "torch" not in sys.modules and not hasattr(onepass, "nothing")
from onepass.tools.cli.params import Command
import onepass.native, onepass._engines, onepass._explain, onepass._warmup, onepass.patching
Command("x", callback=lambda: None).main([], standalone_mode=False)
from onepass import *
print([f.__name__ for f in (explain, warmup, engines, patch)], set(onepass.__all__) <= set(dir(onepass)))
"""
    done = run_python("-c", code)
    assert done.stdout == "['explain', 'warmup', 'engines', 'patch'] True\n", done.stderr


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = command("explain", "8", "8", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "onepass: no torch here\n")
