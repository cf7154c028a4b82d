"""The clocks of a CPU: calls into memory given beforehand, gradients too, and calls that allocate their results."""

import pytest
import torch

from lib.bench import CPU
from onepass.tools.bench.cases import Case
from onepass.tools.bench.entrants import Naive, Onepass, Torch, TorchCompile
from onepass.tools.bench.run import Runner
from onepass.tools.bench.table import summary
from onepass.tools.bench.timing import Budget
from onepass.tools.bench.work import make

SOFT = Case("t", "t", (6, 40), direction="backward")


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("provider", [Onepass(), Torch()], ids=["onepass", "torch"])
def test_a_gradient_goes_into_the_memory_given(provider: Onepass | Torch, function: str) -> None:
    for dim, dtype in ((-1, "float32"), (0, "bfloat16")):
        work = make(Case("t", "t", (6, 40), dim, function, "backward"), dtype, CPU, 0)
        assert work.out is not None
        assert provider.writes(work)
        work.out.fill_(float("nan"))
        assert provider.prepare(work)() is work.out
        fresh = provider.prepare(work.fresh())()
        assert fresh is not work.out
        torch.testing.assert_close(work.out, fresh)


def test_who_has_no_such_gradient_goes_by_autograd() -> None:
    work = make(SOFT, "float32", CPU, 0)
    for provider in (Naive(), TorchCompile()):
        assert not provider.writes(work)
    assert not Torch().writes(
        make(Case("t", "t", (6, 40), function="softmin", direction="backward"), "float32", CPU, 0)
    )
    assert Naive().prepare(work)() is not work.out


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_results_newly_allocated_are_timed_beside(direction: str) -> None:
    budget = Budget(seconds=0.002, least=2, most=3, warmup=0.001)
    runner = Runner(CPU, [Onepass(), Torch()], budget=budget)
    rows = runner.run([(Case("t", "t", (6, 40), direction=direction), "float32")]).rows
    assert [row.provider for row in rows] == ["copy", "onepass", "torch"]
    assert all(row.ok and row.call_us and row.median_us != row.call_us for row in rows)
    said = "\n".join(summary(rows))
    assert "with results newly allocated onepass is" in said
    assert "a call with its host time" not in said  # a GPU's
