"""The results file: its schema, how it is written, and how a bad one is told."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.bench import measured
from lib.paths import RESULTS, ROOT
from onepass import native
from onepass.tools.bench import environment, results
from onepass.tools.bench.results import Results, ResultsError, Row


@pytest.fixture(scope="module")
def made() -> Results:
    return measured()


# The schema, as docs/benchmark.md has it.
FIELDS = [
    "suite",
    "case",
    "function",
    "shape",
    "strides",
    "dim",
    "dtype",
    "out_dtype",
    "direction",
    "provider",
    "version",
    "engine",
    "threads",
    "world_size",
    "median_us",
    "p20_us",
    "p80_us",
    "graph_us",
    "graph_error",
    "call_us",
    "bytes",
    "gbps",
    "copy_fraction",
    "input_copy_us",
    "ok",
    "error",
    "disturbed",
]


def test_the_file_has_the_documented_fields(made: Results, tmp_path: Path) -> None:
    results.save(made, tmp_path / "deep" / "r.json")
    data = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert list(data) == ["schema", "environment", "rows"]
    assert data["schema"] == 3
    assert len(data["rows"]) == 16
    assert all(list(row) == FIELDS for row in data["rows"])
    assert set(results.ENVIRONMENT) <= set(data["environment"])
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]  # no temporary file is left
    documented = (ROOT / "docs" / "benchmark.md").read_text()
    for name in [*FIELDS, *data["environment"]]:
        assert f"`{name}`" in documented, name


def test_rows_hold_what_was_measured(made: Results) -> None:
    for row in made.rows:
        assert row.world_size == 1
        assert row.threads == torch.get_num_threads()
        assert row.graph_us is None
        if row.provider == "odd":
            continue
        assert row.median_us is not None
        assert row.p20_us is not None
        assert row.p80_us is not None
        assert row.p20_us <= row.median_us <= row.p80_us
        assert row.gbps == pytest.approx(row.bytes / row.median_us * 1e-3)
        copy = next(r for r in made.rows if r.provider == "copy" and r.key() == row.key())
        assert row.copy_fraction == pytest.approx((copy.median_us or 0) / row.median_us)
    copies_ = [r for r in made.rows if r.provider == "copy"]
    assert len(copies_) == 4
    assert all(r.copy_fraction == 1.0 for r in copies_)
    maps = next(r for r in made.rows if r.case == "maps")
    assert (maps.shape, maps.strides, maps.dim) == ([1, 5, 4, 4], [80, 16, 4, 1], 1)


def test_the_environment_names_the_processor_and_the_instruction_set(made: Results) -> None:
    at = made.environment
    assert at["cpu"] == at["device"] == environment.cpu_name()
    assert at["isa"] == native.status("isa")
    script = "from onepass.tools.bench.environment import environment as e; print(e('cpu')['isa'])"
    forced = {**os.environ, "ONEPASS_CPU_CAPABILITY": "baseline"}
    done = subprocess.run([sys.executable, "-c", script], env=forced, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "baseline"


def test_a_file_is_read_back_as_it_was(made: Results, tmp_path: Path) -> None:
    results.save(made, tmp_path / "r.json")
    again = results.load(tmp_path / "r.json")
    assert again == made
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(("schema", "lacks"), [(1, "disturbed, graph_error, input_copy_us"), (2, "disturbed")])
def test_a_file_of_an_older_schema_is_read(schema: int, lacks: str, made: Results, tmp_path: Path) -> None:
    data = json.loads(json.dumps(made.as_dict())) | {"schema": schema}
    for row in data["rows"]:
        for name in lacks.split(", "):
            del row[name]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = results.load(tmp_path / "old.json")
    nothing: dict[str, Any] = dict.fromkeys(lacks.split(", "))
    assert old == Results(made.environment, [replace(r, **nothing) for r in made.rows])
    results.save(old, tmp_path / "new.json")
    assert results.load(tmp_path / "new.json") == old
    data["schema"] = 3
    with pytest.raises(ResultsError, match=f"row 0 lacks {lacks}$"):
        results.parse(data)


SUITES = ("backward", "cpu", "few", "models", "powers", "rows", "seeds")


@pytest.mark.parametrize("path", [p for s in SUITES for p in sorted(RESULTS.glob(f"{s}-*.json"))], ids=lambda p: p.name)
def test_committed_files_are_read(path: Path) -> None:
    rows = results.load(path).rows
    assert len(rows) > 50
    assert any(r.ok and r.provider == "onepass" and r.median_us for r in rows)


GRAPHED = [*RESULTS.glob("few-*.json"), *RESULTS.glob("powers-gallery-*.json")]  # were run with --graph


@pytest.mark.parametrize("path", sorted(GRAPHED), ids=str)
def test_committed_files_have_graph_times(path: Path) -> None:
    assert any(r.ok and r.graph_us for r in results.load(path).rows)


def test_a_failed_write_leaves_the_old_file(made: Results, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.save(made, path)
    before = path.read_bytes()
    with pytest.raises((ValueError, ResultsError)):
        results.save(Results(made.environment, [replace(made.rows[0], median_us=float("nan"))]), path)
    with pytest.raises(ResultsError, match="'suite' should be str"):
        results.save(Results(made.environment, [replace(made.rows[0], suite=None)]), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda d: [d], "a results file is an object, got list"),
    "another schema": (lambda d: d | {"schema": 4}, "schema 4 is not known, this version reads schemas 1 to 3"),
    "no environment": (lambda d: {"schema": 1, "rows": []}, "'environment' should be an object, got null"),
    "a thin environment": (lambda d: d | {"environment": {"device": "x"}}, "'environment' lacks device_type, driver"),
    "no rows": (lambda d: d | {"rows": None}, "'rows' should be a list, got null"),
    "a row lacks a field": (lambda d: d | {"rows": [{"suite": "s"}]}, "row 0 lacks bytes, call_us"),
    "a row too rich": (lambda d: d | {"rows": [d["rows"][0] | {"x": 1}]}, "row 0 has unknown x"),
    "text for a number": (
        lambda d: d | {"rows": [d["rows"][0] | {"median_us": "fast"}]},
        "row 0: 'median_us' should be int, got str 'fast'",
    ),
    "true for a number": (lambda d: d | {"rows": [d["rows"][0] | {"bytes": True}]}, "'bytes' should be int, got bool"),
    "ok but untimed": (lambda d: d | {"rows": [d["rows"][0] | {"median_us": None}]}, "'ok' is true but 'median_us'"),
    "a shape of text": (lambda d: d | {"rows": [d["rows"][0] | {"shape": ["4"]}]}, "'shape' should hold ints"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_file_is_told_from_a_good_one(how: str, made: Results, tmp_path: Path) -> None:
    change, message = BAD[how]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(change(json.loads(json.dumps(made.as_dict())))))
    with pytest.raises(ResultsError, match=re.escape(f"{path}: ") + ".*" + re.escape(message)):
        results.load(path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), (b"{", "not JSON"), (b"\xff\xfe\x00", "not a text file")]
)
def test_what_is_no_results_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultsError, match=message):
        results.load(path)


def test_the_schema_is_the_row() -> None:
    assert [f.name for f in fields(Row)] == FIELDS


def test_the_hash_changes_with_the_kernels_alone(tmp_path: Path) -> None:
    for name in ("csrc/cuda/kernels/rows_onchip.cu", "csrc/plan/rows.h", "triton/rows.py", "functional.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = environment.sources_hash(tmp_path)
    (tmp_path / "functional.py").write_text("other")
    (tmp_path / "triton" / "__pycache__").mkdir()
    (tmp_path / "triton" / "__pycache__" / "rows.pyc").write_text("built")
    (tmp_path / "csrc" / "ops.o").write_text("built")
    assert environment.sources_hash(tmp_path) == first
    (tmp_path / "csrc" / "plan" / "rows.h").write_text("other")
    second = environment.sources_hash(tmp_path)
    (tmp_path / "csrc" / "plan" / "rows.h").rename(tmp_path / "csrc" / "plan" / "rows2.h")
    assert len({first, second, environment.sources_hash(tmp_path)}) == 3


def test_rows_are_plain_data(made: Results) -> None:
    assert json.loads(json.dumps([asdict(r) for r in made.rows])) == [asdict(r) for r in made.rows]
