"""The command line: what a user sees, what a user gets wrong, what needs no torch, and `--json`."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

import onepass
from lib.bench import CPU, fake
from lib.cli import call, command, errors, session
from lib.paths import RESULTS
from onepass.tools.bench import cli_run, results, timing
from onepass.tools.bench.providers.builtin import Torch
from onepass.tools.bench.results import Results
from onepass.tools.bench.runner import Runner
from onepass.tools.cli import cli

__all__ = ["fake"]

PACKAGE = Path(onepass.__file__).parent
FEW = str(RESULTS / "few-h200-2026-11-22.json")
H200 = ("--device", "h200")


# bench and plot


def test_bench_shows_a_table_and_a_summary(fake: Any) -> None:
    assert_expected_inline(
        session("bench tiny --device cpu --only onepass,torch --only naive --threads 1"),
        """\
$ onepass bench tiny --device cpu --only onepass,torch --only naive --threads 1
onepass 0.1.0, torch 2.0, on a CPU, 2 threads, avx2
tiny: 2 cases
providers: onepass, torch, naive

[1/2] small, 4x33, f32
    copy                   10.0 us  (9.00 to 11.0)           0.1 GB/s  1.00 of a copy  call 10.0 us
    onepass                12.5 us  (11.2 to 13.8)           0.1 GB/s  0.80 of a copy  call 12.5 us
    torch                  25.0 us  (22.5 to 27.5)           0.0 GB/s  0.40 of a copy  call 25.0 us
    naive                  50.0 us  (45.0 to 55.0)           0.0 GB/s  0.20 of a copy  call 50.0 us
[2/2] maps, 1x5x4x4 dim 1, f32
    copy                   10.0 us  (9.00 to 11.0)           0.1 GB/s  1.00 of a copy  call 10.0 us
    onepass                12.5 us  (11.2 to 13.8)           0.1 GB/s  0.80 of a copy  call 12.5 us
    torch                  25.0 us  (22.5 to 27.5)           0.0 GB/s  0.40 of a copy  call 25.0 us
    naive                  50.0 us  (45.0 to 55.0)           0.0 GB/s  0.20 of a copy  call 50.0 us

case   shape          dtype  copy us          onepass us  of copy  torch us  of copy  naive us  of copy  times torch
-----  -------------  -----  -------  ------  ----------  -------  --------  -------  --------  -------  -----------
small  4x33           f32       10.0  0 GB/s        12.5    0.80*      25.0     0.40      50.0     0.20         2.00
maps   1x5x4x4 dim 1  f32       10.0  0 GB/s        12.5    0.80*      25.0     0.40      50.0     0.20         2.00

onepass is 2.00x as fast as torch (geometric mean of 2, 2.00x to 2.00x)
onepass is 4.00x as fast as naive (geometric mean of 2, 4.00x to 4.00x)
of a copy's speed: onepass 0.80, torch 0.40, naive 0.20 (geometric means)
with newly allocated results onepass is 2.00x as fast as torch (geometric mean of 2, 2.00x to 2.00x)
with newly allocated results onepass is 4.00x as fast as naive (geometric mean of 2, 4.00x to 4.00x)
results: not saved (--json FILE saves them)
""",
    )


def test_bench_says_who_does_not_run(fake: Any) -> None:
    lines = session("bench tiny --quick --device cpu", "bench tiny --quick --gallery --device cpu").splitlines()
    heads = [line for line in lines if line.startswith(("$", "tiny", "  --", "providers", "  without"))]
    text = "\n".join(re.sub(r"(onepass-triton.*?): .*", r"\1: ...", line) for line in heads)
    assert_expected_inline(
        text,
        """\
$ onepass bench tiny --quick --device cpu
tiny: 1 of 2 cases (--quick on cpu)
providers: onepass, torch, naive
  without onepass-cpu: auto selects it here
  without onepass-triton: ...
  without torch-compile: not part of --quick
  --gallery adds the variants of the gallery
$ onepass bench tiny --quick --gallery --device cpu
tiny: 1 of 2 cases (--quick on cpu)
providers: onepass, torch, naive, naive-jit, cpu-threepass, cpu-online
  without onepass-cpu: auto selects it here
  without onepass-triton, triton-row, triton-persistent, triton-online: ...
  without torch-compile, naive-compile: not part of --quick
  without cuda-warp, cuda-block, cuda-online, cuda-auto: runs only on NVIDIA GPUs""",
    )


def test_bench_writes_files_and_plots(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--device cpu --only torch,naive,naive-jit --dtype f32,bf16 --filter SMALL --json out/r.json --plot plots"
    lines = session(f"bench tiny {options}").splitlines()
    assert lines[2] == "tiny: 1 of 2 cases (those with 'SMALL')"
    assert [line for line in lines if line.startswith(("[", "plot", "results"))] == [
        "[1/2] small, 4x33, f32",
        "[2/2] small, 4x33, bf16",
        "plot: plots/tiny-softmax-forward-float32.png",
        "plot: plots/tiny-softmax-forward-bfloat16.png",
        "results: out/r.json",
    ]
    rows = results.load("out/r.json").rows
    names = ("copy", "torch", "naive", "naive-jit")
    assert [(r.dtype, r.provider, r.ok) for r in rows] == [(d, p, True) for d in ("float32", "bfloat16") for p in names]
    drawn = session("plot out/r.json -o again").splitlines()[1:]
    assert len(drawn) == 4
    for path in map(Path, drawn):
        assert path.read_bytes() == Path("plots", path.name).read_bytes()
    results.save(Results(results.load("out/r.json").environment, []), "empty.json")
    assert errors("plot empty.json") == "plot empty.json\n    nothing to draw: no timed row in empty.json\n"


@pytest.mark.parametrize(("function", "direction"), [("logsumexp", "forward"), ("softmin", "backward")])
def test_bench_takes_a_function_and_a_direction(fake: Any, function: str, direction: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = f"--function {function} --direction {direction} --skip torch-compile --filter MAP --device cpu"
    assert f"maps, 1x5x4x4 dim 1, f32, {function} {direction}\n" in session(f"bench tiny {options} --json {file}")
    rows = results.load(file).rows
    assert {(r.function, r.direction, r.case) for r in rows} == {(function, direction, "maps")}
    assert {r.provider for r in rows if r.ok} == {"copy", "onepass", "torch", "naive"}


def test_a_wrong_onepass_fails_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepass, "softmax", lambda x, dim, out=None, **options: out.zero_())
    text = session("bench tiny --device cpu --quick --only onepass,torch")
    assert "    onepass           wrong: error 1.0e+00 at row" in text
    assert text.endswith("results: not saved (--json FILE saves them)\n[exit 1]\n")


def test_an_interrupted_run_keeps_what_it_has(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onepass.tools.bench import runner

    real = runner.make_inputs

    def make_inputs(case: Any, *arguments: Any) -> Any:
        if case.name == "maps":
            raise KeyboardInterrupt
        return real(case, *arguments)

    monkeypatch.setattr(runner, "make_inputs", make_inputs)
    file = tmp_path / "r.json"
    text = session(f"bench tiny --device cpu --only torch --json {file}")
    assert "stopped: what was measured so far is kept\n" in text
    assert text.endswith("[exit 130]\n")
    assert {r.case for r in results.load(file).rows} == {"small"}


def test_disturbed_cases_are_timed_again(fake: Any) -> None:
    fake["torch"] = timing.Stats(25.0, 10.0, 30.0, 100)
    lines = session("bench tiny --quick --device cpu --only torch").splitlines()
    assert [line for line in lines if "disturbed" in line or line.startswith("[")] == [
        "[1/1] small, 4x33, f32",
        "1 of them are timed again because they were disturbed",
        "[2/2] small, 4x33, f32",
        "disturbed (?) and left out of the means: 1 times in 1 case; torch on small, f32: p80 is 3.0 times p20",
    ]


def test_options_reach_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Quiet(Runner):
        def __post_init__(self) -> None:
            seen.append((self.budget, self.graph))
            self.results = Results(dict.fromkeys(results.ENVIRONMENT) | {"device_type": "cuda"}, [])

        def run(self, cases: Any) -> Results:
            return self.results

    monkeypatch.setattr(cli_run, "Runner", Quiet)
    monkeypatch.setattr(cli_run, "parse_device", lambda name: onepass_device(name))
    monkeypatch.setattr(cli_run, "select_providers", lambda *rest: ([Torch()], {}))
    for options in ("", "--quick", "--seconds 2.5", "--quick --seconds 0.01", "--graph --device cuda"):
        assert call("bench", "tiny", *options.split()).exit_code == 0
    assert seen == [
        (timing.FULL, False),
        (timing.QUICK, False),
        (timing.FULL.limit(2.5), False),
        (timing.QUICK.limit(0.01), False),
        (timing.FULL, True),
    ]


def onepass_device(name: str | None) -> Any:
    import torch

    return torch.device(name or CPU)


def test_list() -> None:
    result = call("bench", "--list", "--device", "cpu")
    assert result.exit_code == 0
    text = re.sub(r"(under Triton's interpreter).*|not available: needs .*", r"\1...", result.output)
    assert_expected_inline(
        text,
        """\
providers on cpu:
  onepass           onepass
  onepass-cpu       onepass (cpu engine) -- only with --only: auto selects it here
  onepass-cuda      onepass (cuda engine) -- not available: does not support cpu tensors
  onepass-triton    onepass (triton engine) -- not available: the Triton engine serves CPU tensors only under Triton's interpreter...
  torch             torch
  torch-compile     torch.compile -- not part of --quick
  naive             naive PyTorch, the first variant of the gallery
  liger             Liger -- not available: does not support cpu tensors
  quack             QuACK -- not available: does not support cpu tensors
  copy              runs always: the others are measured by it
variants of the gallery, which run with --gallery, or one by its name with --only:
  naive-jit         Python, naive_jit.py
  naive-compile     Python, naive_compile.py -- not part of --quick
  triton-row        Triton, triton_row.py -- not available: the Triton engine serves CPU tensors only under Triton's interpreter...
  triton-persistent Triton, triton_persistent.py -- not available: the Triton engine serves CPU tensors only under Triton's interpreter...
  triton-online     Triton, triton_online.py -- not available: the Triton engine serves CPU tensors only under Triton's interpreter...
  cpu-threepass     C++, cpu_threepass.cpp
  cpu-online        C++, cpu_online.cpp
  cuda-warp         CUDA, cuda_warp.cu -- not available: runs only on NVIDIA GPUs
  cuda-block        CUDA, cuda_block.cu -- not available: runs only on NVIDIA GPUs
  cuda-online       CUDA, cuda_online.cu -- not available: runs only on NVIDIA GPUs
  cuda-auto         Python, cuda_auto.py -- not available: runs only on NVIDIA GPUs
suites:
  tutorial          98 cases, 10 of them with --quick; float32
                    4096 rows, N = 256 to 12672 in steps of 128, as in the fused-softmax tutorial
  powers-of-two     6 cases, 4 of them with --quick; float32
                    4096 rows, N = 256 to 262144 in steps of 4x
  models            30 cases, 16 of them with --quick; bfloat16, float32
                    the shapes of language models, attention, routers and segmentation
  row-lengths       41 cases, 5 of them with --quick; float32, bfloat16
                    as many rows as 1 GiB holds, N = 8 to 262144, including odd lengths
  few-long-rows     10 cases, 3 of them with --quick; float32, bfloat16
                    1 to 64 rows, N = 128256 to 268435456
  backward          54 cases, 4 of them with --quick; float32, bfloat16
                    gradients of many rows, of few long rows and of vocabularies
  columns           34 cases, 4 of them with --quick; float32, bfloat16
                    softmax over other dims and in other layouts, and its gradient
  cpu               20 cases, 8 of them with --quick; float32, bfloat16, float16
                    the CPU engine: rows of 16 to 16777216 elements, other dims, logsumexp
  cpu-backward      34 cases, 15 of them with --quick; float32, bfloat16, float16
                    gradients at the points of cpu, and of log_softmax
""",  # noqa: E501
    )


# What a user gets wrong


def test_errors_are_one_line() -> None:
    device = "--device cpu"
    lines = errors(
        "brench",
        "bench --fast",
        f"bench modles {device}",
        f"bench --only torhc {device}",
        f"bench --skip torch,x {device}",
        f"bench --only onepass-cuda {device}",
        f"bench models --graph {device}",
        "bench --dtype int8",
        "bench --function softplus",
        "bench --direction up",
        "bench --device tpu9",
        "bench --device meta",
        "bench --device cuda:99",
        "bench --threads 0",
        f"bench --filter 'nothing like it' {device}",
        f"bench --json {os.devnull}/r.json",
        *(f"bench --seconds {seconds}" for seconds in ("0", "-1", "nan", "inf", "s")),
        "plot",
        "plot /nowhere/r.json",
        "plot /proc/version",
        "explain",
        "explain many",
        "explain 4 8 --dim 2",
        "explain 4 8 --dim last",
        "explain 4 8 --dim ,",
        "explain 4 --dtype int3",
        "explain 4 8 --engine warp",
        "explain 4 8 --function softplus",
        "explain 4 8 --device h9000",
        "explain 4 8 --bandwidth -1",
        "explain --json 8 8",
        "bench --json models",
    )
    assert_expected_inline(
        re.sub(r"there are \d+ GPUs", "there are 0 GPUs", lines),
        """\
brench
    No such command 'brench'. Did you mean 'bench'?
bench --fast
    No such option '--fast'. Did you mean '--list'?
bench modles --device cpu
    unknown suite 'modles': there are tutorial, powers-of-two, models, row-lengths, few-long-rows, backward, columns, cpu, cpu-backward
bench --only torhc --device cpu
    unknown provider 'torhc': there are onepass, onepass-cpu, onepass-cuda, onepass-triton, torch, torch-compile, naive, liger, quack, naive-jit, naive-compile, triton-row, triton-persistent, triton-online, cpu-threepass, cpu-online, cuda-warp, cuda-block, cuda-online, cuda-auto
bench --skip torch,x --device cpu
    unknown provider 'x': there are onepass, onepass-cpu, onepass-cuda, onepass-triton, torch, torch-compile, naive, liger, quack, naive-jit, naive-compile, triton-row, triton-persistent, triton-online, cpu-threepass, cpu-online, cuda-warp, cuda-block, cuda-online, cuda-auto
bench --only onepass-cuda --device cpu
    provider 'onepass-cuda' cannot run on cpu: does not support cpu tensors
bench models --graph --device cpu
    --graph is the time in a CUDA graph and needs a GPU
bench --dtype int8
    unknown dtype 'int8': take one of float64, float32, bfloat16, float16, f64, f32, bf16, f16
bench --function softplus
    unknown function 'softplus': there are softmax, log_softmax, softmin, logsumexp
bench --direction up
    Invalid value for '--direction': 'up' is not one of 'forward', 'backward'.
bench --device tpu9
    unknown device 'tpu9': take cpu, cuda or cuda:N
bench --device meta
    the benchmark has no clock for 'meta': take cpu, cuda or cuda:N
bench --device cuda:99
    device 'cuda:99' is not available: there are 0 GPUs
bench --threads 0
    Invalid value for '--threads': 0 is not in the range x>=1.
bench --filter 'nothing like it' --device cpu
    no case of models has 'nothing like it' in its name
bench --json /dev/null/r.json
    /dev/null/r.json: cannot be written
bench --seconds 0
    Invalid value for '--seconds': 0.0 is not in the range x>0.
bench --seconds -1
    Invalid value for '--seconds': -1.0 is not in the range x>0.
bench --seconds nan
    Invalid value for '--seconds': takes a finite number, got nan
bench --seconds inf
    Invalid value for '--seconds': takes a finite number, got inf
bench --seconds s
    Invalid value for '--seconds': 's' is not a valid float range.
plot
    Missing argument 'FILE...'.
plot /nowhere/r.json
    /nowhere/r.json: No such file or directory
plot /proc/version
    /proc/version: not JSON (line 1: Expecting value)
explain
    Missing argument 'SIZES...'.
explain many
    Invalid value: SIZES takes whole numbers, got 'many'
explain 4 8 --dim 2
    dim must be in [-2, 1] for shape [4, 8], got 2
explain 4 8 --dim last
    Invalid value: --dim takes whole numbers, got 'last'
explain 4 8 --dim ,
    Invalid value: --dim takes whole numbers, got ','
explain 4 --dtype int3
    unknown dtype 'int3': take one of float64, float32, bfloat16, float16, f64, f32, bf16, f16
explain 4 8 --engine warp
    engine must be 'auto', 'cpu', 'cuda' or 'triton', got 'warp'
explain 4 8 --function softplus
    function must be one of softmax, log_softmax, softmin, logsumexp, state, got 'softplus'
explain 4 8 --device h9000
    device must be a torch device or the name of a known GPU, got 'h9000'; known GPUs, which need not be here, are a100, h100, h200, b200, l4, rtx4090, mi300x; of another give --arch, --sm-count and --bandwidth (arch=, sm_count=, bandwidth=)
explain 4 8 --bandwidth -1
    Invalid value for '--bandwidth': -1.0 is not in the range x>0.
explain --json 8 8
    Invalid value for '--json': --json takes a FILE with a dot or a slash in its name, got '8'; without a FILE write it last
bench --json models
    Invalid value for '--json': --json takes a FILE with a dot or a slash in its name, got 'models'; without a FILE write it last
""",  # noqa: E501
    )


def test_a_traceback_is_never_an_answer() -> None:
    done = command("bench", "nope")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("onepass: unknown suite 'nope': there are tutorial, ")


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run([sys.executable, "-m", "onepass", "--help"], stdout=gone, stderr=subprocess.PIPE)
    assert done.stderr == b""


# Help, info, explain


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


def test_explain_of_a_device_that_is_not_here() -> None:
    result = call("explain", "8192", "151936", "--dtype", "bf16", "--dim", "-1", *H200)
    assert "NVIDIA H200" in result.output
    assert "4,270 GB/s" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "8192 151936 --dtype bf16 --dim -1 --device h200",
            {"engine": "cuda", "shape": [8192, 151936], "bytes": 4978638848, "copy_us": 4978638848 / 4270e3},
        ),
        ("64x50257 --device cpu --bandwidth 100", {"engine": "cpu", "bandwidth_gbs": 100.0}),
        ("2 3 4 --dim 0,2 --device cpu --bandwidth 1", {"dim": [0, 2], "shape": [2, 3, 4]}),
        (
            "4 8 --dtype f16 --out-dtype f32 --device h200",
            {"dtype": "float16", "out_dtype": "float32", "bytes": 4 * 8 * 6},
        ),
        ("4 8 --function logsumexp --device h200", {"function": "logsumexp", "bytes": 4 * 9 * 4}),
    ],
)
def test_explain_takes_its_options(arguments: str, expected: dict[str, Any]) -> None:
    result = call("explain", *arguments.split(), "--json")
    assert result.exit_code == 0, result.output
    explained = json.loads(result.output)
    assert {name: explained[name] for name in expected} == expected


# --json [FILE]

SAME: dict[str, tuple[str, ...]] = {
    "info": ("info",),
    "explain": ("explain", "4", "8", *H200),
    "traffic": ("traffic", "4", "8", *H200, "--only", "naive"),
    "compare": ("compare", FEW, FEW),
    "gallery": ("gallery",),
    "tune --show": ("tune", "--show", *H200),
    "bench --list": ("bench", "--list", "--device", "cpu"),
}
MEASURED: dict[str, tuple[str, ...]] = {
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
    done = command(*arguments, "--seconds", "0.02", "--json", "r.json", "--plot", "plots", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "results: r.json"
    rows = results.load(tmp_path / "r.json").rows
    assert {r.provider for r in rows} == {"copy", "onepass", "torch", "naive"}
    if not all(r.disturbed for r in rows):
        assert (tmp_path / "plots" / "models-softmax-forward-float32.png").stat().st_size > 5000


LIGHT: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "--help": ("--help",),
    "--version": ("--version",),
    **{f"{name} -h": (name, "-h") for name in cli.commands},
    "gallery run -h": ("gallery", "run", "-h"),
    "gallery": ("gallery",),
    "gallery as JSON": ("gallery", "--json"),
    "gallery list": ("gallery", "list"),
    "gallery show": ("gallery", "show", "cuda-online"),
    "gallery shuffle": ("gallery", "shuffle"),
    "compare": ("compare", FEW, FEW),
    "a wrong option": ("explain", "--fast"),
}


@pytest.mark.parametrize("what", LIGHT)
def test_what_needs_no_torch_does_not_wait_for_it(what: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(*LIGHT[what], python=("-X", "importtime"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == (2 if what == "a wrong option" else 0), done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"onepass", "onepass.tools.cli", "click"} <= imported
    assert not imported & {"torch", "rich", "matplotlib", "numpy", "onepass.native"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # 0.2 s of processor time


SCRIPT = "import sys; import onepass_launcher; sys.argv[0] = 'onepass'; onepass_launcher.main()"
REGISTERED = "import onepass, torch; print(torch.ops.onepass.softmax, onepass.explain.__name__, onepass.nn.__name__)"


def test_the_console_script_loads_the_library_only_when_needed() -> None:
    entry = (PACKAGE.parent.parent / "pyproject.toml").read_text()
    assert 'onepass = "onepass_launcher:main"' in entry
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {SCRIPT}"
    for arguments, last in ((("--version",), "False"), (("explain", "8", "8", *H200), "True")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", last)


def test_the_library_imports_no_tools() -> None:
    code = "import sys, onepass, onepass.nn; print([m for m in sys.modules if 'onepass.tools' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "[]\n")
    sources = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "tools" not in p.parents and p.name != "__main__.py"]
    assert [p for p in sources if "onepass.tools" in p.read_text() or "from .tools" in p.read_text()] == []


@pytest.mark.parametrize("how", ["-c", "a script", "-m"])
def test_everyone_else_has_the_operators_at_once(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for file in ("mine/__init__.py", "mine/__main__.py", "onepass_user.py"):
        (tmp_path / file).write_text("" if file.endswith("__init__.py") else REGISTERED)
    started = {"-c": ("-c", REGISTERED), "a script": ("onepass_user.py",), "-m": ("-m", "mine", "onepass")}[how]
    done = subprocess.run([sys.executable, *started], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "onepass.softmax explain onepass.nn\n")


@pytest.mark.parametrize("name", ["__all__", "explain, warmup, engines, patch"])
def test_a_name_loads_all_names_whatever_was_imported_before(name: str) -> None:
    """All names of the package are there after its modules were imported one by one."""
    ask = "sorted(set(onepass.__all__) - set(dir(onepass)))" if name == "__all__" else f"[f.__name__ for f in ({name})]"
    code = f"""
import onepass_launcher, sys
import onepass
assert "torch" not in sys.modules and not hasattr(onepass, "nothing")
from onepass.tools.cli.params import Command
import onepass.native, onepass._engines, onepass._explain, onepass._warmup, onepass.patching
Command("x", callback=lambda: None).main([], standalone_mode=False)
from onepass import *
print({ask})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == ("[]\n" if name == "__all__" else f"{name.split(', ')}\n"), done.stderr


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = command("explain", "8", "8", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "onepass: no torch here\n")
