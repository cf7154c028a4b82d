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
from .gradients import backward, expand, expand_planes, tangent

FAMILY = ("softmax", "log_softmax", "softmin")
REDUCTIONS = ("logsumexp", "state")  # of which state gives two planes, the maxima and the sums
_ops = torch.ops.onepass
RAW = {name: getattr(_ops, f"_{name}").default._op for name in (*FAMILY, *REDUCTIONS)}
_REGISTERED = {name: getattr(_ops, name).default for name in (*FAMILY, *REDUCTIONS)}
_OUT = {name: getattr(_ops, name).out for name in (*FAMILY, "logsumexp")}

library = torch.library.Library("onepass", "FRAGMENT")
_TRITON = "(Tensor input, str function, int[] dim, ScalarType? dtype, bool keepdim"
library.define(f"triton{_TRITON}) -> Tensor")
library.define(f"triton.out{_TRITON}, *, Tensor(a!) out) -> ()")


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    kept = [1 if i in dims else size for i, size in enumerate(shape)]
    return kept if keepdim else [size for i, size in enumerate(kept) if i not in dims]


def state_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a state: the one that a row is computed in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def empty(function: str, x: Tensor, dims: Sequence[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    if function in REDUCTIONS:
        shape = reduced_shape(x.shape, [d % max(x.dim(), 1) for d in dims], keepdim)
        return x.new_empty([2, *shape], dtype=state_dtype(x)) if function == "state" else x.new_empty(shape)
    return torch.empty_like(x, dtype=dtype or x.dtype)


class Differentiable(torch.autograd.Function):
    """A call under a function transform (torch.func) or forward-mode AD."""

    @staticmethod
    def forward(
        x: Tensor, function: str, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str
    ) -> Tensor:
        return raw(function, x, dims, dtype, keepdim, engine)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.function, ctx.dims, ctx.dtype, ctx.keepdim, ctx.engine = inputs
        ctx.input_dtype, ctx.output_dtype = x.dtype, output.dtype
        saved = (x, output) if ctx.function in REDUCTIONS else (output,)  # what torch saves, no more
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx = backward(ctx.function, g, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.input_dtype)
        return dx, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, *_: None) -> Tensor | None:
        if t is None:
            return None
        return tangent(ctx.function, t, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.output_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        function, dims, dtype, keepdim, engine = rest
        x = x.movedim(in_dims[0] or 0, 0)
        batch = int(function == "state")  # where the batch comes out: behind the planes
        if x.dim() == 1 and dims:  # a batch of 0-d tensors: the one dim of each is not there to name
            y = Differentiable.apply(x.unsqueeze(1), function, [1], dtype, False, engine)
            return y.reshape(y.shape[: batch + 1]), batch
        return Differentiable.apply(x, function, [d + 1 for d in dims], dtype, keepdim, engine), batch


class Recorded(torch.autograd.Function):
    """A call under eager autograd alone. Its forward has the context too: an eighth of the cost of binding arguments to
    `setup_context`, which transforms need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: str, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str
    ) -> Tensor:
        output = raw(function, x, dims, dtype, keepdim, engine)
        ctx.function, ctx.dims, ctx.keepdim, ctx.input_dtype = function, dims, keepdim, x.dtype
        ctx.save_for_backward(*((x, output) if function in REDUCTIONS else (output,)))
        return output

    backward = staticmethod(Differentiable.backward)


# Routes -------------------------------------------------------------------------------------------------------------


def raw(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """The kernel alone: no gradient, no checks but the kernel's own."""
    if engine == "triton":
        return _ops.triton.default(x, function, dims, dtype, keepdim)
    if function in REDUCTIONS:
        return RAW[function](x, dims, keepdim)
    return RAW[function](x, dims) if dtype is None else RAW[function](x, dims, dtype=dtype)


def call(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """A checked call by the route that its surroundings ask for."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        if engine == "triton":
            return _ops.triton.default(x, function, dims, dtype, keepdim)
        if function in REDUCTIONS:
            return _REGISTERED[function](x, dims, keepdim)
        return _REGISTERED[function](x, dims, dtype=dtype)
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return Differentiable.apply(x, function, dims, dtype, keepdim, engine)
    if x.requires_grad and torch.is_grad_enabled():
        return Recorded.apply(x, function, dims, dtype, keepdim, engine)
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
    whole = out
    if function in REDUCTIONS:
        whole = (expand_planes if function == "state" else expand)(out, dims, keepdim)
    triton_engine.forward(function, input, whole, tuple(dims))


@torch._disable_dynamo
def _triton_kernel(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    out = empty(function, input, dim, dtype, keepdim)
    _triton_out(input, function, dim, dtype, keepdim, out=out)
    return out


def _raise_version(name: str, operator: Any) -> None:
    """Who saved `out` for a backward must learn that it was overwritten, also by a direct call of the operator."""

    def overwrite(keyset: Any, *given: Any, **named: Any) -> None:
        torch.autograd.graph.increment_version(named.get("out", given[-1]))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *given, **named)

    library.impl(name, overwrite, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"onepass::{name}", lambda *_, **__: None, lib=library)


for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton", _triton_kernel, _key)
    library.impl("triton.out", _triton_out, _key)


def _setup(ctx: Any, function: str, x: Tensor, dims: list[int], keepdim: bool, output: Tensor) -> None:
    ctx.function, ctx.dims, ctx.keepdim, ctx.input_dtype = function, dims, keepdim, x.dtype
    ctx.save_for_backward(*((x, output) if function in REDUCTIONS else (output,)))


def _gradient(ctx: Any, g: Tensor) -> Tensor:
    saved = ctx.saved_tensors  # of which the first has the rank of the input
    dims = [d % max(saved[0].dim(), 1) for d in ctx.dims]
    return backward(ctx.function, g, saved, dims, ctx.keepdim, ctx.input_dtype)


def _register(function: str) -> None:
    reduces = function in REDUCTIONS

    def fake(input: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return empty(function, input, dim, dtype, keepdim)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Any = None) -> None:
        _setup(ctx, function, inputs[0], inputs[1], reduces and inputs[2], output)

    def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradient(ctx, g), None, None) if reduces else (_gradient(ctx, g), None)

    for name in (function, f"_{function}"):
        torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    if function in _OUT:
        _raise_version(f"{function}.out", _OUT[function])
    torch.library.register_autograd(f"onepass::{function}", gradients, setup_context=setup, lib=library)


for _name in (*FAMILY, *REDUCTIONS):
    _register(_name)


@torch.library.register_fake("onepass::_softmax_backward", lib=library)
def _(grad: Tensor, y: Tensor, function: int, dim: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_like(y, dtype=dtype)


@torch.library.register_fake("onepass::_logsumexp_backward", lib=library)
def _(grad: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return torch.empty_like(x)


for _name in ("_softmax_backward", "_logsumexp_backward"):
    _raise_version(f"{_name}.out", getattr(_ops, _name).out)


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
