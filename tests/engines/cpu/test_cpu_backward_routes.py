"""Which way a gradient goes on a CPU, and what is done for fresh results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib.support import ours
from onepass import autograd
from onepass.validation import Spec

ops = torch.ops.onepass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused operators that a test calls, and whether their own gradient was asked for."""
    made: list[str] = []
    alone, apply = autograd._call_backward_kernel, autograd.TransformBackward.apply

    def spy(spec: Spec, *given: Any) -> Any:
        made.append(spec.function)
        return alone(spec, *given)

    def recorded(*given: Any) -> Any:
        made.append("differentiable")
        return apply(*given)

    monkeypatch.setattr(autograd, "_call_backward_kernel", spy)
    monkeypatch.setattr(autograd.TransformBackward, "apply", recorded)
    return made


def test_the_fused_route_is_taken(function: str, calls: list[str]) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    ours(function)(x, 1).sum().backward()
    ours(function)(torch.nn.Parameter(torch.randn(4, 6)), 1).sum().backward()
    assert calls == 2 * [function]


def test_a_call_is_recorded_without_the_context_of_transforms(function: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    assert "EagerFunction" in str(ours(function)(x, 1).grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = ours(function)(x, 1)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(ours(function)(x, 1).square().sum(), x)
    )
    seen = []
    torch.func.grad(lambda t: seen.append(ours(function)(t, 1)) or seen[0].sum())(x.detach())
    assert "EagerFunction" not in str(seen[0].grad_fn)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {  # of asking for a gradient's gradient
    "create_graph": lambda f, x: torch.autograd.grad(f(x), x, create_graph=True),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_differentiable_route_is_taken(function: str, way: str, calls: list[str]) -> None:
    WAYS[way](lambda t: ours(function)(t, -1).square().sum(), torch.randn(4, 6, requires_grad=True))
    assert calls[:1] == ["differentiable"]
    assert function in calls  # the engine's operator, below it


def test_what_torch_vectorises_by_itself_is_plain_arithmetic(function: str, calls: list[str]) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    y = ours(function)(x, -1)
    g = torch.randn(3, *y.shape)
    (got,) = torch.autograd.grad(y, x, g, is_grads_batched=True, retain_graph=True)
    assert not calls
    torch.testing.assert_close(got, torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in g]))


def test_gradcheck(function: str, calls: list[str]) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    for dims in (0, 1, 2):
        assert torch.autograd.gradcheck(lambda t, d=dims: ours(function)(t, d), x)
    assert calls


def _flags(address: int) -> list[str]:
    """What the system has noted of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and Path("/proc/self/smaps").exists()


@pytest.mark.skipif(not HUGE_PAGES, reason="this system has no transparent huge pages")
@pytest.mark.parametrize("gradient", [False, True])
def test_large_fresh_results_ask_for_huge_pages(gradient: bool) -> None:
    def made(rows: int) -> Tensor:
        x = torch.zeros(rows, 1024)
        return ops._softmax_backward(x, x, 0, [1], x.dtype) if gradient else onepass.softmax(x)

    large = made(16384)
    assert "hg" in _flags(large.data_ptr() + large.numel() * 2)
    small = made(1024)
    assert small.shape == (1024, 1024)
    assert torch.equal(small, torch.full_like(small, 0.0 if gradient else 1 / 1024))
