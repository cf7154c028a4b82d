"""The profiles of `onepass profile`: what is in them, what is kept out, and a GPU's part with a CPU in its place."""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onepass.tools.bench.profile import Choices, contestants
from onepass.tools.bench.profiler import SPENT, Contestant, Profiler, quiet
from onepass.tools.bench.run import DeviceLost
from onepass.tools.gallery import VARIANTS

CPU = torch.device("cpu")


def profiler(device: torch.device = CPU, **options: Any) -> Profiler:
    chosen = Choices(6, 40, device)
    return Profiler(chosen.case, chosen.dtype, chosen.device, **options)


def _raise(error: Exception) -> Any:
    raise error


def test_the_first_call_is_profiled_without_warm_up_and_is_not_with_it() -> None:
    seen: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return torch.softmax(x.neg().neg() if len(seen) == 1 else x, -1)

    one = Contestant("mine", counted)
    _, table, _ = profiler(calls=2, warmup=False).profiled(one, "count", 10)
    assert "aten::neg" in table
    assert len(seen) == 2
    seen.clear()
    _, table, found = profiler(calls=2).profiled(one, "count", 10)
    assert "aten::neg" not in table
    assert len(seen) > 3
    assert found is not None
    assert found.operators == 2


def test_the_trace_leaves_a_link_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "t.json"
    link.symlink_to(file)
    profiler().trace([Contestant("torch", lambda x: torch.softmax(x, -1))], str(link))
    assert link.is_symlink()
    assert "torch" in [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]


# The profiler's noise


def test_the_log_is_kept_from_stderr_and_all_else_is_not() -> None:
    lines = (
        "USDT:2026-11-21 06:44:04 4643:4643 Handler.cpp:52] start",
        "an error of CUDA",
        "[W1121 06:44:04 c.cpp:9] hm",
    )
    script = f"""
import os
from onepass.tools.bench.profiler import quiet
with quiet() as said:
    for text in {lines!r}:
        os.write(2, text.encode() + b"\\n")
os.write(2, b"after\\n")
print(*said, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "an error of CUDA\nafter\n"
    assert done.stdout.splitlines() == [lines[0], lines[2]]


def test_stderr_is_given_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        with quiet():
            warnings.warn("unheard", stacklevel=1)
            os.write(2, b"heard\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "heard\nafter\n"


def test_on_a_gpu_kernels_are_spent_between_preparing_and_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in the GPU's place: what is spent is in no table, the contestant is, and all is waited for."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    mine, spent = profiler(), torch.ones(4)
    mine.gpu = True
    mine.clocks = SimpleNamespace(flush=spent, spin_up=lambda seconds: spent.neg_())
    monkeypatch.setattr(mine, "_on_device", contextlib.nullcontext)
    error, table, found = mine.profiled(Contestant("mine", lambda x: torch.softmax(x, -1)), "self_cuda_time_total", 50)
    assert error is None
    assert spent[0] == 0
    assert spent[1] == -1
    assert "aten::softmax" in table
    assert "aten::zero_" not in table
    assert "aten::neg_" not in table
    assert found is not None
    assert found.kernels == 0
    assert waited == [CPU] * 3
    assert len(VARIANTS) + 4 < SPENT  # a profile each, torch's, ours, the first and the trace


def test_a_gpu_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = profiler()
    mine.gpu = True
    monkeypatch.setattr(mine, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: _raise(RuntimeError("unspecified launch failure")))
    with pytest.raises(DeviceLost, match="mine left the GPU unusable: unspecified launch failure"):
        mine.profiled(Contestant("mine", lambda x: _raise(RuntimeError("no"))), "count", 10)


@pytest.mark.gpu
def test_gpu_no_kernel_is_lost_however_many_profiles_there_are() -> None:
    chosen = Choices(6, 40, torch.device("cuda"))
    mine = profiler(chosen.device)
    for _ in range(16):
        for contestant in contestants(chosen)[0]:
            error, _, found = mine.profiled(contestant, "self_cuda_time_total", 10)
            assert error is None
            assert found is not None
            assert found.kernels == 1, contestant.name
