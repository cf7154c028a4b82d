"""The gallery's rungs in the race: when they run, what they take, and that `naive` is the rung of that name."""

import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from lib.bench import CPU, TINY, run
from onepass.reference import softmax
from onepass.tools.bench import command, results, timing
from onepass.tools.bench.cases import Case, Suite
from onepass.tools.bench.entrants import Naive
from onepass.tools.bench.providers import pick, registry
from onepass.tools.bench.results import Results
from onepass.tools.bench.run import Runner
from onepass.tools.bench.rungs import RungProvider, providers, refusal
from onepass.tools.bench.suites import SUITES
from onepass.tools.cli import cli
from onepass.tools.gallery import VARIANTS, Variant

MATRIX = Case("tiny", "tiny 5x33", (5, 33), quick=("cpu",))
JOINING = [name for name in VARIANTS if name != "naive"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that takes no time."""
    monkeypatch.setitem(SUITES, "tiny", Suite("tiny", "one matrix, one map", (MATRIX, Case("tiny", "map", (2, 3, 4)))))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, list[dict[str, int]]]:
    """A rung that notes its launch parameters and refuses rows of more than 64."""
    seen: list[dict[str, int]] = []

    def f(x: torch.Tensor, out: torch.Tensor, **launch: int) -> torch.Tensor:
        seen.append(launch)
        return out.copy_(softmax(x, 1))

    module = types.ModuleType("onepass.tools.gallery.told")
    module.softmax = f
    module.refuses = lambda rows, n, dtype: f"rows of 64, got {n}" if n > 64 else None
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.told", module)
    return Variant("told", "naive.py", "told:softmax", lambda device: None, ("num_warps", "threads")), seen


# Who runs


def test_every_rung_is_a_provider_once() -> None:
    known = registry()
    assert [name for name, p in known.items() if p.gallery] == JOINING
    assert [p.name for p in providers()] == JOINING
    assert isinstance(known["naive"], Naive)
    assert not known["naive"].gallery


def test_the_rungs_run_when_asked_for_alone() -> None:
    here = [n for n in JOINING if VARIANTS[n].unavailable(CPU) is None and not n.startswith("triton")]
    plain, left_out = pick(CPU)
    assert not any(p.gallery for p in plain)
    assert not set(JOINING) & set(left_out)
    joined, left_out = pick(CPU, gallery=True)
    assert [p.name for p in joined] == [*(p.name for p in plain), *here]
    assert set(JOINING) - set(here) <= set(left_out)
    assert left_out["cuda-warp"] == "runs only on NVIDIA GPUs"


def test_only_wins_over_the_gallery_and_skip_leaves_out() -> None:
    for gallery in (False, True):
        assert [p.name for p in pick(CPU, only=("naive-jit", "torch"), gallery=gallery)[0]] == ["torch", "naive-jit"]
    assert "naive-jit" not in [p.name for p in pick(CPU, skip=("naive-jit",), gallery=True)[0]]


def test_the_quick_form_leaves_out_what_compiles_for_seconds() -> None:
    chosen, left_out = pick(CPU, gallery=True, quick=True)
    assert "naive-compile" not in [p.name for p in chosen]
    assert left_out["naive-compile"] == "not in the quick form"


def test_a_rung_for_elsewhere_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=re.escape("'cuda-warp' cannot run on cpu: runs only on NVIDIA GPUs")):
        pick(CPU, only=("cuda-warp",))


def test_triton_rungs_on_the_cpu_run_when_named() -> None:
    provider = registry()["triton-row"]
    assert provider.redundant(CPU) == "interprets its kernels on the CPU, which takes minutes"
    assert provider.redundant(torch.device("cuda")) is None
    assert registry()["cpu-online"].redundant(CPU) is None


# What they take


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({}, "float32", None),
        ({}, "float16", None),
        ({}, "bfloat16", None),
        ({"dim": 1}, "float32", None),
        ({"dim": (1,)}, "float32", None),
        ({}, "float64", "float32, float16 and bfloat16, got float64"),
        ({"dim": 0}, "float32", "the last dim of a matrix"),
        ({"dim": (0, 1)}, "float32", "the last dim of a matrix"),
        ({"shape": (33,)}, "float32", "the last dim of a matrix"),
        ({"shape": (2, 5, 3)}, "float32", "the last dim of a matrix"),
        ({"function": "log_softmax"}, "float32", "only the forward of softmax"),
        ({"direction": "backward"}, "float32", "only the forward of softmax"),
        ({"out_dtype": "float32"}, "bfloat16", "no dtype to give"),
        ({"shape": (5, 65)}, "float32", "rows of 64, got 65"),
    ],
)
def test_what_a_rung_takes(change: dict[str, Any], dtype: str, reason: str | None, told: Any) -> None:
    case = replace(MATRIX, **change)
    got = RungProvider(told[0]).supports(case, dtype)
    assert got == refusal(told[0], case, dtype)
    assert got is None if reason is None else got is not None and got.endswith(reason)


def test_launch_parameters_reach_the_rung(told: Any) -> None:
    rung, seen = told
    provider = RungProvider(rung, num_warps=8)
    rows, said = run(MATRIX, provider)
    assert rows["told"].ok, said
    assert seen
    assert all(launch == {"num_warps": 8} for launch in seen)
    seen.clear()
    assert run(MATRIX, RungProvider(rung))[0]["told"].ok
    assert all(launch == {} for launch in seen)


def test_what_a_rung_refuses_has_a_row_that_says_why(told: Any) -> None:
    rows, _ = run(replace(MATRIX, shape=(5, 65)), RungProvider(told[0]))
    assert rows["told"].error == "unsupported: rows of 64, got 65"


def test_memory_of_the_naive_rungs_is_counted() -> None:
    for provider in providers():
        least = 16 * 5 * 33 if provider.name.startswith("naive") else 2 * 5 * 33
        assert provider.workspace(MATRIX, "bfloat16") == least


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_rung_of_the_cpu_is_right_and_timed(name: str, dtype: str) -> None:
    reason = VARIANTS[name].unavailable(CPU)
    if reason is not None:
        pytest.skip(reason)
    provider = registry()[name]
    rows, said = run(MATRIX, provider, dtype=dtype)
    assert rows[name].ok, said
    assert rows[name].version
    assert provider.takes_out(MATRIX) == VARIANTS[name].takes_out


@pytest.mark.gpu
def test_each_rung_of_a_gpu_is_right_and_has_all_three_times() -> None:
    device = torch.device("cuda")
    entrants = [p for n, p in registry().items() if n in VARIANTS and p.unavailable(device) is None]
    assert {"naive", "triton-row", "cuda-warp"} <= {p.name for p in entrants}
    runner = Runner(device, entrants, budget=TINY, graph=True)
    for row in runner.run([(Case("t", "64x1000", (64, 1000)), "bfloat16")]).rows:
        assert row.ok, f"{row.provider}: {row.error}"
        assert all(us is not None and 0 < us < 1e5 for us in (row.median_us, row.call_us)), row.provider
        if not row.provider.endswith(("jit", "compile")):
            assert row.graph_us is not None, row.provider


# naive


def test_naive_is_the_rung_for_what_the_rung_takes() -> None:
    naive = Naive()
    for dtype in ("float32", "float16", "bfloat16"):
        assert naive.function(MATRIX, dtype) is VARIANTS["naive"]
    for other in (replace(MATRIX, dim=0), replace(MATRIX, out_dtype="float32"), replace(MATRIX, function="logsumexp")):
        assert naive.function(other, "bfloat16") is not VARIANTS["naive"]
    assert naive.function(MATRIX, "float64") is not VARIANTS["naive"]


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, "float64"),
        ({}, "bfloat16"),
        ({"dim": 0}, "bfloat16"),
        ({"dim": (0, 1)}, "float16"),
        ({"out_dtype": "float32"}, "float16"),
        ({"out_dtype": "bfloat16"}, "float32"),
    ],
)
def test_naive_writes_into_out(change: dict[str, Any], dtype: str) -> None:
    case = replace(MATRIX, **change)
    assert Naive().takes_out(case)
    rows, said = run(case, Naive(), dtype=dtype)  # the checker poisons the output
    assert rows["naive"].ok, said
    x = torch.randn(5, 33, dtype=getattr(torch, dtype))
    out = torch.empty(5, 33, dtype=getattr(torch, case.out_dtype or dtype))
    assert Naive().function(case, dtype)(x, out=out) is out


# The command line


def test_bench_says_that_there_is_a_gallery(tiny: None) -> None:
    arguments = ("bench", "tiny", "--quick", "--device", "cpu", "--seconds", "0.001")
    plain = call(*arguments)
    assert plain.exit_code == 0, plain.output
    assert plain.output.count("the gallery's rungs run with --gallery") == 1
    assert "naive-jit" not in plain.output
    joined = call(*arguments, "--gallery")
    assert joined.exit_code == 0, joined.output
    assert "run with --gallery" not in joined.output
    assert re.search(r"^providers: onepass, torch, naive, naive-jit, ", joined.output, re.MULTILINE)
    assert re.search(r"^  without cuda-warp, .*cuda-auto: runs only on NVIDIA GPUs$", joined.output, re.MULTILINE)
    assert re.search(r"^  without .*naive-compile: not in the quick form$", joined.output, re.MULTILINE)


@pytest.mark.parametrize("flag", [(), ("--gallery",)])
def test_a_rung_by_its_name(tiny: None, tmp_path: Path, flag: tuple[str, ...]) -> None:
    file = tmp_path / "r.json"
    options = ("--device", "cpu", "--only", "naive-jit,naive", "--seconds", "0.001", "--json", str(file))
    result = call("bench", "tiny", *options, *flag)
    assert result.exit_code == 0, result.output
    assert "run with --gallery" not in result.output
    rows = {(r.case, r.provider): r for r in results.load(file).rows}
    assert {p for _, p in rows} == {"copy", "naive", "naive-jit"}
    assert rows["tiny 5x33", "naive-jit"].ok
    assert rows["map", "naive-jit"].error == "unsupported: a variant takes only the last dim of a matrix"
    assert rows["map", "naive"].ok


def test_list_has_the_rungs_under_a_heading_of_their_own() -> None:
    lines = call("bench", "--list", "--device", "cpu").output.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("rungs of the gallery, raced with --gallery"))
    own = lines[heading + 1 : lines.index("suites:")]
    assert [line.split()[0] for line in own] == JOINING
    assert any(re.match(r"  cuda-warp +CUDA, cuda_warp.cu -- not here: runs only on NVIDIA GPUs$", x) for x in own)
    assert any(re.match(r"  naive-jit +Python, naive_jit.py", x) for x in own)
    assert any(line.startswith("  naive ") for line in lines[:heading])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), timing.FULL),
        (("--quick",), timing.QUICK),
        (("--seconds", "2.5"), replace(timing.FULL, seconds=2.5)),
        (("--quick", "--seconds", "0.01"), replace(timing.QUICK, seconds=0.01, warmup=0.01)),
    ],
)
def test_seconds_replace_the_budgets(
    monkeypatch: pytest.MonkeyPatch, tiny: None, options: tuple[str, ...], expected: timing.Budget
) -> None:
    seen = []

    class Quiet(Runner):
        def run(self, cases: Any) -> Results:
            seen.append(self.budget)
            return self.results

    monkeypatch.setattr(command, "Runner", Quiet)
    assert call("bench", "tiny", "--device", "cpu", *options).exit_code == 0
    assert seen == [expected]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [("0", "x>0"), ("-1", "x>0"), ("nan", "finite number, got nan"), ("inf", "finite"), ("s", "not a valid float")],
)
def test_wrong_seconds(seconds: str, message: str) -> None:
    result = call("bench", "--seconds", seconds)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("onepass: Invalid value for '--seconds': ")


def test_languages() -> None:
    names = ("naive", "triton-row", "cpu-online", "cuda-warp", "cuda-auto")
    assert [VARIANTS[name].language for name in names] == ["Python", "Triton", "C++", "CUDA", "Python"]
