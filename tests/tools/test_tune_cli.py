"""`onepass tune`: its errors in a line, its output, and on a GPU a whole short run."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner, Result

import onepass
from lib.tune import BASE, H200, FakeMeter
from onepass import native
from onepass import tables as store
from onepass.tools.cli import cli
from onepass.tools.cli.tune import print_tables, rows_of
from onepass.tools.tune.candidates import candidates, kernels
from onepass.tools.tune.compile import compile_all
from onepass.tools.tune.run import Options, sweep

LOOSE = {"rtol": 1e-2, "atol": 1e-5}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", *arguments])


def has_nvrtc() -> bool:
    try:
        return bool(native.status("nvrtc"))
    except RuntimeError:
        return False


@no_gpu
@pytest.mark.parametrize(
    "arguments", [(), ("--show", "--device", "cuda"), ("--lengths", "64", "--fresh"), ("--device", "cuda:0")]
)
def test_without_a_gpu_it_is_one_line(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("onepass: nothing to measure: ")
    assert "CUDA" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "cpu"), "takes a CUDA device, got 'cpu'"),
        (("--device", "nonsense"), "takes a CUDA device, as cuda or cuda:0, got 'nonsense'"),
        (("--mib", "0"), "--mib"),
        (("--repeats", "x"), "--repeats"),
        (("--lengths", "a"), "takes whole numbers, got 'a'"),
        (("--lengths", ""), "no lengths"),
        (("--lengths", "1"), "from 2 to 2**24, got 1"),
        (("--dtypes", "f64"), "got float64"),
        (("--dtypes", "int8"), "int8"),
        (("--dtypes", "f16,bf16"), "one table"),
        (("--functions", "softmin"), "which stand for the others; got softmin"),
        (("--out", "/dev/null/file.json"), "cannot be written"),
        (("more",), "more"),
        (("--json",), "--json goes with --show"),
        (("--show", "--device", "mi300x"), "AMD Instinct MI300X has no tables"),
    ],
)
def test_wrong_arguments(arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    ("device", "gpu", "words"),
    [
        ("h200", "NVIDIA H200, compute 90, 132 multiprocessors", "tables built in, measured on NVIDIA H200"),
        ("L4", "NVIDIA L4, compute 89, 58 multiprocessors", "tables measured on NVIDIA H200, .* (the nearest)"),
    ],
)
def test_show_needs_no_gpu(device, gpu, words, monkeypatch):
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    result = call("--show", "--device", device)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == gpu
    assert re.match(words.replace("(", r"\(").replace(")", r"\)"), lines[1])
    assert "rows32" in result.stdout
    shown = json.loads(call("--show", "--device", device, "--json").stdout)
    assert gpu == f"{shown['gpu']}, compute {shown['compute']}, {shown['multiprocessors']} multiprocessors"
    assert shown["tables"] == BASE


@no_gpu
def test_show_without_a_device_shows_the_built_in_tables(monkeypatch):
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    assert call("--show").stdout == call("--show", "--device", "h200").stdout


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A GPU whose times are made up; its file is tables.json. Gives the meters: of each run the next."""
    meters: list[FakeMeter] = []
    monkeypatch.setenv("ONEPASS_TABLES", str(tmp_path / "tables.json"))
    monkeypatch.setattr("onepass.tools.tune.run.cuda_index", lambda device: 0)

    def tune(device, options, path, fresh, watcher):
        path = (path or store.default_path("NVIDIA H200")).absolute()
        return sweep(H200, options, path, meters.pop(0), BASE, lambda origin, tables: None, fresh, watcher)

    monkeypatch.setattr("onepass.tools.tune.run.tune", tune)
    return meters


def test_a_run_says_what_it_finds(fake, tmp_path):
    fake.append(FakeMeter())
    result = call("--lengths", "64,4096", "--dtypes", "f32")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("softmax float32 1048576x64: warp lanes ")
    for line, rows in zip(lines[1:3], (16384, 4096), strict=True):
        assert line.startswith(f"softmax float32 {rows}x4096: block values ")
        assert re.search(r", 0\.[78]\d\d of a copy, in use 0\.750$", line)  # a copy is made to take 90, that 120
    assert lines[3].startswith("logsumexp float32 1048576x64: warp lanes ")
    assert re.search(r", [12]\.\d\d\d of a copy's time, in use 1\.333$", lines[3])
    assert re.match(
        r"columns float32 1048576x64: columns lanes \d+ values \d+ split .* of a copy, in use 0\.750$", lines[5]
    )
    assert re.match(r"column_gradients float32 1048576x64: columns .* of an addition, in use 0\.750$", lines[7])
    assert lines[9].startswith(f"{tmp_path / 'tables.json'}: ")
    assert "from 9 measurements on NVIDIA H200" in lines[9]
    assert len(lines) == 10
    assert store.read(tmp_path / "tables.json").gpu == "NVIDIA H200"


def test_a_run_that_is_broken_off_says_what_is_kept(fake):
    fake += [FakeMeter(3), FakeMeter()]
    result = call("--lengths", "64,128,4096")
    assert result.exit_code == 130
    assert [line for line in result.stderr.splitlines() if line] == [
        "3 of 26 measurements are kept; the same command goes on there",
        "onepass: stopped",
    ]
    result = call("--lengths", "64,128,4096")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "going on: 3 of 26 measurements are there"
    assert len(result.stdout.splitlines()) == 25


def test_errors_of_a_run_are_one_line(fake):
    fake += [FakeMeter(1, RuntimeError), FakeMeter()]
    result = call("--lengths", "64,128")
    assert (result.exit_code, result.stderr) == (2, "onepass: stopped here\n")
    result = call("--lengths", "64")
    assert result.exit_code == 2
    assert "of another sweep" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_it_says_where_a_file_elsewhere_is_used(fake, tmp_path, monkeypatch):
    fake += [FakeMeter(), FakeMeter()]
    elsewhere = tmp_path / "a" / "b.json"
    result = call("--lengths", "64", "--out", str(elsewhere))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"used where ONEPASS_TABLES={elsewhere}"
    monkeypatch.setenv("ONEPASS_TABLES", "off")
    result = call("--lengths", "64", "--out", str(elsewhere))
    assert result.stdout.splitlines()[-1] == "not used while ONEPASS_TABLES=off"


def test_the_tables_are_shown_in_full(capsys):
    print_tables(BASE)
    shown = capsys.readouterr().out
    cells = rows_of(BASE)
    assert len(cells) == sum(len(table) for table in BASE.values())
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for row in cells:
        assert " ".join(" ".join(row).split()) in lines
    assert cells[0][:3] == ("rows32", f"1 to {BASE['rows32'][0][0]}", "warp")
    assert cells[-1][1].endswith(" and more")
    assert cells[-1][2:] == ("columns-grid", "", "", "8", "")
    others = [row for row in cells if row[2] == "as others"]
    assert others
    assert all(row[3:] == ("", "", "", "") for row in others)


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")
def test_kernels_are_compiled_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    todo = kernels([("softmax", "float32", c.plan) for c in candidates(9, 4, 1000, H200)])[:3]
    told: list[tuple[int, int]] = []
    compile_all(todo, 90, lambda *done: told.append(done))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    before = native.counts()
    for function, dtype, plan in todo:
        type_ = getattr(torch, dtype)
        native.compile_kernel(function, type_, type_, plan, 90, os.devnull)
    after = native.counts()
    assert (after[0] - before[0], after[1] - before[1]) == (0, 3)


def test_a_kernel_that_does_not_compile_is_left_to_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEPASS_NVRTC", str(tmp_path / "none.so"))
    told: list[tuple[int, int]] = []
    compile_all([("logsumexp", "float32", candidates(64, 4, 1000, H200)[0].plan)], 90, lambda *done: told.append(done))
    assert told == [(0, 1), (1, 1)]


# On a GPU

USED = """
import json, sys, torch, onepass
x = torch.randn(3000, int(sys.argv[1]), device="cuda")
torch.testing.assert_close(onepass.softmax(x).double(), onepass.reference.softmax(x, -1), rtol=1e-5, atol=1e-12)
plan = onepass.explain(x)
print(json.dumps([plan.notes, plan.tier]))
"""


def used(n: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", USED, str(n)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.gpu
def test_a_short_run_makes_a_file_that_is_used(tmp_path, monkeypatch):
    path = tmp_path / "tables.json"
    monkeypatch.setenv("ONEPASS_TABLES", str(path))
    before = native.tables(kind_here())
    try:
        result = call("--mib", "8", "--repeats", "3", "--lengths", "33,4096")
        assert result.exit_code == 0, result.output
        stored = store.read(path)
        assert native.tables(kind_here()) == {"origin": stored.origin, "tables": stored.tables}
        shown = call("--show")
        assert shown.exit_code == 0, shown.output
        assert str(path) in shown.stdout
    finally:
        native.set_tables(kind_here(), **before)
    measured = json.loads(path.read_text())["measured"]
    assert {(p["function"], p["dtype"], p["n"], p["rows"]) for p in measured} == set(
        Options(mib=8, lengths=(33, 4096)).points
    )
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
    before = native.tables(kind_here())
    streams = [[store.ANY, 5, 256, 16, 1, 0]]
    of_ours = dict.fromkeys(("rows32", "rows16", "reduce32", "reduce16"), streams)
    native.set_tables(kind_here(), "a test", {**BASE, **of_ours})
    x = torch.randn(5001, device="cuda", dtype=dtype)
    try:
        with onepass.batch_invariant():
            for function in ("softmax", "logsumexp"):
                assert onepass.explain(x, function=function).tier == "stream"
                found = []
                for offset in range(9):
                    moved = torch.empty(5010, device="cuda", dtype=dtype)[offset : offset + 5001].copy_(x)
                    found.append(getattr(onepass, function)(moved, 0))
                torch.testing.assert_close(found[0].double(), getattr(onepass.reference, function)(x, 0), **LOOSE)
                assert all(torch.equal(found[0], other) for other in found)
    finally:
        native.set_tables(kind_here(), **before)


@pytest.mark.gpu
def test_a_wrong_file_is_told_at_the_first_call(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text("nonsense")
    done = used(64, ONEPASS_TABLES=str(path))
    assert done.returncode == 1
    assert f"ValueError: onepass: the file of tables {path} is not JSON" in done.stderr


def kind_here() -> str:
    return torch.cuda.get_device_name()
