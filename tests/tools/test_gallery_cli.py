"""`onepass gallery`: the list, the sources, one variant checked and timed, and the butterfly exchange."""

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def wrong(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(softmax(x, 1) * 1.01)

    def raises(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too many resources\nrequested")

    def interrupted(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    module: Any = types.ModuleType("onepass.tools.gallery.made_up")
    module.refuses = lambda rows, n, dtype: f"takes rows of 64, got {n}" if n > 64 else None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    away = {"away": "the driver is on leave"}
    for name, f in {**{f.__name__: f for f in (right, wrong, raises, interrupted)}, "away": right}.items():
        setattr(module, name, f)
        params = ("num_warps", "block_size", "threads") if f is right else ()
        variant = Variant(name, "naive.py", f"made_up:{name}", lambda device, name=name: away.get(name), params)
        monkeypatch.setitem(VARIANTS, name, variant)
    return seen


def test_commands_print_their_transcript() -> None:
    replay("gallery")


def test_runs_that_fail_print_their_transcript(made_up: Any) -> None:
    """Wrong input is one line on stderr before anything runs."""
    replay("gallery-errors")
    assert made_up == {}


# The list and the sources ----------------------------------------------------------------------------------------


def test_the_list_as_json() -> None:
    for command in (("gallery", "--json"), ("gallery", "list", "--json")):
        found = json.loads(call(*command).stdout)
        assert [variant["name"] for variant in found] == list(VARIANTS)
        assert found[0]["idea"] == VARIANTS["naive"].header.idea
    online = {key: found[5][key] for key in ("name", "language", "runs_on", "traffic", "cached")}
    assert online == {
        "name": "triton-online",
        "language": "Triton",
        "runs_on": "GPU",
        "traffic": {"reads": [2, 0], "writes": [1, 0]},
        "cached": {"reads": [1, 0], "writes": [1, 0]},
    }


def test_the_list_says_where_variants_run() -> None:
    for variant in VARIANTS.values():
        on_cpu = variant.unavailable(torch.device("cpu"))
        if "CPU" not in variant.runs_on:
            assert on_cpu is None or "GPU" in on_cpu or "TRITON_INTERPRET" in on_cpu
        elif variant.name not in ("naive-jit", "naive-compile"):  # those need TorchScript, a compiler
            assert on_cpu is None


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_a_terminal(width: int, fake_terminal: Any) -> None:
    screen = fake_terminal(MODULE, width)
    session("gallery")
    assert all(len(line) <= width for line in screen.getvalue().splitlines())
    assert "…" not in screen.getvalue()
    for variant in VARIANTS.values():
        assert re.search(rf"^ +\d+ +{variant.name} ", screen.getvalue(), re.MULTILINE)
    assert "NVIDIA GPU" in screen.getvalue()


@pytest.mark.parametrize("name", VARIANTS)
def test_show(name: str, fake_terminal: Any) -> None:
    source = VARIANTS[name].source
    assert call("gallery", "show", name).output == source
    screen = fake_terminal(MODULE, 60, "standard")
    assert call("gallery", "show", name, "--path").output == f"{VARIANTS[name].path}\n"
    assert screen.getvalue() == ""
    call("gallery", "show", name)
    assert screen.getvalue().count("\x1b[") > 50
    assert re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).rstrip("\n") == source.rstrip("\n")


# One variant -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("command", "message", "status"),
    [
        ("wrong 4 8", "wrong: wrong: error", 1),
        ("raises 4 8", "raised: RuntimeError: too many resources", 1),
        (f"right {10**11} 64 --no-baseline", "skipped: needs 71525.7 GiB", 1),
        ("interrupted 4 8 --no-baseline", "stopped", 130),
    ],
)
def test_a_run_that_fails(command: str, message: str, status: int, made_up: Any) -> None:
    text = session(f"gallery run {command} --device cpu")
    assert message in text
    assert "as fast as" not in text
    assert text.endswith(f"exit status {status}\n")


@pytest.mark.gpu
def test_run_on_a_gpu_with_launch_parameters() -> None:
    for name, param in (("triton-row", "--num-warps 8"), ("cuda-block", "--threads 128")):
        assert f"{name} is " in session(f"gallery run {name} 64 1000 {param} --device cuda")


# The butterfly exchange ------------------------------------------------------------------------------------------

# A published kernel of 32 threads that exchanges lane numbers prints this: `id` receives, `max` merges.
RECEIVED = {
    16: "16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    8: "8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 24 25 26 27 28 29 30 31 16 17 18 19 20 21 22 23",
    4: "4 5 6 7 0 1 2 3 12 13 14 15 8 9 10 11 20 21 22 23 16 17 18 19 28 29 30 31 24 25 26 27",
    2: "2 3 0 1 6 7 4 5 10 11 8 9 14 15 12 13 18 19 16 17 22 23 20 21 26 27 24 25 30 31 28 29",
    1: "1 0 3 2 5 4 7 6 9 8 11 10 13 12 15 14 17 16 19 18 21 20 23 22 25 24 27 26 29 28 31 30",
}
LARGEST = {16: [*range(16, 32)] * 2, 8: [*range(24, 32)] * 4, 4: [28, 29, 30, 31] * 8, 2: [30, 31] * 16, 1: [31] * 32}


def test_the_published_exchange() -> None:
    assert butterfly(range(32), "id") == [(mask, [int(v) for v in text.split()]) for mask, text in RECEIVED.items()]
    assert butterfly(range(32), "max") == list(LARGEST.items())


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32])
@pytest.mark.parametrize(("op", "merge"), [("max", max), ("sum", sum)])
def test_every_lane_ends_with_all_values(lanes: int, op: str, merge: Any) -> None:
    values = [(7 * lane) % 13 - 40 for lane in range(lanes)]
    steps = butterfly(values, op)
    assert [mask for mask, _ in steps] == [2**i for i in reversed(range(lanes.bit_length() - 1))]
    for mask, after in steps:  # after mask m a lane has merged the lanes whose numbers have its last log2(m) bits
        assert after == [merge(values[lane % mask :: mask]) for lane in range(lanes)]


def test_a_terminal_colours_the_lanes_that_exchange(fake_terminal: Any) -> None:
    fake_terminal(MODULE, 10, "standard")
    magenta, cyan = "\x1b[35m{}\x1b[0m", "\x1b[36m{}\x1b[0m"
    lines = call("gallery", "shuffle", "--lanes", "4", "--op", "id").stdout.splitlines()
    assert lines[:2] == ["lane     0 1 2 3", "mask=2:  " + f"{cyan} {cyan} {magenta} {magenta}".format(2, 3, 0, 1)]
