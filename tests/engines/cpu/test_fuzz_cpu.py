"""The fuzzing of the CPU engine: two seconds of it, and that it notices what it is for."""

import itertools
import re

import pytest
import torch

import onepass
from lib.scripts import load_script
from lib.support import DTYPES, FUNCTIONS, INTEGERS, SOFTMAXES, outcome
from onepass import reference


@pytest.fixture(scope="module")
def fuzz():
    return load_script("fuzz_cpu")


def test_two_seconds_find_nothing(fuzz, capsys):
    threads = torch.get_num_threads()
    status = fuzz.main(["--minutes", str(2 / 60), "--seed", "1"])
    said = capsys.readouterr().out
    assert status == 0, said
    calls = re.search(r", seed 1: ([\d,]+) calls of [\d,]+ elements in [\d.]+ s, 0 failures", said)
    assert calls
    assert int(calls[1].replace(",", "")) > 5
    assert torch.get_num_threads() == threads


def test_the_calls_are_of_every_kind(fuzz):
    calls = [fuzz.Call(0, number) for number in range(3000)]
    assert {c.function for c in calls} == {*FUNCTIONS, "state"}
    assert {c.dtype for c in calls} == {*DTYPES, *INTEGERS}
    assert {(c.dtype, c.result) for c in calls} >= {(a, b) for a in DTYPES for b in DTYPES}
    assert {c.mode for c in calls} == {"fresh", "out", "in place"}
    assert {c.kind for c in calls} == {"contiguous", "permuted", "sliced", "expanded", "overlapping"}
    assert {len(c.view.sizes) for c in calls} == set(range(6))
    assert {c.threads for c in calls} == set(range(2, 9))
    assert {c.engine for c in calls} == {"auto", "cpu"}
    assert any(isinstance(c.dim, tuple) and len(c.dim) == 3 for c in calls)
    assert any(0 in c.view.sizes for c in calls)
    assert any(max(c.view.sizes, default=0) > 50_000 for c in calls)
    assert any(bool(c.input().isinf().any()) for c in calls[:300])
    assert [str(c) for c in calls[:50]] == [str(fuzz.Call(0, number)) for number in range(50)]
    assert str(calls[0]) != str(fuzz.Call(1, 0))


def fails(fuzz, capsys, words, monkeypatch):
    """A run that fails, and one of its failures made again: wrong with the fault, right without it."""
    assert fuzz.main(["--minutes", "0.5", "--seed", "2", "--most", "1"]) == 1
    said = capsys.readouterr().out
    assert words in said
    again = re.search(r"python scripts/fuzz_cpu.py (--seed 2 --call \d+)", said)
    assert again
    assert fuzz.main(again[1].split()) == 1
    assert words in capsys.readouterr().out
    monkeypatch.undo()
    assert fuzz.main(again[1].split()) == 0


@pytest.mark.parametrize("function", [*FUNCTIONS, "state", "gradient", "score"])
def test_a_wrong_value_of_the_definition_is_a_failure(fuzz, capsys, monkeypatch, function):
    owner, words = {"state": (reference, "sums of"), "gradient": (fuzz, "gradient of")}.get(
        function, (reference, "wrong, first at")
    )
    right = getattr(owner, function)

    def wrong(*arguments, **options):
        made = right(*arguments, **options)
        if function == "state":
            return made[0], made[1] * 1.001
        return [made[0] * 1.5, made[1]] if function == "gradient" else made + 0.05

    monkeypatch.setattr(owner, function, wrong)
    fails(fuzz, capsys, words, monkeypatch)


def test_gradients_are_of_every_kind(fuzz):
    made = [fuzz.Gradient(0, number) for number in range(2000)]
    assert {c.mode for c in made} == {"out", "saved", "grad"}
    assert {(c.saved_type, c.dx_type) for c in made} == {(a, b) for a in DTYPES for b in DTYPES}
    assert {(c.function, c.grad_type == c.saved_type) for c in made} == {(f, True) for f in FUNCTIONS} | {
        ("logsumexp", False)
    }


def test_scored_calls_are_of_every_kind(fuzz):
    made = [fuzz.Scored(0, number) for number in range(2000)]
    assert {(c.way, c.function) for c in made} == {(w, f) for w in ("none", "autograd", "operator") for f in FUNCTIONS}
    assert {name for c in made for name in c.sides} == {"scale", "bias", "alibi", "sink", "mask"}
    assert {dtype for c in made for dtype, _ in c.sides.values()} == {*DTYPES, torch.bool}
    numbers = {"scale", "softcap", "sink", "causal", "window", "offset", "empty"}
    assert {name for c in made for name in c.numbers} == numbers
    assert any(len(c.sides) == 5 for c in made)
    assert any(0 in view.strides and max(view.sizes) > 1 for c in made for _, view in c.sides.values())


@pytest.mark.parametrize(
    ("way", "name"),
    [("operator", "the input"), *(("autograd", n) for n in ("the input", "scale", "bias", "alibi", "sink"))],
)
def test_a_wrong_gradient_of_scores_is_a_failure(fuzz, monkeypatch, way, name):
    right = fuzz.Scored.judge_gradients

    def judge(self, made, *operands):
        right(self, {n: t * 1.5 if n == name else t for n, t in made.items()}, *operands)

    monkeypatch.setattr(fuzz.Scored, "judge_gradients", judge)
    calls = (fuzz.Scored(3, number) for number in itertools.count())
    mine = itertools.islice((c for c in calls if c.way == way and name in ("the input", *c.sides)), 10)
    assert any(f"the gradient of {name} is wrong" in str(outcome(c.check)) for c in mine)


def test_calls_over_segments_are_of_every_kind(fuzz):
    made = [fuzz.Segmented(0, number) for number in range(1000)]
    assert {(c.function, c.dtype) for c in made} == {
        (f, d) for f in ("softmax", "log_softmax", "logsumexp") for d in DTYPES
    }
    assert {len(c.view.sizes) for c in made} == {1, 2, 3}
    assert {(c.is_shuffled, c.has_bias, c.has_gradient) for c in made} == set(
        itertools.product((False, True), repeat=3)
    )
    assert any(not sum(c.lengths) for c in made)
    assert any(max(c.lengths, default=0) > 10_000 for c in made)


@pytest.mark.parametrize(("judge", "words"), [("judge_forward", "the result"), ("judge_gradient", "the gradient")])
def test_a_wrong_value_of_segments_is_a_failure(fuzz, monkeypatch, judge, words):
    right = getattr(fuzz.Segmented, judge)
    at = 1 if judge == "judge_forward" else 3

    def wrong(self, *given):
        right(self, *(t * 1.1 if k == at else t for k, t in enumerate(given)))

    monkeypatch.setattr(fuzz.Segmented, judge, wrong)
    calls = (fuzz.Segmented(3, number) for number in range(40))
    assert any(f"{words} is wrong" in str(outcome(call.check)) for call in calls)


def plant(monkeypatch, fault):
    """Every softmax of the family with a fault after it."""
    for function in SOFTMAXES:
        right = getattr(onepass, function)

        def wrong(x, dim, right=right, **options):
            y = right(x, dim, **options)
            if y.numel():
                fault(x, y)
            return y

        monkeypatch.setattr(onepass, function, wrong)


def other_bits(x, y):
    if torch.get_num_threads() > 1:
        y.view(-1)[0] = 0.0625


def beside(x, y):
    if y.storage_offset():
        y.as_strided((1,), (1,), 0).fill_(1.0)


def into_the_input(x, y):
    if x.data_ptr() != y.data_ptr():
        x.view(-1)[0] = 3


def raises(x, y):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_bits, "threads give other bits"),
        (beside, "an element beside the result was written"),
        (into_the_input, "the input has changed"),
        (raises, "raised RuntimeError: out of luck"),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_a_planted_fault_is_found(fuzz, capsys, monkeypatch, fault, words):
    def only_whole(x, y):
        if fault not in (other_bits, into_the_input) or (x.is_contiguous() and y.is_contiguous()):
            fault(x, y)

    plant(monkeypatch, only_whole)
    fails(fuzz, capsys, words, monkeypatch)


WRONG = [("fuzz_cpu", *o) for o in (("--minutes", "0"), ("--call", "-1"), ("--seed", "x"))]
WRONG += [("sanitize", *o) for o in (("--sets", "mmx"), ("--minutes", "0"), ("--seed", "-1"))] + [
    ("soak", "--calls", "0")
]


@pytest.mark.parametrize(("script", "option", "value"), WRONG)
def test_a_wrong_option_is_reported(capsys, script, option, value):
    with pytest.raises(SystemExit) as end:
        load_script(script).main([option, value])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert option in said or value in said
