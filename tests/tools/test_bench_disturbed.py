"""A benchmark on a machine that does something else: what is timed again, marked, and left out of the means."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lib.bench import CPU, Log
from lib.compare import file, row
from lib.paths import RESULTS
from onepass.tools.bench import compare, results, table, timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.disturbed import SLOW, mark, slow_copies
from onepass.tools.bench.entrants import Naive, Torch
from onepass.tools.bench.plot import draw
from onepass.tools.bench.report import Plain
from onepass.tools.bench.results import Results, ResultsError, Row
from onepass.tools.bench.run import Runner
from onepass.tools.bench.stats import Stats

BUDGET = timing.Budget(seconds=1e-4, least=5, most=5, warmup=0.0)
QUIET, NOISY = Stats(10.0, 9.0, 11.0, 100), Stats(10.0, 9.0, 27.0, 100)


def copy(case: str, size: int, us: float, **fields: Any) -> Row:
    return row(us, provider="copy", case=case, bytes=size, **fields)


# The rule


def test_no_copy_of_a_published_file_is_disturbed() -> None:
    seen = 0
    for path in RESULTS.rglob("*.json"):
        try:
            rows = results.load(path).rows
        except ResultsError:  # other files, not of the benchmark
            continue
        seen += sum(r.provider == "copy" for r in rows)
        assert slow_copies(rows) == {}, path
    assert seen > 1500


LADDER = [copy(f"{size} MB", size * 10**6, us) for size, us in ((1, 20), (4, 100), (16, 1600), (64, 8000))]


@pytest.mark.parametrize(
    ("case", "us", "times"),
    [
        ("1 MB", 399, None),  # up to four times the 100 us of 4 MB
        ("1 MB", 7921, "79.2"),
        ("4 MB", 1000, None),  # 16 MB take more; 1 MB was in a cache, and took a twelfth of a quarter
        ("4 MB", 6500, "20.3"),
        ("64 MB", 4 * 4 * 6400, None),  # four copies of 16 MB take 6400 us
        ("64 MB", 104960, "4.1"),
    ],
)
def test_a_copy_is_judged_by_those_of_the_other_cases(case: str, us: float, times: str | None) -> None:
    rows = [copy(r.case, r.bytes, us if r.case == case else r.median_us or 0.0) for r in LADDER]
    expected = {} if times is None else {next(r for r in rows if r.case == case).key(): times}
    found = slow_copies(rows)
    assert found.keys() == expected.keys()
    for key, number in expected.items():
        assert found[key] == f"its copy takes {number} times as long as other copies of the run allow"


def test_a_single_case_and_cases_of_one_size_are_judged_too() -> None:
    assert slow_copies([copy("alone", 1000, 1e6)]) == {}
    same = [copy(name, 1000, us) for name, us in (("a", 10.0), ("b", 10.0 * SLOW + 1), ("c", 11.0))]
    assert [key[1] for key in slow_copies(same)] == ["b"]


def test_a_disturbed_copy_marks_its_case() -> None:
    rows = [row(10.0), copy("a case", 800, 10.0, disturbed="p80 is 3.0 times p20"), row(10.0, case="other")]
    mark(rows)
    assert [r.disturbed for r in rows] == ["of its copy p80 is 3.0 times p20", "p80 is 3.0 times p20", None]


# A run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`clock(stats, ...)` is what the clock tells of each case in turn, by provider, and QUIET from then on."""

    def script(*told: Mapping[str, Stats]) -> list[str]:
        asked: list[str] = []
        turns: Iterator[Mapping[str, Stats]] = iter(told)

        def alternate(calls: Mapping[str, Any], budget: Any) -> dict[str, Stats]:
            if asked and asked[-1] == "first":
                asked[-1] = "both"  # the second clock, of calls that allocate
                return dict.fromkeys(calls, QUIET)
            asked.append("first")
            given = next(turns, {})
            return {name: given.get(name, QUIET) for name in calls}

        monkeypatch.setattr(timing, "alternate", alternate)
        return asked

    return script


CASES = [(Case("t", name, (4, n)), "float32") for name, n in (("small", 8), ("middle", 16), ("large", 32))]


def race(log: Any = None) -> tuple[Runner, Log]:
    log = log or Log()
    runner = Runner(CPU, [Torch(), Naive()], reporter=log, budget=BUDGET)
    runner.run(CASES)
    return runner, log


def test_a_quiet_run_times_every_case_once(clock: Any) -> None:
    asked = clock()
    runner, log = race()
    assert len(asked) == 3
    assert log.said == []
    assert not any(r.disturbed for r in runner.results.rows)


def test_what_is_disturbed_is_timed_again_once(clock: Any) -> None:
    asked = clock({}, {"torch": NOISY}, {}, {"torch": Stats(20.0, 19.0, 21.0, 100)})
    runner, log = race()
    assert len(asked) == 4
    assert log.said == ["again: 1"]
    assert [(r.case, r.provider) for r in runner.results.rows] == [
        (case, name) for case in ("small", "middle", "large") for name in ("copy", "torch", "naive")
    ]
    assert not any(r.disturbed for r in runner.results.rows)
    assert runner.results.rows[4].median_us == 20.0


def test_what_is_disturbed_again_is_marked(clock: Any) -> None:
    clock({}, {"torch": NOISY}, {}, {"torch": NOISY, "naive": QUIET})
    runner, _ = race()
    marked = {(r.case, r.provider): r.disturbed for r in runner.results.rows if r.disturbed}
    assert marked == {("middle", "torch"): "p80 is 3.0 times p20"}


def test_a_slow_copy_marks_the_whole_case(clock: Any) -> None:
    slow = {"copy": Stats(1000.0, 990.0, 1010.0, 100)}
    asked = clock(slow, {}, {}, slow)
    runner, log = race()
    assert (len(asked), log.said) == (4, ["again: 1"])
    marked = {(r.case, r.provider) for r in runner.results.rows if r.disturbed}
    assert marked == {("small", name) for name in ("copy", "torch", "naive")}
    assert runner.results.rows[1].disturbed == "its copy takes 100.0 times as long as other copies of the run allow"


def test_few_samples_say_nothing_of_the_spread(clock: Any) -> None:
    asked = clock({"torch": Stats(10.0, 9.0, 27.0, 4)})
    race()
    assert len(asked) == 3


def test_a_run_that_is_broken_off_is_marked(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock({"torch": NOISY})
    runner = Runner(CPU, [Torch()], reporter=Log(), budget=BUDGET)
    real = runner._case

    def case(case: Case, dtype: str) -> list[Row]:
        if case.name == "large":
            raise KeyboardInterrupt
        return real(case, dtype)

    monkeypatch.setattr(runner, "_case", case)
    with pytest.raises(KeyboardInterrupt):
        runner.run(CASES)
    assert [(r.case, r.provider) for r in runner.results.rows if r.disturbed] == [("small", "torch")]


def test_a_pipe_is_told(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    clock({}, {"torch": NOISY}, {}, {"torch": NOISY})
    runner, _ = race(Plain(3))
    Plain(3).finish(runner.results.rows)
    said = capsys.readouterr().out
    assert "1 of them timed again: disturbed\n[4/4] middle, 4x16, f32\n" in said
    assert "? p80 is 3.0 times p20" in said
    assert said.splitlines()[-1] == (
        "disturbed (?), and left out of the means: 1 of the times, of 1 case; "
        "torch on middle, f32: p80 is 3.0 times p20"
    )


# What is made of marked rows

ROWS = [
    row(10.0, provider="copy", copy_fraction=1.0),
    row(20.0, copy_fraction=0.5),
    row(40.0, provider="torch", copy_fraction=0.25),
    row(10.0, provider="copy", case="odd", copy_fraction=1.0, gbps=80.0, disturbed="so"),
    row(1.0, case="odd", copy_fraction=10.0, disturbed="so"),
    row(40.0, case="odd", provider="torch", copy_fraction=0.25, disturbed="so"),
]


def test_the_means_leave_it_out() -> None:
    said = table.summary(ROWS)
    assert said[:2] == [
        "onepass is 2.00x as fast as torch (geometric mean of 1)",
        "of a copy's speed: onepass 0.50, torch 0.25 (geometric means)",
    ]
    assert said[-1] == "disturbed (?), and left out of the means: 3 of the times, of 1 case; copy on odd, f32: so"
    assert not any("disturbed" in text for text in table.summary(ROWS[:3]))


def test_the_table_marks_it() -> None:
    first, second = table.plain(ROWS).splitlines()[2:]
    assert first.split("  f32  ")[1].split() == ["10.0", "20.0", "0.50*", "40.0", "0.25", "2.00"]
    assert second.split("  f32  ")[1].split() == ["10.0?", "80", "GB/s", "1.00?", "10.00", "40.0?", "0.25", "40.00?"]


def test_compare_does_not_judge_it() -> None:
    before = file(row(10.0, provider="copy"), row(10.0), row(10.0, case="odd"))
    after = file(row(90.0, provider="copy", disturbed="so"), row(10.0), row(90.0, case="odd", disturbed="so"))
    for files in ((before, after), (after, before)):
        found = compare.compare(*files)
        assert [c.after.case for c in found.changes] == ["a case"]
        assert (found.copies, [r.case for r in found.disturbed]) == (0, ["odd"])
        assert found.as_dict()["disturbed"] == 1
    wrong = compare.compare(after, file(row(10.0), row(None, None, ok=False, error="wrong: x", case="odd")))
    assert wrong.count("regression") == 1


def test_no_picture_shows_it(tmp_path: Path) -> None:
    assert draw([Results(file().environment, ROWS[3:])], tmp_path) == []
    assert len(draw([Results(file().environment, ROWS)], tmp_path)) == 2
