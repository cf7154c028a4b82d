"""The benchmark, driven by tiny cases through its Python interface: what is checked, timed, written and drawn."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass import reference
from onepass.bench import environment, results, stats, table, timing
from onepass.bench.cases import DIRECTIONS, FUNCTIONS, ITEMSIZE, SUITES, Case, dtype_name
from onepass.bench.check import Checker
from onepass.bench.entrants import Naive, Onepass, Torch
from onepass.bench.providers import COPY, Provider, pick, register, registry
from onepass.bench.report import LiveTable, Plain
from onepass.bench.results import Results, ResultsError, Row
from onepass.bench.run import Runner
from onepass.bench.work import copies, make

CPU = torch.device("cpu")
TINY = timing.Budget(seconds=1e-4, least=2, most=4, warmup=0.0)
CASE = Case("tiny", "tiny 4x33", (4, 33))


class Odd(Provider):
    """A provider that does what a test needs; it counts its calls."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor], name: str = "odd", **reasons: Any):
        self.name, self.label, self.f, self.calls = name, name, f, 0
        self.unsupported, self.takes = reasons.get("unsupported"), reasons.get("takes", 0)

    def supports(self, case: Case, dtype: str) -> str | None:
        return self.unsupported

    def workspace(self, case: Case, dtype: str) -> int:
        return self.takes

    def function(self, case: Case, dtype: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.f(x)

        return call


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def case(self, case: Case, dtype: str) -> None: ...
    def status(self, text: str) -> None: ...
    def rows(self, rows: Any) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


def run(case: Case, *providers: Provider, dtype: str = "float32", **options: Any) -> tuple[dict[str, Row], list[str]]:
    log = Log()
    runner = Runner(CPU, providers, reporter=log, budget=TINY, **options)
    runner.run([(case, dtype)])
    return {row.provider: row for row in runner.results.rows}, log.said


# Cases are data


def test_suites_are_what_they_are_said_to_be() -> None:
    assert list(SUITES) == ["seeds", "powers", "models"]
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


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "one element off": lambda x: torch.softmax(x, -1).index_fill(0, torch.tensor([3]), 0.5),
    "NaN in one place": lambda x: torch.softmax(x, -1).masked_fill(torch.arange(33) == 32, float("nan")),
    "drops the last element": lambda x: torch.cat([torch.softmax(x[:, :-1], -1), torch.zeros(4, 1)], 1),
    "half precision": lambda x: torch.softmax(x.bfloat16(), -1).float(),
    "wrong shape": lambda x: torch.softmax(x, -1)[:2],
    "wrong dtype": lambda x: torch.softmax(x, -1).double(),
}


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
    monkeypatch.setattr("onepass.bench.check.WHOLE", 400)
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


@pytest.mark.gpu
def test_the_clocks_of_a_gpu() -> None:
    case = Case("tiny", "64x1000", (64, 1000))
    runner = Runner(torch.device("cuda"), [Onepass(), Torch()], budget=TINY)
    for row in runner.run([(case, "bfloat16")]).rows:
        assert row.ok, row.error
        assert all(us is not None and 0 < us < 1e5 for us in (row.median_us, row.graph_us, row.call_us))
    assert runner.clocks is not None
    assert runner.clocks.buffers(1 << 20) * (1 << 20) > 2 * runner.clocks.l2
    assert runner.results.environment["driver"]


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
    monkeypatch.setattr("onepass.bench.providers._REGISTRY", registry())
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


# The file


@pytest.fixture(scope="module")
def made() -> Results:
    """A real run: two cases, two dtypes, one of the providers wrong."""
    runner = Runner(CPU, [Onepass(), Torch(), Odd(WRONG["zeros"])], budget=TINY)
    cases = [CASE, Case("tiny", "maps", (1, 5, 4, 4), dim=1)]
    return runner.run([(case, dtype) for case in cases for dtype in ("float32", "bfloat16")])


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
    "call_us",
    "bytes",
    "gbps",
    "copy_fraction",
    "ok",
    "error",
]


def test_the_file_has_the_documented_fields(made: Results, tmp_path: Path) -> None:
    results.save(made, tmp_path / "deep" / "r.json")
    data = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert list(data) == ["schema", "environment", "rows"]
    assert data["schema"] == 1
    assert len(data["rows"]) == 16
    assert all(list(row) == FIELDS for row in data["rows"])
    assert set(results.ENVIRONMENT) <= set(data["environment"])
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]  # no temporary file is left
    documented = (Path(__file__).parent.parent / "docs" / "benchmark.md").read_text()
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


def test_a_file_is_read_back_as_it_was(made: Results, tmp_path: Path) -> None:
    results.save(made, tmp_path / "r.json")
    again = results.load(tmp_path / "r.json")
    assert again == made
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_write_leaves_the_old_file(made: Results, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.save(made, path)
    before = path.read_bytes()
    with pytest.raises((ValueError, ResultsError)):
        results.save(Results(made.environment, [replace(made.rows[0], median_us=float("nan"))]), path)
    with pytest.raises(ResultsError, match="'suite' should be str"):
        results.save(Results(made.environment, [replace(made.rows[0], suite=None)]), path)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda d: [d], "a results file is an object, got list"),
    "another schema": (lambda d: d | {"schema": 2}, "schema 2 is not known, this version reads schema 1"),
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
    for name in ("csrc/cuda/rows.cu", "csrc/plan.h", "triton/rows.py", "functional.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = environment.sources_hash(tmp_path)
    (tmp_path / "functional.py").write_text("other")
    (tmp_path / "triton" / "__pycache__").mkdir()
    (tmp_path / "triton" / "__pycache__" / "rows.pyc").write_text("built")
    (tmp_path / "csrc" / "ops.o").write_text("built")
    assert environment.sources_hash(tmp_path) == first
    (tmp_path / "csrc" / "plan.h").write_text("other")
    second = environment.sources_hash(tmp_path)
    (tmp_path / "csrc" / "plan.h").rename(tmp_path / "csrc" / "plan2.h")
    assert len({first, second, environment.sources_hash(tmp_path)}) == 3


# What is shown


def test_plain_lines_tell_the_run(made: Results) -> None:
    out = io.StringIO()
    plain = Plain(4, out)
    plain.case(CASE, "float32")
    plain.rows([r for r in made.rows if r.key() == made.rows[0].key()])
    plain.finish(made.rows)
    text = out.getvalue()
    assert text.isascii()
    assert "[1/4] tiny 4x33, 4x33, f32" in text
    assert "of a copy" in text
    assert "WRONG" in text
    assert re.search(r"^odd: tiny 4x33, f32: wrong: error .* \(and 3 more\)$", text, re.MULTILINE)
    assert re.search(r"onepass is \d+\.\d\dx as fast as torch \(geometric mean of 4, ", text)
    widths = {len(line) for line in text.splitlines() if line.startswith("----")}
    assert len(widths) == 1


def test_the_summary_of_known_numbers() -> None:
    def row(case: str, provider: str, us: float) -> Row:
        return Row("s", case, "softmax", [2, 2], [2, 1], -1, "float32", "float32", "forward", provider, median_us=us,
                   bytes=16, gbps=1.0, copy_fraction=0.5, ok=True)  # fmt: skip

    rows = [row("a", "onepass", 1.0), row("a", "torch", 2.0), row("b", "onepass", 1.0), row("b", "torch", 8.0)]
    assert "onepass is 4.00x as fast as torch (geometric mean of 2, 2.00x to 8.00x)" in table.summary(rows)
    assert [line.best() for line in table.lines(rows)] == ["onepass", "onepass"]
    assert table.plain(rows).splitlines()[2].split() == ["a", "2x2", "f32", "1.00", "0.50*", "2.00", "0.50"]


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_live_table_fits_the_terminal(made: Results, width: int) -> None:
    from rich.console import Console

    rows = [replace(r, case="4K attention, 128 queries", median_us=r.median_us and 123456.7) for r in made.rows]
    rows = [replace(r, case=f"{r.case}, {r.shape}") for r in rows]
    live = LiveTable(4, "title")
    live.console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None)
    with live.console.capture() as caught:
        live.console.print(live.table(rows))
    text = caught.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert ("shape" in text) == (width == 160)
    assert text.count("WRONG") == 4
    assert "…" not in text
    for part in ("onepass", "torch", "bf16", "attention", "queries"):
        assert part in text


# The pictures


def sweep(file: Results) -> Results:
    """A sweep's rows out of nothing: what is drawn needs no clock."""
    rows = []
    for n in (256, 1024, 4096):
        for i, name in enumerate(("copy", "onepass", "torch", "mine")):
            us = n * 0.01 * (i + 1)
            row = Row("sweep", f"64x{n}", "softmax", [64, n], [n, 1], -1, "float32", "float32", "forward", name)
            row = replace(row, threads=file.rows[0].threads, ok=True)
            rows.append(replace(row, median_us=us, bytes=512 * n, gbps=512 * n / us * 1e-3, copy_fraction=1 / (i + 1)))
    return Results(file.environment, rows)


def test_pictures_are_drawn_from_files_without_a_clock_or_torch(made: Results, tmp_path: Path) -> None:
    results.save(Results(made.environment, made.rows + sweep(made).rows), tmp_path / "r.json")
    code = f"""
import sys, types
package = types.ModuleType("onepass")
package.__path__ = [{str(Path(results.__file__).parent.parent)!r}]
sys.modules["onepass"] = package
from onepass.bench.plot import draw
from onepass.bench.results import load
for folder in ("a", "b"):
    paths = draw([load("r.json")], folder)
print(*[p.name for p in paths])
assert "torch" not in sys.modules and "onepass.bench.timing" not in sys.modules, "imported"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("sweep-softmax-forward-float32", "tiny-softmax-forward-bfloat16", "tiny-softmax-forward-float32")
    assert sorted(done.stdout.split()) == sorted(f"{n}.{end}" for n in names for end in ("png", "svg"))
    for name in done.stdout.split():
        first, second = (tmp_path / folder / name for folder in ("a", "b"))
        assert first.stat().st_size > 5000
        assert first.read_bytes() == second.read_bytes(), f"{name} differs from run to run"
        if name.endswith("png"):
            assert first.read_bytes().startswith(b"\x89PNG")


def test_a_newer_file_is_drawn_over_an_older_one(made: Results, tmp_path: Path) -> None:
    from onepass.bench.plot import draw

    old, new = sweep(made), sweep(made)
    old = Results(old.environment | {"date": "2020-01-01T00:00:00+00:00"}, [replace(r, gbps=1.0) for r in old.rows])
    both = [p for p in draw([new, old], tmp_path / "both") if p.suffix == ".svg"]
    alone = [p for p in draw([new], tmp_path / "alone") if p.suffix == ".svg"]
    assert [p.read_bytes() for p in both] == [p.read_bytes() for p in alone]
    other = Results(new.environment | {"device": "Other/GPU"}, [replace(r, threads=None) for r in new.rows])
    names = [p.name for p in draw([new, other], tmp_path / "two") if p.suffix == ".svg"]
    assert len(names) == 2
    assert "sweep-softmax-forward-float32-Other-GPU.svg" in names


def test_many_providers_and_cases_still_make_one_page(made: Results, tmp_path: Path) -> None:
    from onepass.bench.plot import draw

    row = next(r for r in made.rows if r.ok)
    rows = [
        replace(row, case=f"case {c}", provider=name, copy_fraction=3.0 if c == 0 else 0.5, dtype="float32")
        for c in range(24)
        for name in ("onepass", "torch", "naive", "a", "b", "copy")
    ]
    png, svg = draw([Results(made.environment, rows)], tmp_path)
    width, height = (int.from_bytes(png.read_bytes()[i : i + 4]) for i in (16, 20))
    assert 1200 <= width <= 1500
    assert height <= 1600
    assert svg.stat().st_size > 5000


def test_rows_are_plain_data(made: Results) -> None:
    assert json.loads(json.dumps([asdict(r) for r in made.rows])) == [asdict(r) for r in made.rows]
