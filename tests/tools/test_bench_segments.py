"""The suite `segments`: small cases on a CPU, mistakes that are found, the compiled peers, the table and the plots."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from rich.console import Console

import onepass
from lib.bench import CPU, TINY, Log, fake, row
from lib.scripts import load_script
from lib.transcript import assert_snapshot, call, session
from onepass.tools.bench import results, segment_cases, segments
from onepass.tools.bench.cases import Case
from onepass.tools.bench.provider import Provider
from onepass.tools.bench.random_cases import MB
from onepass.tools.bench.random_report import show_ratios
from onepass.tools.bench.results import Row
from onepass.tools.bench.segment_cases import CLASSES, KINDS, MEAN_LENGTHS, SegmentCase

__all__ = ["fake"]

HAS_PYG = importlib.util.find_spec("torch_geometric") is not None
NAMED = {
    "cpu": (((60,), 7, "random"), ((50, 3), 9, "Zipf"), ((2, 2), 5, "random"), ((40,), 4, "equal"), ((3,), 1, "Zipf"))
}
ALL = segments.providers()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cases, "NAMED", NAMED)
    monkeypatch.setattr(segment_cases, "SWEEP_ITEMS", {"cpu": 300})
    monkeypatch.setattr(segment_cases, "MEAN_LENGTHS", (1, 10, 100))


def made(*classes: str, **options: Any) -> list[Case]:
    chosen = {"seed": 0, "count": 3, "dtypes": (), "moves": (0.01 * MB, 0.1 * MB), "kind": "cpu"} | options
    return segment_cases.make(classes=classes, **chosen)


def run(cases: list[Case], *providers: Provider, device: torch.device = CPU) -> list[Row]:
    runner = segments.SegmentRunner(device, providers, progress=Log(), budget=TINY)
    return runner.run([(case, case.dtypes[0]) for case in cases]).rows


def runnable(*names: str) -> list[Provider]:
    return [ALL[name] for name in names if ALL[name].unavailable(CPU) is None]


def test_every_provider_is_right(small: None) -> None:
    names = [name for name in ALL if not name.endswith("-compile")]
    rows = run(made(), *runnable(*names))
    assert {r.provider for r in rows} == {"copy", *(p.name for p in runnable(*names))}
    wrong = [(r.case, r.provider, r.error) for r in rows if not r.ok]
    assert {(name, error) for _, name, error in wrong} == {
        ("onepass-index", "unsupported: its gradient is that of onepass, by the offsets")
    }
    assert all(r.call_us and r.copy_fraction and r.threads for r in rows if r.ok)
    assert {r.suite for r in rows} == {f"segments/{name}" for name in CLASSES}


@pytest.mark.gpu
def test_every_provider_is_right_on_a_gpu(small: None) -> None:
    names = [name for name in ALL if not name.endswith("-compile")]
    rows = run(made(), *runnable(*names), device=torch.device("cuda"))
    assert {r.error for r in rows} == {None, "unsupported: its gradient is that of onepass, by the offsets"}


def test_a_case_that_the_memory_does_not_hold_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(segments.SegmentRunner, "expect", full)
    rows = run([SegmentCase("t", "t", (5,), 0, dtypes=("float32",))], ALL["onepass"])
    assert {r.error for r in rows} == {"skipped: the memory does not hold the data and the reference"}


def test_the_limit_moves_the_tensors_and_the_offsets() -> None:
    case = SegmentCase("t", "t", (50, 3), 0, segments=9)
    assert case.bytes("float32") == 2 * 600 + 80
    assert replace(case, direction="backward").bytes("bfloat16") == 3 * 300 + 80
    runner = segments.SegmentRunner(CPU, [])
    for direction, reads in (("forward", 1), ("backward", 2)):
        each = replace(case, direction=direction)
        moved = runner.limit(runner.make(each, "float32", torch.Generator().manual_seed(0)))()
        assert 0 <= each.bytes("float32") - (reads + 1) * moved.nbytes < 4 * (reads + 1)


@pytest.mark.parametrize("lengths", segment_cases.LENGTHS)
@pytest.mark.parametrize(("items", "number"), [(1000, 30), (30, 30), (7, 20), (5, 1)])
def test_offsets_cover_the_items(lengths: str, items: int, number: int) -> None:
    case = SegmentCase("t", "t", (items,), 0, segments=number, lengths=lengths)
    offsets = segments._offsets(case, torch.Generator().manual_seed(0))
    assert (offsets.shape[0], int(offsets[0]), int(offsets[-1])) == (number + 1, 0, items)
    assert (offsets.diff() >= 0).all()
    if lengths == "equal":
        assert offsets.diff().max() - offsets.diff().min() <= 1
    if (lengths, items) == ("Zipf", 1000):
        assert offsets.diff().max() > 4 * offsets.diff().float().mean()


@pytest.mark.parametrize("dtype", segment_cases.DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_mistake_is_found(small: None, dtype: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onepass.segment_softmax
    case = made(f"named-{direction}", dtypes=(dtype,))[0]

    def wrong(x: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        return right(x, *given, **more).mul(1.05)

    monkeypatch.setattr(onepass, "segment_softmax", wrong)
    for name in ("onepass", "onepass-plan"):
        (ours,) = (r for r in run([case], ALL[name]) if r.provider == name)
        assert (ours.error or "").startswith("wrong: an error of ")
        assert not ours.ok
    idle = segments.SegmentProvider("idle", "idle", lambda ragged: lambda x: x * torch.nan)
    wide = segments.SegmentProvider("wide", "wide", lambda ragged: lambda x: x.double())
    errors = [r.error or "" for r in run([case], idle, wide) if r.provider != "copy"]
    assert errors[0] == "wrong: an error of nan times what is allowed"
    assert direction == "backward" or errors[1].startswith("wrong: the result is torch.float64")


def test_rounded_sums_are_allowed_their_error_and_onepass_is_not(small: None) -> None:
    case = replace(made("named-forward", dtypes=("bfloat16",))[3], shape=(40,), segments=1)
    peer = segments.SegmentProvider("peer", "peer", lambda r: lambda x: 1.2 * segments._torch_softmax(x, r.index, 1))
    exact = segments.SegmentProvider("exact", "exact", peer.make)
    exact.rounds_sums = False
    rows = {r.provider: r for r in run([case], peer, exact)}
    assert rows["peer"].ok
    assert not rows["exact"].ok


@pytest.mark.slow
def test_a_compiled_peer_is_right_and_runs_only_when_asked(small: None) -> None:
    names = segments.compiled_names()
    assert names == ("pyg-index-compile", "pyg-ptr-compile", "torch-compile")
    assert all(ALL[name].redundant(CPU) for name in names)
    asked = segments.providers(compiled=True)
    assert [asked[name].redundant(CPU) is None for name in names] == [True, True, not HAS_PYG]
    (peer,) = runnable("torch-compile") or pytest.skip("needs a compiler")
    rows = run([case for case in made("named-backward", dtypes=("float32",)) if case.shape == (60,)], peer)
    assert [r.error for r in rows] == [None, None]


def test_without_torch_geometric_torch_takes_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for present in (False, True):
        monkeypatch.setattr(segments, "find_spec", lambda name, present=present: present or None)
        known = segments.providers()
        missing = None if present else "torch_geometric is not installed"
        assert {known[name].unavailable(CPU) for name in ("pyg-index", "pyg-ptr", "pyg-unsorted")} == {missing}
        assert (known["torch"].redundant(CPU) is not None) == present


def test_a_seed_draws_the_same_cases_everywhere() -> None:
    cases = segment_cases.make(5, 20, ("random-forward", "random-backward"), (), (16 * MB, 320 * MB), "cuda")
    assert crc32(repr([(c.suite, c.name, c.dtypes) for c in cases]).encode()) == 1468594870
    assert len(cases) == 40
    for case in cases:
        assert isinstance(case, SegmentCase)
        assert 16 * MB <= case.bytes(case.dtypes[0]) <= 320 * MB
        assert 1 <= case.segments <= case.shape[0]
        assert case.dtypes[0] in segment_cases.DTYPES
    for kind in ("cpu", "cuda"):
        every = segment_cases.make(0, 1, (), (), (2 * MB, 32 * MB), kind)
        assert len({(c.suite, c.name, c.dtypes) for c in every}) == len(every)
        assert len(every) == 4 * (5 + len(MEAN_LENGTHS)) + 2


def test_tables_and_pictures_are_made_of_files(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep is curves over the mean length."""
    file, plots = tmp_path / "segments-tiny-2026-01-01.json", tmp_path / "plots"
    arguments = "bench segments --device cpu --classes named-forward,sweep-forward --seconds 0.01 --only onepass,torch"
    assert call(*arguments.split(), "--dtype", "f32", "--json", str(file)).exit_code == 0
    saved = results.load(file)
    assert {segment_cases.mean_length(r.case, r.shape[0]) for r in saved.rows if "sweep" in r.suite} == {1, 10, 100}
    for r in saved.rows:
        r.disturbed = None
    results.save(saved, file)
    for name in ("draw_masks", "draw_ranks", "draw_course", "make_notebook"):  # which write into docs/
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(draw=lambda folder: None, main=lambda: None))
    figures = load_script("make_figures")
    for name, value in {"RESULTS": tmp_path, "PLOTS": plots, "PICTURES": {}, "SEGMENTS": {"tiny": [file.name]}}.items():
        monkeypatch.setattr(figures, name, value)
    lines = figures.segments("tiny").splitlines()
    assert len(lines) == 2 + len(NAMED["cpu"]) + 1
    assert lines[-1].startswith("| sweep, forward, 3 cases: mean (least) |  | ")
    assert lines[0] == "| case | dtype | of the limit |"  # none of PyTorch Geometric
    plots.mkdir()
    figures.draw()
    assert [path.name for path in plots.iterdir()] == ["tiny-float32.png"]


def test_ratios_by_class() -> None:
    rows = []
    for i, (index, ptr) in enumerate(((300.0, 400.0), (500.0, 200.0), (None, 800.0))):
        about = {"suite": "segments/random-forward", "case": str(i)}
        times = {"copy": 50.0, "onepass": 100.0, "pyg-index": index, "pyg-ptr": ptr, "torch-compile": 200.0}
        rows += [row(us, provider=name, ok=us is not None, **about) for name, us in times.items()]
    rows += [row(us, provider=name, suite="segments/sweep-forward") for name, us in (("copy", 9.0), ("onepass", 10.0))]
    console = Console(width=120)
    with console.capture() as capture:
        for table in show_ratios(rows):
            console.print(table)
    assert_snapshot("segment-ratios", "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    assert show_ratios([row(suite="models")]) == []


def test_the_command_prints_its_transcript(
    small: None, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "find_spec", lambda name: None)
    begin = "bench segments --device cpu --dtype f32 "
    commands = (
        begin + "--classes named-forward,named-backward --filter random",
        begin + "--only pyg-index",
        "bench segments --classes rows --device cpu",
        "bench segments models --device cpu",
        "bench segments --direction backward --device cpu",
    )
    assert_snapshot("bench-segments", session(*commands))
    drawn = begin + "--only onepass --seed 3 --count 2 --classes random-forward --mb 1 2"
    assert call(*drawn.split(), "--json", str(tmp_path / "r.json")).exit_code == 0
    assert {r.suite for r in results.load(tmp_path / "r.json").rows} == {"segments/random-forward"}
    assert KINDS == ("named", "sweep", "random")
