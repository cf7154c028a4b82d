"""The cases of scores: what is named and drawn, that each is right, that a mistake is found, and what is said.

No test names a length that a seed draws.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from lib.bench import CPU, TINY, fake, run
from lib.transcript import assert_snapshot, call, session
from onepass.scores import NAMES
from onepass.tools.bench import results
from onepass.tools.bench.cases import Case, name_case
from onepass.tools.bench.cli_run import Options, select_cases
from onepass.tools.bench.correctness import Checker, Inputs, blocked, make_inputs
from onepass.tools.bench.provider import COPY, Provider
from onepass.tools.bench.providers import Naive, Onepass, Torch, TorchCompile
from onepass.tools.bench.random_cases import MB
from onepass.tools.bench.runner import Runner
from onepass.tools.bench.score_cases import CLASSES, FIXED, SIZES, fixed, make

__all__ = ["fake"]

SMALL = (0.2 * MB, 0.4 * MB)
ARGUMENTS: dict[str, Any] = {
    "scale": (6, 1),
    "bias": (1, 24),
    "mask": (6, 24),
    "causal": True,
    "window": (3, 2),
    "alibi": (1,),
    "softcap": 2.0,
    "sink": (1, 1),
}


def scored(direction: str = "forward", dim: int = -1, **scores: Any) -> Case:
    shape = (1, 6, 24) if "alibi" in scores else (6, 24)
    return name_case("t", shape, dim, direction=direction, scores=tuple(scores.items()))


def drawn(seed: int, count: int, *classes: str, moves: tuple[float, float] = SMALL) -> list[Case]:
    return make(seed, count, classes or tuple(CLASSES), (), moves, "cpu")[1]


def test_the_named_cases() -> None:
    """A line per device, direction and dtype."""
    lines: dict[str, list[str]] = {}
    for kind, sizes in SIZES.items():
        cases = fixed(*sizes)
        assert len({(c.suite, c.name) for c in cases}) == len(cases)
        for c in cases:
            lines.setdefault(f"{kind} {c.direction} {c.dtypes[0]}", []).append(c.name)
    assert_snapshot("score-cases", "".join(f"{name}: {'; '.join(names)}\n" for name, names in lines.items()))
    assert {c.dtypes for c in fixed(*SIZES["cpu"], ("float16",))} == {("float16",)}
    assert [c.suite for c in make(0, 1, ("backward",), (), SMALL, "cpu")[0]] == ["scores/backward"] * 10


def test_a_seed_draws_the_same_cases_everywhere() -> None:
    cases = drawn(5, 40, moves=(2 * MB, 32 * MB))
    assert crc32(repr([(c.suite, c.name, c.dtypes, c.direction) for c in cases]).encode()) == 280486555
    assert Counter(c.suite for c in cases) == {f"scores/{name}": 40 for name in CLASSES}
    assert drawn(5, 7, "random-forward", moves=(2 * MB, 32 * MB)) == cases[:7]
    assert all(2 * MB <= c.bytes(c.dtypes[0]) <= 32 * MB for c in cases)
    assert {name for c in cases for name, _ in c.scores} == NAMES - {"empty"}
    assert {len(c.shape) for c in cases} == {2, 3, 4}
    for case in cases:
        assert case.scores
        assert (case.dim == -1) == (case.suite != "scores/random-other-dim")
        assert case.direction == ("backward" if "backward" in case.suite else "forward") or case.dim != -1


def test_each_row_has_an_element_that_takes_part() -> None:
    for case in [*drawn(6, 60), *fixed(2, 2, 8, 40)]:
        out = blocked(case, make_inputs(case, case.dtypes[0], CPU, 0).side, CPU)
        if out is not None:
            assert not out.expand(case.shape).all(case.dim).any(), case.name


def wrong(device: str, cases: Sequence[Case], *providers: Provider) -> list[Any]:
    rows = Runner(torch.device(device), providers, budget=TINY, kernels_only=True).run(
        [(c, c.dtypes[0]) for c in cases]
    )
    assert len(rows.rows) == len(cases) * (1 + len(providers))
    return [(r.suite, r.case, r.provider, r.error) for r in rows.rows if not r.ok]


def test_each_case_is_right(device: str) -> None:
    assert wrong(device, [*drawn(3, 6), *fixed(2, 2, 8, 40)], Onepass(), Torch()) == []


@pytest.mark.slow
def test_each_case_is_right_compiled(device: str) -> None:
    if reason := TorchCompile().unavailable(torch.device(device)):
        pytest.skip(reason)
    assert wrong(device, fixed(2, 2, 8, 40)[1::3], TorchCompile()) == []


class Without(Onepass):
    """onepass without one of the arguments."""

    def __init__(self, argument: str):
        super().__init__()
        self.argument = argument

    def side(self, inputs: Inputs) -> dict[str, Any]:
        return {name: value for name, value in inputs.side.items() if name != self.argument}


@pytest.mark.parametrize("direction", FIXED)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_forgotten_argument_is_found(argument: str, direction: str) -> None:
    case = scored(direction, **{argument: ARGUMENTS[argument]})
    for dtype in ("float32", "float64"):
        rows, said = run(case, Onepass(), Torch(), dtype=dtype)
        assert not said, rows
    rows, _ = run(case, Without(argument))
    assert (rows["onepass"].error or "").startswith("wrong: error")


def test_steps_in_sixteen_bits_are_allowed_their_rounding_and_onepass_is_not() -> None:
    inputs = make_inputs(scored(scale=2.0, bias=(6, 24), softcap=5.0, mask=(6, 24)), "bfloat16", CPU, 0)
    checker = Checker(inputs, 0)
    assert checker.check(Onepass().prepare(inputs)()) is None
    chain = Torch().prepare(inputs)()
    assert checker.check(chain, stepwise=True) is None
    assert "allowed 1.6e-02" in (checker.check(chain) or "")
    assert checker.check(chain * 1.5, stepwise=True) is not None
    assert Torch.stepwise
    assert not Onepass.stepwise


class Changed(Onepass):
    """onepass with its gradients changed."""

    def __init__(self, change: Callable[..., Any]):
        super().__init__()
        self.change = change

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        made = super().prepare(inputs)
        return lambda: self.change(*made())


def test_the_gradient_of_a_bias_is_computed_and_checked() -> None:
    for shape in ((1, 24), (6, 24)):
        case = replace(scored("backward", bias=shape), grads=("bias",))
        for dtype in ("float32", "bfloat16"):
            rows, said = run(case, Onepass(), Torch(), dtype=dtype)
            assert not said, rows
        for change, wrong in (
            (lambda dx, dbias: (dx, 1.01 * dbias), "of the gradient of bias"),
            (lambda dx, dbias: (dx, dbias[:1, :1]), "the gradient of bias is of shape"),
            (lambda dx, dbias: (dx * 1.01, dbias), "at row"),
        ):
            error = run(case, Changed(change))[0]["onepass"].error or ""
            assert error.startswith("wrong: ")
            assert wrong in error


def test_the_limit_reads_what_is_beside_the_input_once() -> None:
    case = scored(scale=(6, 1), bias=(1, 24), mask=(6, 24), window=(3, 3))
    assert case.bytes("bfloat16") == 2 * 144 * 2 + 6 * 2 + 24 * 2 + 144
    assert replace(case, direction="backward").bytes("bfloat16") == 3 * 144 * 2
    copied = COPY.prepare(make_inputs(case, "bfloat16", CPU, 0))()
    assert copied.numel() * 2 == case.bytes("bfloat16") // 2
    summed = COPY.prepare(make_inputs(replace(case, direction="backward"), "bfloat16", CPU, 0))()
    assert summed.shape == case.shape


def test_others_take_no_scores() -> None:
    rows, _ = run(scored(scale=0.5), Naive())
    assert rows["naive"].error == "unsupported: takes no scores"
    assert [p.__name__ for p in (Provider, Naive, Onepass, Torch, TorchCompile) if p.takes_scores] == [
        "Onepass",
        "Torch",
        "TorchCompile",
    ]


def test_torch_compile_runs_unless_it_is_left_out() -> None:
    options = Options(suites=("scores",), count=4, device="cpu")
    pairs, _ = select_cases(options, CPU)
    assert not any(case.without for case, _ in pairs)
    some, _ = select_cases(replace(options, compile=6), CPU)
    assert sum(not case.without for case, _ in some if "random" in case.suite) == 6
    assert not any(case.without for case, _ in some if "random" not in case.suite)
    assert [Options(suites=(name,)).sizes(CPU) for name in ("random", "scores")] == [(8, 640), (2, 32)]
    assert options.sizes(torch.device("cuda")) == (16, 320)


def test_the_command_prints_its_transcript(fake: Any, tmp_path: Path) -> None:
    begin = "bench scores --device cpu --only onepass,torch "
    named = begin + "--classes forward,backward --filter sink"
    random = begin + "--seed 3 --count 1 --classes random-forward,random-other-dim --mb 1 2"
    errors = ("bench scores --classes rows --device cpu", "bench scores --direction backward --device cpu")
    assert_snapshot("bench-scores", session(named, *errors, hide=r"\d+(x\d+)+"))
    assert call(*random.split(), "--json", str(tmp_path / "r.json")).exit_code == 0
    saved = results.load(tmp_path / "r.json")
    assert (saved.environment["count"], saved.environment["mb"], saved.environment["seed"]) == (1, [1.0, 2.0], 3)
    assert {r.suite for r in saved.rows} == {"scores/random-forward", "scores/random-other-dim"}
    assert all(r.ok and r.call_us is None for r in saved.rows)
