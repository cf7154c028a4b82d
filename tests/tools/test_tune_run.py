"""A whole sweep with a timer that makes times up, its errors; and the file, which is written whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from lib.tune import BASE, H200, FakeTimer
from onepass import native
from onepass import tables as store
from onepass.tools.tune.run import Options, sweep
from onepass.tools.tune.sizes import COLUMN_LENGTHS, FEW, FUNCTIONS, LENGTHS, LONGEST
from onepass.tools.tune.timing import WrongResultError

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
    stored = run(
        path,
        timer,
        use=lambda *what: used.append(what),
        on_compiled=lambda *what: seen.append(what),
        on_measured=lambda measurement, *what: seen.append((measurement.n, *what)),
    )
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, WrongResultError])
@pytest.mark.parametrize("stop", [0, 5])
def test_an_interrupted_sweep_writes_nothing(path, stop, error):
    with pytest.raises(error, match="stopped here"):
        run(path, FakeTimer(stop, error))
    assert not path.parent.exists()


def test_a_file_is_written_whole_or_not_at_all(path, monkeypatch):
    run(path, FakeTimer())
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("os.replace", "onepass.tables.os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(name, fail)
            with pytest.raises(OSError, match="No space"):
                run(path, FakeTimer(seed=1))
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["tables.json"]
    run(path, FakeTimer(seed=1))
    assert store.read(path).tables != json.loads(before)["tables"]


def test_tables_that_the_engine_refuses_are_not_written(path):
    def refuse(origin, tables):
        raise RuntimeError("onepass: table write_f32: unsound")

    with pytest.raises(RuntimeError, match="unsound"):
        run(path, FakeTimer(), use=refuse)
    assert not path.exists()


def test_a_sweep_measures_what_is_asked_for(path):
    timer = FakeTimer()
    options = Options(lengths=(21, 1000, 200000), functions=("columns",), dtypes=("float32",), size_mib=16)
    stored = run(path, timer, options)
    assert [(f, d, n) for f, d, n, _ in timer.done] == [("columns", "float32", 21), ("columns", "float32", 1000)]
    assert {(kernel.function, kernel.which) for kernel in timer.prepared} == {("softmax", "forward")}
    assert [name for name in BASE if stored.tables[name] != BASE[name]] == ["columns_f32"]
    assert stored == store.read(stored.path)
    native.set_tables("a GPU", stored.origin, stored.tables)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": ()}, r"got \(\)"),
        ({"lengths": (1,)}, "from 2 to"),
        ({"lengths": (2**25,)}, "from 2 to"),
        ({"lengths": (LONGEST + 1,), "functions": FUNCTIONS[2:]}, f"columns have up to {LONGEST} elements"),
        ({"dtypes": ("float64",)}, "got float64"),
        ({"dtypes": ("float16", "bfloat16")}, "share a table"),
        ({"functions": ("softmin",)}, "got softmin"),
    ],
)
def test_wrong_options(given, message):
    with pytest.raises(ValueError, match=message):
        Options(**given)


def test_all_lengths_are_the_default():
    rows = [point for point in Options().points if point[0] in FUNCTIONS[:2]]
    assert {n for *_, n, _ in rows} == set(LENGTHS)
    few = [p for p in rows if p[3] == (FEW, 1) and p[0] == "softmax" and 256 <= p[2] <= 16384]
    assert {n for *_, n, _ in few} == {n for n in LENGTHS if 256 <= n <= 16384 and n % 4 == 0}
    assert len(rows) == len(set(rows)) == 4 * len(LENGTHS) + len(few) - 1  # 256 MiB hold 4096 rows of 16384 floats
    columns = {(f, d, n) for f, d, n, _ in Options().points} - {(f, d, n) for f, d, n, _ in rows}
    assert len(columns) == 4 * len(COLUMN_LENGTHS)
