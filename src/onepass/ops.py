"""The operators in PyTorch: fake kernels, gradients, vmap, and the route a call takes.

Three routes: no gradient needed -> the raw operator, which costs least; eager autograd and function transforms ->
`Differentiable`; compiling, and tensor subclasses -> the registered operator, which a graph keeps by name. The plain
call of the first, which is most calls, has a way of its own (plain.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import native  # noqa: F401  (loads the operators)
from . import triton as triton_engine

FAMILY = ("softmax", "log_softmax", "softmin")
_ops = torch.ops.onepass
RAW = {name: getattr(_ops, f"_{name}").default._op for name in (*FAMILY, "logsumexp")}
_REGISTERED = {name: getattr(_ops, name).default for name in (*FAMILY, "logsumexp")}
_OUT = {name: getattr(_ops, name).out for name in (*FAMILY, "logsumexp")}

library = torch.library.Library("onepass", "FRAGMENT")
_TRITON = "(Tensor input, str function, int[] dim, ScalarType? dtype, bool keepdim"
library.define(f"triton{_TRITON}) -> Tensor")
library.define(f"triton.out{_TRITON}, *, Tensor(a!) out) -> ()")


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    kept = [1 if i in dims else size for i, size in enumerate(shape)]
    return kept if keepdim else [size for i, size in enumerate(kept) if i not in dims]


def empty(function: str, x: Tensor, dims: Sequence[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    if function == "logsumexp":
        return x.new_empty(reduced_shape(x.shape, [d % max(x.dim(), 1) for d in dims], keepdim))
    return torch.empty_like(x, dtype=dtype or x.dtype)


# Gradients, by plain arithmetic on what was saved: differentiable themselves, so second order comes with them ------


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _weights(function: str, saved: Sequence[Tensor], dims: Sequence[int], keepdim: bool) -> Tensor:
    """The softmax that a gradient of log_softmax or logsumexp is weighted with."""
    if function == "log_softmax":
        return _wide(saved[0]).exp()
    x, lse = saved
    return (_wide(x) - _wide(_expand(lse, dims, keepdim))).exp()


def _expand(reduced: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    if not keepdim:
        for dim in sorted(dims):
            reduced = reduced.unsqueeze(dim)
    return reduced


def _backward(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype
) -> Tensor:
    if function == "logsumexp":
        return (_wide(_expand(g, dims, keepdim)) * _weights(function, saved, dims, keepdim)).to(to)
    g = _wide(g)
    if function == "log_softmax":
        return (g - _weights(function, saved, dims, keepdim) * g.sum(dims, keepdim=True)).to(to)
    y = _wide(saved[0])
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    return (dx if function == "softmax" else -dx).to(to)


def _tangent(
    function: str, t: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype
) -> Tensor:
    t = _wide(t)
    if function == "logsumexp":
        return (t * _weights(function, saved, dims, keepdim)).sum(dims, keepdim=keepdim).to(to)
    if function == "log_softmax":
        return (t - (_weights(function, saved, dims, keepdim) * t).sum(dims, keepdim=True)).to(to)
    y = _wide(saved[0])
    dy = y * (t - (t * y).sum(dims, keepdim=True))
    return (dy if function == "softmax" else -dy).to(to)


class Differentiable(torch.autograd.Function):
    """A call under eager autograd or a function transform (torch.func)."""

    @staticmethod
    def forward(
        x: Tensor, function: str, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str
    ) -> Tensor:
        return raw(function, x, dims, dtype, keepdim, engine)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.function, ctx.dims, ctx.dtype, ctx.keepdim, ctx.engine = inputs
        ctx.input_dtype, ctx.output_dtype = x.dtype, output.dtype
        saved = (x, output) if ctx.function == "logsumexp" else (output,)  # what torch saves, no more
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx = _backward(ctx.function, g, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.input_dtype)
        return dx, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, *_: None) -> Tensor | None:
        if t is None:
            return None
        return _tangent(ctx.function, t, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.output_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        function, dims, dtype, keepdim, engine = rest
        x = x.movedim(in_dims[0] or 0, 0)
        if x.dim() == 1 and dims:  # a batch of 0-d tensors: the one dim of each is not there to name
            return Differentiable.apply(x.unsqueeze(1), function, [1], dtype, False, engine).reshape(x.shape), 0
        return Differentiable.apply(x, function, [d + 1 for d in dims], dtype, keepdim, engine), 0


# Routes -------------------------------------------------------------------------------------------------------------


def raw(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """The kernel alone: no gradient, no checks but the kernel's own."""
    if engine == "triton":
        return _ops.triton.default(x, function, dims, dtype, keepdim)
    if function == "logsumexp":
        return RAW[function](x, dims, keepdim)
    return RAW[function](x, dims) if dtype is None else RAW[function](x, dims, dtype=dtype)


def call(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """A checked call by the route that its surroundings ask for."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        if engine == "triton":
            return _ops.triton.default(x, function, dims, dtype, keepdim)
        if function == "logsumexp":
            return _REGISTERED[function](x, dims, keepdim)
        return _REGISTERED[function](x, dims, dtype=dtype)
    if (
        (x.requires_grad and torch.is_grad_enabled())
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return Differentiable.apply(x, function, dims, dtype, keepdim, engine)
    return raw(function, x, dims, dtype, keepdim, engine)


def call_out(
    function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str, out: Tensor
) -> None:
    """A checked call into a checked `out`."""
    given: tuple[Any, ...] = (x, dims)
    named: dict[str, Any] = {"out": out}
    if engine == "triton":
        operator, given = _ops.triton.out, (x, function, dims, dtype, keepdim)
    elif function == "logsumexp":
        operator, given = _OUT[function], (x, dims, keepdim)
    else:
        operator, named = _OUT[function], {"dtype": dtype, "out": out}
    if torch.compiler.is_compiling():
        operator(*given, **named)
        return
    with torch._C._AutoDispatchBelowADInplaceOrView():  # the version is raised here, at a tenth of the cost
        operator(*given, **named)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


# Registrations ------------------------------------------------------------------------------------------------------


# A graph calls these two; what they launch is not to be traced when it runs.
@torch._disable_dynamo
def _triton_out(
    input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool, *, out: Tensor
) -> None:
    dims = sorted(d % input.dim() for d in dim) if input.dim() else []
    whole = out if function != "logsumexp" or keepdim else _expand(out, dims, False)
    triton_engine.forward(function, input, whole, tuple(dims))


@torch._disable_dynamo
def _triton_kernel(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    out = empty(function, input, dim, dtype, keepdim)
    _triton_out(input, function, dim, dtype, keepdim, out=out)
    return out


def _raise_version(name: str, operator: Any) -> None:
    """Who saved `out` for a backward must learn that it was overwritten, also by a direct call of the operator."""

    def overwrite(keyset: Any, *given: Any, out: Tensor, **named: Any) -> None:
        torch.autograd.graph.increment_version(out)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *given, out=out, **named)

    library.impl(name, overwrite, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"onepass::{name}", lambda *_, **__: None, lib=library)


for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton", _triton_kernel, _key)
    library.impl("triton.out", _triton_out, _key)


def _setup(ctx: Any, function: str, x: Tensor, dims: list[int], keepdim: bool, output: Tensor) -> None:
    ctx.function, ctx.dims, ctx.keepdim, ctx.input_dtype = function, dims, keepdim, x.dtype
    ctx.save_for_backward(*((x, output) if function == "logsumexp" else (output,)))


def _gradient(ctx: Any, g: Tensor) -> Tensor:
    dims = [
        d % max(g.dim() + (0 if ctx.keepdim or ctx.function != "logsumexp" else len(ctx.dims)), 1) for d in ctx.dims
    ]
    return _backward(ctx.function, g, ctx.saved_tensors, dims, ctx.keepdim, ctx.input_dtype)


def _register(function: str) -> None:
    lse = function == "logsumexp"

    def fake(input: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return empty(function, input, dim, dtype, keepdim)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Any = None) -> None:
        _setup(ctx, function, inputs[0], inputs[1], lse and inputs[2], output)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradient(ctx, g), None, None) if lse else (_gradient(ctx, g), None)

    for name in (function, f"_{function}"):
        torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    _raise_version(f"{function}.out", _OUT[function])
    torch.library.register_autograd(f"onepass::{function}", backward, setup_context=setup, lib=library)


for _name in (*FAMILY, "logsumexp"):
    _register(_name)


@torch.library.register_fake("onepass::triton", lib=library)
def _(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    return empty(function, input, dim, dtype, keepdim)


_raise_version("triton.out", _ops.triton.out)


def _triton_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, function, dims, _, keepdim = inputs
    _setup(ctx, function, x, dims, keepdim, output)


torch.library.register_autograd(
    "onepass::triton",
    lambda ctx, g: (_gradient(ctx, g), None, None, None, None),
    setup_context=_triton_setup,
    lib=library,
)
