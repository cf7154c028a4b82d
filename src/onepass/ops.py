"""The operators in PyTorch: fake kernels, gradients, vmap, and the paths that a call may take.

If no gradient is needed, the operator is called below autograd, which is cheapest. Eager autograd records a call with
`EagerFunction`; function transforms and forward-mode AD use `TransformFunction`. When compiling, and for tensor
subclasses, the registered operator is called. A graph keeps it by name, and it takes one of the other paths when it
runs. Most calls need none of this: they take the fast path (functional.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import triton as triton_engine
from .autograd import PLAIN_TYPES, backward, needs_no_autograd, tangent
from .decompositions import unsqueeze_planes, unsqueeze_reduced
from .native import FUNCTIONS, REDUCTIONS, library
from .validation import FLOATS, HALF_DTYPES, Spec, check_inference, check_memory, has_tangent, result_dtype, wrap_dims

_ops = torch.ops.onepass
_WITH_OUT = tuple(name for name in FUNCTIONS if name != "state")  # these have a fast path too
# A call of a handle enters the dispatcher directly. A call of an OpOverload first looks for __torch_function__ and a
# jit tracer.
call_boxed = torch._C._dispatch_call_boxed
_REGISTERED = {name: getattr(_ops, name).default for name in (*FUNCTIONS, "triton")}
_CALLED = {name: functools.partial(call_boxed, operator._handle) for name, operator in _REGISTERED.items()}
_OUT = {name: getattr(_ops, name).out for name in (*_WITH_OUT, "triton")}
HANDLES = {name: getattr(_ops, f"_{name}").int._handle for name in _WITH_OUT}
OUT_HANDLES = {name: getattr(_ops, f"_{name}").int_out._handle for name in _WITH_OUT}
# Aliases, because a look-up in a module costs 40 ns and a call makes eight.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # skips the Python kernels of autograd, 3 us a call
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_tracing_state = torch._C._get_tracing_state
_torch_function_modes = torch._C._len_torch_function_stack


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    # Not `i in dims`: that is always False if torch.compile makes a graph for a symbolic dim.
    reduced = [any(i == d for d in dims) for i in range(len(shape))]
    if keepdim:
        return [1 if gone else size for size, gone in zip(shape, reduced, strict=True)]
    return [size for size, gone in zip(shape, reduced, strict=True) if not gone]


def _empty(x: Tensor, spec: Spec) -> Tensor:
    """An empty tensor with the dtype, shape and strides of the result."""
    dtype = result_dtype(spec.function, x.dtype, spec.dtype)
    if spec.function not in REDUCTIONS:
        return torch.empty_like(x, dtype=dtype)
    shape = reduced_shape(x.shape, [d % max(x.dim(), 1) for d in spec.dims], spec.keepdim)
    return x.new_empty([2, *shape] if spec.function == "state" else shape, dtype=dtype)


class TransformFunction(torch.autograd.Function):
    """A call under a function transform (torch.func) or forward-mode AD."""

    @staticmethod
    def forward(x: Tensor, spec: Spec) -> Tensor:
        return _call_registered(x, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.spec = inputs
        ctx.input_dtype, ctx.output_dtype = x.dtype, output.dtype
        saved = (x, output) if ctx.spec.function in REDUCTIONS else (output,)  # the same as torch saves
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx.spec, g, ctx.saved_tensors, ctx.input_dtype), None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, *_: None) -> Tensor | None:
        return None if t is None else tangent(ctx.spec, t, ctx.saved_tensors, ctx.output_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, spec: Spec) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0] or 0, 0)
        batch = int(spec.function == "state")  # the batch dim of the result: behind the planes of a state
        if x.dim() == 1 and spec.dims:  # a batch of 0-d tensors: the dim that they reduce needs a dim of size 1
            y = TransformFunction.apply(x.unsqueeze(1), spec._replace(dims=[1], keepdim=False))
            return y.reshape(y.shape[: batch + 1]), batch
        return TransformFunction.apply(x, spec._replace(dims=[d + 1 for d in spec.dims])), batch


class EagerFunction(torch.autograd.Function):
    """A call under eager autograd alone. Its forward takes the context, at an eighth of the cost of a separate
    `setup_context`, which transforms need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        output = _call_kernel(x, spec)
        ctx.spec, ctx.input_dtype = spec, x.dtype
        ctx.save_for_backward(*((x, output) if spec.function in REDUCTIONS else (output,)))
        return output

    backward = staticmethod(TransformFunction.backward)


# Paths of a call ------------------------------------------------------------------------------------------------------


def _differentiable(x: Tensor, spec: Spec, apply: Any) -> Tensor:
    """A call with derivatives. `apply` is that of an autograd.Function.

    The derivatives of logsumexp are computed from its result. For a half type the rounded result would make them
    inaccurate: in bfloat16, the gradient of a row of values around 100 sums to 0.84 to 1.25. So for a half input a
    float32 result is saved, and the caller gets a rounded one.
    """
    if spec.function == "logsumexp" and spec.dtype is None and x.dtype in HALF_DTYPES:
        return apply(x, spec._replace(dtype=torch.float32)).to(x.dtype)
    return apply(x, spec)


def _invoke(operators: dict[str, Any], x: Tensor, spec: Spec, **named: Any) -> Any:
    """Calls the operator of `operators` that serves the call. `named` is an `out`, or nothing."""
    function, dims, dtype, keepdim, engine = spec
    if engine == "triton":
        return operators["triton"](x, function, dims, dtype, keepdim, **named)
    if dtype is not None:
        named["dtype"] = dtype
    if function in REDUCTIONS:
        return operators[function](x, dims, keepdim, **named)
    return operators[function](x, dims, **named)


def _call_registered(x: Tensor, spec: Spec) -> Tensor:
    """The registered operator below autograd: no gradient is recorded, and only the kernel checks anything."""
    with _BelowAutograd():
        return _invoke(_CALLED, x, spec)


def _call_kernel(x: Tensor, spec: Spec) -> Tensor:
    """As `_call_registered`, but by the operator of the fast path if that takes the call. It takes no call under
    autocast."""
    function, dims, dtype, keepdim, engine = spec
    if len(dims) == 1 and function in HANDLES and engine != "triton" and not _is_autocast_enabled():
        lse = function == "logsumexp"
        if not (lse and dtype):
            y = call_boxed(HANDLES[function], x, dims[0], keepdim if lse else dtype)
            if y is not None:
                return y
    with _BelowAutograd():
        return _invoke(_CALLED, x, spec)


def call(x: Tensor, spec: Spec) -> Tensor:
    """A checked call, by the path that the current modes and transforms need."""
    if _is_compiling() or type(x) not in PLAIN_TYPES or _tracing_state() or _torch_function_modes():
        return _invoke(_REGISTERED, x, spec)
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return _differentiable(x, spec, TransformFunction.apply)
    if x.requires_grad and _is_grad_enabled():
        return _differentiable(x, spec, EagerFunction.apply)
    return _call_kernel(x, spec)


def call_out(x: Tensor, spec: Spec, out: Tensor) -> None:
    """A checked call into a checked `out`. The operator checks whether `out` shares memory with the input."""
    if torch.compiler.is_dynamo_compiling() and not out.is_contiguous():  # Dynamo does not support such an out=
        out.copy_(call(x, spec))
        return
    if torch.compiler.is_compiling():
        _invoke(_OUT, x, spec, out=out)
        return
    with torch._C._AutoDispatchBelowADInplaceOrView():  # incrementing the version below takes a tenth of the time
        _invoke(_OUT, x, spec, out=out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


# Registrations --------------------------------------------------------------------------------------------------------


# A graph calls these two functions when it runs. Dynamo must not trace into them then.
@torch._disable_dynamo
def _triton_out(
    input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool, *, out: Tensor
) -> None:
    check_memory(function, input, out)
    dims = sorted(wrap_dims(function, input, dim)) if input.dim() else []
    whole = out
    if function in REDUCTIONS:
        whole = (unsqueeze_planes if function == "state" else unsqueeze_reduced)(out, dims, keepdim)
    triton_engine.launch_forward(function, input, whole, tuple(dims))


@torch._disable_dynamo
def _triton_kernel(input: Tensor, function: str, dim: list[int], dtype: torch.dtype | None, keepdim: bool) -> Tensor:
    out = _empty(input, Spec(function, dim, dtype, keepdim))
    _triton_out(input, function, dim, dtype, keepdim, out=out)
    return out


def _register(name: str, as_spec: Callable[..., Spec]) -> None:
    """Registers an operator's fake kernel, and its kernels under autograd and function transforms. `as_spec` takes the
    arguments of the operator except the input."""
    operator = _CALLED[name]

    def kernel(input: Tensor, *given: Any, **named: Any) -> Tensor:
        if needs_no_autograd(input):
            with _BelowAutograd():
                return operator(input, *given, **named)
        spec = as_spec(*given, **named)
        dims = wrap_dims(spec.function, input, spec.dims)
        return _differentiable(input, spec._replace(dims=dims), TransformFunction.apply)

    def fake(input: Tensor, *given: Any, **named: Any) -> Tensor:
        return _empty(input, as_spec(*given, **named))

    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    for key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(name, kernel, key)


def _parse(function: str, dim: list[int], keepdim: bool = False, dtype: Any = None) -> Spec:
    return Spec(function, dim, dtype, keepdim)


def _register_out(name: str, operator: Any) -> None:
    """Registers a kernel that increments the version of `out`, so that a backward that saved `out` finds that it was
    overwritten, also by a direct call of the operator."""

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


def _register_fast_path(function: str) -> None:
    """Registers the operators of the fast path. They return None, or False, if a mode or a transform is active."""
    name, lse = f"_{function}.int", function == "logsumexp"

    def fake(input: Tensor, dim: int, option: Any = None) -> Tensor | None:
        rank, dtype = max(input.dim(), 1), None if lse else option
        if not -rank <= dim < rank or input.dtype not in FLOATS or dtype not in (None, *FLOATS):
            return None
        return _empty(input, Spec(function, [dim], dtype, lse and bool(option)))

    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    # They also return None under torch.jit.trace, which has to record the registered operator, and for tensors that no
    # kernel takes, sparse ones for example, for which the slow path raises the error.
    keys = ["AutocastCUDA", "Batched", "CompositeExplicitAutograd", "FuncTorchDynamicLayerFrontMode", "Tracer"]
    for key in (*keys, "NestedTensorCPU", "NestedTensorCUDA"):
        library.impl(name, lambda *_: None, key)
        library.impl(f"{name}_out", lambda *_: False, key)
    for key in ("Functionalize", "Negative"):
        library.impl(f"{name}_out", lambda *_: False, key)
    for overload in (name, f"{name}_out"):  # without a kernel here, torch also checks whether a gradient is needed
        library.impl(overload, torch.library.fallthrough_kernel, "Autograd")


for _name in FUNCTIONS:
    _register(_name, functools.partial(_parse, _name))
for _name in _WITH_OUT:
    _register_fast_path(_name)
_register("triton", functools.partial(Spec, engine="triton"))
for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton", _triton_kernel, _key)
    library.impl("triton.out", _triton_out, _key)
for _name in (*_OUT, "_softmax_backward", "_logsumexp_backward"):
    _register_out(f"{_name}.out", getattr(_ops, _name).out)
