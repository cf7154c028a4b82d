"""onepass, torch and other packages as providers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

import onepass
from onepass._engines import unavailable
from onepass.tools.bench.cases import FUNCTIONS, ITEMSIZE, Case
from onepass.tools.bench.collect_env import version as version_of
from onepass.tools.bench.correctness import Inputs, blocked, distances
from onepass.tools.bench.gallery_providers import gallery_unsupported
from onepass.tools.bench.provider import INTERPRETED, Call, Provider
from onepass.tools.gallery import VARIANTS

_ENGINES = {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")}  # by the device type of the tensors


class Onepass(Provider):
    """onepass itself, with `engine="auto"` or one engine."""

    takes_scores = True

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
            return INTERPRETED
        return "auto selects it here" if self._available(device)[:1] == [self.requested] else None

    def _available(self, device: torch.device) -> list[str]:
        """The engines that can run on the device; auto selects the first."""
        return [engine for engine in _ENGINES[device.type] if unavailable(engine, device) is None]

    def writes_out(self, inputs: Inputs) -> bool:
        return not inputs.side and (inputs.grad is None or self.requested != "triton")

    def backward(self, inputs: Inputs) -> Call:
        case, x, grad, out = inputs.case, inputs.x, inputs.grad, cast(Tensor, inputs.out)
        y, dims = self.forward(case, inputs.dtype)(x), list(case.dims())
        if case.function == "logsumexp":
            op: Any = torch.ops.onepass._logsumexp_backward.out
            arguments: tuple[Any, ...] = (grad, x, y, dims, False)
        else:
            op, arguments = torch.ops.onepass._softmax_backward.out, (grad, y, FUNCTIONS.index(case.function), dims)

        def call() -> Tensor:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # skips a kernel in Python that increments the version
                torch._C._dispatch_call_boxed(op._handle, *arguments, out)
            return out

        return call

    def version(self) -> str | None:
        return onepass.__version__

    def engine(self, inputs: Inputs) -> str | None:
        case, out_dtype = inputs.case, _options(inputs.case).get("dtype")
        options: dict[str, Any] = {
            "engine": self.requested,
            "bandwidth": 1.0,
        }  # any bandwidth, so that none is measured
        return onepass.explain(inputs.x, case.dim, function=case.function, out_dtype=out_dtype, **options).engine

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        f, options = getattr(onepass, case.function), _options(case)
        return lambda x, out=None, **side: f(x, case.dim, out=out, engine=self.requested, **options, **side)


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
    f = partial(_TORCH[case.function], dim=case.dim, **_options(case))
    return partial(_chain, f, case.dim) if case.scores else f


def _chain(
    f: Callable[[Tensor], Tensor],
    dim: Any,
    x: Tensor,
    scale: Tensor | float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    blocked: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The scores as users of torch write them, a step after another in the input's dtype, and their softmax."""
    if scale is not None:
        x = x * scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + bias
    if blocked is not None:
        x = x.masked_fill(blocked, -torch.inf)
    if sink is None:
        return f(x)
    column = sink.expand(x.narrow(dim, 0, 1).shape)
    return f(torch.cat([x, column], dim)).narrow(dim, 0, x.size(dim))


def _needs_flatten(case: Case) -> bool:
    """Whether the case has several dims and torch's function takes one."""
    return case.function != "logsumexp" and len(case.dims()) > 1


class Torch(Provider):
    """torch's own function. In a layout that is not contiguous, the result has the strides that torch chooses.

    These are contiguous, and so is the output that is allocated beforehand in place of the given one.
    """

    name = label = "torch"
    takes_scores = stepwise = True

    def unsupported(self, case: Case, dtype: str) -> str | None:
        rank, dims = len(case.shape), case.dims()
        if _needs_flatten(case) and (case.layout or dims != tuple(range(rank - len(dims), rank))):
            return f"torch's {case.function} takes one dim, or the last dims of a contiguous tensor as one"
        return None

    def writes_out(self, inputs: Inputs) -> bool:
        case = inputs.case
        return case.function != "softmin" and not (case.layout and inputs.grad is not None) and not inputs.side

    def workspace(self, case: Case, dtype: str) -> int:
        return super().workspace(case, dtype) * (6 if case.scores else 1)  # a result of each step

    def side(self, inputs: Inputs) -> dict[str, Any]:
        """A bias and a mask. They contain all terms that depend on positions, and are made before the call is timed."""
        case, given, x = inputs.case, inputs.side, inputs.x
        side: dict[str, Any] = {name: given[name] for name in ("scale", "softcap", "bias") if name in given}
        if "alibi" in given:
            slopes = given["alibi"].to(torch.promote_types(x.dtype, torch.float32))[..., None, None]
            far = -slopes * distances(case, given, x.device).abs()
            side["bias"] = (far + given.get("bias", 0.0)).to(x.dtype)
        side["blocked"] = blocked(case, given, x.device)
        if "sink" in given:
            side["sink"] = torch.as_tensor(given["sink"], dtype=x.dtype, device=x.device)
        return side

    def prepare(self, inputs: Inputs) -> Call:
        case = inputs.case
        if case.layout and inputs.out is not None and self.writes_out(inputs):
            inputs = replace(inputs, out=torch.empty_like(inputs.out, memory_format=torch.contiguous_format))
        if not _needs_flatten(case):
            return super().prepare(inputs)
        # A user of torch would view the last dims as one.
        first = len(case.shape) - len(case.dims())
        x = inputs.x.flatten(first)
        out, grad = (None if t is None else t.flatten(first) for t in (inputs.out, inputs.grad))
        flat = replace(case, shape=tuple(x.shape), dim=-1)
        call = super().prepare(Inputs(flat, inputs.dtype, x, out, grad))
        return lambda: call().view(case.shape)

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


def compile_for_case(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()  # or the ninth shape exceeds the limit of recompilations and runs uncompiled
    torch._functorch.config.donated_buffer = False  # a backward that is called again needs its saved tensors
    return torch.compile(f, dynamic=False, **options)


def compiler_missing(device: torch.device) -> str | None:
    """What torch.compile needs but does not find, or None."""
    if device.type == "cpu":
        return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"
    return None if version_of("triton") else "needs triton"


class TorchCompile(Torch):
    """Inductor's code for torch's own function, compiled for each shape."""

    name, label = "torch-compile", "torch.compile"
    quick = False  # the first compilation takes 16 s on two cores

    def __init__(self) -> None:
        self._compiled: tuple[tuple[Case, str], Callable[..., Tensor]] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        return compiler_missing(device)

    def writes_out(self, inputs: Inputs) -> bool:
        return False

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if self._compiled is None or self._compiled[0] != (case, dtype):
            self._compiled = ((case, dtype), compile_for_case(_torch_call(case)))
        return self._compiled[1]


class Naive(Provider):
    """The definition with one torch operator per step; each step reads and writes the whole tensor.

    It is the gallery's variant `naive` if that supports the case, else the same steps. 16-bit types are computed in
    float32 and rounded at the end: in 16 bits `x - max(x)` alone would cost 1.6% of a probability's value.
    """

    name, label = "naive", "naive PyTorch, the first variant of the gallery"

    def writes_out(self, inputs: Inputs) -> bool:
        return inputs.grad is None and inputs.case.function == "softmax"

    def workspace(self, case: Case, dtype: str) -> int:
        return 4 * prod(case.shape) * max(4, ITEMSIZE[dtype])  # at most four temporaries at a time

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if gallery_unsupported(VARIANTS["naive"], case, dtype) is None:
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


# Other packages, if they are installed


class Liger(Provider):
    """Liger-Kernel's Triton softmax."""

    name, label = "liger", "Liger"
    MAX_ROW = 65536  # up to 0.8.5 a longer row raises, although a kernel for it exists

    def unavailable(self, device: torch.device) -> str | None:
        missing = None if self.version() else "liger-kernel is not installed"
        return "does not support cpu tensors" if device.type == "cpu" else missing

    def unsupported(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "Liger has only softmax without a dtype"
        if case.dims() != (len(case.shape) - 1,):
            return "Liger takes only the last dim"
        version = [int(number) for number in re.findall(r"\d+", self.version() or "")[:3]]
        limited = case.row() > self.MAX_ROW and version <= [0, 8, 5]
        return f"Liger takes rows of at most {self.MAX_ROW} elements" if limited else None

    def version(self) -> str | None:
        return version_of("liger-kernel")

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        return cast(Call, import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply)


class Quack(Provider):
    """QuACK's softmax in the CuTe DSL, from quack-kernels. It compiles a kernel for each row length and dtype in its
    first call, which takes about a second and is the checked call."""

    name, label = "quack", "QuACK"
    DTYPES = ("float32", "bfloat16", "float16")
    VECTOR_BYTES = 16  # a row must be a multiple of one load
    MAX_ROW_BYTES = 16 * 232448  # a row must fit into the shared memory of 16 blocks

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "does not support cpu tensors"
        if torch.version.hip:
            return "needs an NVIDIA GPU"
        return None if self.version() else "quack-kernels is not installed"

    def unsupported(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "QuACK has only softmax without a dtype"
        if len(case.shape) != 2 or case.dims() != (1,) or case.layout:
            return "QuACK takes the last dim of a matrix"
        if dtype not in self.DTYPES:
            return f"QuACK takes {', '.join(self.DTYPES)}"
        row_bytes = case.row() * ITEMSIZE[dtype]
        if row_bytes % self.VECTOR_BYTES:
            return f"QuACK takes rows of a multiple of {self.VECTOR_BYTES} bytes"
        if row_bytes > self.MAX_ROW_BYTES:  # its loops are unrolled, and the compilation would not end
            return f"QuACK takes rows of at most {self.MAX_ROW_BYTES} bytes, the shared memory of 16 blocks"
        return None

    def version(self) -> str | None:
        return version_of("quack-kernels")

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        return cast(Call, import_module("quack.softmax").softmax)  # attribute `quack.softmax` hides the module
