"""The benchmark, driven by tiny cases through its Python interface: what is checked, and what is timed."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, WRONG, Odd, run
from onepass import reference
from onepass.tools.bench import stats, table, timing
from onepass.tools.bench.cases import DIRECTIONS, FUNCTIONS, ITEMSIZE, Case, dtype_name
from onepass.tools.bench.check import Checker
from onepass.tools.bench.entrants import Naive, Onepass, Torch
from onepass.tools.bench.providers import COPY, pick, register, registry
from onepass.tools.bench.suites import SUITES
from onepass.tools.bench.work import copies, make

# Cases are data


def test_suites_are_what_they_are_said_to_be() -> None:
    assert list(SUITES) == ["seeds", "powers", "models", "rows", "few", "backward", "columns", "cpu", "cpu-backward"]
    assert [c.shape for c in SUITES["seeds"].cases] == [(4096, 128 * i) for i in range(2, 100)]
    assert [c.shape[1] for c in SUITES["powers"].cases] == [256, 1024, 4096, 16384, 65536, 262144]
    shapes = {c.shape for c in SUITES["models"].cases}
    assert {(m, n) for m in (1, 8, 64, 1024) for n in (50257, 128256, 151936, 262144)} <= shapes
    assert {(8, 12, 197, 197), *((32, q, n) for q in (1, 128) for n in (1024, 4096, 32768))} <= shapes
    assert {(8192, e) for e in (8, 128, 256)} <= shapes
    maps = {c.shape[1:]: c.dim for c in SUITES["models"].cases if len(c.shape) == 4 and c.shape[-1] == 512}
    assert maps == {(21, 512, 512): 1, (19, 512, 512): 1}


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_names_each_case_once_and_has_a_quick_form(suite: str) -> None:
    cases = SUITES[suite].cases
    assert len({c.name for c in cases}) == len(cases)
    for device in ("cpu", "cuda"):
        assert 0 < sum(device in c.quick for c in cases) <= len(cases)
    for case in cases:
        assert case.suite == suite
        assert case.function in FUNCTIONS
        assert case.direction in DIRECTIONS
        assert set(case.dtypes) <= set(ITEMSIZE)


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "float32", 2 * 6 * 4),
        ({"out_dtype": "float32"}, "float16", 6 * 2 + 6 * 4),
        ({"function": "logsumexp"}, "bfloat16", 6 * 2 + 2 * 2),
        ({"direction": "backward"}, "float64", 3 * 6 * 8),
        ({"direction": "backward", "function": "logsumexp"}, "float32", 2 * 6 * 4 + 2 * 2 * 4),
    ],
)
def test_bytes_are_read_once_and_written_once(options: dict[str, Any], dtype: str, expected: int) -> None:
    assert Case("t", "t", (2, 3), **options).bytes(dtype) == expected


@pytest.mark.parametrize(
    ("text", "name"), [("f32", "float32"), ("BF16", "bfloat16"), ("torch.half", "float16"), ("float64", "float64")]
)
def test_dtype_names(text: str, name: str) -> None:
    assert dtype_name(text) == name


def test_a_wrong_dtype_name_is_told_with_what_is_taken() -> None:
    with pytest.raises(ValueError, match=r"'int8'.*float32.*bf16"):
        dtype_name("int8")


# Right before fast


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_torch_and_naive_are_right_and_timed(function: str, direction: str, dtype: str) -> None:
    case = replace(CASE, function=function, direction=direction, shape=(2, 5, 3), dim=1)
    rows, said = run(case, Torch(), Naive(), dtype=dtype)
    assert not said
    assert all(row.ok and row.error is None for row in rows.values())
    assert list(rows) == ["copy", "torch", "naive"]


def test_onepass_is_right_on_every_quick_shape_class() -> None:
    for case in (CASE, Case("t", "dim 1", (2, 5, 3), dim=1), Case("t", "dims", (2, 5, 3), dim=(0, 2))):
        rows, said = run(case, Onepass(), Torch())
        assert rows["onepass"].ok, said
        assert rows["onepass"].engine == "cpu"
        assert rows["torch"].ok == isinstance(case.dim, int)


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_provider_is_shown_and_never_timed(how: str) -> None:
    odd = Odd(WRONG[how])
    rows, said = run(CASE, odd, Torch())
    assert odd.calls == 1  # the check's
    assert not rows["odd"].ok
    assert rows["odd"].median_us is None
    assert rows["odd"].gbps is None
    assert (rows["odd"].error or "").startswith("wrong: ")
    assert any("odd: wrong" in text for text in said)
    assert rows["torch"].ok
    assert table.cell(rows["odd"]) == ("WRONG", "")


def test_an_output_that_is_not_written_is_found() -> None:
    class Lazy(Odd):
        """Right on the first call; later ones leave the output as it is."""

        def takes_out(self, case: Case) -> bool:
            return True

        def function(self, case: Case, dtype: str) -> Callable[..., torch.Tensor]:
            return lambda x, out: out

    rows, _ = run(CASE, Torch(), Lazy(lambda x: x))
    assert (rows["odd"].error or "").startswith("wrong: error nan")


def test_a_raising_provider_is_shown_as_an_error() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no row of 33\nand more")

    odd = Odd(f)
    rows, said = run(CASE, odd, Torch())
    assert odd.calls == 1
    assert rows["odd"].error == "raised: NotImplementedError: no row of 33"
    assert any("no row of 33" in text for text in said)
    assert rows["torch"].ok


def test_what_does_not_fit_is_skipped_aloud() -> None:
    rows, said = run(CASE, Torch(), free=lambda: 100)
    assert all(not row.ok and (row.error or "").startswith("skipped: needs") for row in rows.values())
    assert len(said) == 1
    assert "free" in said[0]


def test_a_provider_that_needs_too_much_is_skipped_alone() -> None:
    rows, said = run(CASE, Odd(lambda x: torch.softmax(x, -1), takes=1 << 30), Torch(), free=lambda: 1 << 20)
    assert (rows["odd"].error or "").startswith("skipped: takes 1.0 GiB")
    assert any("odd: skipped" in text for text in said)
    assert rows["torch"].ok


def test_an_unsupported_case_has_a_row_that_says_why() -> None:
    rows, _ = run(CASE, Odd(torch.zeros_like, unsupported="even rows alone"), Torch())
    assert rows["odd"].error == "unsupported: even rows alone"
    assert "odd: unsupported: even rows alone (1 cases)" in table.troubles(list(rows.values()))


@pytest.mark.parametrize(
    ("dim", "last"),
    [(-1, (19, 29, slice(None))), (1, (19, slice(None), 6)), ((0, 2), (slice(None), 29, slice(None)))],
)
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_drawn_rows_are_whole_rows_of_the_result(
    dim: Any, last: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("t", "t", (20, 30, 7), dim=dim, function=function)
    monkeypatch.setattr("onepass.tools.bench.check.WHOLE", 400)
    work = make(case, "float64", CPU, 0)
    checker = Checker(work, seed=1)
    assert checker.rows is not None
    assert len(checker.rows) < case.rows()
    assert {0, case.rows() - 1} <= set(checker.rows.tolist())
    result = getattr(reference, function)(work.x, dim)
    assert checker.check(result).ok
    wrong = result.clone()  # a change in the last row is found, and named
    (wrong[last] if function == "softmax" else wrong.view(-1)[-1:]).add_(1.0)
    verdict = checker.check(wrong)
    assert not verdict.ok
    assert f"row {case.rows() - 1}" in str(verdict)


def test_data_depends_on_the_seed_and_the_case_alone() -> None:
    first, again = make(CASE, "float32", CPU, 3).x, make(CASE, "float32", CPU, 3).x
    assert torch.equal(first, again)
    assert not torch.equal(first, make(CASE, "float32", CPU, 4).x)
    assert not torch.equal(first, make(replace(CASE, name="other"), "float32", CPU, 3).x)
    assert 0.5 < float(first.std()) < 1.5


def test_rotating_buffers_are_apart_aligned_and_equal() -> None:
    work = make(CASE, "float32", CPU, 0)
    several = copies(work, 3)
    assert len({w.x.data_ptr() for w in several}) == 3
    assert {(w.x.data_ptr() - several[0].x.data_ptr()) % 512 for w in several} == {0}
    assert all(torch.equal(w.x, work.x) and w.out is not None and w.out.shape == work.x.shape for w in several)


# The clocks


def test_statistics_of_known_data() -> None:
    got = stats.summarise([float(v) for v in range(100, -1, -1)])
    assert (got.median, got.p20, got.p80, got.samples) == (50.0, 20.0, 80.0, 101)
    assert stats.summarise([7.0]) == stats.Stats(7.0, 7.0, 7.0, 1)
    values = torch.rand(37).tolist()
    got = stats.summarise(values)
    expected = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    assert [got.median, got.p20, got.p80] == pytest.approx(expected.tolist())
    with pytest.raises(ValueError, match="no samples"):
        stats.summarise([])


@pytest.mark.parametrize("counts", [{"a": 6, "b": 6, "c": 6}, {"a": 9, "b": 3, "c": 1}, {"a": 5, "b": 2}, {"a": 1}])
def test_turns_alternate(counts: dict[str, int]) -> None:
    turns = timing.schedule(counts)
    assert {name: turns.count(name) for name in counts} == counts
    rounds, at = max(counts.values()), 0
    if len(set(counts.values())) == 1:  # each round has everyone once, and not always in one order
        parts = [turns[i : i + len(counts)] for i in range(0, len(turns), len(counts))]
        assert all(set(part) == set(counts) for part in parts)
        assert len({part[0] for part in parts}) == min(rounds, len(counts))
    for name in counts:  # nobody is done in the first half
        at = max(i for i, n in enumerate(turns) if n == name)
        assert at >= len(turns) // 2


def test_the_clock_alternates_the_calls_and_leaves_out_the_first() -> None:
    now, log = [0], []

    def call(name: str, cost: int) -> Callable[[], None]:
        def made() -> None:
            now[0] += cost * (10 if name not in log else 1)
            log.append(name)

        return made

    budget = timing.Budget(seconds=1.0, least=3, most=5, warmup=0.0)
    got = timing.alternate({"a": call("a", 2000), "b": call("b", 5000)}, budget, clock=lambda: now[0])
    assert got == {"a": stats.Stats(2.0, 2.0, 2.0, 5), "b": stats.Stats(5.0, 5.0, 5.0, 5)}
    assert log[4:] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]


def test_the_budget_bounds_the_samples() -> None:
    budget = timing.Budget(seconds=1.0, least=10, most=100, warmup=0.0)
    assert [budget.samples(s) for s in (60.0, 2.0, 1.0, 0.05, 1e-6, 0.0)] == [3, 5, 10, 20, 100, 100]
    assert [budget.tries(s, 5) for s in (60.0, 1.0, 0.21, 0.2, 1e-6)] == [1, 1, 1, 5, 5]


@pytest.mark.parametrize(("seconds", "warmup"), [(0.02, 0.02), (0.1, 0.1), (2.0, 0.1)])
def test_the_warmup_is_no_longer_than_the_measurement(seconds: float, warmup: float) -> None:
    got = timing.FULL.bounded(seconds)
    assert (got.seconds, got.warmup, got.least, got.most) == (seconds, warmup, timing.FULL.least, timing.FULL.most)


# The registry


def test_pick_knows_its_names_and_reasons() -> None:
    names = list(registry())
    assert names[:4] == ["onepass", "onepass-cpu", "onepass-cuda", "onepass-triton"]
    assert {"torch", "torch-compile", "naive", "liger"} <= set(names)
    chosen, left_out = pick(CPU, quick=True)
    assert [p.name for p in chosen] == ["onepass", "torch", "naive"]
    assert {"onepass-cpu", "onepass-cuda", "torch-compile", "liger"} <= set(left_out)
    assert [p.name for p in pick(CPU, only=("torch", "onepass-cpu"))[0]] == ["onepass-cpu", "torch"]
    assert [p.name for p in pick(CPU, skip=("naive", "torch-compile"))[0]] == ["onepass", "torch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("torhc",)}, "unknown provider 'torhc': there are onepass, "),
        ({"skip": ("x",)}, "unknown provider 'x'"),
        ({"only": ("onepass-cuda",)}, "'onepass-cuda' cannot run on cpu: serves no cpu tensors"),
        ({"only": ("torch",), "skip": ("torch",)}, "no provider is left"),
    ],
)
def test_pick_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pick(CPU, **options)


def test_a_kernel_joins_by_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.providers._REGISTRY", registry())
    odd = Odd(lambda x: torch.softmax(x, -1))
    register(odd)
    assert pick(CPU, only=("odd",))[0] == [odd]
    for taken in (odd, COPY):
        with pytest.raises(ValueError, match="is there already"):
            register(taken)


def test_a_forced_engine_runs_beside_auto_only_when_asked_for() -> None:
    rows, _ = run(CASE, Onepass(), Onepass("cpu"))
    assert list(rows) == ["copy", "onepass"]
    rows, _ = run(CASE, Onepass(), Onepass("cpu"), forced=frozenset({"onepass-cpu"}))
    assert rows["onepass-cpu"].ok
    assert rows["onepass-cpu"].engine == "cpu"
