"""The results file: its schema, how it is written, what is wrong with a bad one; and two of them compared."""

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lib.bench import CASE, CPU, MAPS, TINY, Odd, bad, file, row
from lib.paths import RESULTS, ROOT
from lib.scripts import Forks
from lib.transcript import replay
from onepass import native
from onepass.tools.bench import collect_env, results
from onepass.tools.bench.compare import Comparison, compare, show
from onepass.tools.bench.providers import Onepass, Torch
from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.bench.runner import Runner
from onepass.tools.bench.timing import slow_copies


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
    assert (list(data), data["schema"], len(data["rows"])) == (["schema", "environment", "rows"], 4, 16)
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
    copies = {r.key(): r for r in measured.rows if r.provider == "copy"}
    assert len(copies) == 4
    for each in measured.rows:
        assert (each.world_size, each.threads, each.graph_us) == (1, torch.get_num_threads(), None)
        assert each.ok == (each.provider != "odd")
        if each.ok:
            assert each.median_us is not None
            assert (each.min_us or 1e9) <= (each.p20_us or 0) <= each.median_us <= (each.p80_us or 0)
            assert each.gbps == pytest.approx(each.bytes / each.median_us * 1e-3)
            assert each.copy_fraction == pytest.approx((copies[each.key()].median_us or 0) / each.median_us)
    maps = next(r for r in measured.rows if r.case == "maps")
    assert (maps.shape, maps.strides, maps.dim) == ([1, 5, 4, 4], [80, 16, 4, 1], 1)


def test_the_environment_names_the_processor_and_the_instruction_set(
    measured: Results, processes: Forks, tmp_path: Path
) -> None:
    at = measured.environment
    assert at["cpu"] == at["device"] == collect_env.cpu_name()
    assert at["isa"] == native.status("isa")
    script = "from onepass.tools.bench.collect_env import environment as e; print(e('cpu')['isa'])"
    (done,) = processes.run(tmp_path, script, ONEPASS_CPU_CAPABILITY="baseline")
    assert (done.out, done.errors) == ("baseline\n", "")


@pytest.mark.parametrize(
    ("schema", "lacks"), [(1, "disturbed, graph_error, input_copy_us, min_us"), (2, "disturbed, min_us"), (3, "min_us")]
)
def test_a_file_of_an_older_schema_is_read(schema: int, lacks: str, measured: Results, tmp_path: Path) -> None:
    data = json.loads(json.dumps(measured.as_dict())) | {"schema": schema}
    for saved in data["rows"]:
        for name in lacks.split(", "):
            del saved[name]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = results.load(tmp_path / "old.json")
    nothing: dict[str, Any] = dict.fromkeys(lacks.split(", "))
    assert old == Results(measured.environment, [replace(r, **nothing) for r in measured.rows])
    results.save(old, tmp_path / "new.json")
    assert results.load(tmp_path / "new.json") == old
    data["schema"] = 4
    with pytest.raises(ResultsError, match=f"row 0 lacks {lacks}$"):
        results.parse(data)


KINDS = ("backward", "cpu", "few", "models", "powers", "rows", "seeds")


def test_published_files_are_read_and_no_copy_in_them_is_disturbed() -> None:
    seen = files = 0
    for path in RESULTS.rglob("*.json"):
        ours = path.parent == RESULTS and path.name.split("-")[0] in KINDS
        with nullcontext() if ours else suppress(ResultsError):  # some are not files of the benchmark
            rows = results.load(path).rows
            seen += sum(r.provider == "copy" for r in rows)
            assert slow_copies(rows) == {}, path
            if ours:
                files += 1
                assert len(rows) > (19 if "gallery-cpu" in path.name else 50)  # its two loops are slow
                assert any(r.ok and r.provider == "onepass" and r.median_us for r in rows)
    assert seen > 1200
    assert files >= 15


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
    (lambda d: d | {"schema": 5}, "schema 5 is not known, this version reads schemas 1 to 4"),
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


# Two files compared: which rows are matched, what counts as a change, and what is shown


def judge(before: Row | list[Row], after: Row | list[Row], **options: Any) -> Comparison:
    a, b = (rows if isinstance(rows, list) else [rows] for rows in (before, after))
    return compare(file(*a), file(*b), **options)


def unjudged(found: Comparison) -> dict[str, list[str]]:
    """The cases of the rows that are not judged."""
    return {name: [r.case for r in rows] for name, rows in found.unjudged.items() if rows}


def verdict(before: Row, after: Row, **options: Any) -> str:
    (change,) = judge(before, after, **options).changes
    return change.verdict


@pytest.mark.parametrize("spread", [0.0, None])
@pytest.mark.parametrize(
    ("threshold", "unchanged", "regression", "gain"),
    [
        (2.0, (100.0, 102.0, 98.0), (102.001,), (97.999,)),  # 1.02 - 1 is 0.020000000000000018
        (10.0, (110.0,), (111.0,), ()),
        (0.0, (100.0,), (100.001,), (99.999,)),
        (100.0, (199.0,), (201.0,), ()),
    ],
)
def test_the_threshold_is_a_percentage_of_the_time_before(
    spread: float | None, threshold: float, unchanged: Any, regression: Any, gain: Any
) -> None:
    for expected, times in {"unchanged": unchanged, "regression": regression, "gain": gain}.items():
        for after in times:
            assert verdict(row(100.0, spread), row(after, spread), threshold=threshold) == expected, after


@pytest.mark.parametrize(
    ("before", "after", "expected", "noise"),
    [
        ((90, 110), (95, 120), "unchanged", 0.2325581),
        ((90, 110), (110, 130), "unchanged", 0.2),  # they touch
        ((90, 110), (110.01, 130), "regression", 0.2),
        ((90, 110), (80, 90), "unchanged", 0.2),
        ((90, 110), (80, 89.99), "gain", 0.2),
        ((90, 130), (100, 125), "unchanged", 0.3636363),  # one within the other
        ((98, 102), (190, 210), "regression", 0.1),
    ],
)
def test_ranges_that_overlap_are_noise(before: Any, after: Any, expected: str, noise: float) -> None:
    a, b = (row(sum(ends) / 2, None, p20_us=float(ends[0]), p80_us=float(ends[1])) for ends in (before, after))
    (change,) = judge(a, b).changes
    assert (change.verdict, change.noise) == (expected, pytest.approx(noise))
    for one, other in ((replace(a, p20_us=None), b), (a, replace(b, p80_us=None))):  # the percentage decides
        (change,) = judge(one, other, threshold=0).changes
        assert (change.verdict != "unchanged", change.noise) == (a.median_us != b.median_us, None)
    for metric in ("graph_us", "call_us"):  # have no quantiles
        one, other = row(100.0, 50.0, **{metric: 10.0}), row(1000.0, 50.0, **{metric: 10.3})
        (change,) = judge(one, other, metric=metric).changes
        assert (change.before_us, change.after_us, change.noise, change.verdict) == (10.0, 10.3, None, "regression")
        assert verdict(other, one, metric=metric) == "gain"


def test_rows_are_matched_by_what_they_are() -> None:
    of = {
        **{"suite": "tutorial", "case": "another", "function": "logsumexp", "shape": [4, 101], "dim": 0},
        **{"dtype": "bfloat16", "out_dtype": "float64", "direction": "backward", "provider": "torch"},
        **{"threads": 2, "world_size": 2},
    }
    every = [row(), *(row(**{name: value}) for name, value in of.items())]
    found = judge(every, [replace(r, median_us=100.0 + i) for i, r in enumerate(every[::-1])])
    assert (len(found.changes), unjudged(found)) == (len(every), {})
    for name, value in of.items():
        found = judge([row(), row(provider="x")], [row(**{name: value}), row(provider="x")])
        assert [getattr(r, name) for r in found.unjudged["only_after"]] == [value]
        assert [getattr(r, name) for r in found.unjudged["only_before"]] == [getattr(row(), name)]
    changed = row(dim=1, strides=[100, 1], version="9", engine="cuda", bytes=8, copy_fraction=0.5)
    assert verdict(row(), changed) == "unchanged"
    assert verdict(row(dim=[1, 0]), row(dim=[0, -1])) == "unchanged"
    assert verdict(row(shape=[], dim=0), row(shape=[], dim=-1)) == "unchanged"
    (change,) = judge([row(1.0), row(2.0)], [row(50.0), row(4.0)]).changes  # the last of several counts
    assert (change.before_us, change.after_us) == (2.0, 4.0)


def test_the_worst_come_first() -> None:
    times = {"a": (100, 100.5), "b": (100, 150), "c": (100, 40), "d": (100, 101), "e": (100, 300), "f": (100, 50)}
    before = [row(float(t[0]), case=name) for name, t in times.items()] + [row(case="g"), bad(case="h")]
    after = [row(float(t[1]), case=name) for name, t in times.items()] + [bad(case="g"), row(case="h")]
    assert [c.after.case for c in judge(before, after).changes] == list("gebdafch")


@pytest.mark.parametrize("error", ["wrong: error 0.5", "raised: RuntimeError: no", None, "out of luck"])
def test_right_to_wrong_is_a_regression_and_back_a_gain(error: str | None) -> None:
    for metric in ("median_us", "call_us"):
        (change,) = judge(row(call_us=7.0), bad(error), metric=metric).changes
        assert (change.verdict, change.ratio, change.after_us) == ("regression", None, None)
        assert change.error == (error or "not ok, without an error message")
        (change,) = judge(bad(error), row(call_us=7.0), metric=metric).changes
        assert (change.verdict, change.ratio, change.before_us, change.error) == ("gain", None, None, None)
    assert verdict(row(), bad(error), metric="graph_us") == "regression"  # timed or not


LACKS: list[list[Row]] = [
    [],
    [bad("skipped: needs 9 GiB", case="x")],
    [bad("unsupported: takes only the last dim", case="x")],
]


@pytest.mark.parametrize(
    ("a", "b", "where", "metric"),
    [
        ([row(case="x")], [row(case="x", graph_us=5.0)], "only_after", "graph_us"),
        ([row(case="x", graph_us=5.0)], [row(case="x")], "only_before", "graph_us"),
        ([row(case="x")], [row(case="x")], "untimed", "graph_us"),
        ([bad(case="x")], [bad("raised: x", case="x")], "wrong_in_both", "median_us"),
        ([row(case="x")], [row(90.0, case="x", disturbed="so")], "disturbed", "median_us"),
        ([row(90.0, case="x", disturbed="so")], [row(case="x")], "disturbed", "median_us"),
        *(([has], lacks, "only_before", "median_us") for has in (row(case="x"), bad(case="x")) for lacks in LACKS),
        *((lacks, [has], "only_after", "median_us") for has in (row(case="x"), bad(case="x")) for lacks in LACKS),
        *((lacks, [bad("skipped: too", case="x")], None, "median_us") for lacks in LACKS),  # in neither
    ],
)
def test_times_and_rows_that_are_not_judged(a: list[Row], b: list[Row], where: str | None, metric: str) -> None:
    common = row(graph_us=1.0)
    found = judge([common, *a], [common, *b], metric=metric)
    assert (unjudged(found), [c.verdict for c in found.changes]) == ({where: ["x"]} if where else {}, ["unchanged"])
    assert where is None or found.as_dict()[where] == 1


def test_the_copy_is_shown_and_not_judged() -> None:
    def rows(*times: float, **fields: Any) -> list[Row]:
        return [row()] + [row(t, case=str(i), provider="copy", call_us=7.0, **fields) for i, t in enumerate(times)]

    found = judge(rows(100.0, 100.0), rows(200.0, 50.0, 1.0))
    assert (found.copy, len(found.copies), unjudged(found)) == (pytest.approx(1.0), 2, {})
    assert [c.after.provider for c in found.changes] == ["onepass"]
    for after, differs in ((105.0, False), (105.1, True), (95.0, False), (94.9, True)):
        assert judge(rows(100.0), rows(after)).copy_differs() == differs
    assert judge([*rows(100.0), row(call_us=1.0)], [*rows(300.0), row(call_us=1.0)], metric="call_us").copy == 1.0
    assert judge(row(), row()).copy is None
    assert judge(rows(100.0), rows(900.0, disturbed="so")).copy is None


def test_providers_can_be_chosen() -> None:
    before = [row(provider=name) for name in ("copy", "torch", "onepass", "naive")]
    after = [replace(r, median_us=200.0, p20_us=200.0, p80_us=200.0) for r in before] + [row(provider="liger")]
    for options, names in (
        ({}, ["onepass", "naive", "torch"]),
        ({"only": ("torch",)}, ["torch"]),
        ({"skip": ("torch", "liger")}, ["onepass", "naive"]),
    ):
        found = judge(before, after, **options)
        assert ([*found.providers()], found.copy) == (names, 2.0)
        assert len(found.unjudged["only_after"]) == int(not options)


def test_devices_and_threads_must_match() -> None:
    """The transcript has the error of two devices."""
    assert compare(file(row()), file(row(200.0), device="A100"), any_device=True).count("regression") == 1
    with pytest.raises(ValueError, match=r"nothing to compare: .* \(the rows have 2 threads before, 4, 8 after\)$"):
        judge(row(threads=2), [row(threads=8), row(threads=4)])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["median_us", "p20_us", "p80_us", "call_us"])
def test_an_impossible_time_is_an_error(name: str, value: float) -> None:
    metric = name if name == "call_us" else "median_us"
    good = row(call_us=1.0)
    broken = replace(good, **{name: value})
    for files, which in (((good, broken), "y"), ((broken, good), "x")):
        with pytest.raises(ResultsError, match=rf"^{which}: onepass on a case, float32: '{name}' is not a time, got "):
            judge(*files, metric=metric, names=("x", "y"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.json and b.json, and files that cannot be compared with them."""
    gradient: dict[str, Any] = {"function": "logsumexp", "direction": "backward", "dtype": "bfloat16"}
    made = {
        "a": file(
            row(50.0, provider="copy"),
            row(100.0, 2.0, graph_us=5.0, call_us=9.0),
            row(100.0, 2.0, provider="torch"),
            row(100.0, 2.0, provider="naive", **gradient),
            row(100.0, 2.0, case="same"),
            row(provider="liger"),
            commit="abc",
        ),
        "b": file(
            row(50.0, provider="copy"),
            row(150.0, 2.0, graph_us=6.0, call_us=9.0),
            row(50.0, 2.0, provider="torch"),
            bad(provider="naive", **gradient),
            row(100.0, 2.0, case="same"),
            bad(case="new"),
        ),
        "a100": file(row(100.0), row(53.0, provider="copy"), device="A100"),
        "threads": file(*(row(99.999, threads=n, shape=[], dim=0) for n in (1, 2)), row(suite="cpu", world_size=4)),
        "other": file(row(case="other"), row(provider="copy")),
        "empty": file(),
        "zero": file(row(0.0)),
    }
    monkeypatch.chdir(tmp_path)
    for name, each in made.items():
        results.save(each, f"{name}.json")
    Path("bad.json").write_text("{")
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    Path("old.json").write_text('{"schema": 0}')


def test_the_command_prints_its_transcript(files: None) -> None:
    replay("compare")


@pytest.mark.parametrize("columns", [80, 98])
def test_a_terminal_gets_colours_and_a_table_that_fits(columns: int, files: None) -> None:
    both = (results.load("a.json"), results.load("b.json"))
    screen = io.StringIO()
    console = Console(file=screen, width=columns, force_terminal=True, color_system="standard", highlight=False)
    show(compare(*both), both, ("a.json", "b.json"), console, every=True)
    text = screen.getvalue()
    assert re.search(r"\x1b\[31m *WRONG", text)
    assert re.search(r"\x1b\[32m *-50\.0%", text)
    assert "\x1b[1;31m2 regressions, 1 gain, 1 unchanged" in text
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in text.splitlines()]
    table = lines[lines.index("") + 1 :][:-8]
    assert max(map(len, table)) <= columns
    assert ("verdict" in text, "shape" in text) == (columns > 80, False)
