"""The results file: its schema, how it is written, and what is wrong with a bad one."""

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

from lib.bench import CASE, CPU, MAPS, TINY, Odd
from lib.paths import RESULTS, ROOT
from onepass import native
from onepass.tools.bench import collect_env, results
from onepass.tools.bench.providers import Onepass, Torch
from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.bench.runner import Runner


@pytest.fixture(scope="module")
def measured() -> Results:
    """A real run: two cases, two dtypes, one of the providers wrong."""
    runner = Runner(CPU, [Onepass(), Torch(), Odd(torch.zeros_like)], budget=TINY)
    return runner.run([(case, dtype) for case in (CASE, MAPS) for dtype in ("float32", "bfloat16")])


def test_the_file_has_the_documented_fields(measured: Results, tmp_path: Path) -> None:
    names = [f.name for f in fields(Row)]
    path = tmp_path / "deep" / "r.json"
    results.save(measured, path)
    data = json.loads(path.read_text())
    assert (list(data), data["schema"], len(data["rows"])) == (["schema", "environment", "rows"], 3, 16)
    assert all(list(row) == names for row in data["rows"])
    assert set(results.ENVIRONMENT) <= set(data["environment"])
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]  # no temporary file is left
    documented = (ROOT / "docs" / "benchmark.md").read_text()
    assert [name for name in [*names, *data["environment"]] if f"`{name}`" not in documented] == []
    assert results.load(path) == measured
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert json.loads(json.dumps([asdict(r) for r in measured.rows])) == [asdict(r) for r in measured.rows]


def test_rows_hold_what_was_measured(measured: Results) -> None:
    copies = {row.key(): row for row in measured.rows if row.provider == "copy"}
    assert len(copies) == 4
    for row in measured.rows:
        assert (row.world_size, row.threads, row.graph_us) == (1, torch.get_num_threads(), None)
        assert row.ok == (row.provider != "odd")
        if row.ok:
            assert row.median_us is not None
            assert (row.p20_us or 1e9) <= row.median_us <= (row.p80_us or 0)
            assert row.gbps == pytest.approx(row.bytes / row.median_us * 1e-3)
            assert row.copy_fraction == pytest.approx((copies[row.key()].median_us or 0) / row.median_us)
    maps = next(r for r in measured.rows if r.case == "maps")
    assert (maps.shape, maps.strides, maps.dim) == ([1, 5, 4, 4], [80, 16, 4, 1], 1)


def test_the_environment_names_the_processor_and_the_instruction_set(measured: Results) -> None:
    at = measured.environment
    assert at["cpu"] == at["device"] == collect_env.cpu_name()
    assert at["isa"] == native.status("isa")
    script = "from onepass.tools.bench.collect_env import environment as e; print(e('cpu')['isa'])"
    environment = {**os.environ, "ONEPASS_CPU_CAPABILITY": "baseline"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "baseline"


@pytest.mark.parametrize(("schema", "lacks"), [(1, "disturbed, graph_error, input_copy_us"), (2, "disturbed")])
def test_a_file_of_an_older_schema_is_read(schema: int, lacks: str, measured: Results, tmp_path: Path) -> None:
    data = json.loads(json.dumps(measured.as_dict())) | {"schema": schema}
    for row in data["rows"]:
        for name in lacks.split(", "):
            del row[name]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = results.load(tmp_path / "old.json")
    nothing: dict[str, Any] = dict.fromkeys(lacks.split(", "))
    assert old == Results(measured.environment, [replace(r, **nothing) for r in measured.rows])
    results.save(old, tmp_path / "new.json")
    assert results.load(tmp_path / "new.json") == old
    data["schema"] = 3
    with pytest.raises(ResultsError, match=f"row 0 lacks {lacks}$"):
        results.parse(data)


KINDS = ("backward", "cpu", "few", "models", "powers", "rows", "seeds")


@pytest.mark.parametrize("path", [p for k in KINDS for p in sorted(RESULTS.glob(f"{k}-*.json"))], ids=lambda p: p.name)
def test_committed_files_are_read(path: Path) -> None:
    rows = results.load(path).rows
    assert len(rows) > 50
    assert any(r.ok and r.provider == "onepass" and r.median_us for r in rows)
    if path.name.startswith(("few", "powers-gallery")):  # were run with --graph
        assert any(r.ok and r.graph_us for r in rows)


def test_a_failed_write_leaves_the_old_file(measured: Results, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.save(measured, path)
    before = path.read_bytes()
    for change, message in (
        ({"median_us": float("nan")}, "JSON"),
        ({"suite": None}, "'suite' should be str, got null"),
    ):
        with pytest.raises(ValueError, match=message):
            results.save(Results(measured.environment, [replace(measured.rows[0], **change)]), path)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def with_row(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data | {"rows": [data["rows"][0] | change]}


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: [d], "a results file should be an object, got list"),
    (lambda d: d | {"schema": 4}, "schema 4 is not known, this version reads schemas 1 to 3"),
    (lambda d: {"schema": 1, "rows": []}, "'environment' should be an object, got null"),
    (lambda d: d | {"environment": {"device": "x"}}, "'environment' lacks device_type, driver"),
    (lambda d: d | {"rows": None}, "'rows' should be a list, got null"),
    (lambda d: d | {"rows": [{"suite": "s"}]}, "row 0 lacks bytes, call_us"),
    (with_row(x=1), "row 0 has unknown x"),
    (with_row(median_us="fast"), "row 0: 'median_us' should be float | None, got str 'fast'"),
    (with_row(graph_error=3), "row 0: 'graph_error' should be str | None, got int '3'"),
    (with_row(bytes=True), "'bytes' should be int, got bool"),
    (with_row(median_us=None), "'ok' is true but 'median_us' is null"),
    (with_row(shape=["4"]), "'shape' should hold ints, got ['4']"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_bad_file_is_told_from_a_good_one(change: Any, message: str, measured: Results, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(change(json.loads(json.dumps(measured.as_dict())))))
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


def test_the_hash_changes_with_the_kernels_alone(tmp_path: Path) -> None:
    names = ("csrc/cuda/kernels/rows_onchip.cu", "csrc/plan/rows.h", "triton/rows.py", "functional.py")
    for name in (*names, "tools/gallery/cuda_warp.cu"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = collect_env.sources_hash(tmp_path)
    (tmp_path / "functional.py").write_text("other")
    (tmp_path / "triton" / "__pycache__").mkdir()
    (tmp_path / "triton" / "__pycache__" / "rows.pyc").write_text("built")
    (tmp_path / "csrc" / "ops.o").write_text("built")
    assert collect_env.sources_hash(tmp_path) == first
    (tmp_path / "csrc" / "plan" / "rows.h").write_text("other")
    second = collect_env.sources_hash(tmp_path)
    (tmp_path / "csrc" / "plan" / "rows.h").rename(tmp_path / "csrc" / "plan" / "rows2.h")
    third = collect_env.sources_hash(tmp_path)
    (tmp_path / "tools" / "gallery" / "cuda_warp.cu").write_text("other")
    assert len({first, second, third, collect_env.sources_hash(tmp_path)}) == 4
    assert all((collect_env.PACKAGE / folder).is_dir() for folder in collect_env.SOURCES)
