"""The soak run: short on a GPU; on a CPU, that it notices what it is for."""

import json
from pathlib import Path
from typing import Any

import pytest

import onepass
from lib.paths import ROOT
from lib.scripts import load_script, run_python


@pytest.fixture
def soak(monkeypatch):
    """The script as a module, with a small pool."""
    module = load_script("soak")
    monkeypatch.setattr(module, "LENGTHS", [1, 33, 100, 1000])
    monkeypatch.setattr(module, "LONG", [(1, 5000)])
    monkeypatch.setattr(module, "ELEMENTS", 2**11)
    return module


def run(soak: Any, file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = soak.main(["--device", "cpu", "--json", str(file), *arguments])
    return status, json.loads(file.read_text())


def test_it_makes_the_calls_and_says_so(soak, tmp_path, capsys):
    status, record = run(soak, tmp_path / "a.json", "--calls", "1003", "--every", "20")
    assert status == 0
    assert (record["calls"], record["trouble"], record["seed"]) == (1003, None, 0)
    assert record["checks"] == 1003 // 20
    assert "1,003 calls (0 in graphs), 50 checked, all right" in capsys.readouterr().out
    assert run(soak, tmp_path / "b.json", "--calls", "1003")[1]["sequence"] == record["sequence"]
    assert run(soak, tmp_path / "b.json", "--calls", "1003", "--seed", "1")[1]["sequence"] != record["sequence"]


def test_it_stops_in_time(soak, tmp_path):
    status, record = run(soak, tmp_path / "a.json", "--calls", "1000000000", "--seconds", "0.2")
    assert status == 0
    assert 0 < record["calls"] < 10**6
    assert record["seconds"] < 20


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "softmin", "logsumexp"])
def test_a_wrong_result_ends_it(soak, tmp_path, monkeypatch, capsys, function):
    real, start = getattr(onepass, function), soak.Soak.run

    def wrong(x, dim, **options):
        y = real(x, dim, **options)
        y[(-1,) * y.dim()] += 0.05  # one element of a call
        return y

    def later(self, *arguments):
        monkeypatch.setattr(onepass, function, wrong)
        return start(self, *arguments)

    monkeypatch.setattr(soak.Soak, "run", later)
    status, record = run(soak, tmp_path / "a.json", "--calls", "100000", "--every", "3")
    assert status == 1
    assert record["calls"] < 10_000
    assert f"{function} of (" in record["trouble"]
    assert "wrong, first at" in capsys.readouterr().err


def test_a_call_that_raises_ends_it(soak, tmp_path, monkeypatch, capsys):
    def raises(x, dim, **options):
        raise RuntimeError("onepass: cuLaunchKernelEx failed")

    monkeypatch.setattr(onepass, "softmin", raises)
    status, record = run(soak, tmp_path / "a.json")
    assert status == 1
    assert record["trouble"] == "call 0: raised onepass: cuLaunchKernelEx failed"
    assert "raised onepass" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["process", "tensors"])
def test_growing_memory_ends_it(soak, tmp_path, monkeypatch, capsys, what):
    asked = []

    def memory(self):
        asked.append(0)
        steps = {"process": 20 * 2**20, "tensors": 512}
        return {"process": 2**30, "tensors": 2**20} | {what: 2**20 + len(asked) * steps[what]}

    monkeypatch.setattr(soak.Soak, "memory", memory)
    status, record = run(soak, tmp_path / "a.json", "--calls", "4000")
    assert status == 1
    assert record["calls"] < 4000
    assert f"memory: {what} grew from" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_short_soak(tmp_path):
    file = tmp_path / "soak.json"
    options = ["--calls", "100000", "--seconds", "60", "--every", "50", "--json", file]
    done = run_python(ROOT / "scripts" / "soak.py", *options, timeout=500)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    record = json.loads(file.read_text())
    assert record["trouble"] is None
    assert record["graph_calls"] > record["calls"] / 20
    assert record["checks"] > record["calls"] / 60
