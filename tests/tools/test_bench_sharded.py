"""The suite `sharded`: small cases on two processes of a CPU, mistakes and failures of one rank, and the table."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from lib.bench import TINY, US, Log, fake, row, stats
from lib.transcript import assert_snapshot, call, session
from onepass.tools.bench import results, sharded, sharded_cases
from onepass.tools.bench.cases import Case
from onepass.tools.bench.provider import Provider
from onepass.tools.bench.random_report import show_exchanges
from onepass.tools.bench.results import Row
from onepass.tools.bench.runner import DeviceLost
from onepass.tools.bench.sharded_cases import CLASSES, PHASES, ShardedCase
from onepass.tools.bench.sharded_providers import Ours, Part

__all__ = ["fake"]

SMALL = dict.fromkeys(("cpu", "cuda"), ((4, 33), (3, 64)))
CASE = ShardedCase("sharded/softmax-forward", "4 x 33", (4, 33), dtypes=("float32",), ranks=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAMED", "ODDS", "SIZES_OF_LOSS"):
        monkeypatch.setattr(sharded_cases, name, SMALL)


class Odd(Ours):
    """Does what a test needs on rank 1."""

    def __init__(self, name: str, of_result: Callable[[torch.Tensor], torch.Tensor]):
        self.name, self.of_result = name, of_result

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        f, x = super().function(part)
        return (lambda x: self.of_result(f(x)) if dist.get_rank() else f(x)), x


def _fail(y: torch.Tensor) -> torch.Tensor:
    raise ValueError("of rank 1")


def _fill(y: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("full")


def _leave(y: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def mistakes() -> dict[str, Provider]:
    made = {"wrong": lambda y: 1.05 * y, "wide": torch.Tensor.double, "raises": _fail, "full": _fill, "leaves": _leave}
    return {name: Odd(name, f) for name, f in made.items()} | sharded.providers()


def run(cases: list[Case], *names: str, kind: str = "cpu", ranks: int = 2) -> tuple[list[Row], list[str]]:
    """The rows and the messages."""
    known, log = mistakes(), Log()
    options = {"budget": TINY, "kernels_only": True, "progress": log}
    runner = sharded.ShardedRunner(torch.device(kind), [known[name] for name in names], ranks, mistakes, **options)
    return runner.run([(case, case.dtypes[0]) for case in cases]).rows, log.text


def check_all(kind: str, ranks: int) -> None:
    cases = sharded_cases.make((), (), kind, ranks)
    assert {case.suite for case in cases} == {f"sharded/{name}" for name in CLASSES}
    rows, _ = run(cases, "onepass", "dtensor", "loss_parallel", kind=kind, ranks=ranks)
    for case in cases:
        own = [r for r in rows if (r.suite, r.case, r.function) == (case.suite, case.name, case.function)]
        own = [r for r in own if (r.direction, r.dtype) == (case.direction, case.dtypes[0])]
        peer = [] if case.phase else [{"cross_entropy": "loss_parallel"}.get(case.function, "dtensor")]
        assert [r.provider for r in own] == ["copy", "onepass", *peer], case
        for r in own:
            assert r.ok, r
            assert r.copy_fraction, r
            assert r.world_size == ranks, r


@pytest.mark.slow  # the transcript has some of them
def test_every_provider_is_right(small: None) -> None:
    check_all("cpu", 2)


@pytest.mark.gpu
def test_every_provider_is_right_on_gpus(small: None) -> None:
    check_all("cuda", torch.cuda.device_count())


def test_what_fails_on_one_rank_fails_on_all() -> None:
    rows, messages = run([CASE], "wrong", "wide", "raises", "full", "onepass")
    found = {r.provider: re.sub(r"of .*e[+-].. times", "of ... times", r.error or "") for r in rows}
    assert found == {
        "copy": "",
        "wrong": "wrong: an error of ... times what is allowed (rank 1)",
        "wide": "wrong: the result is torch.float64 of shape [4, 16] (rank 1)",
        "raises": "raised: ValueError: of rank 1 (rank 1)",
        "full": "skipped: out of memory (rank 1)",
        "onepass": "",
    }
    assert len(messages) == 4


def test_a_rank_that_ends_ends_the_run() -> None:
    with pytest.raises(DeviceLost, match=r"rank 1 ended with exit status 3|rank 0: "):
        run([CASE], "leaves")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("columns", [1, 5, 33, 64])
def test_shards_are_those_of_torch(ranks: int, columns: int) -> None:
    case = ShardedCase("t", "t", (2, columns), ranks=ranks)
    own = [case.columns(rank) for rank in range(ranks)]
    assert [c for of in own for c in of] == list(range(columns))
    chunks = [len(t) for t in torch.arange(columns).chunk(ranks)]
    assert [len(of) for of in own] == chunks + [0] * (ranks - len(chunks))
    assert case.bytes("float32") == 2 * 2 * 4 * chunks[0]


def test_cases_have_names_of_their_own() -> None:
    for kind in ("cpu", "cuda"):
        cases = sharded_cases.make((), (), kind, 2)
        assert len({(c.suite, c.name, c.function, c.direction, c.dtypes) for c in cases}) == len(cases)
    assert all(case.moves for case in cases)
    assert {(c.phase, c.function) for c in cases if c.phase} == {phase[:2] for phase in PHASES}


def test_the_table_of_exchanges() -> None:
    about = {"suite": "sharded/softmax-forward", "shape": [1000, 64], "world_size": 4}
    rows = [row(us, provider=name, **about) for name, us in (("copy", 9.0), ("onepass", 30.0), ("dtensor", 800.0))]
    about |= {"suite": "sharded/logsumexp-backward", "function": "logsumexp", "direction": "backward"}
    rows += [row(9.0, provider="copy", **about), row(None, provider="onepass", ok=False, **about)]
    rows += [row(9.0, provider=name, suite="sharded/phases", case="a, state") for name in ("copy", "onepass")]
    console = Console(width=120)
    with console.capture() as capture:
        for table in show_exchanges(rows):
            console.print(table)
    lines = [line.split() for line in capture.get().splitlines()]
    assert [line for line in lines if line[-1:] != ["copy"]][2:] == [
        ["a", "case", "f32", "4", "24000", "21.0", "791"],
        ["a", "case,", "logsumexp", "backward", "f32", "4", "0"],
    ]
    assert show_exchanges([row(suite="models")]) == []


@pytest.mark.slow
def test_the_command_prints_its_transcript(
    small: None, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks run; their times are replaced."""
    start = sharded._start

    def steady(plan: Any) -> Iterator[tuple[Any, ...]]:
        for name, *given in start(plan):
            for each in given[0] if name == "finish_case" else ():
                of = stats(US.get(each.provider, 30.0))
                each.median_us, each.p20_us, each.p80_us, each.min_us = of.median, of.p20, of.p80, of.smallest
                each.gbps, each.copy_fraction = each.bytes / of.median * 1e-3, US["copy"] / of.median
            yield name, *given

    monkeypatch.setattr(sharded, "_start", steady)
    file = tmp_path / "r.json"
    begin = "bench sharded --device cpu --seconds 0.01 --dtype f32 "
    commands = (
        f"{begin}--classes softmax-forward,logsumexp-backward,phases --filter 33 --json {file}",
        begin + "--classes rows",
        "bench sharded models --device cpu",
        "bench models --ranks 2 --device cpu",
        "bench sharded --direction backward --device cpu",
    )
    assert_snapshot("bench-sharded", session(*commands, hide=re.escape(str(tmp_path))))
    saved = results.load(file)
    assert (saved.environment["world_size"], saved.environment["backend"]) == (2, "gloo")
    assert {r.world_size for r in saved.rows} == {2}
    assert call(*f"{begin}--ranks 0".split()).exit_code == 2
