"""The providers of this package: onepass and its engines, torch, torch.compile and naive PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

import onepass
from onepass._engines import unavailable
from onepass.tools.bench.cases import FUNCTIONS, ITEMSIZE, Case
from onepass.tools.bench.collect_env import version as version_of
from onepass.tools.bench.inputs import Inputs
from onepass.tools.bench.providers import Call, Provider, gallery, register
from onepass.tools.bench.providers.third_party import Liger, Quack
from onepass.tools.gallery import VARIANTS

_ENGINES = {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")}  # by the device type of the tensors


class Onepass(Provider):
    """onepass itself, with `engine="auto"` or one engine."""

    def __init__(self, engine: str = "auto"):
        self.requested = engine
        self.name = "onepass" if engine == "auto" else f"onepass-{engine}"
        self.label = "onepass" if engine == "auto" else f"onepass ({engine} engine)"

    def unavailable(self, device: torch.device) -> str | None:
        if self.requested == "auto":
            return None if self._available(device) else f"no engine supports {device.type} here"
        if self.requested not in _ENGINES[device.type]:
            return f"does not support {device.type} tensors"
        return unavailable(self.requested, device)

    def redundant(self, device: torch.device) -> str | None:
        if self.requested == "triton" and device.type == "cpu":
            return gallery.INTERPRETED
        return "auto selects it here" if self._available(device)[:1] == [self.requested] else None

    def _available(self, device: torch.device) -> list[str]:
        """The engines that can run on the device; auto selects the first."""
        return [engine for engine in _ENGINES[device.type] if unavailable(engine, device) is None]

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward"

    def writes_out(self, inputs: Inputs) -> bool:
        return super().writes_out(inputs) or (inputs.grad is not None and self.requested != "triton")

    def backward(self, inputs: Inputs) -> Call:
        case, x, grad, out = inputs.case, inputs.x, inputs.grad, cast(Tensor, inputs.out)
        y, dims = self.forward(case, inputs.dtype)(x), list(case.dims())
        if case.function == "logsumexp":
            op: Any = torch.ops.onepass._logsumexp_backward.out
            arguments: tuple[Any, ...] = (grad, x, y, dims, False)
        else:
            op, arguments = torch.ops.onepass._softmax_backward.out, (grad, y, FUNCTIONS.index(case.function), dims)

        def call() -> Tensor:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # where a kernel in Python raises the version
                torch._C._dispatch_call_boxed(op._handle, *arguments, out)
            return out

        return call

    def version(self) -> str | None:
        return onepass.__version__

    def engine(self, inputs: Inputs) -> str | None:
        explanation = onepass.explain(
            inputs.x,
            inputs.case.dim,
            function=inputs.case.function,
            out_dtype=_options(inputs.case).get("dtype"),
            engine=self.requested,
            bandwidth=1.0,  # any number, so that none is measured
        )
        return explanation.engine

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        f, options = getattr(onepass, case.function), _options(case)
        return lambda x, out=None: f(x, case.dim, out=out, engine=self.requested, **options)


_TORCH: dict[str, Callable[..., Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmin": torch.nn.functional.softmin,
    "logsumexp": torch.logsumexp,
}


def _options(case: Case) -> dict[str, torch.dtype]:
    """The `dtype=` of a call, if the case has one."""
    return {"dtype": getattr(torch, case.out_dtype)} if case.out_dtype else {}


def _torch_call(case: Case) -> Callable[..., Tensor]:
    f, dim, options = _TORCH[case.function], case.dim, _options(case)
    return lambda x, **out: f(x, dim, **options, **out)


def _needs_flatten(case: Case) -> bool:
    """Whether the case has several dims and torch's function takes one."""
    return case.function != "logsumexp" and len(case.dims()) > 1


def _flatten(inputs: Inputs) -> Inputs:
    """The same inputs with the last dims as one, as a user of torch would view them."""
    case = inputs.case
    first = len(case.shape) - len(case.dims())
    x = inputs.x.flatten(first)
    out, grad = (None if t is None else t.flatten(first) for t in (inputs.out, inputs.grad))
    return replace(inputs, case=replace(case, shape=tuple(x.shape), dim=-1), x=x, out=out, grad=grad)


class Torch(Provider):
    """torch's own function. In a layout that is not contiguous, the result has the strides that torch chooses."""

    name = label = "torch"

    def unsupported(self, case: Case, dtype: str) -> str | None:
        rank, dims = len(case.shape), case.dims()
        if _needs_flatten(case) and (case.layout or dims != tuple(range(rank - len(dims), rank))):
            return f"torch's {case.function} takes one dim, or the last dims of a contiguous tensor as one"
        return None

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward" and case.function != "softmin" and not case.layout

    def writes_out(self, inputs: Inputs) -> bool:
        case = inputs.case
        has_backward = inputs.grad is not None and case.function != "softmin" and not case.layout
        return super().writes_out(inputs) or has_backward

    def prepare(self, inputs: Inputs) -> Call:
        if not _needs_flatten(inputs.case):
            return super().prepare(inputs)
        call, shape = super().prepare(_flatten(inputs)), inputs.case.shape
        return lambda: call().view(shape)

    def backward(self, inputs: Inputs) -> Call:
        """The operators that torch's autograd calls, in their `out` form; for logsumexp its three operations."""
        case, x, grad, out = inputs.case, inputs.x, cast(Tensor, inputs.grad), cast(Tensor, inputs.out)
        y = self.forward(case, inputs.dtype)(x)
        if case.function == "logsumexp":
            for dim in case.dims():
                grad, y = grad.unsqueeze(dim), y.unsqueeze(dim)
            return lambda: torch.sub(x, y, out=out).exp_().mul_(grad)
        (dim,) = case.dims()
        if case.function == "softmax":
            return lambda: torch._softmax_backward_data(grad, y, dim, x.dtype, grad_input=out)
        return lambda: torch._log_softmax_backward_data(grad, y, dim, x.dtype, out=out)

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        return _torch_call(case)


class TorchCompile(Torch):
    """Inductor's code for torch's own function, compiled for each shape."""

    name = "torch-compile"
    label = "torch.compile"
    quick = False  # the first compilation takes 16 s on two cores

    def __init__(self) -> None:
        self._compiled: tuple[tuple[Case, str], Callable[..., Tensor]] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"
        return None if version_of("triton") else "needs triton"

    def takes_out(self, case: Case) -> bool:
        return False

    def writes_out(self, inputs: Inputs) -> bool:
        return False

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if self._compiled is None or self._compiled[0] != (case, dtype):
            torch._dynamo.reset()  # or the ninth shape exceeds the limit of recompilations and runs uncompiled
            self._compiled = ((case, dtype), torch.compile(_torch_call(case), dynamic=False))
        return self._compiled[1]


class Naive(Provider):
    """The definition with one torch operator per step; each step reads and writes the whole tensor.

    Where the gallery's variant `naive` supports the case, this is that variant, and else the same steps for any
    function, dim and dtype. 16-bit types are computed in float32 and rounded at the end: in the 16-bit type itself
    `x - max(x)` alone would cost 1.6% of a probability's value.
    """

    name = "naive"
    label = "naive PyTorch, the first variant of the gallery"

    def takes_out(self, case: Case) -> bool:
        return case.direction == "forward" and case.function == "softmax"

    def workspace(self, case: Case, dtype: str) -> int:
        return 4 * prod(case.shape) * max(4, ITEMSIZE[dtype])  # at most four temporaries at a time

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if gallery.unsupported(VARIANTS["naive"], case, dtype) is None:
            return VARIANTS["naive"]
        dims, result = case.dims(), getattr(torch, case.out_dtype or dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32

        def naive(x: Tensor, out: Tensor | None = None) -> Tensor:
            x = -x.to(wide) if case.function == "softmin" else x.to(wide)
            top = x.amax(dims, keepdim=True)
            z = x - top
            e = z.exp()
            total = e.sum(dims, keepdim=True)
            if case.function == "log_softmax":
                return (z - total.log()).to(result)
            if case.function == "logsumexp":
                return (top + total.log()).squeeze(dims).to(result)
            return (e / total).to(result) if out is None else torch.div(e, total, out=out)

        return naive


_ENGINE_PROVIDERS = map(Onepass, ("auto", "cpu", "cuda", "triton"))
for _provider in (*_ENGINE_PROVIDERS, Torch(), TorchCompile(), Naive(), Liger(), Quack(), *gallery.providers()):
    register(_provider)
