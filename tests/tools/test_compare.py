"""Two results files compared: which rows are matched, and what counts as a change."""

from dataclasses import replace
from typing import Any

import pytest

from lib.compare import bad, file, row
from onepass.tools.bench.compare import Comparison, compare
from onepass.tools.bench.results import ResultsError, Row


def judged(before: Row | list[Row], after: Row | list[Row], **options: Any) -> Comparison:
    a, b = (rows if isinstance(rows, list) else [rows] for rows in (before, after))
    return compare(file(*a), file(*b), **options)


def verdict(before: Row, after: Row, **options: Any) -> str:
    (change,) = judged(before, after, **options).changes
    return change.verdict


# What counts as a change


@pytest.mark.parametrize(
    ("after", "least", "expected"),
    [
        (100.0, 2.0, "unchanged"),
        (102.0, 2.0, "unchanged"),  # not more than 2%
        (102.001, 2.0, "regression"),
        (98.0, 2.0, "unchanged"),
        (97.999, 2.0, "gain"),
        (110.0, 10.0, "unchanged"),
        (111.0, 10.0, "regression"),
        (100.0, 0.0, "unchanged"),
        (100.001, 0.0, "regression"),
        (99.999, 0.0, "gain"),
        (199.0, 100.0, "unchanged"),
        (201.0, 100.0, "regression"),
    ],
)
@pytest.mark.parametrize("spread", [0.0, None])
def test_the_threshold_is_a_percentage_of_the_time_before(
    after: float, least: float, expected: str, spread: float | None
) -> None:
    assert verdict(row(100.0, spread), row(after, spread), least=least) == expected


def test_the_default_threshold_is_two_percent_whatever_the_last_bit() -> None:
    assert verdict(row(1.0), row(1.02)) == "unchanged"  # 1.02 - 1 is 0.020000000000000018
    assert verdict(row(1.0), row(1.0201)) == "regression"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((90, 110), (95, 120), "unchanged"),
        ((90, 110), (110, 130), "unchanged"),  # they touch
        ((90, 110), (110.01, 130), "regression"),
        ((90, 110), (80, 90), "unchanged"),
        ((90, 110), (80, 89.99), "gain"),
        ((90, 130), (100, 125), "unchanged"),  # one within the other
    ],
)
def test_ranges_that_overlap_are_noise(before: Any, after: Any, expected: str) -> None:
    a, b = (row(sum(ends) / 2, None, p20_us=float(ends[0]), p80_us=float(ends[1])) for ends in (before, after))
    assert verdict(a, b) == expected


def test_noise_is_the_wider_of_the_two_ranges() -> None:
    (change,) = judged(row(100.0, 2.0), row(200.0, 10.0)).changes
    assert change.noise == pytest.approx(0.1)
    (change,) = judged(row(100.0, 8.0), row(200.0, 10.0)).changes
    assert change.noise == pytest.approx(0.16)
    assert change.ratio == 2.0


@pytest.mark.parametrize("without", ["before", "after", "both"])
def test_where_quantiles_are_null_the_percentage_alone_counts(without: str) -> None:
    a = row(100.0, None if without != "after" else 50.0)
    b = row(103.0, None if without != "before" else 50.0)
    (change,) = judged(a, b).changes
    assert (change.verdict, change.noise) == ("regression", None)
    assert verdict(a, b, least=4) == "unchanged"


@pytest.mark.parametrize("of", ["graph_us", "call_us"])
def test_other_times_have_no_quantiles(of: str) -> None:
    a, b = row(100.0, 50.0, **{of: 10.0}), row(1000.0, 50.0, **{of: 10.3})
    (change,) = judged(a, b, of=of).changes
    assert (change.before_us, change.after_us, change.noise, change.verdict) == (10.0, 10.3, None, "regression")
    assert verdict(b, a, of=of) == "gain"


# Which rows are matched


def test_rows_are_matched_by_what_they_are() -> None:
    of = {
        "suite": "powers",
        "case": "another",
        "function": "logsumexp",
        "shape": [4, 101],
        "dim": 0,
        "dtype": "bfloat16",
        "out_dtype": "float64",
        "direction": "backward",
        "provider": "torch",
        "threads": 2,
        "world_size": 2,
    }
    every = [row(), *(row(**{name: value}) for name, value in of.items())]
    found = judged(every, [replace(r, median_us=100.0 + i) for i, r in enumerate(every[::-1])])
    assert len(found.changes) == len(every)
    assert not found.only_before + found.only_after
    for name, value in of.items():
        found = judged([row(), row(provider="x")], [row(**{name: value}), row(provider="x")])
        assert [getattr(r, name) for r in found.only_after] == [value]
        assert [getattr(r, name) for r in found.only_before] == [getattr(row(), name)]


def test_what_may_change_does_not_keep_rows_apart() -> None:
    changed = row(dim=1, strides=[100, 1], version="9", engine="cuda", bytes=8, copy_fraction=0.5)
    assert verdict(row(), changed) == "unchanged"
    assert verdict(row(dim=[1, 0]), row(dim=[0, -1])) == "unchanged"
    assert verdict(row(shape=[], dim=0), row(shape=[], dim=-1)) == "unchanged"


def test_of_several_rows_with_one_key_the_last_counts() -> None:
    (change,) = judged([row(1.0), row(2.0)], [row(50.0), row(4.0)]).changes
    assert (change.before_us, change.after_us) == (2.0, 4.0)


def test_the_worst_come_first() -> None:
    times = {"a": (100, 100.5), "b": (100, 150), "c": (100, 40), "d": (100, 101), "e": (100, 300), "f": (100, 50)}
    before = [row(float(t[0]), case=name) for name, t in times.items()] + [row(case="g"), bad(case="h")]
    after = [row(float(t[1]), case=name) for name, t in times.items()] + [bad(case="g"), row(case="h")]
    assert [c.after.case for c in judged(before, after).changes] == list("gebdafch")


# Rows that are not right


@pytest.mark.parametrize("error", ["wrong: error 0.5", "raised: RuntimeError: no", None, "out of luck"])
@pytest.mark.parametrize("of", ["median_us", "call_us"])
def test_right_to_wrong_is_a_regression_and_back_a_gain(error: str | None, of: str) -> None:
    (change,) = judged(row(call_us=7.0), bad(error), of=of).changes
    assert (change.verdict, change.ratio, change.after_us) == ("regression", None, None)
    assert change.error == (error or "not ok, with no error told")
    (change,) = judged(bad(error), row(call_us=7.0), of=of).changes
    assert (change.verdict, change.ratio, change.before_us, change.error) == ("gain", None, None, None)
    assert verdict(row(), bad(error), of="graph_us") == "regression"  # timed or not


def test_wrong_in_both_is_counted_and_not_judged() -> None:
    found = judged([row(), bad(case="x")], [row(), bad("raised: x", case="x")])
    assert [r.case for r in found.wrong_in_both] == ["x"]
    assert [c.verdict for c in found.changes] == ["unchanged"]
    alone = judged(bad(), bad())
    assert (alone.changes, len(alone.wrong_in_both)) == ([], 1)


@pytest.mark.parametrize("lack", [None, "skipped: needs 9 GiB", "unsupported: takes the last dim alone"])
@pytest.mark.parametrize("has", [row(case="x"), bad(case="x")])
def test_what_one_file_lacks_is_no_regression(lack: str | None, has: Row) -> None:
    lacks = [row()] + ([bad(lack, case="x")] if lack else [])
    found = judged([row(), has], lacks)
    assert ([r.case for r in found.only_before], found.only_after) == (["x"], [])
    found = judged(lacks, [row(), has])
    assert (found.only_before, [r.case for r in found.only_after]) == ([], ["x"])
    assert found.count("regression") == found.count("gain") == 0
    found = judged(lacks, [row(), bad("skipped: too", case="x")])  # in neither
    assert not found.only_before + found.only_after + found.wrong_in_both


def test_a_time_that_one_file_lacks() -> None:
    a, b = row(case="x", graph_us=None), row(case="x", graph_us=5.0)
    common = row(graph_us=1.0)
    found = judged([common, a], [common, b], of="graph_us")
    assert (len(found.changes), len(found.only_before), len(found.only_after)) == (1, 0, 1)
    found = judged([common, b], [common, a], of="graph_us")
    assert (len(found.changes), len(found.only_before), len(found.only_after)) == (1, 1, 0)
    found = judged([common, a], [common, a], of="graph_us")
    assert (len(found.changes), len(found.untimed), len(found.only_before + found.only_after)) == (1, 1, 0)


# The copy, providers, devices


def test_the_copy_is_told_and_not_judged() -> None:
    def rows(*times: float) -> list[Row]:
        return [row()] + [row(t, case=str(i), provider="copy", call_us=7.0) for i, t in enumerate(times)]

    found = judged(rows(100.0, 100.0), rows(200.0, 50.0, 1.0))
    assert (found.copy, found.copies) == (pytest.approx(1.0), 2)
    assert [c.after.provider for c in found.changes] == ["onepass"]
    assert not found.only_after + found.only_before
    for after, differs in ((105.0, False), (105.1, True), (95.0, False), (94.9, True)):
        found = judged(rows(100.0), rows(after))
        assert found.copy_differs() == differs
    assert judged([*rows(100.0), row(call_us=1.0)], [*rows(300.0), row(call_us=1.0)], of="call_us").copy == 1.0
    assert judged(row(), row()).copy is None


def test_providers_can_be_chosen() -> None:
    before = [row(provider=name) for name in ("copy", "torch", "onepass", "naive")]
    after = [replace(r, median_us=200.0, p20_us=200.0, p80_us=200.0) for r in before] + [row(provider="liger")]

    def names(**options: Any) -> list[str]:
        found = judged(before, after, **options)
        assert found.copy == 2.0
        assert len(found.only_after) == (not options)
        return found.providers()

    assert names() == ["onepass", "naive", "torch"]
    assert names(only=("torch",)) == ["torch"]
    assert names(skip=("torch", "liger")) == ["onepass", "naive"]
    with pytest.raises(ValueError, match=r"unknown provider 'torhc': there are torch, onepass, naive, liger$"):
        judged(before, after, only=("torch", "torhc"))
    with pytest.raises(ValueError, match="the copy is always told and never judged: there are torch"):
        judged(before, after, skip=("copy",))
    with pytest.raises(ValueError, match="nothing to compare"):
        judged(before, after, only=("liger",))


def test_two_devices_are_refused_unless_asked_for() -> None:
    a, b = file(row()), file(row(200.0), device="A100")
    with pytest.raises(ValueError, match=r"^x was measured on H200, y on A100: .* with --any-device only$"):
        compare(a, b, names=("x", "y"))
    assert compare(a, b, any_device=True).count("regression") == 1


def test_threads_of_two_numbers_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"nothing to compare: .* \(the rows have 2 threads before, 4, 8 after\)$"):
        judged(row(threads=2), [row(threads=8), row(threads=4)])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["median_us", "p20_us", "p80_us", "call_us"])
def test_a_time_that_is_none_is_told(name: str, value: float) -> None:
    of = name if name == "call_us" else "median_us"
    good = row(call_us=1.0)
    broken = replace(good, **{name: value})
    for files, told in (((good, broken), "y"), ((broken, good), "x")):
        with pytest.raises(ResultsError, match=rf"^{told}: onepass on a case, float32: '{name}' is no time, got "):
            judged(*files, of=of, names=("x", "y"))


@pytest.mark.parametrize("options", [{"least": -1}, {"least": float("nan")}, {"least": float("inf")}, {"of": "gbps"}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"least must be|unknown time"):
        judged(row(), row(), **options)
