"""The time in a CUDA graph and a logsumexp beside a copy of its input: in a run, on the screen and in the file."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lib.bench import CASE, CPU, TINY, Log, Odd
from onepass.tools.bench import command, results, table
from onepass.tools.bench.cases import Case
from onepass.tools.bench.entrants import Onepass, Torch
from onepass.tools.bench.graph import GraphClock, buffers
from onepass.tools.bench.report import LiveTable, Plain
from onepass.tools.bench.results import ENVIRONMENT, Results, Row
from onepass.tools.bench.run import Runner
from onepass.tools.bench.stats import Stats
from onepass.tools.cli import cli

L2 = 60 << 20
GIB = 1 << 30


# The run


class Clocks:
    """A GPU's clocks that need none: every call takes 10 us, a copy of an input 20."""

    l2 = L2

    def cold(self, call: Any, budget: Any) -> Stats:
        call()
        return Stats(10.0, 9.0, 11.0, 5)

    def back_to_back(self, call: Any, budget: Any) -> float:
        call()
        return 12.0


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Row], list[str]]]:
    """Runs on the CPU as on a GPU: `refused` are the providers that raise in a capture."""

    def race(case: Case, *providers: Any, graph_too: bool = True, free: int = GIB) -> tuple[dict[str, Row], list[str]]:
        def time(self: GraphClock, calls: Any, each_us: float, seconds: float) -> float:
            assert len(calls) == buffers(L2, case.bytes("float32"))
            for call in calls:
                call()
            return 5.0

        monkeypatch.setattr(GraphClock, "time", time)
        log = Log()
        runner = Runner(CPU, providers, reporter=log, budget=TINY, free=lambda: free, graph=graph_too)
        monkeypatch.setattr(runner, "clocks", Clocks())
        runner.run([(case, "float32")])
        return {row.provider: row for row in runner.results.rows}, log.said

    return race


LARGE = Case("t", "large", (64, 8192))  # 2 MiB each way: 31 buffers


def test_a_run_with_graphs_has_a_time_or_a_reason_for_each(raced: Any) -> None:
    class Fragile(Odd):
        def prepare(self, work: Any) -> Any:
            self.prepared = getattr(self, "prepared", 0) + 1
            if self.prepared > 1:  # the first is for the check and the clocks
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().prepare(work)

    fragile = Fragile(lambda x: torch.softmax(x, -1))
    rows, said = raced(LARGE, Onepass(), fragile, Odd(torch.zeros_like, name="zeros"))
    assert (rows["copy"].graph_us, rows["onepass"].graph_us) == (5.0, 5.0)
    assert rows["onepass"].graph_error is None
    assert rows["odd"].ok
    assert (rows["odd"].median_us, rows["odd"].graph_us) == (10.0, None)
    assert rows["odd"].graph_error == "RuntimeError: operation not permitted when stream is capturing"
    assert (rows["zeros"].graph_us, rows["zeros"].graph_error) == (None, None)  # wrong, so never timed
    assert [text for text in said if "zeros" not in text] == []


def test_a_run_without_graphs_has_neither(raced: Any) -> None:
    rows, _ = raced(LARGE, Torch(), graph_too=False)
    assert all(row.graph_us is None and row.graph_error is None for row in rows.values())
    assert not table.has_graph(list(rows.values()))
    assert rows["torch"].call_us == 12.0


def test_buffers_that_do_not_fit_or_are_too_many_are_a_reason(raced: Any) -> None:
    rows, _ = raced(LARGE, Torch(), free=160 << 20)
    assert rows["torch"].graph_error == "31 buffers of 4.0 MiB and their outputs do not fit"
    assert rows["torch"].ok
    rows, _ = raced(CASE, Torch())
    assert "buffers of 1056 bytes would be needed" in (rows["torch"].graph_error or "")


def test_the_option_needs_a_gpu_and_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli, ("bench", "few", "--graph", "--device", "cpu"))
    assert result.exit_code == 2
    assert "--graph is the time in a CUDA graph: it needs a GPU" in result.output
    seen: list[bool] = []

    class Quiet(Runner):
        def __post_init__(self) -> None:
            seen.append(self.graph)
            self.results = Results(dict.fromkeys(ENVIRONMENT) | {"device": "H200", "device_type": "cuda"}, [])

        def run(self, cases: Any) -> Results:
            return self.results

    monkeypatch.setattr(command, "Runner", Quiet)
    monkeypatch.setattr(command, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command, "pick", lambda *rest: ([Torch()], {}))
    for options in ((), ("--graph",)):
        assert CliRunner().invoke(cli, ("bench", "few", *options)).exit_code == 0
    assert seen == [False, True]


# The copy of a logsumexp's input


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_logsumexp_is_timed_beside_a_copy_of_its_input(function: str, direction: str, raced: Any) -> None:
    case = replace(LARGE, function=function, direction=direction)
    here = function == "logsumexp" and direction == "forward"
    rows, _ = raced(case, Torch(), graph_too=False)
    assert rows["torch"].input_copy_us == (10.0 if here else None)
    runner = Runner(CPU, [Torch()], budget=TINY)  # and by the clock of the CPU
    for row in runner.run([(case, "float32")]).rows:
        assert row.ok
        assert (row.input_copy_us is not None and row.input_copy_us > 0) == here


def test_the_share_of_the_copy_of_the_input_is_shown() -> None:
    rows = [shown("onepass", us, function="logsumexp", case=case, input_copy_us=100.0) for case, us in CASES]
    assert [table.input_share(r) for r in rows] == [0.5, 0.72]
    said = table.summary(rows)
    assert "logsumexp, the time over that of a copy of the input: onepass 0.60 (at most 0.72)" in said
    assert not any("copy of the input" in text for text in table.summary([shown("onepass", 50.0)]))
    assert "0.50 of the time of a copy of the input" in printed([rows[0]])


# What is shown and kept


CASES = (("a", 50.0), ("b", 72.0))


def shown(provider: str, us: float | None, **fields: Any) -> Row:
    row = Row("s", "a", "softmax", [4, 33], [33, 1], -1, "float32", "float32", "forward", provider)
    row = replace(row, median_us=us, gbps=1.0, copy_fraction=0.9, bytes=1056, ok=us is not None)
    return replace(row, **fields)


def printed(rows: list[Row]) -> str:
    out = io.StringIO()
    Plain(1, out).rows(rows)
    return out.getvalue()


ROWS = [
    shown("copy", 10.0, graph_us=8.0),
    shown("onepass", 11.0, graph_us=10.0),
    shown("naive", 40.0, graph_error="RuntimeError: capturing"),
    shown("odd", None, error="wrong: error 1.0"),
]


def test_the_table_has_a_column_for_the_graph() -> None:
    text = table.plain(ROWS).splitlines()
    head = "case shape dtype copy us graph us onepass us of copy graph us naive us of copy graph us"
    assert " ".join(text[0].split()) == f"{head} odd us of copy graph us"
    assert " ".join(text[2].split()) == "a 4x33 f32 10.0 1 GB/s 8.00 11.0 0.90* 10.0 40.0 0.90 - WRONG"
    without = [replace(r, graph_us=None, graph_error=None) for r in ROWS]
    assert "graph" not in table.plain(without)
    assert "naive: a, f32: no time in a graph: RuntimeError: capturing" in table.troubles(ROWS)
    assert "in a CUDA graph, of a copy's speed: onepass 0.80 (geometric means)" in table.summary(ROWS)
    assert not any("graph" in text for text in [*table.summary(without), *table.troubles(without)])
    assert [line.split("  graph ")[-1] for line in printed(ROWS).splitlines()[1:4]] == ["8.00 us", "10.0 us", "-"]


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_live_table_has_it_and_fits_the_terminal(width: int) -> None:
    from rich.console import Console

    live = LiveTable(1, "title")
    live.console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None)
    with live.console.capture() as caught:
        live.console.print(live.table(ROWS))
    text = caught.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert text.count("graph") == 4
    assert "8.00" in text
    for row in ROWS:
        row = replace(row, graph_us=None, graph_error=None)
        with live.console.capture() as caught:
            live.console.print(live.table([row]))
        assert "graph" not in caught.get()


def test_the_file_keeps_the_time_and_the_reason(tmp_path: Path) -> None:
    environment = dict.fromkeys(ENVIRONMENT)
    results.save(Results(environment, ROWS), tmp_path / "r.json")
    again = results.load(tmp_path / "r.json").rows
    assert [(r.graph_us, r.graph_error) for r in again] == [
        (8.0, None),
        (10.0, None),
        (None, "RuntimeError: capturing"),
        (None, None),
    ]
    with pytest.raises(results.ResultsError, match="'graph_error' should be str"):
        results.save(Results(environment, [replace(ROWS[0], graph_error=3)]), tmp_path / "r.json")  # type: ignore[arg-type]


# On a GPU


@pytest.mark.gpu
def test_the_clocks_of_a_gpu() -> None:
    case = Case("tiny", "64x1000", (64, 1000))
    runner = Runner(torch.device("cuda"), [Onepass(), Torch()], budget=TINY, graph=True)
    for row in runner.run([(case, "bfloat16")]).rows:
        assert row.ok, row.error
        assert all(us is not None and 0 < us < 1e5 for us in (row.median_us, row.graph_us, row.call_us))
    assert runner.clocks is not None
    assert runner.results.environment["driver"]


@pytest.mark.gpu
def test_what_waits_for_the_gpu_has_a_reason_and_the_next_is_timed() -> None:
    """A read of one value in each call: not allowed in a capture."""

    def waits(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        float(y[0, 0])
        return y

    case = Case("tiny", "64x4096", (64, 4096))
    before = torch.cuda.current_stream()
    runner = Runner(torch.device("cuda"), [Odd(waits), Onepass(), Torch()], budget=TINY, graph=True)
    for again in range(2):
        rows = {row.provider: row for row in runner.run([(case, "float32")]).rows[4 * again :]}
        assert rows["odd"].ok
        assert rows["odd"].graph_us is None
        assert "captur" in (rows["odd"].graph_error or "")
        for name in ("copy", "onepass", "torch"):
            assert 0 < (rows[name].graph_us or 0) < 1e4, rows[name].graph_error
    assert torch.cuda.current_stream() == before


@pytest.mark.gpu
def test_memory_is_given_back_between_cases() -> None:
    cases = [(Case("t", f"N {n}", (1, n), fill=1 << 28).at("float32"), "float32") for n in (1000, 1025, 4096)]
    runner = Runner(torch.device("cuda"), [Onepass(), Torch()], budget=TINY, graph=True)
    seen = []
    for pair in cases:
        assert all(row.ok for row in runner.run([pair]).rows)
        seen.append(torch.cuda.memory_reserved())
    assert max(seen) - min(seen) < 64 << 20
    assert max(seen) < 4 << 30  # buffers that flush the L2 cache, and those of the graphs
