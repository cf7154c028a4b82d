"""A whole sweep with a meter that makes times up: broken off, taken up, refused; and the file, whole or not at all."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from lib.tune import BASE, H200, RTX, FakeMeter
from onepass import native
from onepass import tables as store
from onepass.tools.tune.candidates import Gpu
from onepass.tools.tune.lengths import FEW, LENGTHS
from onepass.tools.tune.measure import FUNCTIONS, WrongResultError
from onepass.tools.tune.run import Options, sweep

SOME = Options(lengths=(9, 64, 1024, 4096))
TOTAL = 36  # of two dtypes and four functions, and softmax of 4096 rows of two of the lengths


def run(path: Path, meter: FakeMeter, gpu: Gpu = H200, options: Options = SOME, fresh: bool = False, use=None):
    return sweep(gpu, options, path, meter, BASE, use or (lambda origin, tables: None), fresh)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "tables.json"


def journal_of(path: Path) -> Path:
    return path.with_name("tables.json.journal")


def test_a_sweep_writes_a_file_that_loads(path):
    used = []
    meter = FakeMeter()
    stored = run(path, meter, use=lambda *what: used.append(what))
    assert meter.done == SOME.points
    assert len(meter.done) == TOTAL
    assert meter.prepared
    assert store.read(path) == stored
    assert used == [(stored.origin, stored.tables)]
    assert "NVIDIA H200" in stored.origin
    assert str(path) in stored.origin
    content = json.loads(path.read_text())
    assert (content["version"], content["compute"], content["multiprocessors"]) == (store.VERSION, 90, 132)
    assert {"gpu", "date", "torch", "onepass", "tables", "measured"} <= set(content)
    assert [(p["function"], p["dtype"], p["n"], p["rows"]) for p in content["measured"]] == sorted(SOME.points)
    assert all(0 < len(p["times"]) <= 8 for p in content["measured"])
    assert os.listdir(path.parent) == ["tables.json"]
    native.set_tables("a GPU", stored.origin, stored.tables)  # sound


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, WrongResultError])
@pytest.mark.parametrize("stop", [0, 1, 5, 15])
def test_a_sweep_that_was_broken_off_goes_on_where_it_stopped(path, tmp_path, stop, error):
    with pytest.raises(error, match="stopped here"):
        run(path, FakeMeter(stop, error))
    assert not path.exists()
    rest, shown = FakeMeter(), []

    class Watch:
        def compiled(self, done, total): ...

        def measured(self, point, done, total):
            shown.append((point and point.n, done, total))

    stored = sweep(H200, SOME, path, rest, BASE, lambda origin, tables: None, watcher=Watch())
    assert rest.done == SOME.points[stop:]
    assert shown[0] == (None, stop, TOTAL)
    assert shown[1:] == [(n, stop + i, TOTAL) for i, (*_, n, _) in enumerate(SOME.points[stop:], 1)]
    assert not journal_of(path).exists()
    assert stored.tables == run(tmp_path / "at_once.json", FakeMeter()).tables


def test_only_what_is_left_is_compiled(path):
    whole = FakeMeter()
    run(path, whole)
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(5))
    rest = FakeMeter()
    run(path, rest)
    assert 0 < len(rest.prepared) < len(whole.prepared)


def test_fresh_starts_anew(path):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(5))
    meter = FakeMeter()
    run(path, meter, fresh=True)
    assert meter.done == SOME.points


def test_an_interrupted_line_is_measured_again(path):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(3))
    text = journal_of(path).read_bytes()
    for cut in (1, 7, len(text.splitlines()[-1])):
        journal_of(path).write_bytes(text[:-cut])
        meter = FakeMeter(2)
        with pytest.raises(KeyboardInterrupt):
            run(path, meter)
        assert meter.done == SOME.points[2:4]
        assert len(journal_of(path).read_bytes().splitlines()) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [b"nonsense", *lines[1:]],
        lambda lines: [b"[]", *lines[1:]],
        lambda lines: [lines[0], b"{", *lines[2:]],
        lambda lines: [lines[0], b"{}", *lines[2:]],
        lambda lines: [lines[0], b"[1, 2]", *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"times": [[', b'"times": [[true, '), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"times": [', b'"times": [[0, 1, 0, 1, 0, 0.0], '), *lines[2:]],
        lambda lines: [lines[0], lines[1][: lines[1].index(b'"times"')] + b'"times": [], "refused": {}}'],
        lambda lines: [b"\xff\xfe\x00", *lines],
        lambda lines: [lines[0], lines[1].replace(b'"softmax"', b'"tanh"'), *lines[2:]],
    ],
)
def test_a_damaged_journal_is_refused(path, damage):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(3))
    lines = journal_of(path).read_bytes().splitlines()
    damaged = b"\n".join(damage(lines)) + b"\n"
    assert damaged != journal_of(path).read_bytes()
    journal_of(path).write_bytes(damaged)
    meter = FakeMeter()
    with pytest.raises(ValueError, match=r"tables\.json\.journal is damaged .*--fresh starts anew"):
        run(path, meter)
    assert not meter.done
    assert journal_of(path).read_bytes() == damaged
    run(path, meter, fresh=True)
    assert meter.done == SOME.points


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        (RTX, SOME, "RTX 4090"),
        (H200, Options(lengths=SOME.lengths, mib=8), "mib: 256, now 8"),
        (H200, Options(lengths=SOME.lengths, repeats=3), "repeats: 15, now 3"),
        (H200, Options(lengths=(9, 64)), "points: "),
        (H200, Options(lengths=SOME.lengths, dtypes=("float32",)), "points: "),
        (H200, Options(lengths=SOME.lengths, functions=("softmax",)), "points: "),
    ],
)
def test_a_journal_of_another_sweep_is_refused(path, gpu, options, words):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(3))
    meter = FakeMeter()
    with pytest.raises(ValueError, match=f"of another sweep .*{words}.*--fresh starts anew"):
        run(path, meter, gpu, options)
    assert not meter.done


def test_a_journal_without_a_point_is_in_nobodys_way(path):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(0))
    assert journal_of(path).exists()
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(1), RTX)
    rest = FakeMeter()
    run(path, rest, RTX)
    assert rest.done == SOME.points[1:]


def test_a_journal_of_another_version_is_refused(path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(3))
    monkeypatch.setattr("onepass.tools.tune.run.__version__", "9.9")
    with pytest.raises(ValueError, match=r'onepass: "[^"]+", now "9\.9"'):
        run(path, FakeMeter())


def test_two_sweeps_do_not_write_one_journal(path):
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeMeter(3))
    with open(journal_of(path), "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for fresh in (False, True):
            with pytest.raises(ValueError, match="another process is tuning"):
                run(path, FakeMeter(), fresh=fresh)
    meter = FakeMeter()
    run(path, meter)
    assert meter.done == SOME.points[3:]


def test_a_file_is_written_whole_or_not_at_all(path, monkeypatch):
    run(path, FakeMeter())
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            if name == "replace":
                patch.setattr(os, name, fail)
            else:
                patch.setattr("onepass.tables.os.fsync", fail)
            with pytest.raises(OSError, match="No space"):
                store.write(path, json.loads(before))
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["tables.json"]
    with monkeypatch.context() as patch:  # and what was measured is kept
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            run(path, FakeMeter(seed=1))
    meter = FakeMeter()
    run(path, meter)
    assert meter.done == []
    assert store.read(path).tables != json.loads(before)["tables"]


def test_tables_that_the_engine_refuses_are_not_written(path):
    def refuse(origin, tables):
        raise RuntimeError("onepass: table rows32: unsound")

    with pytest.raises(RuntimeError, match="unsound"):
        run(path, FakeMeter(), use=refuse)
    assert not path.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mib": 0}, "mib is a whole number, at least 1; got 0"),
        ({"repeats": True}, "repeats is a whole number"),
        ({"lengths": ()}, "no lengths"),
        ({"lengths": (1,)}, "from 2 to"),
        ({"lengths": (2**25,)}, "from 2 to"),
        ({"dtypes": ()}, "got none"),
        ({"dtypes": ("float64",)}, "got float64"),
        ({"dtypes": ("float16", "bfloat16")}, "one table"),
        (
            {"functions": ()},
            "functions are softmax, logsumexp, columns, column_gradients, which stand for .*; got none",
        ),
        ({"functions": ("softmin",)}, "got softmin"),
    ],
)
def test_wrong_options(given, words):
    with pytest.raises(ValueError, match=words):
        Options(**given)


def test_all_lengths_are_the_default():
    points = [point for point in Options().points if point[0] in FUNCTIONS]
    assert {n for *_, n, _ in points} == set(LENGTHS)
    few = [point for point in points if point[3] == FEW and point[0] == "softmax" and 256 <= point[2] <= 16384]
    assert {n for *_, n, _ in few} == {n for n in LENGTHS if 256 <= n <= 16384 and n % 4 == 0}
    assert len(points) == len(set(points)) == 4 * len(LENGTHS) + len(few) - 1  # 256 MiB hold 4096 of 16384 floats
