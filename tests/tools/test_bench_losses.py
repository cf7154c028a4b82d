"""The suite `losses`: small cases on a CPU, and a loss that is wrong."""

import pytest
import torch

from onepass.tools.bench import losses
from onepass.tools.bench.registry import registry
from onepass.tools.bench.runner import Runner
from onepass.tools.bench.timing import QUICK

SMALL = {"cpu": (((6, 33), "float32"), ((2, 7, 5), "bfloat16"))}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(losses, "SHAPES", SMALL)
    providers = losses.with_losses([registry()[name] for name in ("onepass", "torch", "naive")])
    return losses.LossRunner(torch.device("cpu"), providers, budget=QUICK.limit(0.01), kernels_only=True)


def test_a_run(runner):
    cases = [(case, case.dtypes[0]) for case in losses.cases("cpu")]
    rows = runner.run(cases).rows
    assert [(row.case, row.provider) for row in rows if not row.ok] == []
    assert {row.provider for row in rows} == {"copy", "onepass", "torch"}
    assert len(rows) == 3 * len(cases) == 36
    moves = {row.case: row.bytes / (6 * 33 * 4) for row in rows if row.shape == [6, 33]}
    for function, (forward, both) in losses.MOVES.items():
        assert moves[f"{function}, 6x33, forward"] == forward
        assert moves[f"{function}, 6x33, forward and backward"] == both


def test_a_wrong_loss_is_not_timed(runner, monkeypatch):
    monkeypatch.setattr(
        losses.onepass, "cross_entropy", lambda x, target: torch.nn.functional.cross_entropy(x, target) * 1.5
    )
    rows = runner.run([(losses.cases("cpu")[0], "float32")]).rows
    (ours,) = (row for row in rows if row.provider == "onepass")
    assert not ours.ok
    assert (ours.error or "").startswith("wrong: off by")
