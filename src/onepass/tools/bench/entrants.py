"""The providers that come with the package: onepass and its engines, torch, torch.compile, naive PyTorch, those from
other packages (`packages.py`), and the rungs of the gallery (`rungs.py`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from onepass.tools.bench.cases import FUNCTIONS, ITEMSIZE, Case
from onepass.tools.bench.environment import version as version_of
from onepass.tools.bench.packages import Liger, Quack
from onepass.tools.bench.providers import Call, Provider, register
from onepass.tools.bench.rungs import INTERPRETED, refusal
from onepass.tools.bench.rungs import providers as rungs
from onepass.tools.bench.work import Work
from onepass.tools.gallery import VARIANTS

_SERVES = {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")}  # engines by the device type of the tensors


class Onepass(Provider):
    """onepass itself: `engine="auto"`, or one engine forced."""

    def __init__(self, engine: str = "auto"):
        self.chosen = engine
        self.name = "onepass" if engine == "auto" else f"onepass-{engine}"
        self.label = "onepass" if engine == "auto" else f"onepass ({engine} engine)"

    def unavailable(self, device: torch.device) -> str | None:
        from onepass._engines import unavailable

        if self.chosen == "auto":
            return None if self._usable(device) else f"no engine serves {device.type} here"
        if self.chosen not in _SERVES[device.type]:
            return f"serves no {device.type} tensors"
        return unavailable(self.chosen, device)

    def redundant(self, device: torch.device) -> str | None:
        if self.chosen == "triton" and device.type == "cpu":
            return INTERPRETED
        return "is what auto takes here" if self._usable(device)[:1] == [self.chosen] else None

    def _usable(self, device: torch.device) -> list[str]:
        """The engines that serve the device, the one that auto takes first."""
        from onepass._engines import unavailable

        return [engine for engine in _SERVES[device.type] if unavailable(engine, device) is None]

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward"

    def writes(self, work: Work) -> bool:
        return super().writes(work) or (work.grad is not None and self.chosen != "triton")

    def gradient(self, work: Work) -> Call:
        case, x, grad, out = work.case, work.x, work.grad, cast(Tensor, work.out)
        y, dims = self.function(case, work.dtype)(x), list(case.dims())
        given: tuple[Any, ...] = (grad, y, FUNCTIONS.index(case.function), dims)
        into = torch.ops.onepass._softmax_backward.out
        if case.function == "logsumexp":
            into, given = torch.ops.onepass._logsumexp_backward.out, (grad, x, y, dims, False)

        def call() -> Tensor:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # where a kernel in Python raises the version
                torch._C._dispatch_call_boxed(into._handle, *given, out)
            return out

        return call

    def version(self) -> str | None:
        import onepass

        return onepass.__version__

    def engine(self, work: Work) -> str | None:
        import onepass

        explanation = onepass.explain(
            work.x,
            work.case.dim,
            function=work.case.function,
            out_dtype=work.out_dtype,
            engine=self.chosen,
            bandwidth=1.0,  # given, so that none is measured
        )
        return explanation.engine

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


def _several(case: Case) -> bool:
    """Are there several dims, of which torch's function takes one?"""
    return case.function != "logsumexp" and len(case.dims()) > 1


def _joined(work: Work) -> Work:
    """The last dims, several, as one: views, as a user of torch has it."""
    case = work.case
    first = len(case.shape) - len(case.dims())
    x = work.x.flatten(first)
    out, grad = (None if t is None else t.flatten(first) for t in (work.out, work.grad))
    return replace(work, case=replace(case, shape=tuple(x.shape), dim=-1), x=x, out=out, grad=grad)


class Torch(Provider):
    """torch's own function. In other layouts into a result of its own, of the strides that torch gives it."""

    name = "torch"
    label = "torch"

    def supports(self, case: Case, dtype: str) -> str | None:
        rank, dims = len(case.shape), case.dims()
        if _several(case) and (case.layout or dims != tuple(range(rank - len(dims), rank))):
            return f"torch's {case.function} takes one dim, or several last ones of a contiguous tensor as one"
        return None

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward" and case.function != "softmin" and not case.layout

    def writes(self, work: Work) -> bool:
        case = work.case
        return super().writes(work) or (work.grad is not None and case.function != "softmin" and not case.layout)

    def prepare(self, work: Work) -> Call:
        if not _several(work.case):
            return super().prepare(work)
        call, shape = super().prepare(_joined(work)), work.case.shape
        return lambda: call().view(shape)

    def gradient(self, work: Work) -> Call:
        """The operators that torch's autograd calls, in their form with an `out`; of logsumexp its three steps."""
        case, x, grad, out = work.case, work.x, cast(Tensor, work.grad), cast(Tensor, work.out)
        y = self.function(case, work.dtype)(x)
        if case.function == "logsumexp":
            for dim in case.dims():
                grad, y = grad.unsqueeze(dim), y.unsqueeze(dim)
            return lambda: torch.sub(x, y, out=out).exp_().mul_(grad)
        (dim,) = case.dims()
        if case.function == "softmax":
            return lambda: torch._softmax_backward_data(grad, y, dim, x.dtype, grad_input=out)
        return lambda: torch._log_softmax_backward_data(grad, y, dim, x.dtype, out=out)

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

    def writes(self, work: Work) -> bool:
        return False

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if self._made is None or self._made[0] != (case, dtype):
            torch._dynamo.reset()  # else the ninth shape is over the limit of recompilations and runs uncompiled
            self._made = ((case, dtype), torch.compile(_torch_call(case), dynamic=False))
        return self._made[1]


class Naive(Provider):
    """The definition, a torch operator a step: each step reads and writes the whole tensor.

    It is the rung `naive` of the gallery for what a rung takes, and the same steps for every other function, dim and
    dtype. Half types are computed in float32 and rounded at the end: in the half type itself `x - max(x)` alone would
    cost 1.6% of a probability's value.
    """

    name = "naive"
    label = "naive PyTorch, the gallery's first rung"

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward" and case.function == "softmax"

    def workspace(self, case: Case, dtype: str) -> int:
        return 4 * prod(case.shape) * max(4, ITEMSIZE[dtype])  # at most four whole temporaries at a time

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if refusal(VARIANTS["naive"], case, dtype) is None:
            return VARIANTS["naive"]
        dims, result = case.dims(), getattr(torch, case.out_dtype or dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32

        def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.to(wide)
            top = x.amax(dims, keepdim=True)
            return x - top, top

        def softmax(x: Tensor, out: Tensor | None = None) -> Tensor:
            e = shifted(x)[0].exp()
            total = e.sum(dims, keepdim=True)
            return (e / total).to(result) if out is None else torch.div(e, total, out=out)

        def log_softmax(x: Tensor) -> Tensor:
            z = shifted(x)[0]
            return (z - z.exp().sum(dims, keepdim=True).log()).to(result)

        def logsumexp(x: Tensor) -> Tensor:
            z, top = shifted(x)
            return (top + z.exp().sum(dims, keepdim=True).log()).squeeze(dims).to(result)

        made = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
        return made.get(case.function) or (lambda x: softmax(-x))


_OWN = (*map(Onepass, ("auto", "cpu", "cuda", "triton")), Torch(), TorchCompile(), Naive(), Liger(), Quack())
for _provider in (*_OWN, *rungs()):
    register(_provider)
