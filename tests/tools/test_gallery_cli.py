"""`onepass gallery`: the list, the sources, one variant checked and timed, and the butterfly exchange."""

import doctest
import importlib
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from expecttest import assert_expected_inline

from lib.transcript import errors, fake_terminal, transcript
from onepass.reference import softmax
from onepass.tools.bench import results
from onepass.tools.cli import cli
from onepass.tools.gallery import VARIANTS, Variant
from onepass.tools.gallery.launch_params import LAUNCH_PARAMS
from onepass.tools.gallery.shuffle import butterfly, summary

__all__ = ["fake_terminal"]
MODULE = "onepass.tools.cli.gallery"


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Variants that are right, wrong, raise and are interrupted; gives the launch parameters of the last call."""
    seen: dict[str, int] = {}
    module = types.ModuleType("onepass.tools.gallery.made_up")

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

    module.refuses = lambda rows, n, dtype: f"takes rows of 64, got {n}" if n > 64 else None
    for f in (right, wrong, raises, interrupted):
        setattr(module, f.__name__, f)
        params = ("num_warps", "block_size", "threads") if f is right else ()
        variant = Variant(f.__name__, "naive.py", f"made_up:{f.__name__}", lambda device: None, params)
        monkeypatch.setitem(VARIANTS, f.__name__, variant)
    away = Variant("away", "naive.py", "made_up:right", lambda device: "the driver is on leave")
    monkeypatch.setitem(VARIANTS, "away", away)
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.made_up", module)
    return seen


# The list --------------------------------------------------------------------------------------------------------


def test_the_list() -> None:
    assert_expected_inline(
        transcript("gallery"),
        """\
$ onepass gallery
 1  naive              Python  CPU, GPU    reads 5MN + 2M      writes 3MN + 2M   subtract each row's maximum, so
    that no exponential overflows; exponentiate; divide by the sum
 2  naive-jit          Python  CPU, GPU    reads 5MN + 2M      writes 3MN + 2M   let a compiler of whole functions
    see all five calls
 3  naive-compile      Python  CPU, GPU    reads MN            writes MN         a compiler that fuses across
    reductions
 4  triton-row         Triton  GPU         reads MN            writes MN         a program loads its whole row once,
    keeps it in registers, and does all five steps there
 5  triton-persistent  Triton  GPU         reads MN            writes MN         start the programs once and keep
    them
 6  triton-online      Triton  GPU         reads 2MN (MN)      writes MN         a row that does not fit on the chip
    is read in chunks
 7  cpu-threepass      C++     CPU         reads 3MN (MN)      writes MN         a loop for the maximum, a loop for
    the sum of exp(x - maximum), a loop that writes each exp(x - maximum) / sum
 8  cpu-online         C++     CPU         reads 2MN (MN)      writes MN         keep the sum relative to the
    largest element so far, and where a larger one comes, rescale it by exp(old - new): the pair (maximum, sum) of
    all elements so far
 9  cuda-warp          CUDA    NVIDIA GPU  reads 3MN (MN)      writes MN         the 32 lanes of a warp take every
    32nd element of a row
10  cuda-block         CUDA    NVIDIA GPU  reads 3MN (MN)      writes MN         all threads of a block take a row
    together
11  cuda-online        CUDA    NVIDIA GPU  reads 2MN (MN)      writes MN         each thread keeps the pair
    (maximum, sum) of the elements it has seen, and rescales the sum when a larger one comes (Milakov and
    Gimelshein, arXiv:1805.02867)
12  cuda-auto          Python  NVIDIA GPU  reads 3MN (MN)      writes MN         the dispatch of the published CUDA
    code, which looks only at the length of a row: cuda-warp up to 1024 columns, cuda-block above
Traffic in elements for an M x N matrix; in brackets the part from memory while the caches hold the rows.
The Triton variants run on the CPU too, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.
onepass gallery show NAME prints a variant; onepass gallery run NAME M N checks and times one.
onepass bench --list shows which of them cannot run here, and why.
""",
    )
    assert transcript("gallery list").splitlines()[1:] == transcript("gallery").splitlines()[1:]


def test_the_list_as_json() -> None:
    for command in (("gallery", "--json"), ("gallery", "list", "--json")):
        found = json.loads(CliRunner().invoke(cli, command).stdout)
        assert [variant["name"] for variant in found] == list(VARIANTS)
        assert found[0]["idea"] == VARIANTS["naive"].header.idea
    short = [(v["runs_on"], v["traffic"], v["cached"], v["launch_parameters"][:1]) for v in found[4:6]]
    assert_expected_inline(
        "\n".join(map(str, short)),
        """\
('GPU', {'reads': [1, 0], 'writes': [1, 0]}, None, ['num_warps'])
('GPU', {'reads': [2, 0], 'writes': [1, 0]}, {'reads': [1, 0], 'writes': [1, 0]}, ['num_warps'])""",
    )


def test_the_list_says_where_variants_run() -> None:
    for variant in VARIANTS.values():
        on_cpu = variant.unavailable(torch.device("cpu"))
        if "CPU" not in variant.runs_on:
            assert on_cpu is None or "GPU" in on_cpu or "TRITON_INTERPRET" in on_cpu
        elif variant.name not in ("naive-jit", "naive-compile"):  # those need TorchScript, a compiler
            assert on_cpu is None


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_list_fits_a_terminal(width: int, fake_terminal: Any) -> None:
    screen = fake_terminal(MODULE, width)
    transcript("gallery")
    assert all(len(line) <= width for line in screen.getvalue().splitlines())
    assert "…" not in screen.getvalue()
    for variant in VARIANTS.values():
        assert re.search(rf"^ +\d+ +{variant.name} ", screen.getvalue(), re.MULTILINE)
    words = " ".join(screen.getvalue().split())
    assert "subtract each row's maximum" in words
    assert "NVIDIA GPU" in words


# The sources -----------------------------------------------------------------------------------------------------


def test_show(fake_terminal: Any) -> None:
    for name, variant in VARIANTS.items():
        assert CliRunner().invoke(cli, ["gallery", "show", name]).output == variant.source
    screen = fake_terminal(MODULE, 40, "standard")
    assert CliRunner().invoke(cli, ["gallery", "show", "naive", "--path"]).output == f"{VARIANTS['naive'].path}\n"
    assert VARIANTS["naive"].path.is_file()
    assert screen.getvalue() == ""


def test_show_on_a_terminal_has_colours(fake_terminal: Any) -> None:
    for name, variant in VARIANTS.items():
        screen = fake_terminal(MODULE, 60, "standard")
        transcript(f"gallery show {name}")
        assert screen.getvalue().count("\x1b[") > 50
        assert re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).rstrip("\n") == variant.source.rstrip("\n")


# One variant -----------------------------------------------------------------------------------------------------

QUICK = "--device cpu --no-baseline"


def test_run_checks_and_times_a_variant_beside_torch(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    text = transcript(f"gallery run naive 20 33 --device cpu --dtype bf16 --seed 3 --json {file}")
    assert "naive: Python, naive.py" in text
    assert re.search(r"^naive is \d+\.\d\dx as fast as torch( \(disturbed\))?$", text, re.MULTILINE)
    assert text.splitlines()[-1] == f"results: {file}"
    saved = results.load(file)
    assert [row.provider for row in saved.rows] == ["copy", "naive", "torch"]
    assert all(row.ok and row.shape == [20, 33] and row.dtype == "bfloat16" for row in saved.rows)
    assert saved.environment["seed"] == 3
    assert "launch" not in saved.environment


def test_run_without_torch(made_up: Any) -> None:
    text = transcript(f"gallery run right 4 8 {QUICK}")
    assert "torch us" not in text
    assert "as fast as" not in text
    assert "exit status" not in text
    assert made_up == {}


def test_launch_parameters_are_passed_and_saved(made_up: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    text = transcript(f"gallery run right 4 8 {QUICK} --num-warps 8 --block-size 64 --threads 96 --json {file}")
    assert "num_warps 8, block_size 64, threads 96" in text
    assert made_up == {"num_warps": 8, "block_size": 64, "threads": 96}
    assert results.load(file).environment["launch"] == {"right": made_up}


def test_every_launch_parameter_is_an_option() -> None:
    assert {name for variant in VARIANTS.values() for name in variant.launch_params} == set(LAUNCH_PARAMS)
    text = transcript("gallery run --help")
    assert_expected_inline(
        re.search(r"  --num-warps.*?(?=  -h)", text, re.DOTALL)[0],
        """\
  --num-warps N         Warps of a Triton program.
  --num-stages N        Rows or chunks in flight in a Triton loop.
  --num-ctas N          Thread blocks of a cluster that share a Triton program.
  --maxnreg N           The most registers of a thread.
  --block-size N        Elements of a Triton program's tile.
  --programs N          Programs of the persistent launch.
  --threads N           Threads of a CUDA block.
  --blocks N            Blocks of the CUDA launch.
""",
    )


@pytest.mark.parametrize(
    ("command", "message", "status"),
    [
        ("run wrong 4 8 --device cpu", "wrong: wrong: error", 1),
        ("run raises 4 8 --device cpu", "raised: RuntimeError: too many resources", 1),
        (f"run right {10**11} 64 {QUICK}", "skipped: needs 71525.7 GiB", 1),
        (f"run interrupted 4 8 {QUICK}", "stopped", 130),
    ],
)
def test_a_run_that_fails(command: str, message: str, status: int, made_up: Any) -> None:
    text = transcript(f"gallery {command}")
    assert message in text
    assert "as fast as" not in text
    assert text.endswith(f"exit status {status}\n")


def test_wrong_input_is_one_line_before_anything_runs(made_up: Any) -> None:
    text = errors(
        "gallery race",
        "gallery --json -- show naive",
        "gallery show navie",
        "gallery show",
        "gallery run navie 4 8",
        "gallery run naive 4",
        "gallery run naive 0 8",
        "gallery run naive 4 0",
        "gallery run naive 4 many",
        "gallery run naive 4 8 --dtype int8",
        "gallery run naive 4 8 --dtype f64",
        "gallery run naive 4 8 --device tpu",
        "gallery run naive 4 8 --seed -1",
        f"gallery run away 4 8 {QUICK}",
        f"gallery run right 4 65 {QUICK}",
        f"gallery run right 4 8 --programs 2 {QUICK}",
        "gallery run naive 4 8 --threads 32",
        f"gallery run right 4 8 --num-warps 3 {QUICK}",
        f"gallery run right 4 8 --threads all {QUICK}",
        "gallery run naive 4 8 --json /dev/null/r.json",
        "gallery shuffle --op min",
        "gallery shuffle --lanes 64",
        "gallery shuffle 16",
    )
    assert_expected_inline(
        text,
        """\
gallery race
  No such command 'race'.
gallery --json -- show naive
  --json before show applies to the list; write it last
gallery show navie
  unknown variant 'navie': there are naive, naive-jit, naive-compile, triton-row, triton-persistent, triton-online,
    cpu-threepass, cpu-online, cuda-warp, cuda-block, cuda-online, cuda-auto, right, wrong, raises, interrupted,
    away
gallery show
  Missing argument 'NAME'.
gallery run navie 4 8
  unknown variant 'navie': there are naive, naive-jit, naive-compile, triton-row, triton-persistent, triton-online,
    cpu-threepass, cpu-online, cuda-warp, cuda-block, cuda-online, cuda-auto, right, wrong, raises, interrupted,
    away
gallery run naive 4
  Missing argument 'N'.
gallery run naive 0 8
  Invalid value for 'M': 0 is not in the range x>=1.
gallery run naive 4 0
  Invalid value for 'N': 0 is not in the range x>=1.
gallery run naive 4 many
  Invalid value for 'N': 'many' is not a valid integer range.
gallery run naive 4 8 --dtype int8
  unknown dtype 'int8': take one of float64, float32, bfloat16, float16, f64, f32, bf16, f16
gallery run naive 4 8 --dtype f64
  naive: the gallery takes float32, float16 and bfloat16, got float64
gallery run naive 4 8 --device tpu
  unknown device 'tpu': take cpu, cuda or cuda:N
gallery run naive 4 8 --seed -1
  Invalid value for '--seed': -1 is not in the range 0<=x<=2147483647.
gallery run away 4 8 --device cpu --no-baseline
  away cannot run on cpu: the driver is on leave
gallery run right 4 65 --device cpu --no-baseline
  right: takes rows of 64, got 65
gallery run right 4 8 --programs 2 --device cpu --no-baseline
  right: got --programs; it takes --num-warps, --block-size, --threads
gallery run naive 4 8 --threads 32
  naive: got --threads; it takes no launch parameters
gallery run right 4 8 --num-warps 3 --device cpu --no-baseline
  right: --num-warps must be 1 to 32, a power of two; got 3
gallery run right 4 8 --threads all --device cpu --no-baseline
  Invalid value for '--threads': 'all' is not a valid integer.
gallery run naive 4 8 --json /dev/null/r.json
  /dev/null/r.json: cannot be written
gallery shuffle --op min
  Invalid value for '--op': 'min' is not one of 'max', 'sum', 'id'.
gallery shuffle --lanes 64
  Invalid value for '--lanes': '64' is not one of '32', '16', '8', '4', '2'.
gallery shuffle 16
  Got unexpected extra argument (16)
""",
    )
    assert made_up == {}


@pytest.mark.gpu
def test_run_on_a_gpu_with_launch_parameters() -> None:
    for name, param in (("triton-row", "--num-warps 8"), ("cuda-block", "--threads 128")):
        assert f"{name} is " in transcript(f"gallery run {name} 64 1000 {param} --device cuda")


# The butterfly exchange ------------------------------------------------------------------------------------------

LANES = (2, 4, 8, 16, 32)
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


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("op", "merge"), [("max", max), ("sum", sum)])
def test_every_lane_ends_with_all_values(lanes: int, op: str, merge: Any) -> None:
    values = [(7 * lane) % 13 - 40 for lane in range(lanes)]
    steps = butterfly(values, op)
    assert [mask for mask, _ in steps] == [2**i for i in reversed(range(lanes.bit_length() - 1))]
    assert steps[-1][1] == [merge(values)] * lanes
    for mask, after in steps:  # after mask m a lane has merged the lanes whose numbers have its last log2(m) bits
        assert after == [merge(values[lane % mask :: mask]) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", LANES)
def test_id_pairs_lanes_that_differ_in_one_bit(lanes: int) -> None:
    for mask, received in butterfly([10 * lane for lane in range(lanes)], "id"):
        partner = [value // 10 for value in received]
        assert all(abs(lane - other) == mask for lane, other in enumerate(partner))
        assert [partner[other] for other in partner] == list(range(lanes))


def test_wrong_arguments_of_the_exchange() -> None:
    for lanes in (0, 1, 3, 31, 64):
        with pytest.raises(ValueError, match=rf"takes 2, 4, 8, 16 or 32 lanes, got {lanes}$"):
            butterfly(range(lanes), "max")
    with pytest.raises(ValueError, match=re.escape("op must be one of max, sum, id; got 'min'")):
        butterfly([1, 2], "min")


def test_the_exchange_printed() -> None:
    sentences = [summary(range(lanes), op) for lanes, op in ((32, "sum"), (2, "sum"), (8, "id"), (2, "id"))]
    assert_expected_inline(
        "\n".join(sentences),
        """\
After 5 exchanges all 32 lanes hold 496, the sum.
After 1 exchange all 2 lanes hold 1, the sum.
Each lane has read the value of lane ^ mask: with mask 4 lower and upper lanes swap, with mask 1 neighbours swap.
Each lane has read the value of lane ^ mask: with mask 1 neighbours swap.""",
    )
    assert_expected_inline(
        transcript("gallery shuffle", "gallery shuffle --op id --lanes 8"),
        """\
$ onepass gallery shuffle
lane      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
mask=16: 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
mask=8:  24 25 26 27 28 29 30 31 24 25 26 27 28 29 30 31 24 25 26 27 28 29 30 31 24 25 26 27 28 29 30 31
mask=4:  28 29 30 31 28 29 30 31 28 29 30 31 28 29 30 31 28 29 30 31 28 29 30 31 28 29 30 31 28 29 30 31
mask=2:  30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31 30 31
mask=1:  31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31 31

After 5 exchanges all 32 lanes hold 31, the largest.
$ onepass gallery shuffle --op id --lanes 8
lane     0 1 2 3 4 5 6 7
mask=4:  4 5 6 7 0 1 2 3
mask=2:  2 3 0 1 6 7 4 5
mask=1:  1 0 3 2 5 4 7 6

Each lane has read the value of lane ^ mask: with mask 4 lower and upper lanes swap, with mask 1 neighbours swap.
""",
    )


def test_a_terminal_colours_the_lanes_that_exchange(fake_terminal: Any) -> None:
    fake_terminal(MODULE, 10, "standard")
    text = transcript("gallery shuffle --lanes 4 --op id").replace("\x1b", "")
    assert_expected_inline(
        text,
        """\
$ onepass gallery shuffle --lanes 4 --op id
lane     [2m0[0m [2m1[0m [2m2[0m [2m3[0m
mask=2:  [36m[1m2[0m [36m[1m3[0m [35m[1m0[0m [35m[1m1[0m
mask=1:  [36m[1m1[0m [35m[1m0[0m [36m[1m3[0m [35m[1m2[0m

Each lane has read the value of lane ^ mask: with mask 2 lower and upper lanes swap, with mask 1 neighbours swap.
""",
    )


def test_the_examples_run() -> None:
    for module in (MODULE, "onepass.tools.gallery.shuffle"):
        done = doctest.testmod(importlib.import_module(module))
        assert done.attempted >= 1
        assert not done.failed
