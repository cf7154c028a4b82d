"""Checking and timing candidates, with fake launches that are wrong, refused, or fail."""

import json

import pytest
import torch

from lib.tune import H200
from onepass import reference
from onepass.tools.tune.candidates import Candidate, Choice, Plan, candidates
from onepass.tools.tune.sizes import FUNCTIONS
from onepass.tools.tune.timing import TRIAL_CALLS, CudaTimer, Measurement, WrongResultError, check_result, measure

CHOICES = [Choice(0, lanes, 0, 1, 0) for lanes in (1, 2, 4, 8)]
TRIED = [Candidate(c, Plan(0, c.threads, 128 // c.threads, 4, 4, 1, 0)) for c in CHOICES]
SHAPES = {"softmax": (100, 8), "logsumexp": (100, 8), "columns": (3, 16, 64), "columns_backward": (3, 16, 64)}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def defined(function, x, grad):
    if grad is not None:
        x = x.double()
        return x * (grad - (x * grad).sum(1, keepdim=True))
    return (reference.logsumexp if function == "logsumexp" else reference.softmax)(x, 1)


def once(call, repeats) -> float:
    call()
    return 5.0


def measured(spoil, tried=TRIED, synchronize=lambda: None, function="softmax", clock=once) -> Measurement:
    x = torch.randn(SHAPES[function], generator=torch.Generator().manual_seed(0))
    grad = torch.randn(x.shape) if function == "columns_backward" else None
    x = x if grad is None else x.softmax(1)

    def launch(plan, y):
        y.copy_(defined(function, x, grad))
        if plan is not None:
            spoil(plan, y)

    return measure(function, x, grad, tried, launch, clock, synchronize)


@every_function
def test_a_point_has_a_time_for_each_choice(function):
    shape = SHAPES[function]
    tried = TRIED if len(shape) == 2 else candidates(function, 16, (3, 64), 4, H200)
    point = measured(lambda plan, y: None, tried, function=function)
    assert (point.function, point.dtype, point.n, point.rows) == (
        function,
        "float32",
        shape[1],
        192 if tried is not TRIED else 100,
    )
    assert (point.copy_us, point.auto_us) == (5.0, 5.0)
    assert point.times == dict.fromkeys([choice for choice, _ in tried], 5.0)
    saved = {**vars(point), "times": sorted([*choice, 5.0] for choice in point.times)}
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
        (lambda y: y.mul_(1.001), r"is wrong: an error of \S+, 1e-05 is allowed"),
        (lambda y: y[-1].zero_(), "is wrong"),
        (lambda y: y.view(-1)[-1].add_(0.001), r"is wrong: an error of \S+, 1e-05 is allowed"),
        (lambda y: y.view(-1)[37].fill_(torch.nan), "is wrong"),
        (lambda y: y.view(-1)[37].fill_(torch.inf), "is wrong"),
        (lambda y: y.copy_(y.roll(1, -1 if y.dim() < 3 else 1)), "is wrong"),
    ],
)
@every_function
def test_a_wrong_candidate_is_an_error(function, spoil, words):
    what = f"{function} of {'x'.join(map(str, SHAPES[function]))} float32 by plan (0, 4, 32,"
    with pytest.raises(WrongResultError, match=words) as raised:
        measured(lambda plan, y: spoil(y) if plan.threads_per_row == 4 else None, function=function)
    assert what in str(raised.value)


def test_every_element_has_to_be_written():
    """An element that was not written is found, whichever rows are compared."""
    for row in range(100):
        with pytest.raises(WrongResultError):
            measured(lambda plan, y, row=row: y[row, 3].fill_(torch.nan))


@pytest.mark.parametrize("left_out", [0, 999])
def test_an_element_that_a_reduction_leaves_out_is_found(left_out):
    def launch(plan, y):
        kept = [i for i in range(1000) if plan is None or i != left_out]
        y.copy_(x[:, kept].double().logsumexp(1))

    x = torch.randn(50, 1000)
    with pytest.raises(WrongResultError):
        measure("logsumexp", x, None, TRIED, launch, once, lambda: None)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_function
def test_the_timer_launches_what_is_checked(function, dtype, monkeypatch):
    """By the plan in use, on the CPU, which takes no other."""
    timer = object.__new__(CudaTimer)
    timer.repeats, timer.device = 3, torch.device("cpu")
    shape = (64, 1) if function in FUNCTIONS[:2] else (2, 128)
    plan = candidates(function, 64, shape, dtype.itemsize, H200)[0].plan

    def look(name, x, grad, tried, launch, *_):
        assert (name, tuple(x.shape)) == (function, (64, 64) if shape[1] == 1 else (2, 64, 128))
        y, forced = ((x.new_empty(64) if function == "logsumexp" else torch.empty_like(x)) for _ in range(2))
        launch(None, y)
        check_result(y, defined(function, x, grad), "it", 0.0 if grad is None else x.double().max().item())
        with pytest.raises(RuntimeError, match="only CUDA calls have a plan to force"):
            launch(plan, forced)
        return "a point"

    monkeypatch.setattr("onepass.tools.tune.timing.measure", look)
    assert timer.measure(function, str(dtype)[6:], 64, shape, []) == "a point"
