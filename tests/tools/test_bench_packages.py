"""Liger and QuACK, with modules that stand in for the packages: what is refused, and what becomes of a wrong one."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, run
from onepass.tools.bench import packages, table
from onepass.tools.bench.cases import Case
from onepass.tools.bench.entrants import Torch
from onepass.tools.bench.packages import Liger, Quack
from onepass.tools.bench.providers import registry
from onepass.tools.bench.suites import SUITES

CUDA = torch.device("cuda")
Softmax = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Softmax], None]:
    """Puts a softmax into the place of both packages'."""

    def install(softmax: Softmax) -> None:
        for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.softmax", "quack", "quack.softmax"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        modules: Any = sys.modules
        modules["quack"].softmax = softmax  # as in the package: the function lies over the module of its name
        modules["quack.softmax"].softmax = softmax
        modules["liger_kernel.ops.softmax"].LigerSoftmaxFunction = type("F", (), {"apply": staticmethod(softmax)})
        monkeypatch.setattr(packages, "version_of", lambda name: "1.2.3")

    return install


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_both_are_in_the_registry_and_missed_where_they_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version_of", lambda name: None)
    for name, package in (("liger", "liger-kernel"), ("quack", "quack-kernels")):
        provider = registry()[name]
        assert provider.unavailable(CUDA) == f"{package} is not installed"
        assert provider.unavailable(CPU) == "serves no cpu tensors"
    monkeypatch.setattr(packages, "version_of", lambda name: "1.2.3")
    monkeypatch.setattr(torch.version, "hip", None)
    assert Quack().unavailable(CUDA) is None
    assert Liger().unavailable(CUDA) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Quack().unavailable(CUDA) == "needs an NVIDIA GPU"


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (Case("t", "t", (4, 1024)), "float32", None),
        (Case("t", "t", (4, 1024)), "float16", None),
        (Case("t", "t", (4, 12)), "float32", None),
        (Case("t", "t", (4, 1024), dim=1), "bfloat16", None),
        (Case("t", "t", (4, 262144), direction="backward"), "float32", None),
        (Case("t", "t", (4, 12)), "bfloat16", "QuACK takes rows of whole 16 bytes"),
        (Case("t", "t", (4, 33)), "float32", "QuACK takes rows of whole 16 bytes"),
        (Case("t", "t", (4, 1024)), "float64", "QuACK takes float32, bfloat16, float16"),
        (Case("t", "t", (4, 1024), dim=0), "float32", "QuACK takes the last dim of a matrix"),
        (Case("t", "t", (2, 4, 1024)), "float32", "QuACK takes the last dim of a matrix"),
        (Case("t", "t", (1024,)), "float32", "QuACK takes the last dim of a matrix"),
        (Case("t", "t", (4, 1024), function="logsumexp"), "float32", "QuACK has softmax alone, without a dtype"),
        (Case("t", "t", (4, 1024), out_dtype="float32"), "float16", "QuACK has softmax alone, without a dtype"),
        (Case("t", "t", (1, 1 << 20)), "bfloat16", None),
        (Case("t", "t", (1, 1 << 20)), "float32", "takes rows of at most 3719168 bytes"),
        (Case("t", "t", (1, 1 << 28)), "float32", "takes rows of at most 3719168 bytes"),
    ],
)
def test_what_quack_takes(case: Case, dtype: str, reason: str | None) -> None:
    got = Quack().supports(case, dtype)
    assert got is None if reason is None else reason in (got or "")


def test_quack_takes_every_vector_length_of_the_rows_suite() -> None:
    cases = [(c.at(d), d) for c in SUITES["rows"].cases if c.function == "softmax" for d in c.dtypes]
    left_out = {(c.row(), d) for c, d in cases if Quack().supports(c, d)}
    odd = (33, 781, 1025, 32001, 50257)
    assert left_out == {(n, d) for n in odd for d in ("float32", "bfloat16")} | {(100, "bfloat16")}


@pytest.mark.parametrize("provider", [Quack(), Liger()], ids=lambda p: p.name)
def test_a_right_one_is_timed(provider: Any, installed: Callable[[Softmax], None]) -> None:
    installed(softmax)
    rows, said = run(Case("t", "t", (4, 32)), provider, Torch())
    assert rows[provider.name].ok, said
    assert rows[provider.name].version == "1.2.3"
    assert not said


@pytest.mark.parametrize("provider", [Quack(), Liger()], ids=lambda p: p.name)
def test_a_nan_is_told_as_wrong_and_the_race_goes_on(provider: Any, installed: Callable[[Softmax], None]) -> None:
    installed(lambda x: softmax(x).index_fill(1, torch.tensor([5]), float("nan")))
    rows, said = run(Case("t", "t", (4, 32)), provider, Torch())
    row = rows[provider.name]
    assert (row.error or "").startswith("wrong: error nan at row 0, element 5")
    assert row.median_us is None
    assert len(said) == 1
    assert table.cell(row) == ("WRONG", "")
    assert rows["torch"].ok


def limited(x: torch.Tensor) -> torch.Tensor:
    """As Liger up to 0.8.5."""
    if x.shape[-1] > 65536:
        raise RuntimeError(
            f"Cannot launch Triton kernel since n = {x.shape[-1]} exceeds the recommended Triton blocksize"
        )
    return softmax(x)


@pytest.mark.parametrize(
    ("n", "error"), [(65536, None), (65537, "unsupported: Liger takes rows of at most 65536 elements")]
)
def test_ligers_limit_is_a_refusal(n: int, error: str | None, installed: Callable[[Softmax], None]) -> None:
    installed(limited)
    rows, said = run(Case("t", "t", (1, n)), Liger(), Torch())
    assert rows["liger"].error == error
    assert not said
    assert table.cell(rows["liger"])[0] != "ERROR"
    assert rows["torch"].ok


def test_a_liger_without_the_limit_is_timed(installed: Callable[[Softmax], None]) -> None:
    installed(softmax)
    rows, _ = run(Case("t", "t", (1, 65537)), Liger())
    assert rows["liger"].ok


def test_another_error_of_liger_is_an_error(installed: Callable[[Softmax], None]) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    installed(broken)
    rows, said = run(Case("t", "t", (1, 65537)), Liger(), Torch())
    assert rows["liger"].error == "raised: RuntimeError: out of resource: shared memory"
    assert len(said) == 1


def test_a_package_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.softmax", None)
    rows, _ = run(Case("t", "t", (4, 32)), Quack(), Torch())
    assert "ModuleNotFoundError" in (rows["quack"].error or "")
    assert rows["torch"].ok
    assert CASE.row() == 33  # and a row of 33 is refused before that
    assert (run(CASE, Quack())[0]["quack"].error or "").startswith("unsupported")
