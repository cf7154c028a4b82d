"""`onepass profile`: its tables, its trace, and what it refuses."""

import contextlib
import gzip
import io
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType

from lib.bench import CPU, Odd, softmax
from lib.scripts import Forks
from lib.transcript import assert_snapshot, call, replay
from onepass.tools.bench import profile
from onepass.tools.bench.profile import OUTSIDE, SACRIFICED, Options, ProfileLine, Profiler, contestants, make_line
from onepass.tools.bench.provider import Provider
from onepass.tools.bench.runner import DeviceLost, recover
from onepass.tools.gallery import VARIANTS, Variant

RULE = re.compile(r"^-{5,}(?:  -{5,})+ *$", re.MULTILINE)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery that takes no time: one that runs, one that takes no long rows, and one that is not available."""
    variants = {
        "naive": VARIANTS["naive"],
        "picky": Variant("picky", "naive.py", "naive:softmax", lambda device: None),
        "gone": Variant("gone", "naive.py", "naive:softmax", lambda device: "lives on the moon"),
    }

    def refuses(variant: Variant, rows: int, n: int, dtype: torch.dtype) -> str | None:
        return f"takes rows of up to 64, got {n}" if variant.name == "picky" and n > 64 else None

    monkeypatch.setattr("onepass.tools.gallery.variants.VARIANTS", variants)
    monkeypatch.setattr(profile, "VARIANTS", variants)
    monkeypatch.setattr(Variant, "refuses", refuses)


def on_cpu(*arguments: str) -> Any:
    return call("profile", *arguments, "--device", "cpu")


def sections(output: str) -> dict[str, str]:
    """torch's table of each contestant by its name."""
    parts = re.split(r"^(\S+): \S+ \S+ on \S+, .*$", output.partition("\neach number")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_tables_of_torch_onepass_and_a_variant(few: None) -> None:
    result = on_cpu("6", "40", "--include", "naive", "--dtype", "bf16", "--calls", "3", "--sort", "count")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "\nonepass: 6x40 bfloat16 on cpu, 3 calls\n" in result.output
    tables = sections(result.output)
    assert list(tables) == ["torch", "onepass", "naive"]
    for name, operator in (("torch", "aten::softmax"), ("onepass", "onepass::_softmax"), ("naive", "aten::amax")):
        for called in (operator, name):
            assert re.search(rf"^ *{called} .* 3 *$", tables[name], re.MULTILINE)
        assert "Self CPU time total: " in tables[name]
        counts = [int(line.split()[-1]) for line in RULE.split(tables[name])[2].strip().splitlines()]
        assert counts == sorted(counts, reverse=True)
    beside = result.output.partition("\neach number")[2]
    assert re.search(r"^torch +2 +\S+ +1\.00 +\S", beside, re.MULTILINE), beside
    assert re.search(r"^onepass +1 +\S+ +\d+\.\d\d +\S", beside, re.MULTILINE), beside
    first = on_cpu("6", "40", "--rows", "1", "--no-warmup").output
    assert "\nonepass: 6x40 float32 on cpu, the first call\n" in first
    assert [len(RULE.split(t)[2].strip().splitlines()) for t in sections(first).values()] == [1, 1]
    assert "on cpu, the first 2 calls\n" in on_cpu("6", "40", "--no-warmup", "--calls", "2").output


def test_all_includes_what_runs_and_says_what_does_not(request: pytest.FixtureRequest) -> None:
    chosen, excluded = contestants(Options(6, 40, CPU, names=("all",)))
    names = [contestant.name for contestant in chosen]
    assert names == ["torch", "onepass", *(name for name in VARIANTS if name not in excluded)]
    assert "naive" in names
    assert set(excluded) <= set(VARIANTS)
    request.getfixturevalue("few")
    result = on_cpu("3x80", "--include", "all")
    assert list(sections(result.output)) == ["torch", "onepass", "naive"]
    assert "\n  without picky: takes rows of up to 64, got 80\n" in result.output
    assert "\n  without gone: cannot run on cpu: lives on the moon\n" in result.output
    assert list(sections(on_cpu("3", "64", "--include", "all,naive").output))[2:] == ["naive", "picky"]


def test_errors_are_one_line_before_anything_runs(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "Profiler", None)
    monkeypatch.setattr(profile, "free_bytes", lambda device: 1 << 30)
    replay("profile-errors")


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (torch.zeros_like, "wrong: error 1.0e+00 at row "),
        (lambda x: softmax(x)[:2], "wrong: shape (2, 40), torch.float32; it should be (6, 40)"),
        (lambda x: _raise(RuntimeError("no\nmore")), "raised: RuntimeError: no"),
    ],
)
def test_a_wrong_contestant_has_no_table(
    few: None, does: Any, said: str, warmup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.tools.gallery.naive.softmax", lambda x, out: does(x))
    result = on_cpu("6", "40", "--include", "naive", *([] if warmup else ["--no-warmup"]))
    assert result.exit_code == 1, result.output
    assert sections(result.output)["naive"].strip().startswith(said)
    assert "aten::softmax" in sections(result.output)["torch"]
    assert not re.search(r"^naive ", result.output, re.MULTILINE)


@pytest.mark.parametrize("name", ["t.json", "new/folder/t.json.gz"])
def test_the_trace_has_every_contestant(few: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / name, tmp_path / "link.json"
    link.symlink_to(file)
    for written in (file, link):
        result = on_cpu("6", "40", "--include", "naive", "--trace", str(written))
        assert result.output.endswith(f"\ntrace: {written}\n")
        with gzip.open(file, "rt") if name.endswith("gz") else open(file) as opened:
            names = [event.get("name") for event in json.load(opened)["traceEvents"]]
        at = [names.index(name) for name in ("torch", "onepass", "naive")]
        assert at == sorted(at)
        assert {"aten::softmax", "onepass::_softmax", "aten::amax"} <= set(names)
    assert link.is_symlink()
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", lambda self, path: None)
    result = on_cpu("6", "40", "--trace", str(file))
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == f"no trace: {file}: the profiler wrote nothing"


# The profiler


def profiler(device: torch.device = CPU, **options: Any) -> Profiler:
    return Profiler(Options(6, 40, device, **options))


def on_screen(print_to: Callable[[Console], Any], width: int = 1000) -> tuple[Any, list[str]]:
    """What a function that prints to a console returns, and its lines."""
    screen = io.StringIO()
    result = print_to(Console(file=screen, width=width, highlight=False))
    return result, [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_warm_up_hides_the_first_call() -> None:
    for warmup in (False, True):
        odd = Odd(lambda x: softmax(x.neg().neg() if odd.calls == 1 else x), name="mine")  # noqa: B023
        table, line = profiler(calls=2, warmup=warmup, sort="count").measure(odd)
        assert ("aten::neg" in table) == (not warmup)
        assert odd.calls == (5 if warmup else 2)
        assert line is not None
        assert (line.operators == 2) == warmup


def test_the_log_is_kept_from_stderr_and_everything_else_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["USDT:2026-11-21 06:44:04 4643:4643 Handler.cpp:52] start", "an error of CUDA", "[W1121 06:44:04 c.cc] h"]
    log: list[str] = []
    with contextlib.suppress(ZeroDivisionError), profile.capture_log(log):
        warnings.warn("unheard", stacklevel=1)
        os.write(2, "\n".join([*lines, ""]).encode())
        raise ZeroDivisionError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "an error of CUDA\nafter\n"
    assert log == [lines[0], lines[2]]


def test_nothing_is_on_stderr_and_a_reader_may_leave(processes: Forks, tmp_path: Path) -> None:
    code = "from onepass.tools.cli import main; main(['profile', '4', '9', '--device', 'cpu'])"
    leave = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
    for begin in ("", f"import os; {leave}; "):
        (done,) = processes.run(tmp_path, begin + code)
        assert (done.status, done.errors) == (1 if begin else 0, "")
        assert begin or "onepass::_softmax" in done.out


def test_on_a_gpu_kernels_are_launched_between_preparing_and_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in place of the GPU: these kernels are in no table, the contestant is, and the GPU is waited for."""
    waited: list[object] = []
    monkeypatch.setattr(profile, "synchronise", waited.append)
    mine, flush = profiler(limit=50), torch.ones(4)
    waited.clear()
    mine.gpu = True
    mine.clocks = SimpleNamespace(flush=flush, spin_up=lambda seconds: flush.neg_())
    table, line = mine.measure(Odd(softmax))
    assert flush[:2].tolist() == [0, -1]
    assert "aten::softmax" in table
    assert not {"aten::zero_", "aten::neg_"} & set(table.split())
    assert line is not None
    assert line.kernels == 0
    assert waited == [CPU] * 3
    assert len(VARIANTS) + 4 < SACRIFICED  # a profile for each, for torch and onepass, the first one and the trace


def test_a_gpu_that_does_not_respond_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: _raise(RuntimeError("unspecified launch failure")))
    with pytest.raises(DeviceLost, match="odd left the GPU unusable: unspecified launch failure"):
        recover(torch.device("cuda"), "odd", RuntimeError("no"))
    measure = Profiler.measure

    def lost(self: Profiler, provider: Provider) -> Any:
        return measure(self, provider) if provider.name == "torch" else _raise(DeviceLost("gone"))

    monkeypatch.setattr(Profiler, "measure", lost)
    options = Options(6, 40, CPU, trace=str(tmp_path / "t.json"))
    (status, lines), said = on_screen(lambda console: profile.run(options, console))
    assert (status, [line.name for line in lines]) == (1, ["torch"])
    assert "stopped: gone" in said
    assert any(re.search(r"^torch +2 ", line) for line in said)
    assert not list(tmp_path.iterdir())


def test_a_gpu_whose_kernels_are_not_recorded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        log = ("USDT:2026-11-21 06:44:04 1:1 a.cpp:1] start", "WARNING:2026-11-21 06:44:04 1:1 a.cpp:1] no CUPTI")

        def __init__(self, *of: Any) -> None: ...

        def measure(self, provider: Provider) -> Any:
            return "a table", ProfileLine(provider.name, 0.0, 0.0, "", 1.0, 20.0, OUTSIDE)

    monkeypatch.setattr(profile, "Profiler", Blind)
    monkeypatch.setattr(profile, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    options = Options(6, 40, torch.device("cuda:0"))
    (status, _), said = on_screen(lambda console: profile.run(options, console))
    assert status == 0
    assert said[0].endswith(", on NVIDIA H200")
    assert said[-1] == f"the profiler recorded no kernel where the table has 0: {Blind.log[1]}"


def event(name: str, us: float, self_us: float = 0.0, gpu: bool = False, annotation: bool = False) -> Any:
    """An event as torch has it, with the attributes that are read."""
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        self_cpu_time_total=self_us,
        is_user_annotation=annotation,
    )


LONG = "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float, float>(float*, float const*)"


def gpu_call(name: str, kernels: list[tuple[str, float]], host: float) -> list[Any]:
    """A call on a GPU: its annotation on the host and on the device, the launches and the kernels."""
    return [
        event(name, host, host - len(kernels), annotation=True),
        *(event("cudaLaunchKernel", 1.0, 1.0) for _ in kernels),
        *(event(kernel, us, gpu=True) for kernel, us in kernels),
        event(name, sum(us for _, us in kernels) + 5.0, gpu=True, annotation=True),
    ]


def two() -> list[ProfileLine]:
    torchs = gpu_call("torch", [(LONG, 50.0)], 20.0)
    ours = gpu_call("onepass", [("onepass_kernel", 30.0), ("Memset (Device)", 2.0)], 12.5) * 2
    return [make_line("torch", torchs, 1), make_line("onepass", ours, 2)]


def test_a_line_counts_kernels_and_adds_times() -> None:
    assert two() == [
        ProfileLine("torch", 1.0, 50.0, LONG, 1.0, 20.0, OUTSIDE),
        ProfileLine("onepass", 1.0, 32.0, "onepass_kernel", 2.0, 12.5, OUTSIDE),  # a Memset is no kernel, but time
    ]
    naive = make_line("naive", gpu_call("naive", [("exp", 7.0), ("sum", 4.0), ("sum", 4.0)], 90.0), 1)
    assert (naive.kernel, naive.kernels) == ("sum", 3)  # the longest sum
    host = event("mine", 9.0, 9.0, annotation=True)  # an annotation on the device is no kernel, whatever torch says
    mine = make_line("mine", [host, event("mine", 99.0, gpu=True), event("k", 4.0, gpu=True)], 1)
    assert (mine.kernels, mine.device_us) == (1, 4.0)
    operators = [event("aten::softmax", 90.0, 20.0), event("aten::_softmax", 70.0, 70.0)]
    line = make_line("mine", [event("mine", 100.0, 10.0, annotation=True), *operators], 1)
    assert line == ProfileLine("mine", 0, 0, "", 2, 100.0, "aten::_softmax")


def test_the_table() -> None:
    blind = ProfileLine("torch", 0.0, 0.0, "", 1.0, 20.0, OUTSIDE)
    tables = [(two(), True), (two(), False), (two()[1:], True), ([blind, two()[1]], True)]  # two lack torch, a kernel
    printed = [line for table in tables for line in on_screen(lambda console: profile.show(*table, console))[1]]  # noqa: B023
    assert_snapshot("profile-tables", "".join(f"{line}\n" for line in printed))
    for width in (80, 120):  # the names of kernels fold
        _, lines = on_screen(lambda console: profile.show(two(), True, console), width)
        assert all(len(line) <= width for line in lines)
        assert any(re.fullmatch("onepass +1 +32\\.0 +12\\.5 +0\\.64 +onepass_kernel", line) for line in lines)


@pytest.mark.gpu
def test_gpu_tables_have_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    options = ("--device", "cuda", "--include", "naive", "--calls", "2", "--trace", str(file))
    result = call("profile", "256", "1024", *options)
    assert result.exit_code == 0, result.output
    tables = sections(result.output)
    assert list(tables) == ["torch", "onepass", "naive"]
    assert all("Self CUDA" in table and "Self CUDA time total: " in table for table in tables.values())
    assert "onepass_kernel" in tables["onepass"]
    assert "softmax" in tables["torch"].lower()
    beside = result.output.partition("\neach number")[2]
    assert re.search(r"^torch +1 +\S+ +\S+ +1\.00 +\S", beside, re.MULTILINE), beside
    assert re.search(r"^onepass +1 +\S+ +\S+ +\d+\.\d\d +onepass_kernel *$", beside, re.MULTILINE), beside
    assert re.search(r"^naive +5 ", beside, re.MULTILINE), beside
    events = json.loads(file.read_text())["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert kernels.count("onepass_kernel") == 2
    assert len(kernels) == 2 * (1 + 1 + 5)
    for key in ("self_cuda_time_total", "cuda_time_total", "cuda_time", "self_cpu_time_total", "count"):
        result = call("profile", "8", "64", "--device", "cuda", "--sort", key, "--no-warmup")
        assert result.exit_code == 0, result.output
        assert "the first call" in result.output


@pytest.mark.gpu
def test_gpu_no_kernel_is_lost_however_many_profiles_there_are() -> None:
    options = Options(6, 40, torch.device("cuda"))
    mine = profiler(options.device)
    for _ in range(16):
        for provider in contestants(options)[0]:
            _, line = mine.measure(provider)
            assert line is not None
            assert line.kernels == 1, provider.name
