"""`onepass tune`: its output, its errors, and on a GPU a whole short run."""

import json
import re
import subprocess

import pytest
import torch
from click.testing import Result

import onepass
from lib import transcript
from lib.scripts import run_python
from lib.transcript import assert_snapshot, replay, session
from lib.tune import BASE, H200, FakeTimer
from onepass import native
from onepass import tables as store
from onepass.tools.cli.tune import format_measurement, table_cells
from onepass.tools.tune.candidates import Choice
from onepass.tools.tune.run import Options, sweep
from onepass.tools.tune.timing import Measurement

TOLERANCE = {"rtol": 1e-2, "atol": 1e-5}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def call(*arguments: str) -> Result:
    return transcript.call("tune", *arguments)


@no_gpu
def test_without_a_gpu_it_is_one_line():
    text = session("tune", "tune --show --device cuda", "tune --lengths 64", "tune --device cuda:0")
    assert len(re.findall(r"^! onepass: nothing to measure: .*CUDA.*\nexit status 2$", text, re.MULTILINE)) == 4


def test_commands_print_their_transcript(monkeypatch):
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    replay("tune")
    for device, title, origin in (
        ("h200", "NVIDIA H200, compute 90, 132 multiprocessors", r"tables built in, measured on NVIDIA H200, \S+"),
        (
            "L4",
            "NVIDIA L4, compute 89, 58 multiprocessors",
            r"tables measured on .* \(the nearest\); `onepass tune` .*",
        ),
    ):
        lines = call("--show", "--device", device).stdout.splitlines()
        assert lines[0] == title
        assert re.fullmatch(origin, lines[1])
        assert [line.split() for line in lines[4:]] == [" ".join(row).split() for row in table_cells(BASE)]
        shown = json.loads(call("--show", "--device", device, "--json").stdout)
        assert (shown["gpu"], shown["tables"]) == (title.partition(",")[0], BASE)
    if not torch.cuda.is_available():
        assert call("--show").stdout == call("--show", "--device", "h200").stdout


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


@pytest.mark.parametrize(
    ("function", "choice", "line"),
    [
        ("softmax", Choice(0, 4, 0, 1, 0), "softmax float32 9x8: warp threads 4, 0.500 of a copy, in use 0.400"),
        (
            "columns_backward",
            Choice(6, 256, 8, 16, 8),
            "columns_backward float32 9x8: columns threads 256 items_per_thread 8 blocks_per_row 16 smem_vecs 8, "
            "0.500 of an addition, in use 0.400",
        ),
        (
            "logsumexp",
            Choice(2, 0, 16, 1, 0),
            "logsumexp float32 9x8: block items_per_thread 16, 2.000 of a copy's time, in use 2.500",
        ),
    ],
)
def test_a_measurement_in_a_line(function, choice, line):
    times = {choice: 2.0, Choice(2, 64, 16, 1, 0): 3.0}
    assert format_measurement(Measurement(function, "float32", 8, 9, 1.0, 2.5, times)) == line


def test_errors_of_a_run_are_one_line(fake):
    fake += [FakeTimer(1, RuntimeError), FakeTimer(3)]
    result = call("--lengths", "64,128")
    assert (result.exit_code, result.stderr) == (2, "onepass: stopped here\n")
    assert call("--lengths", "64,128").exit_code == 130


def test_it_says_how_a_file_elsewhere_is_used(fake, tmp_path, monkeypatch):
    fake += [FakeTimer(), FakeTimer()]
    elsewhere = tmp_path / "a" / "b.json"
    result = call("--lengths", "64", "--out", str(elsewhere))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"used with ONEPASS_TABLES={elsewhere}"
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    result = call("--lengths", "64", "--out", str(elsewhere))
    assert result.stdout.splitlines()[-1] == "not used while ONEPASS_TABLES=off"


def test_the_tables_in_cells():
    cells = table_cells(BASE)
    assert len(cells) == sum(len(table) for table in BASE.values())
    assert cells[0][1:3] == (f"1 to {next(iter(BASE.values()))[0][0]}", "warp")
    assert cells[-1][1].endswith(" and more")
    assert cells[-1][2:] == ("columns-grid", "", "", "8", "")
    others = [row for row in cells if row[2] == "as others"]
    assert others
    assert all(row[3:] == ("", "", "", "") for row in others)


# On a GPU ----------------------------------------------------------------------------------------------------------

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
        result = call("--size-mib", "8", "--repeats", "3", "--lengths", "33,4096")
        assert result.exit_code == 0, result.output
        stored = store.read(path)
        assert native.tables(gpu_here()) == {"origin": stored.origin, "tables": stored.tables}
        shown = call("--show")
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
