"""The providers of the suite `sharded`: onepass, DTensor and loss_parallel, for the columns of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import onepass
from onepass import distributed
from onepass._engines import resolve
from onepass.state_ops import finish_rows, gradient_finish, gradient_sum
from onepass.tools.bench.provider import Call, Provider
from onepass.tools.bench.sharded_cases import ShardedCase


@dataclass
class Part:
    """This rank's columns, the further arguments of a gradient and a loss, and the rows that are checked."""

    case: ShardedCase
    x: Tensor
    grad: Tensor | None
    target: Tensor | None
    start: int
    rows: Tensor


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def slowest(times: list[float]) -> list[float]:
    """For each time, the longest among the ranks."""
    return [max(of) for of in zip(*gather(times), strict=True)]


class ShardProvider(Provider):
    """A function of the columns of each rank."""

    rounds_steps = True  # whether it rounds steps to the dtype of the input, as many libraries do

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        """The function to time and its input."""
        raise NotImplementedError

    def calls(self, part: Part) -> list[Call]:
        """A gradient goes through autograd; its forward is not timed."""
        f, x = self.function(part)
        if part.case.direction == "forward":
            return [lambda: f(x)]
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        grad = self.gradient(part)
        return [lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]]

    def gradient(self, part: Part) -> Any:
        """The gradient of the result."""
        return part.grad

    def local(self, got: Any, part: Part) -> Tensor:
        """This rank's part of the result of a call."""
        assert isinstance(got, Tensor)
        return got


class Ours(ShardProvider):
    """onepass.distributed, and its phases one by one."""

    name = label = "onepass"
    rounds_steps = False

    def version(self) -> str | None:
        return onepass.__version__

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        f = getattr(distributed, part.case.function)
        return (lambda x: f(x, -1 if part.target is None else part.target)), part.x

    def calls(self, part: Part) -> list[Call]:
        x, grad, phase, function = part.x, part.grad, part.case.phase, part.case.function
        if not phase:
            return super().calls(part)
        engine = resolve("auto", x.device)
        if phase == "state":
            return [lambda: onepass.state(x, -1)]
        m, l = onepass.state(x, -1, keepdim=True)
        if phase == "finish":
            return [lambda: finish_rows(x, m, l, [1], function, None, engine)]
        assert grad is not None
        y = finish_rows(x, m, l, [1], function, None, engine)
        total = gradient_sum(grad, y, [1], function, engine)
        if phase == "gradient_sum":
            return [lambda: gradient_sum(grad, y, [1], function, engine)]
        return [lambda: gradient_finish(grad, y, total, [1], function, x.dtype, engine)]

    def local(self, got: Any, part: Part) -> Tensor:
        return super().local(got.logsumexp() if isinstance(got, onepass.State) else got, part)


class InKernel(Ours):
    """onepass.distributed with exchange="kernel"."""

    name, label = "onepass-kernel", "onepass, exchange='kernel'"

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "exchanges states within kernels of GPUs"

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        f = getattr(distributed, part.case.function)
        return (lambda x: f(x, -1, exchange="kernel")), part.x


class OfDTensor(ShardProvider):
    """torch's function of a DTensor that is sharded in its last dim. Every rank gathers whole rows."""

    name, label = "dtensor", "torch of a DTensor"

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        f = getattr(torch, part.case.function)
        return (lambda x: f(x, -1)), self.split(part.x, part)

    def split(self, x: Tensor, part: Part) -> DTensor:
        shape = torch.Size(part.case.shape)
        return DTensor.from_local(x, _mesh(part), [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))

    def gradient(self, part: Part) -> Any:
        if part.grad is None or part.grad.dim() == len(part.case.shape):
            return None if part.grad is None else self.split(part.grad, part)
        return DTensor.from_local(part.grad, _mesh(part), [Replicate()], run_check=False)

    def local(self, got: Any, part: Part) -> Tensor:
        if not isinstance(got, DTensor):
            return super().local(got, part)
        if got.dim() == len(part.case.shape):
            return got.redistribute(placements=[Shard(1)]).to_local()
        return got.full_tensor()


def _mesh(part: Part) -> DeviceMesh:
    return _make_mesh(part.x.device.type, part.case.ranks)


@cache
def _make_mesh(kind: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(kind, (ranks,))


class LossParallel(OfDTensor):
    """torch's cross-entropy of a DTensor whose classes are sharded."""

    name, label = "loss_parallel", "cross_entropy within loss_parallel"

    def function(self, part: Part) -> tuple[Callable[[Any], Any], Any]:
        target = part.target
        assert target is not None
        return (lambda x: torch.nn.functional.cross_entropy(x, target)), self.split(part.x, part)

    def calls(self, part: Part) -> list[Call]:
        with loss_parallel():
            (call,) = super().calls(part)

        def within() -> Any:
            with loss_parallel():
                return call()

        return [within]


def providers() -> dict[str, Provider]:
    return {provider.name: provider for provider in (Ours(), InKernel(), OfDTensor(), LossParallel())}
