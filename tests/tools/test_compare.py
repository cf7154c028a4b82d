"""Two results files compared: which rows are matched, what counts as a change, and what is shown."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lib.bench import bad, file, row
from lib.transcript import replay
from onepass.tools.bench import results
from onepass.tools.bench.compare import Comparison, compare, show
from onepass.tools.bench.results import ResultsError, Row


def judge(before: Row | list[Row], after: Row | list[Row], **options: Any) -> Comparison:
    a, b = (rows if isinstance(rows, list) else [rows] for rows in (before, after))
    return compare(file(*a), file(*b), **options)


def unjudged(found: Comparison) -> dict[str, list[str]]:
    """The cases of the rows that are not judged."""
    return {name: [r.case for r in rows] for name, rows in found.unjudged.items() if rows}


def verdict(before: Row, after: Row, **options: Any) -> str:
    (change,) = judge(before, after, **options).changes
    return change.verdict


# What counts as a change


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


@pytest.mark.parametrize("metric", ["graph_us", "call_us"])
def test_other_metrics_have_no_quantiles(metric: str) -> None:
    a, b = row(100.0, 50.0, **{metric: 10.0}), row(1000.0, 50.0, **{metric: 10.3})
    (change,) = judge(a, b, metric=metric).changes
    assert (change.before_us, change.after_us, change.noise, change.verdict) == (10.0, 10.3, None, "regression")
    assert verdict(b, a, metric=metric) == "gain"


# Which rows are matched


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
@pytest.mark.parametrize("metric", ["median_us", "call_us"])
def test_right_to_wrong_is_a_regression_and_back_a_gain(error: str | None, metric: str) -> None:
    (change,) = judge(row(call_us=7.0), bad(error), metric=metric).changes
    assert (change.verdict, change.ratio, change.after_us) == ("regression", None, None)
    assert change.error == (error or "not ok, without an error message")
    (change,) = judge(bad(error), row(call_us=7.0), metric=metric).changes
    assert (change.verdict, change.ratio, change.before_us, change.error) == ("gain", None, None, None)
    assert verdict(row(), bad(error), metric="graph_us") == "regression"  # timed or not


@pytest.mark.parametrize("lack", [None, "skipped: needs 9 GiB", "unsupported: takes only the last dim"])
@pytest.mark.parametrize("has", [row(case="x"), bad(case="x")])
def test_what_one_file_lacks_is_no_regression(lack: str | None, has: Row) -> None:
    lacks = [row()] + ([bad(lack, case="x")] if lack else [])
    for files, where in ((([row(), has], lacks), "only_before"), ((lacks, [row(), has]), "only_after")):
        found = judge(*files)
        assert (unjudged(found), [c.verdict for c in found.changes]) == ({where: ["x"]}, ["unchanged"])
    assert unjudged(judge(lacks, [row(), bad("skipped: too", case="x")])) == {}  # in neither


@pytest.mark.parametrize(
    ("a", "b", "where", "metric"),
    [
        (row(case="x"), row(case="x", graph_us=5.0), "only_after", "graph_us"),
        (row(case="x", graph_us=5.0), row(case="x"), "only_before", "graph_us"),
        (row(case="x"), row(case="x"), "untimed", "graph_us"),
        (bad(case="x"), bad("raised: x", case="x"), "wrong_in_both", "median_us"),
        (row(case="x"), row(90.0, case="x", disturbed="so"), "disturbed", "median_us"),
        (row(90.0, case="x", disturbed="so"), row(case="x"), "disturbed", "median_us"),
    ],
)
def test_times_and_rows_that_are_not_judged(a: Row, b: Row, where: str, metric: str) -> None:
    common = row(graph_us=1.0)
    found = judge([common, a], [common, b], metric=metric)
    assert (unjudged(found), [c.verdict for c in found.changes]) == ({where: ["x"]}, ["unchanged"])
    assert found.as_dict()[where] == 1


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
    for options, message in (
        ({"only": ("torch", "torhc")}, r"unknown provider 'torhc': there are torch, onepass, naive, liger$"),
        ({"skip": ("copy",)}, "the copy is shown always and never judged: there are torch"),
        ({"only": ("liger",)}, "nothing to compare"),
    ):
        with pytest.raises(ValueError, match=message):
            judge(before, after, **options)


def test_devices_and_threads_must_match() -> None:
    a, b = file(row()), file(row(200.0), device="A100")
    with pytest.raises(ValueError, match=r"^x was measured on H200, y on A100: --any-device compares times of two dev"):
        compare(a, b, names=("x", "y"))
    assert compare(a, b, any_device=True).count("regression") == 1
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


# The command


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
    Path("old.json").write_text('{"schema": 0}')


def test_the_command_prints_its_transcript(files: None) -> None:
    replay("compare")


@pytest.mark.parametrize("columns", [80, 98, 140])
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
    assert ("shape" in text) == (columns == 140)
    assert ("verdict" in text) == (columns > 80)
