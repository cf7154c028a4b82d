"""The estimate by which plans of columns are compared, and the scripts that fit it; no GPU is needed."""

import sys

import pytest
import torch

from lib.paths import RESULTS
from lib.scripts import load_script

SWEEP = RESULTS / "sweep-plans-h200-2026-11-30.json.gz"


@pytest.fixture(scope="module")
def fit():
    return load_script("fit_columns")


def test_the_planner_chooses_fast_plans(fit):
    """Of the plans that were timed, the one that the estimate in the library rates as the best."""
    found = fit.read_cases([SWEEP])
    known = fit.look_up(*fit.problems_and_plans(found))
    speeds = []
    for (*_, parts), estimates in zip(found, known, strict=True):
        chosen, _ = max(parts, key=lambda part: estimates[tuple(map(int, part[1]))].estimate)
        speeds.append(chosen / max(part for part, _ in parts))
    speeds = torch.tensor(speeds)
    assert speeds.mean() > 0.965
    assert speeds.quantile(0.1) > 0.9
    assert speeds.min() > 0.65


def test_a_fit_learns_to_choose(fit, monkeypatch):
    """Of three plans of each case the one with the larger feature is the faster one."""
    monkeypatch.setattr(fit, "STEPS", 100)
    x = torch.rand(300, 5, generator=torch.Generator().manual_seed(0))
    case, speed = torch.arange(300) // 3, 0.5 + x[:, 2] / 2
    best = torch.zeros(100).scatter_reduce(0, case, speed, "amax")
    data = fit.Data(x, (speed / best[case]).log(), case)
    assert fit.reached(fit.fit(data.part(torch.arange(100) < 80)), data.part(torch.arange(100) >= 80)).mean() > 0.98


def test_a_sweep_times_the_planners_choice_first(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "fit_columns", fit)
    sweep = load_script("sweep_columns")
    problems = sweep.draw_problems(1, 2, (8, 640))
    assert len(problems) == 12
    for problem, plans in zip(problems, sweep.choose(problems, 4, 3, 0), strict=True):
        known = next(fit.look_up([problem]))
        assert list(map(int, plans[0])) == list(next(iter(known)))
        assert len(plans) == len(set(plans)) <= 9
