"""`onepass tune`: a sweep with a timer that makes times up, its file, output and errors; a short one on a GPU."""

import json
import os
import re
import subprocess
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import onepass
from lib.scripts import run_python
from lib.transcript import assert_snapshot, call, replay, session
from lib.tune import BASE, H200, FakeTimer
from onepass import native
from onepass import tables as store
from onepass.tools.cli.tune import format_measurement, table_cells
from onepass.tools.tune.candidates import Choice
from onepass.tools.tune.run import Options, sweep
from onepass.tools.tune.sizes import COLUMN_LENGTHS, FEW, FUNCTIONS, LENGTHS
from onepass.tools.tune.timing import Measurement, WrongResultError

SOME = Options(lengths=(9, 64, 1024, 4096))
TOTAL = 36  # two dtypes and four functions at four lengths, and softmax of 4096 rows at two of the lengths


def ignore(*what) -> None:
    pass


def run(path: Path, timer: FakeTimer, options=SOME, use=ignore, on_compiled=ignore, on_measured=ignore):
    return sweep(H200, options, path, timer, BASE, use, on_compiled, on_measured)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "tables.json"


def test_a_sweep_writes_a_file_that_loads(path):
    used, seen = [], []
    timer = FakeTimer()
    use, on_compiled = (lambda *what, to=to: to.append(what) for to in (used, seen))
    stored = run(path, timer, SOME, use, on_compiled, lambda measured, *what: seen.append((measured.n, *what)))
    assert timer.done == SOME.points
    assert len(timer.done) == TOTAL
    kernels = len(timer.prepared)
    assert seen == [(kernels, kernels), *((n, i, TOTAL) for i, (*_, n, _) in enumerate(SOME.points, 1))]
    assert store.read(path) == stored
    assert used == [(stored.origin, stored.tables)]
    assert stored.origin.startswith(f"{path}, measured on NVIDIA H200, ")
    content = json.loads(path.read_text())
    assert (content["version"], content["compute"], content["multiprocessors"]) == (store.VERSION, 90, 132)
    assert {"gpu", "date", "torch", "onepass", "tables", "measured"} <= set(content)
    points = sorted((*point, shape[0] * shape[1]) for *point, shape in SOME.points)
    assert [(p["function"], p["dtype"], p["n"], p["rows"]) for p in content["measured"]] == points
    assert all(0 < len(p["times"]) <= 8 for p in content["measured"])
    assert os.listdir(path.parent) == ["tables.json"]
    native.set_tables("a GPU", stored.origin, stored.tables)  # the engine takes them


def refuse(origin, tables) -> None:
    raise RuntimeError("onepass: table write_f32: stopped here")


ERRORS = product((0, 5), (KeyboardInterrupt, RuntimeError, WrongResultError))


@pytest.mark.parametrize(("stop", "error"), [*ERRORS, (None, RuntimeError)])
def test_an_interrupted_sweep_writes_nothing(path, stop, error):
    """Nor one whose tables the engine refuses."""
    with pytest.raises(error, match="stopped here"):
        run(path, FakeTimer(stop, error), use=refuse)
    assert not path.exists()
    assert stop is None or not path.parent.exists()


def test_a_file_is_written_whole_or_not_at_all(path, monkeypatch):
    run(path, FakeTimer())
    before = path.read_bytes()
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    for name in ("os.replace", "onepass.tables.os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(name, fail)
            with pytest.raises(OSError, match="No space"):
                run(path, FakeTimer(seed=1))
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["tables.json"]
    run(path, FakeTimer(seed=1))
    assert store.read(path).tables != json.loads(before)["tables"]


def test_a_sweep_measures_what_is_asked_for(path):
    timer = FakeTimer()
    options = Options(lengths=(21, 1000, 200000), functions=("columns",), dtypes=("float32",), size_mib=16)
    stored = run(path, timer, options)
    assert [(f, d, n) for f, d, n, _ in timer.done] == [("columns", "float32", 21), ("columns", "float32", 1000)]
    assert {(kernel.function, kernel.which) for kernel in timer.prepared} == {("softmax", "forward")}
    assert [name for name in BASE if stored.tables[name] != BASE[name]] == ["columns_f32"]
    assert stored == store.read(stored.path)
    native.set_tables("a GPU", stored.origin, stored.tables)


def test_all_lengths_are_the_default():
    rows = [point for point in Options().points if point[0] in FUNCTIONS[:2]]
    assert {n for *_, n, _ in rows} == set(LENGTHS)
    few = [p for p in rows if p[3] == (FEW, 1) and p[0] == "softmax" and 256 <= p[2] <= 16384]
    assert {n for *_, n, _ in few} == {n for n in LENGTHS if 256 <= n <= 16384 and n % 4 == 0}
    assert len(rows) == len(set(rows)) == 4 * len(LENGTHS) + len(few) - 1  # 256 MiB hold 4096 rows of 16384 floats
    columns = {(f, d, n) for f, d, n, _ in Options().points} - {(f, d, n) for f, d, n, _ in rows}
    assert len(columns) == 4 * len(COLUMN_LENGTHS)


# The command -------------------------------------------------------------------------------------------------------

TOLERANCE = {"rtol": 1e-2, "atol": 1e-5}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@no_gpu
def test_without_a_gpu_it_is_one_line():
    text = session("tune", "tune --show --device cuda", "tune --lengths 64", "tune --device cuda:0")
    assert len(re.findall(r"^\$ onepass tune.*  # error: nothing to measure: .*CUDA", text, re.MULTILINE)) == 4


def test_commands_print_their_transcript(monkeypatch):
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    replay("tune")
    for device, title, origin in (
        ("h200", "NVIDIA H200, compute 90, 132 multiprocessors", r"tables built in, measured on NVIDIA H200, \S+"),
        ("L4", "NVIDIA L4, compute 89, 58 multiprocessors", r"tables measured on .*\(the nearest\); `onepass tune` .*"),
    ):
        lines = call("tune", "--show", "--device", device).stdout.splitlines()
        assert lines[0] == title
        assert re.fullmatch(origin, lines[1])
        assert [line.split() for line in lines[4:]] == [" ".join(row).split() for row in table_cells(BASE)]
        shown = json.loads(call("tune", "--show", "--device", device, "--json").stdout)
        assert (shown["gpu"], shown["tables"]) == (title.partition(",")[0], BASE)
    if not torch.cuda.is_available():
        assert call("tune", "--show").stdout == call("tune", "--show", "--device", "h200").stdout
    cells = table_cells(BASE)
    assert len(cells) == sum(len(table) for table in BASE.values())
    assert cells[0][1:3] == (f"1 to {next(iter(BASE.values()))[0][0]}", "warp")
    assert cells[-1][1].endswith(" and more")
    assert cells[-1][2:] == ("columns-grid", "", "", "8", "")
    others = [row[3:] for row in cells if row[2] == "as others"]
    assert {*others} == {("", "", "", "")}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A GPU whose times are made up; its file is tables.json. Gives the timers, one for each run."""
    timers: list[FakeTimer] = []
    monkeypatch.setenv("ONEPASS_TABLES", str(tmp_path / "tables.json"))
    monkeypatch.setattr("onepass.tools.tune.run.cuda_index", lambda device: 0)

    def tune(device, options, path, *report):
        path = (path or store.default_path("NVIDIA H200")).absolute()
        return sweep(H200, options, path, timers.pop(0), BASE, lambda origin, tables: None, *report)

    monkeypatch.setattr("onepass.tools.tune.run.tune", tune)
    return timers


def test_a_run_prints_one_line_per_measurement(fake, tmp_path):
    fake.append(FakeTimer())
    # Made-up times choose among plans at random; a copy takes 90 us, the plan in use 120.
    hidden = rf"(?<=\d: )[a-z].*(?=, \d)|\d\.\d+(?= of)|\d+ entries|{re.escape(str(tmp_path))}"
    assert_snapshot("tune-run", session("tune --lengths 64,4096 --dtypes f32", hide=hidden))
    assert store.read(tmp_path / "tables.json").gpu == "NVIDIA H200"
    columns = "columns threads 256 items_per_thread 8 blocks_per_row 16 smem_vecs 8, 0.500 of an addition, in use 0.400"
    for function, choice, text in (
        ("softmax", Choice(0, 4, 0, 1, 0), "warp threads 4, 0.500 of a copy, in use 0.400"),
        ("columns_backward", Choice(6, 256, 8, 16, 8), columns),
        ("logsumexp", Choice(2, 0, 16, 1, 0), "block items_per_thread 16, 2.000 of a copy's time, in use 2.500"),
    ):
        times = {choice: 2.0, Choice(2, 64, 16, 1, 0): 3.0}
        line = format_measurement(Measurement(function, "float32", 8, 9, 1.0, 2.5, times))
        assert line == f"{function} float32 9x8: {text}"


def test_errors_of_a_run_are_one_line_and_it_says_how_a_file_elsewhere_is_used(fake, tmp_path, monkeypatch):
    fake += [FakeTimer(1, RuntimeError), FakeTimer(3), FakeTimer(), FakeTimer()]
    result = call("tune", "--lengths", "64,128")
    assert (result.exit_code, result.stderr) == (2, "onepass: stopped here\n")
    assert call("tune", "--lengths", "64,128").exit_code == 130
    elsewhere = tmp_path / "a" / "b.json"
    for last in (f"used with ONEPASS_TABLES={elsewhere}", "not used while ONEPASS_TABLES=off"):
        result = call("tune", "--lengths", "64", "--out", str(elsewhere))
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, last)
        monkeypatch.setenv("ONEPASS_TABLES", "off")


USED = """
import json, sys, torch, onepass
x = torch.randn(3000, int(sys.argv[1]), device="cuda")
torch.testing.assert_close(onepass.softmax(x).double(), onepass.reference.softmax(x, -1), rtol=1e-5, atol=1e-12)
plan = onepass.explain(x)
print(json.dumps([plan.notes, plan.tier]))
"""


def used(n: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", USED, n, **environment)


@pytest.mark.gpu
def test_a_short_run_makes_a_file_that_is_used(tmp_path, monkeypatch):
    path = tmp_path / "tables.json"
    monkeypatch.setenv("ONEPASS_TABLES", str(path))
    before = native.tables(gpu_here())
    try:
        result = call("tune", "--size-mib", "8", "--repeats", "3", "--lengths", "33,4096")
        assert result.exit_code == 0, result.output
        stored = store.read(path)
        assert native.tables(gpu_here()) == {"origin": stored.origin, "tables": stored.tables}
        shown = call("tune", "--show")
        assert shown.exit_code == 0, shown.output
        assert str(path) in shown.stdout
    finally:
        native.set_tables(gpu_here(), **before)
    measured = json.loads(path.read_text())["measured"]
    points = {(*point, shape[0] * shape[1]) for *point, shape in Options(size_mib=8, lengths=(33, 4096)).points}
    assert {(p["function"], p["dtype"], p["n"], p["rows"]) for p in measured} == points
    for point in measured:
        assert point["copy_us"] > 0
        assert min(us for *_, us in point["times"]) < 20 * point["copy_us"]
    for n in (33, 4096):
        done = used(n)
        assert done.returncode == 0, done.stderr
        notes, _ = json.loads(done.stdout)
        assert any(note.startswith(f"tables from {path}, measured on ") for note in notes)
    off = used(33, ONEPASS_TABLES="off")
    assert not any(str(path) in note for note in json.loads(off.stdout)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_streamed_row_has_the_same_bits_wherever_it_lies(dtype):
    before = native.tables(gpu_here())
    streams = [[store.ANY, 5, 256, 16, 1, 0]]
    streamed = dict.fromkeys(("write_f32", "write_f16", "reduce_f32", "reduce_f16"), streams)
    native.set_tables(gpu_here(), "a test", {**BASE, **streamed})
    x = torch.randn(5001, device="cuda", dtype=dtype)
    try:
        with onepass.batch_invariant():
            for function in ("softmax", "logsumexp"):
                assert onepass.explain(x, function=function).tier == "twopass"
                found = []
                for offset in range(9):
                    moved = torch.empty(5010, device="cuda", dtype=dtype)[offset : offset + 5001].copy_(x)
                    found.append(getattr(onepass, function)(moved, 0))
                torch.testing.assert_close(found[0].double(), getattr(onepass.reference, function)(x, 0), **TOLERANCE)
                assert all(torch.equal(found[0], other) for other in found)
    finally:
        native.set_tables(gpu_here(), **before)


@pytest.mark.gpu
def test_a_wrong_file_is_an_error_at_the_first_call(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text("nonsense")
    done = used(64, ONEPASS_TABLES=str(path))
    assert done.returncode == 1
    assert f"ValueError: onepass: the file of tables {path} is not JSON" in done.stderr


def gpu_here() -> str:
    return torch.cuda.get_device_name()
