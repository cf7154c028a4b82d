"""Who is raced: a registry that every kernel joins.

A provider says whether it is to be had on a device, whether it serves a case, and makes the call that is timed. To join,
subclass `Provider` and `register` an instance:

    class Mine(Provider):
        name, label = "mine", "my kernel"

        def function(self, case, dtype):
            return lambda x: my_softmax(x, case.dim)

    register(Mine())
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.bench.cases import ITEMSIZE, Case
from onepass.bench.environment import version as version_of
from onepass.bench.work import Work

Call = Callable[[], Tensor]


class Provider:
    """One line of the race. `quick` says whether the quick form runs it unasked."""

    name: str
    label: str
    quick: bool = True
    limit: bool = False  # a limit (the copy) is what the others are measured by, and is never the best

    def unavailable(self, device: torch.device) -> str | None:
        """Why this provider cannot run on `device` here, or None."""
        return None

    def redundant(self, device: torch.device) -> str | None:
        """Why, on `device`, this provider is another one again and runs only when asked for, or None."""
        return None

    def supports(self, case: Case, dtype: str) -> str | None:
        """Why this provider does not take the case, or None."""
        return None

    def takes_out(self, case: Case) -> bool:
        """Whether `function` gives a callable that takes `out=`."""
        return False

    def workspace(self, case: Case, dtype: str) -> int:
        """Bytes that a call takes besides input and output: what a fresh output takes, at least."""
        return prod(case.out_shape()) * ITEMSIZE[case.result_dtype(dtype)]

    def version(self) -> str | None:
        return version_of("torch")

    def engine(self, work: Work) -> str | None:
        """The engine that serves the call, for providers that have several."""
        return None

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        """The forward: a callable of the input, and of `out=` where `takes_out`. It may be asked for repeatedly."""
        raise NotImplementedError

    def prepare(self, work: Work) -> Call:
        """The call to time: the forward into `work.out` or a fresh output, or the backward of it by autograd."""
        f, x, out, grad = self.function(work.case, work.dtype), work.x, work.out, work.grad
        if grad is not None:
            leaf = x.detach().requires_grad_()
            y = f(leaf)
            return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]
        if out is not None and self.takes_out(work.case):
            return lambda: f(x, out=out)
        return lambda: f(x)


_SERVES = {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")}  # engines by the device type of the tensors


class Onepass(Provider):
    """onepass itself: `engine="auto"`, or one engine forced."""

    def __init__(self, engine: str = "auto"):
        self.chosen = engine
        self.name = "onepass" if engine == "auto" else f"onepass-{engine}"
        self.label = "onepass" if engine == "auto" else f"onepass ({engine} engine)"

    def unavailable(self, device: torch.device) -> str | None:
        import onepass

        engines = onepass.engines()
        if self.chosen == "auto":
            return None if self._usable(device) else f"no engine serves {device.type} here"
        if self.chosen not in _SERVES[device.type]:
            return f"serves no {device.type} tensors"
        return engines.get(self.chosen, "this onepass does not have it")

    def redundant(self, device: torch.device) -> str | None:
        if self.chosen == "triton" and device.type == "cpu":
            return "interprets its kernels on the CPU, which takes minutes"
        return "is what auto takes here" if self._usable(device) == [self.chosen] else None

    def _usable(self, device: torch.device) -> list[str]:
        import onepass

        engines = onepass.engines()
        return [e for e in _SERVES[device.type] if e in engines and engines[e] is None]

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward"

    def version(self) -> str | None:
        import onepass

        return onepass.__version__

    def engine(self, work: Work) -> str | None:
        import onepass

        # a bandwidth is given so that none is measured
        call = {"function": work.case.function, "out_dtype": work.out_dtype, "engine": self.chosen, "bandwidth": 1.0}
        return onepass.explain(work.x, work.case.dim, **call).engine

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        import onepass

        f = getattr(onepass, case.function)
        options: dict[str, Any] = {"engine": self.chosen}
        if case.out_dtype:
            options["dtype"] = getattr(torch, case.out_dtype)
        dim = case.dim
        return lambda x, out=None: f(x, dim, out=out, **options)


def _torch_call(case: Case) -> Callable[..., Tensor]:
    f, dim = _TORCH[case.function], case.dim
    if not case.out_dtype:
        return lambda x, **out: f(x, dim, **out)
    dtype = getattr(torch, case.out_dtype)
    return lambda x, **out: f(x, dim, dtype=dtype, **out)


_TORCH: dict[str, Callable[..., Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmin": torch.nn.functional.softmin,
    "logsumexp": torch.logsumexp,
}


class Torch(Provider):
    name = "torch"
    label = "torch"

    def supports(self, case: Case, dtype: str) -> str | None:
        if case.function != "logsumexp" and len(case.dims()) > 1:
            return f"torch's {case.function} takes one dim"
        return None

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward" and case.function != "softmin"

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        return _torch_call(case)


class TorchCompile(Torch):
    """What Inductor makes of torch's own function, compiled for each shape: the best it can do."""

    name = "torch-compile"
    label = "torch.compile"
    quick = False  # the first compilation takes 16 s on two cores

    def __init__(self) -> None:
        self._made: tuple[tuple[Case, str], Callable[..., Tensor]] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"
        return None if version_of("triton") else "needs triton"

    def takes_out(self, case: Case) -> bool:
        return False

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if self._made is None or self._made[0] != (case, dtype):
            torch._dynamo.reset()  # else the ninth shape is over the limit of recompilations and runs uncompiled
            self._made = ((case, dtype), torch.compile(_torch_call(case), dynamic=False))
        return self._made[1]


class Naive(Provider):
    """The definition, a torch operator a step: each step reads and writes the whole tensor.

    Half types are computed in float32 and rounded at the end: in the half type itself `x - max(x)` alone would cost
    1.6% of a probability's value.
    """

    name = "naive"
    label = "naive PyTorch"

    def workspace(self, case: Case, dtype: str) -> int:
        return 4 * prod(case.shape) * max(4, ITEMSIZE[dtype])  # at most four whole temporaries at a time

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        dims, result = case.dims(), getattr(torch, case.out_dtype or dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32

        def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.to(wide)
            top = x.amax(dims, keepdim=True)
            return x - top, top

        def softmax(x: Tensor) -> Tensor:
            e = shifted(x)[0].exp()
            return (e / e.sum(dims, keepdim=True)).to(result)

        def log_softmax(x: Tensor) -> Tensor:
            z = shifted(x)[0]
            return (z - z.exp().sum(dims, keepdim=True).log()).to(result)

        def logsumexp(x: Tensor) -> Tensor:
            z, top = shifted(x)
            return (top + z.exp().sum(dims, keepdim=True).log()).squeeze(dims).to(result)

        made = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
        return made.get(case.function) or (lambda x: softmax(-x))


class Liger(Provider):
    """Liger-Kernel's Triton softmax, where it is installed."""

    name = "liger"
    label = "Liger"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "serves no cpu tensors"
        return None if self.version() else "liger-kernel is not installed"

    def supports(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "Liger has softmax alone, without a dtype"
        return None if case.dims() == (len(case.shape) - 1,) else "Liger takes the last dim alone"

    def version(self) -> str | None:
        return version_of("liger-kernel")

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return LigerSoftmaxFunction.apply


class Copy(Provider):
    """The limit: a copy (for the backward: an addition) that reads and writes the bytes that the case must."""

    name = "copy"
    label = "copy"
    limit = True

    def prepare(self, work: Work) -> Call:
        x, grad = work.x, work.grad
        if grad is not None:
            if grad.shape != x.shape:  # logsumexp: the input is read, its gradient written
                y = torch.empty_like(x)
                return lambda: y.copy_(x)
            y, z = torch.zeros_like(grad), torch.empty_like(x)
            return lambda: torch.add(y, grad, out=z)
        out = work.out
        if out is None or out.shape != x.shape:  # logsumexp reads much and writes little: a copy of half as much
            flat = x.reshape(-1).view(torch.uint8)
            half = flat[: work.case.bytes(work.dtype) // 2]
            target = torch.empty_like(half)
            return lambda: target.copy_(half)
        return lambda: out.copy_(x)


_REGISTRY: dict[str, Provider] = {}
COPY = Copy()


def register(provider: Provider) -> None:
    """Adds a provider at the end of the order. Raises ValueError for a name that is taken."""
    if provider.name in _REGISTRY or provider.name == COPY.name:
        raise ValueError(f"a provider named {provider.name!r} is there already")
    _REGISTRY[provider.name] = provider


def registry() -> dict[str, Provider]:
    return dict(_REGISTRY)


for _provider in (*map(Onepass, ("auto", "cpu", "cuda", "triton")), Torch(), TorchCompile(), Naive(), Liger()):
    register(_provider)


def pick(
    device: torch.device, only: Sequence[str] = (), skip: Iterable[str] = (), quick: bool = False
) -> tuple[list[Provider], dict[str, str]]:
    """The providers to run, in the registry's order, and why the others are left out, by name.

    Raises ValueError for an unknown name, or where `only` names what cannot run here.
    """
    for name in [*only, *skip]:
        if name not in _REGISTRY:
            raise ValueError(f"unknown provider {name!r}: there are {', '.join(_REGISTRY)}")
    chosen, left_out = [], {}
    for name, provider in _REGISTRY.items():
        asked, reason = name in only, provider.unavailable(device)
        if name in skip or (only and not asked):
            continue
        if reason is None and not asked:
            reason = provider.redundant(device)
        if reason is None and not asked and quick and not provider.quick:
            reason = "is not in the quick form"
        if reason is None:
            chosen.append(provider)
        elif asked:
            raise ValueError(f"provider {name!r} cannot run on {device}: {reason}")
        else:
            left_out[name] = reason
    if not chosen:
        raise ValueError("no provider is left to run")
    return chosen, left_out
