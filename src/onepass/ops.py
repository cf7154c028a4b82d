"""The operators in PyTorch: fake kernels, gradients, vmap, and the route a call takes.

Three routes: no gradient needed -> the operator below autograd, which costs least; eager autograd -> `EagerFunction`,
function transforms and forward-mode AD -> `TransformFunction`; compiling, and tensor subclasses -> the registered
operator, which a graph keeps by name, and which takes the other routes itself when it is called. The plain call of the
first, which is most calls, has a fast path of its own (functional.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import native  # noqa: F401  (loads the operators)
from . import triton as triton_engine
from .autograd import backward, library, needs_no_autograd, tangent, wrap_dims
from .decompositions import unsqueeze_planes, unsqueeze_reduced
from .settings import autocast_to_float32
from .validation import FLOATS, HALVES, TAKES, check_inference, check_memory, has_tangent, normalize_dims

FAMILY = ("softmax", "log_softmax", "softmin")
REDUCTIONS = ("logsumexp", "state")  # of which state gives two planes, the maxima and the sums
_ops = torch.ops.onepass
_REGISTERED = {name: getattr(_ops, name).default for name in (*FAMILY, *REDUCTIONS)}
_CALLED = {name: operator._op for name, operator in _REGISTERED.items()}  # without a look for __torch_function__
_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # past the Python kernels that record, 3 us a call
# The plain call of one dim, straight into the dispatcher: the call of an OpOverload first looks for __torch_function__
# and a jit tracer.
HANDLES = {name: getattr(_ops, f"_{name}").int._handle for name in (*FAMILY, "logsumexp")}
call_boxed = torch._C._dispatch_call_boxed
OUT_HANDLES = {name: getattr(_ops, f"_{name}").int_out._handle for name in (*FAMILY, "logsumexp")}
_OUT = {name: getattr(_ops, name).out for name in (*FAMILY, "logsumexp")}

_TRITON = "(Tensor input, str function, int[] dim, ScalarType? dtype, bool keepdim"
library.define(f"triton{_TRITON}) -> Tensor")
library.define(f"triton.out{_TRITON}, *, Tensor(a!) out) -> ()")


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    # Not `i in dims`: that is always false in a graph that torch.compile makes for any dim.
    reduced = [any(i == d for d in dims) for i in range(len(shape))]
    if keepdim:
        return [1 if gone else size for size, gone in zip(shape, reduced, strict=True)]
    return [size for size, gone in zip(shape, reduced, strict=True) if not gone]


def state_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a state: the one that a row is computed in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def empty(function: str, x: Tensor, dims: Sequence[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    if function in REDUCTIONS:
        shape = reduced_shape(x.shape, [d % max(x.dim(), 1) for d in dims], keepdim)
        return (
            x.new_empty([2, *shape], dtype=state_dtype(x)) if function == "state" else x.new_empty(shape, dtype=dtype)
        )
    return torch.empty_like(x, dtype=dtype or x.dtype)


class TransformFunction(torch.autograd.Function):
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
        dx = backward(ctx.function, g, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.input_dtype, ctx.engine)
        return dx, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, *_: None) -> Tensor | None:
        if t is None:
            return None
        return tangent(ctx.function, t, ctx.saved_tensors, ctx.dims, ctx.keepdim, ctx.output_dtype, ctx.engine)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        function, dims, dtype, keepdim, engine = rest
        x = x.movedim(in_dims[0] or 0, 0)
        batch = int(function == "state")  # where the batch comes out: behind the planes
        if x.dim() == 1 and dims:  # a batch of 0-d tensors: the one dim of each is not there to name
            y = TransformFunction.apply(x.unsqueeze(1), function, [1], dtype, False, engine)
            return y.reshape(y.shape[: batch + 1]), batch
        return TransformFunction.apply(x, function, [d + 1 for d in dims], dtype, keepdim, engine), batch


class EagerFunction(torch.autograd.Function):
    """A call under eager autograd alone. Its forward has the context too: an eighth of the cost of binding arguments to
    `setup_context`, which transforms need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: str, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str
    ) -> Tensor:
        lse = function == "logsumexp"
        if len(dims) == 1 and function in HANDLES and engine != "triton" and not (lse and dtype):
            output = call_boxed(HANDLES[function], x, dims[0], keepdim if lse else dtype)
        else:
            output = raw(function, x, dims, dtype, keepdim, engine)
        ctx.function, ctx.dims, ctx.keepdim, ctx.input_dtype, ctx.engine = function, dims, keepdim, x.dtype, engine
        ctx.save_for_backward(*((x, output) if function in REDUCTIONS else (output,)))
        return output

    backward = staticmethod(TransformFunction.backward)


# Routes -------------------------------------------------------------------------------------------------------------


def differentiable(
    function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str, recorded: bool
) -> Tensor:
    """A call with derivatives; `recorded`: under eager autograd alone.

    The derivatives of logsumexp are made from its result. Of a half type that would be off by what it was rounded by
    (a gradient of rows around 100 adds up to 0.84 to 1.25 in bfloat16), so a half input gives a float32 result, which
    is kept, and the caller a rounded one.
    """
    apply = (EagerFunction if recorded else TransformFunction).apply
    if function == "logsumexp" and dtype is None and x.dtype in HALVES:
        return apply(x, function, dims, torch.float32, keepdim, engine).to(x.dtype)
    return apply(x, function, dims, dtype, keepdim, engine)


def raw(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """The kernel alone: no gradient, no checks but the kernel's own."""
    with _BelowAutograd():
        if engine == "triton":
            return _ops.triton.default(x, function, dims, dtype, keepdim)
        given = (x, dims, keepdim) if function in REDUCTIONS else (x, dims)
        return _CALLED[function](*given) if dtype is None else _CALLED[function](*given, dtype=dtype)


def call(function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str) -> Tensor:
    """A checked call by the route that its surroundings ask for."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or torch._C._get_tracing_state():
        if engine == "triton":
            return _ops.triton.default(x, function, dims, dtype, keepdim)
        if function == "state":
            return _REGISTERED[function](x, dims, keepdim)
        given = (x, dims, keepdim) if function == "logsumexp" else (x, dims)
        return _REGISTERED[function](*given, dtype=dtype)
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return differentiable(function, x, dims, dtype, keepdim, engine, recorded=False)
    if x.requires_grad and torch.is_grad_enabled():
        return differentiable(function, x, dims, dtype, keepdim, engine, recorded=True)
    return raw(function, x, dims, dtype, keepdim, engine)


def call_out(
    function: str, x: Tensor, dims: list[int], dtype: torch.dtype | None, keepdim: bool, engine: str, out: Tensor
) -> None:
    """A checked call into a checked `out`; whether that shares memory with the input, the operator finds out."""
    given: tuple[Any, ...] = (x, dims, keepdim) if function == "logsumexp" else (x, dims)
    named: dict[str, Any] = {"dtype": dtype, "out": out}
    operator = _OUT[function]
    if engine == "triton":
        operator, given, named = _ops.triton.out, (x, function, dims, dtype, keepdim), {"out": out}
    if torch.compiler.is_dynamo_compiling() and not out.is_contiguous():  # Dynamo refuses such an out= of any operator
        out.copy_(call(function, x, dims, dtype, keepdim, engine))
        return
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
    check_memory(function, input, out)
    dims = sorted(d % input.dim() for d in dim) if input.dim() else []
    whole = out
    if function in REDUCTIONS:
        whole = (unsqueeze_planes if function == "state" else unsqueeze_reduced)(out, dims, keepdim)
    triton_engine.forward(function, input, whole, tuple(dims))


@torch._disable_dynamo
def _triton_kernel(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    out = empty(function, input, dim, dtype, keepdim)
    _triton_out(input, function, dim, dtype, keepdim, out=out)
    return out


def _register_out(name: str, operator: Any) -> None:
    """Who saved `out` for a backward must learn that it was overwritten, also by a direct call of the operator."""

    def overwrite(keyset: Any, *given: Any, **named: Any) -> None:
        out = named.get("out", given[-1])
        tensors = [t for t in (*given, out) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(f"onepass::{name} has no gradient, but an argument requires one")
        if has_tangent(*tensors):
            raise NotImplementedError(f"onepass::{name} has no forward-mode gradient, but an argument has a tangent")
        check_inference(name.removesuffix(".out"), out)
        torch.autograd.graph.increment_version(out)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *given, **named)

    library.impl(name, overwrite, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"onepass::{name}", lambda *_, **__: None, lib=library)


for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton", _triton_kernel, _key)
    library.impl("triton.out", _triton_out, _key)


def _routed(function: str | None, engine: str) -> Any:
    """The kernel of a registered operator where gradients, tangents or transforms may be asked for. Of an operator
    that serves every function, `function` is None."""

    def route(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
        if needs_no_autograd(input):
            return raw(function, input, dim, dtype, keepdim, engine)
        dims = wrap_dims(dim, input.dim())
        return differentiable(function, input, dims, dtype, keepdim, engine, recorded=False)

    def of_one(input: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        assert function is not None
        return route(input, function, dim, dtype, keepdim)

    return route if function is None else of_one


def _has_no_gradient(name: str) -> None:
    """Where torch would only warn in backward, and then go on without the gradient."""

    def refuse(ctx: Any, *g: Tensor) -> None:
        raise RuntimeError(f"onepass::{name} has no gradient; onepass::{name.lstrip('_')} has")

    torch.library.register_autograd(f"onepass::{name}", refuse, lib=library)


def _register(function: str) -> None:
    def fake(input: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return empty(function, input, dim, dtype, keepdim)

    for name in (function, f"_{function}"):
        torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    for key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(function, _routed(function, "native"), key)
    _has_no_gradient(f"_{function}")
    if function in _OUT:
        _register_out(f"{function}.out", _OUT[function])


for _name in (*FAMILY, *REDUCTIONS):
    _register(_name)
for _name in ("_softmax_backward", "_logsumexp_backward"):
    _register_out(f"{_name}.out", getattr(_ops, _name).out)


@torch.library.register_fake("onepass::triton", lib=library)
def _(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    return empty(function, input, dim, dtype, keepdim)


_register_out("triton.out", _ops.triton.out)
for _key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
    library.impl("triton", _routed(None, "triton"), _key)


# The operators of the fast path: one dim, and nothing but the kernel needed ------------------------------------------


def _refuse(*_: Any) -> None:
    raise NotImplementedError("onepass: not a plain call")


def _register_fast(function: str) -> None:
    """The kernels of the plain call but the native ones: fake tensors, and who has to see the call after all.

    `option` is keepdim for logsumexp, else dtype.
    """
    name, lse = f"_{function}.int", function == "logsumexp"
    operator = getattr(_ops, function).default._op

    def options(option: Any) -> tuple[torch.dtype | None, bool]:
        return (None, bool(option)) if lse else (option, False)

    def fake(input: Tensor, dim: int, option: Any = None) -> Tensor:
        dtype, keepdim = options(option)
        normalize_dims(function, input, dim)  # refuses what the native kernels refuse: nobody else has looked yet
        if input.dtype not in FLOATS or dtype not in (None, *FLOATS):
            raise NotImplementedError(f"onepass: takes {TAKES}, got {input.dtype} and {dtype}")
        return empty(function, input, [dim], dtype, keepdim)

    def transformed(input: Tensor, dim: int, option: Any = None) -> Tensor:  # torch.func
        dims = normalize_dims(function, input, dim)
        return differentiable(function, input, dims, *options(option), "native", recorded=False)

    def autocast(input: Tensor, dim: int, option: Any = None) -> Tensor:
        dtype, keepdim = options(option)
        if autocast_to_float32(input):
            dtype = dtype or torch.float32
        return operator(input, [dim], keepdim, dtype=dtype) if lse else operator(input, [dim], dtype=dtype)

    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    library.impl(name, _refuse, "Tracer")  # torch.jit.trace writes the registered operator down, which has a gradient
    library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    library.impl(name, autocast, "AutocastCUDA")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # else torch looks here too who needs a gradient
    for key in ("Tracer", "FuncTorchDynamicLayerFrontMode", "Functionalize", "Negative"):
        library.impl(f"{name}_out", _refuse, key)
    library.impl(f"{name}_out", torch.library.fallthrough_kernel, "Autograd")


for _name in (*FAMILY, "logsumexp"):
    _register_fast(_name)
