"""`onepass gallery`: the list, the sources, one variant checked and timed, and the butterfly exchange."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lib.gallery import needs_emulator
from lib.transcript import call, fake_terminal, replay, session
from onepass.reference import softmax
from onepass.tools.bench import results
from onepass.tools.cli.gallery import butterfly
from onepass.tools.gallery import VARIANTS, Variant
from onepass.tools.gallery.launch_params import LAUNCH_PARAMS

__all__ = ["fake_terminal"]
MODULE = "onepass.tools.cli.gallery"


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Variants that are right, wrong, raise and are interrupted; gives the launch parameters of the last call."""
    seen: dict[str, int] = {}

    def right(x: torch.Tensor, out: torch.Tensor, **launch: int) -> torch.Tensor:
        seen.clear()
        seen.update(launch)
        return out.copy_(softmax(x, 1))

    functions = {
        "right": right,
        "away": right,
        "wrong": lambda x, out: out.copy_(softmax(x, 1) * 1.01),
        "raises": Mock(side_effect=RuntimeError("too many resources\nrequested")),
        "interrupted": Mock(side_effect=KeyboardInterrupt),
    }
    refuses = lambda rows, n, dtype: f"takes rows of 64, got {n}" if n > 64 else None  # noqa: E731
    module = SimpleNamespace(refuses=refuses, **functions)
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.made_up", module)
    away = {"away": "the driver is on leave"}
    for name in functions:
        params = ("num_warps", "block_size", "threads") if functions[name] is right else ()
        variant = Variant(name, "naive.py", f"made_up:{name}", lambda device, name=name: away.get(name), params)
        monkeypatch.setitem(VARIANTS, name, variant)
    return seen


def test_commands_print_their_transcript() -> None:
    replay("gallery")


def test_runs_that_fail_print_their_transcript(made_up: Any) -> None:
    """Wrong input is one line on stderr before anything runs."""
    replay("gallery-errors")
    assert made_up == {}
    for command, message, status in (
        ("wrong 4 8", "wrong: wrong: error", 1),
        ("raises 4 8", "raised: RuntimeError: too many resources", 1),
        (f"right {10**11} 64 --no-baseline", "skipped: needs 71525.7 GiB", 1),
        ("interrupted 4 8 --no-baseline", "stopped", 130),
    ):
        text = session(f"gallery run {command} --device cpu")
        assert message in text
        assert "as fast as" not in text
        assert text.endswith(f"exit status {status}\n")


def test_the_list_as_json() -> None:
    for command in (("gallery", "--json"), ("gallery", "list", "--json")):
        found = json.loads(call(*command).stdout)
        assert [variant["name"] for variant in found] == list(VARIANTS)
        assert found[0]["idea"] == VARIANTS["naive"].header.idea
    traffic, cached = ({"reads": [n, 0], "writes": [1, 0]} for n in (2, 1))
    online = {"name": "triton-online", "language": "Triton", "runs_on": "GPU", "traffic": traffic, "cached": cached}
    assert {key: found[5][key] for key in online} == online
    for variant in VARIANTS.values():  # and where they run
        on_cpu = variant.unavailable(torch.device("cpu"))
        if "CPU" not in variant.runs_on:
            assert on_cpu is None or "GPU" in on_cpu or "TRITON_INTERPRET" in on_cpu
        elif variant.name not in ("naive-jit", "naive-compile"):  # those need TorchScript, a compiler
            assert on_cpu is None


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_a_terminal(width: int, fake_terminal: Any) -> None:
    screen = fake_terminal(MODULE, width)
    session("gallery")
    text = screen.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert ("…" in text, "NVIDIA GPU" in text) == (False, True)
    assert all(re.search(rf"^ +\d+ +{name} ", text, re.MULTILINE) for name in VARIANTS)


@pytest.mark.parametrize("name", [*VARIANTS, "vectors.cuh"])
def test_show(name: str, fake_terminal: Any) -> None:
    path = VARIANTS[name].path if name in VARIANTS else VARIANTS["cuda-vector"].path.with_name(name)
    source = path.read_text()
    assert call("gallery", "show", name).output == source
    screen = fake_terminal(MODULE, 60, "standard")
    assert call("gallery", "show", name, "--path").output == f"{path}\n"
    assert screen.getvalue() == ""
    call("gallery", "show", name)
    assert screen.getvalue().count("\x1b[") > 50
    assert re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).rstrip("\n") == source.rstrip("\n")


def test_run_checks_and_times_a_variant_beside_torch(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    text = session(f"gallery run naive 20 33 --device cpu --dtype bf16 --seed 3 --json {file}")
    assert "naive: Python, naive.py" in text
    assert re.search(r"^naive is \d+\.\d\dx as fast as torch( \(disturbed\))?$", text, re.MULTILINE)
    assert text.splitlines()[-1] == f"results: {file}"
    saved = results.load(file)
    assert [row.provider for row in saved.rows] == ["copy", "naive", "torch"]
    assert all(row.ok and row.shape == [20, 33] and row.dtype == "bfloat16" for row in saved.rows)
    assert saved.environment["seed"] == 3
    assert "launch" not in saved.environment


def test_launch_parameters_are_passed_and_saved(made_up: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = f"--device cpu --no-baseline --num-warps 8 --block-size 64 --threads 96 --json {file}"
    text = session(f"gallery run right 4 8 {options}")
    assert "num_warps 8, block_size 64, threads 96" in text
    assert not re.search("torch us|as fast as|exit status", text)
    assert made_up == {"num_warps": 8, "block_size": 64, "threads": 96}
    assert results.load(file).environment["launch"] == {"right": made_up}
    shown = re.findall("--([a-z-]+) N  ", call("gallery", "run", "-h").stdout)
    taken = {name for variant in VARIANTS.values() for name in variant.launch_params}
    assert {name.replace("-", "_") for name in shown} == set(LAUNCH_PARAMS) == taken


@needs_emulator
def test_run_in_the_emulator() -> None:
    text = session("gallery run cuda-warp 3 45 --emulate --threads 64")
    assert re.fullmatch(r".*\ncuda-warp: right on 3x45 float32 \(emulated on the CPU in [\d.]+ s, .*\)\n", text)


@pytest.mark.gpu
def test_run_on_a_gpu_with_launch_parameters() -> None:
    for name, param in (("triton-row", "--num-warps 8"), ("cuda-block", "--threads 128")):
        assert f"{name} is " in session(f"gallery run {name} 64 1000 {param} --device cuda")


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32])
@pytest.mark.parametrize(("op", "merge"), [("max", max), ("sum", sum), ("id", None)])
def test_every_lane_ends_with_all_values(lanes: int, op: str, merge: Any) -> None:
    """The transcript has the numbers that a published kernel of 32 threads prints, whose values are lane numbers."""
    values = [(7 * lane) % 13 - 40 for lane in range(lanes)]
    steps = butterfly(values, op)
    assert [mask for mask, _ in steps] == [2**i for i in reversed(range(lanes.bit_length() - 1))]
    for mask, after in steps:  # after mask m a lane has merged the lanes whose numbers have its last log2(m) bits
        merged = [values[lane ^ mask] if merge is None else merge(values[lane % mask :: mask]) for lane in range(lanes)]
        assert after == merged


def test_a_terminal_colours_the_lanes_that_exchange(fake_terminal: Any) -> None:
    fake_terminal(MODULE, 10, "standard")
    magenta, cyan = "\x1b[35m{}\x1b[0m", "\x1b[36m{}\x1b[0m"
    lines = call("gallery", "shuffle", "--lanes", "4", "--op", "id").stdout.splitlines()
    assert lines[:2] == ["lane     0 1 2 3", "mask=2:  " + f"{cyan} {cyan} {magenta} {magenta}".format(2, 3, 0, 1)]
