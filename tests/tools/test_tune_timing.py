"""Checking and timing candidates, with fake launches that are wrong, refused, or fail."""

import json

import pytest
import torch

from onepass.tools.tune.candidates import Candidate, Choice, Plan
from onepass.tools.tune.timing import TRIAL_CALLS, Measurement, WrongResultError, check_result, measure_rows

CHOICES = [Choice(0, lanes, 0, 1, 0) for lanes in (1, 2, 4, 8)]
TRIED = [Candidate(c, Plan(0, c.threads, 128 // c.threads, 4, 4, 1, 0)) for c in CHOICES]


def launcher(function, spoil):
    def launch(x, plan, y):
        e = x.double().exp()
        y.copy_(e / e.sum(1, keepdim=True) if function == "softmax" else e.sum(1).log())
        if plan is not None:
            spoil(plan, y)

    return launch


def measured(spoil, tried=TRIED, synchronize=lambda: None, function="softmax", clock=None) -> Measurement:
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    launch = launcher(function, spoil)
    clock = clock or (lambda call, repeats: (call(), 5.0)[1])
    return measure_rows(function, x, tried, launch, clock, synchronize)


def test_a_point_has_a_time_for_each_choice():
    point = measured(lambda plan, y: None)
    assert (point.function, point.dtype, point.n, point.rows) == ("softmax", "float32", 8, 100)
    assert (point.copy_us, point.auto_us) == (5.0, 5.0)
    assert point.times == dict.fromkeys(CHOICES, 5.0)
    saved = {**vars(point), "times": [[*choice, 5.0] for choice in CHOICES]}
    assert json.loads(json.dumps(point.as_dict())) == {key: value for key, value in saved.items() if key != "best"}
    assert len(point.as_dict(2)["times"]) == 2


def test_choices_of_one_plan_are_measured_once():
    calls = []
    other = Candidate(Choice(0, 16, 0, 1, 0), TRIED[0].plan)
    point = measured(lambda plan, y: calls.append(plan), [*TRIED, other])
    assert set(point.times) == {*CHOICES, other.choice}
    assert calls.count(TRIED[0].plan) == calls.count(TRIED[1].plan)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda y: y.mul_(1.001), "an error of 1.0e-03, 1e-05 is allowed"),
        (lambda y: y[:, -1].fill_(torch.nan), "is wrong"),
        (lambda y: y[-1].fill_(0), "is wrong"),
        (lambda y: y[1:-1].fill_(torch.nan), "is wrong"),
    ],
)
def test_a_wrong_candidate_is_an_error(spoil, words):
    with pytest.raises(WrongResultError, match=words) as raised:
        measured(lambda plan, y: spoil(y) if plan.threads_per_row == 4 else None)
    assert "softmax of 100x8 float32 by plan (0, 4, 32," in str(raised.value)


def test_every_element_has_to_be_written():
    """An element that was not written is found, whichever rows are compared."""
    for row in range(100):
        with pytest.raises(WrongResultError):
            measured(lambda plan, y, row=row: y[row, 3].fill_(torch.nan))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda y: y.mul_(1.001), "is wrong: an error of 1.0e-03, 1e-05 is allowed"),
        (lambda y: y[-1:].add_(0.001), "is wrong: an error of "),
        (lambda y: y[37:38].fill_(torch.nan), "is wrong"),
        (lambda y: y[37:38].fill_(torch.inf), "is wrong"),
    ],
)
def test_a_wrong_reduction_is_an_error(spoil, words):
    assert measured(lambda plan, y: None, function="logsumexp").function == "logsumexp"
    with pytest.raises(WrongResultError, match=words) as raised:
        measured(lambda plan, y: spoil(y), function="logsumexp")
    assert "logsumexp of 100x8 float32 by plan (0, 1," in str(raised.value)


@pytest.mark.parametrize("left_out", [0, 999])
def test_an_element_that_a_reduction_leaves_out_is_found(left_out):
    def launch(x, plan, y):
        kept = [i for i in range(1000) if plan is None or i != left_out]
        y.copy_(x[:, kept].double().logsumexp(1))

    with pytest.raises(WrongResultError):
        measure_rows(
            "logsumexp", torch.randn(50, 1000), TRIED, launch, lambda call, repeats: (call(), 5.0)[1], lambda: None
        )


def test_slow_plans_are_not_measured_in_full():
    called, timed = [], []

    def clock(call, repeats):
        called.clear()
        call()
        timed.append((*called, repeats))
        return {4: 1.0, 8: 1.05}.get(*called, 2.0) if called else 3.0

    point = measured(lambda plan, y: called.append(plan.threads_per_row), clock=clock)
    assert set(point.times) == {CHOICES[2], CHOICES[3]}
    assert timed == [
        (15,),
        (15,),
        (1, TRIAL_CALLS),
        (2, TRIAL_CALLS),
        (4, TRIAL_CALLS),
        (8, TRIAL_CALLS),
        (4, 15),
        (8, 15),
    ]


def test_a_refused_plan_is_skipped():
    def spoil(plan, y):
        if plan.threads_per_row != 4:
            raise RuntimeError("onepass: too few lanes\nand more")

    point = measured(spoil)
    assert set(point.times) == {CHOICES[2]}
    assert point.refused == {"too few lanes": 3}


def test_a_gpu_that_fails_ends_the_sweep():
    def spoil(plan, y):
        raise RuntimeError("launch")

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        measured(spoil, synchronize=synchronize)
    with pytest.raises(RuntimeError, match="no plan for softmax of 100x8 float32 can be launched: launch"):
        measured(spoil)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_error_and_a_larger_difference_is(dtype):
    exact = torch.softmax(torch.linspace(-20, 5, 4000, dtype=torch.float64), 0)  # far below the smallest normal float16
    check_result(exact.to(dtype), exact, "it")
    for at in (0, 2000, 3999):
        wrong = exact.to(dtype)
        wrong[at] = wrong[at] * 1.02 + 2e-7
        with pytest.raises(WrongResultError, match="it is wrong"):
            check_result(wrong, exact, "it")
