"""`onepass gallery check` and `mistakes`: what is right passes, and what is wrong fails with its hint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.bench import fake
from lib.gallery import needs_emulator
from lib.support import slow
from lib.transcript import call
from onepass.tools.bench import cli_run
from onepass.tools.bench.cases import Case
from onepass.tools.bench.gallery_providers import Learned
from onepass.tools.gallery import VARIANTS
from onepass.tools.gallery.check import Failure, load, trials, try_one
from onepass.tools.gallery.cuda_launches import H200, LIMITS
from onepass.tools.gallery.mistakes import MISTAKES

__all__ = ["fake"]
CPU = torch.device("cpu")
TRIALS = {trial.name: trial for trial in trials()}


def test_a_function_of_python(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, 1)\n")
    done = call("gallery", "check", str(file), "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert re.search(r"softmax of mine.py: (\d+) of \1 inputs right", done.stdout)
    assert "first warps first" not in done.stdout
    file.write_text("def other(x):\n    return x.exp() / x.exp().sum(1, keepdim=True)\n")
    done = call("gallery", "check", str(file), "--device", "cpu", "--function", "other")
    assert done.exit_code == 1
    assert re.search(r"^around 10000 +WRONG  1200 of 1200 wrong, .*: got nan, want [\d.]+$", done.stdout, re.MULTILINE)
    assert "hint: subtract the maximum before the exponential" in done.stdout
    assert re.search(r"^N = 781 +right$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("body", "trial", "what", "hint"),
    [
        ("return torch.softmax(x, 0)", "40 rows", "wrong, first at row 0, element 0", "from row r of x"),
        ("return torch.softmax(x, 1) / 2", "N = 781", "wrong", "the whole row is 0.5 times what it should be"),
        ("x.add_(1); return torch.softmax(x, 1)", "N = 1", "x was written", "only y"),
        ("return torch.softmax(x.nan_to_num(), 1)", "NaN", "got .*, want nan", "fmaxf ignores it"),
        ("return torch.softmax(x, 1)[:, :1]", "one row", "ValueError: gave .1, 1. of", "the shape and the dtype of x"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, body: str, trial: str, what: str, hint: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\n\ndef softmax(x):\n    {body}\n")
    failure = try_one(load(file), TRIALS[trial], CPU)
    assert isinstance(failure, Failure)
    assert re.search(what, failure.what)
    assert hint in failure.hint


FOUND_BY = {
    "race": "first warps first",
    "padding": "N = 781",
    "least-maximum": "around -200",
    "offsets": "rows 2^30 apart",
}


@needs_emulator
@pytest.mark.parametrize("name", ["race", *(slow(name) for name in FOUND_BY if name != "race")])
def test_a_broken_rung_fails_and_the_mended_one_passes(tmp_path: Path, name: str) -> None:
    file = tmp_path / "rung.cu"
    assert call("gallery", "mistakes", name, "-o", str(file)).exit_code == 0
    broken = replace(load(file), emulated=True)
    failure = try_one(broken, TRIALS[FOUND_BY[name]], CPU)
    assert isinstance(failure, Failure)
    assert TRIALS[FOUND_BY[name]].hint in failure.hint
    (tmp_path / "right").mkdir()
    mended = tmp_path / "right" / "rung.cu"
    mended.write_text(VARIANTS[MISTAKES[name].exercise.variant].source)
    assert try_one(replace(load(mended), emulated=True), TRIALS[FOUND_BY[name]], CPU) is None


@needs_emulator
@pytest.mark.slow
def test_every_input_passes_for_a_rung() -> None:
    done = call("gallery", "check", str(VARIANTS["cuda-vector"].path), "--emulate")
    assert done.exit_code == 0, done.output


@needs_emulator
def test_a_kernel_that_leaves_the_row_or_does_not_compile(tmp_path: Path) -> None:
    signature = 'extern "C" __global__ void mine(const TYPE* x, TYPE* y, int64_t m, int64_t n, int64_t xs, int64_t ys)'
    for name, body, what, hint in (
        ("read.cu", "y[n * blockIdx.x] = x[-1];", "a read outside of all tensors: thread 0", "an index is beyond"),
        ("name.cu", "y[0] = nothing;", "does not compile: .*nothing", "-DTYPE=float, half_t or bfloat16_t"),
    ):
        file = tmp_path / name
        file.write_text(f'#include "types.cuh"\n{signature} {{ {body} }}\n')
        failure = try_one(replace(load(file), emulated=True, threads=32), TRIALS["N = 1"], CPU)
        assert isinstance(failure, Failure)
        assert re.search(what, failure.what)
        assert hint in failure.hint


@needs_emulator
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("cuda-columns", "mask >= 8", "mask > 8"),
        ("cuda-backward", "k) - sum", "k) - 2 * sum"),
        ("cuda-cluster", "/ total", "/ sum"),
        ("cuda-grid", "1 / block_sum(total", "2 / block_sum(total"),
    ],
)
def test_a_kernel_that_is_launched_like_another(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    source = VARIANTS[name].source
    assert right in source
    for text, is_right in ((source, True), (source.replace(right, wrong), False)):
        file = tmp_path / f"{is_right}.cu"  # a file is compiled once
        file.write_text(text)
        candidate = replace(load(file, like=name), emulated=True)
        assert (try_one(candidate, TRIALS["N = 5003"], CPU) is None) == is_right
    assert candidate.refuses(torch.zeros(1, 300_000)) == (
        f"takes rows of at most {LIMITS[name](torch.float32, H200)} elements of float32; got N = 300000"
        if name in LIMITS
        else None
    )


def test_wrong_commands(tmp_path: Path) -> None:
    two = 'extern "C" __global__ void a(int x) {}\nextern "C" __global__ void b(int x) {}\n'
    for name, text, options, message in (
        ("a.txt", "", (), "takes a .cu or a .py file, got "),
        ("a.py", "", (), "has no function softmax(x)"),
        ("b.py", "import nothing_of_this_name", (), "b.py cannot be imported: ModuleNotFoundError: No module named"),
        ("b.cu", "", (), 'has no extern "C" __global__ void'),
        ("c.cu", two, (), "has a, b: name one with --function"),
        ("c.cu", two, ("--function", "c"), "has no kernel c; it has a, b"),
        ("c.cu", two, ("--function", "a"), "a must take (const TYPE* x, TYPE* y, int64_t rows, "),
        ("c.cu", two, ("--function", "a", "--like", "cuda-grid"), "must take (const TYPE* __restrict__ x, "),
        ("c.cu", two, ("--like", "cuda-fast"), "no CUDA variant 'cuda-fast'; there are cuda-warp, "),
        ("d.py", "softmax = len", ("--like", "cuda-rows"), "only a kernel is launched like cuda-rows"),
        ("e.cu", VARIANTS["cuda-grid"].source, ("--like", "cuda-grid", "--threads", "64"), "got threads; it takes"),
        ("c.cu", two, ("--threads", "33"), "threads must be 32 to 1024, a multiple of 32; got 33"),
    ):
        (tmp_path / name).write_text(text)
        done = call("gallery", "check", str(tmp_path / name), *options)
        assert (done.exit_code, message in done.stderr) == (2, True), done.output
    (tmp_path / "d.py").write_text("softmax = len")
    done = call("gallery", "check", str(tmp_path / "d.py"), "--emulate")
    assert "--emulate runs CUDA kernels" in done.stderr
    if not torch.cuda.is_available():
        done = call("gallery", "check", str(VARIANTS["cuda-warp"].path))
        assert done.exit_code == 2
        assert "a CUDA kernel needs a GPU; --emulate checks it without one" in done.stderr


def test_the_mistakes_are_listed_and_answered() -> None:
    listed = call("gallery", "mistakes").stdout
    assert [line.split()[0] for line in listed.splitlines()] == [*MISTAKES]
    for name, mistake in MISTAKES.items():
        if mistake.exercise is None:
            assert "no rung to mend" in call("gallery", "mistakes", name).stderr
            continue
        mistaken, right = mistake.texts()
        assert call("gallery", "mistakes", name).stdout == mistaken != right
        answer = call("gallery", "mistakes", name, "--answer").stdout
        changed = [line for line in answer.splitlines()[2:] if line.startswith(("-", "+"))]
        assert {line[0] for line in changed} == {"-", "+"}
        assert len(changed) <= 4
    assert "unknown mistake 'rice'" in call("gallery", "mistakes", "rice").stderr


@pytest.mark.gpu
def test_a_right_kernel_is_timed_beside_the_ladder() -> None:
    done = call("gallery", "check", str(VARIANTS["cuda-online"].path))
    assert done.exit_code == 0, done.output
    assert "yours" in done.stdout


def test_a_function_is_timed_beside_torch_and_onepass(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, 1)\n")
    case = Case("gallery", "4x8", (4, 8))
    assert cli_run.bench_learned(Learned(load(file)), case, "float32", CPU) == 0
    printed = capsys.readouterr().out
    assert "yours: mine.py, softmax" in printed
    assert "cuda-warp" not in printed  # it cannot run here
    file.write_text("def softmax(x):\n    return x * 2\n")
    assert cli_run.bench_learned(Learned(load(file)), case, "float32", CPU) == 1
