"""Gradients of every order: the first by one fused operator, the next by the same operator and pointwise arithmetic.

A gradient takes one of three paths, as a forward does (ops.py). If it needs no gradient itself, the operator alone is
called. Under create_graph, function transforms and forward-mode AD it is `TransformBackward`. When compiling, and for
tensor subclasses, it is the registered operator, which a graph keeps by name. A gradient without a fused operator is
plain arithmetic (decompositions.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad, is_legacy_batchedtensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from . import decompositions
from . import triton as triton_engine
from .decompositions import unsqueeze_reduced
from .native import FUNCTIONS, REDUCTIONS, library
from .validation import Spec, reduces_to, wrap_dims

__all__ = ["PLAIN_TYPES", "backward", "needs_no_autograd", "tangent"]

_NAMES = {number: name for number, name in enumerate(FUNCTIONS) if name not in REDUCTIONS}
_NUMBERS = {name: number for number, name in _NAMES.items()}  # how the operator of gradients takes a function
_REGISTERED = (
    torch.ops.onepass._softmax_backward.default,
    torch.ops.onepass._logsumexp_backward.default,
    torch.ops.onepass.triton_backward.default,
)
_CALLED = tuple(functools.partial(torch._C._dispatch_call_boxed, op._handle) for op in _REGISTERED)
_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # skips the Python kernels of autograd, 3 us a call
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# The devices that have fused gradients, and the meta device.
FUSED = frozenset(
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("onepass::_softmax_backward", device.upper())
) | {"meta"}
_CUDA = "cuda" in FUSED


def _dtypes_match(g: Tensor, t: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether the dtype of `t`, which is g or one of `saved`, matches that of g. It has to be the same, except for the
    input of logsumexp: a logsumexp of its dtype must be able to return g's dtype."""
    return t.dtype is g.dtype or (len(saved) == 2 and t is saved[0] and reduces_to("logsumexp", t.dtype, g.dtype))


def _can_call_kernel(spec: Spec, g: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether the engine's operator can be called directly: it can read the memory, and nothing records the call."""
    dtype = g.dtype
    records = torch.is_grad_enabled()
    for t in (g, *saved):
        if (
            type(t) not in PLAIN_TYPES
            or not (t.is_cpu or (_CUDA and t.is_cuda) or spec.engine == "triton")
            or (t.dtype is not dtype and not _dtypes_match(g, t, saved))
            or t.layout is not torch.strided
            or (records and t.requires_grad)
            or is_legacy_batchedtensor(t)
        ):
            return False
    return forward_ad._current_level < 0 and peek_interpreter_stack() is None and not torch.compiler.is_compiling()


def _has_fused_backward(spec: Spec, g: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether the fused operator takes these tensors. False for the batched tensors of
    torch.autograd.grad(is_grads_batched=True), which the operator would take one by one, and for saved tensors whose
    dtype was changed by hooks."""
    return (g.device.type in FUSED or spec.engine == "triton") and all(
        _dtypes_match(g, t, saved) and t.layout is torch.strided and not is_legacy_batchedtensor(t) for t in (g, *saved)
    )


def backward(spec: Spec, g: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Tensor:
    """The gradient of the input, of dtype `to`, from the upstream gradient g. `saved` is (result), or (input, result)
    for a reduction."""
    if spec.function == "state":
        return decompositions.gradient(spec, g, saved, to)
    if _can_call_kernel(spec, g, saved):
        return _call_backward_kernel(spec, g, saved, to)
    if not _has_fused_backward(spec, g, saved):
        return decompositions.gradient(spec, g, saved, to)
    if torch.compiler.is_compiling() or any(type(t) not in PLAIN_TYPES for t in (g, *saved)):
        return _call_operator(_REGISTERED, spec, g, saved, to)
    x, lse = (*saved, None)[:2]
    return TransformBackward.apply(g, x, lse, spec, to)


def _call_operator(operators: Any, spec: Spec, g: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Any:
    """Calls the engine's operator for a gradient."""
    function, dims, _, keepdim, engine = spec
    softmax, logsumexp, triton = operators
    if engine == "triton":
        x, lse = (*saved, None)[:2]
        return triton(g, x, lse, function, dims, to, keepdim)
    if function == "logsumexp":
        return logsumexp(g, *saved, dims, keepdim)
    return softmax(g, saved[0], _NUMBERS[function], dims, to)


def _call_backward_kernel(spec: Spec, g: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Any:
    with _BelowAutograd():
        return _call_operator(_CALLED, spec, g, saved, to)


def tangent(spec: Spec, t: Tensor, saved: Sequence[Tensor], to: torch.dtype) -> Tensor:
    """The tangent of the result, of dtype `to`, from the tangent t of the input, for the jvp of autograd.Function."""

    def compute(t: Tensor, *saved: Tensor) -> Tensor:
        if spec.function in ("softmax", "softmin"):  # the Jacobian is symmetric
            return backward(spec, t.to(saved[0].dtype), saved, to)
        return decompositions.tangent(spec, t, saved, to)

    return one_level_out(compute, t, *saved)


def one_level_out(compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Calls `compute`, which returns a tensor or a tuple, with the tensors unwrapped by one level of torch.func, and
    with forward mode on.

    torch runs a jvp with forward mode off at all levels, so an outer jvp would take the result as a constant.
    """
    if peek_interpreter_stack() is None:
        return compute(*tensors)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
        result = compute(*(None if t is None else _unwrap_for_grad(t, level) for t in tensors))
    if isinstance(result, tuple):
        return tuple(_wrap_for_grad(t, level) for t in result)
    return _wrap_for_grad(result, level)


class TransformBackward(torch.autograd.Function):
    """A gradient that has gradients. For logsumexp `x` is the input and `lse` the result. For other functions `x` is
    the result and `lse` is None."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, lse: Tensor | None, spec: Spec, to: torch.dtype) -> Tensor:
        return _call_backward_kernel(spec, g, (x,) if lse is None else (x, lse), to)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, lse, ctx.spec, ctx.to = inputs
        tensors = (g, x) if lse is None else (g, x, lse)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, *saved = ctx.saved_tensors
        dg, *dsaved = decompositions.gradient_of_gradient(ctx.spec, v, g, saved)
        if dg is None and ctx.needs_input_grad[0]:
            dg = backward(ctx.spec, v.to(g.dtype), saved, g.dtype)
        return dg, *(*dsaved, None)[:2], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        spec, to, count = ctx.spec, ctx.to, len(ctx.saved_tensors)

        def compute(*tensors: Tensor) -> Any:
            (g, *saved), (tg, *tsaved) = tensors[:count], tensors[count:]
            through_saved = decompositions.gradient_tangent(spec, g, saved, tsaved, to)
            if tg is None:
                return through_saved
            through_g = backward(spec, tg, saved, to)
            return through_g if through_saved is None else through_g + through_saved

        return one_level_out(compute, *ctx.saved_tensors, *tangents[:count])

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, g: Tensor, x: Tensor, lse: Tensor | None, spec: Spec, to: torch.dtype
    ) -> tuple[Tensor, int]:
        def batched(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        g, x = batched(g, in_dims[0]), batched(x, in_dims[1])
        lse = None if lse is None else batched(lse, in_dims[2])
        if x.dim() > 1 or not spec.dims:
            spec = spec._replace(dims=[d + 1 for d in spec.dims])
            return TransformBackward.apply(g, x, lse, spec, to), 0
        # A batch of 0-d tensors: the dim that they reduce needs a dim of size 1.
        g, x = (g if lse is not None else g.unsqueeze(1)), x.unsqueeze(1)
        return TransformBackward.apply(g, x, lse, spec._replace(dims=[1], keepdim=False), to).reshape(-1), 0


# Registrations --------------------------------------------------------------------------------------------------------


def needs_no_autograd(*tensors: Tensor | None) -> bool:
    """Whether no gradient, tangent or transform is needed of an operator that is called with these tensors."""
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        return False
    if torch.is_grad_enabled():
        for t in tensors:  # a generator takes twice the time
            if t is not None and t.requires_grad:
                return False
    return True


Parsed = tuple[tuple[Tensor, Tensor, Tensor | None], Spec, torch.dtype]


def _register(name: str, parse: Callable[..., Parsed]) -> None:
    """Registers the fake kernel of an operator of gradients, and its kernels under autograd and transforms. `parse`
    converts its arguments to (gradient and saved tensors, spec, dtype of the result)."""
    operator = getattr(torch.ops.onepass, name).default

    def fake(*given: Any) -> Tensor:
        (_, x, _), _, to = parse(*given)
        return torch.empty_like(x, dtype=to)

    def kernel(*given: Any) -> Tensor:
        tensors, spec, to = parse(*given)
        if needs_no_autograd(*tensors) or not spec.function:  # the operator raises the error for an unknown number
            with _BelowAutograd():
                return operator(*given)
        spec = spec._replace(dims=wrap_dims(spec.function, tensors[1], spec.dims))
        return TransformBackward.apply(*tensors, spec, to)

    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    for key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(name, kernel, key)


def _parse_softmax(grad: Tensor, y: Tensor, function: int, dim: list[int], dtype: torch.dtype) -> Parsed:
    return (grad, y, None), Spec(_NAMES.get(function, ""), dim, keepdim=True), dtype


def _parse_logsumexp(grad: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Parsed:
    return (grad, x, lse), Spec("logsumexp", dim, keepdim=keepdim), x.dtype


def _parse_triton(
    grad: Tensor, saved: Tensor, lse: Tensor | None, function: str, dim: list[int], dtype: torch.dtype, keepdim: bool
) -> Parsed:
    return (grad, saved, lse), Spec(function, dim, keepdim=keepdim, engine="triton"), dtype


# A graph calls this when it runs. Dynamo must not trace into it then.
@torch._disable_dynamo
def _triton_kernel(*arguments: Any) -> Tensor:
    (grad, saved, lse), spec, dtype = _parse_triton(*arguments)
    dims = tuple(sorted(wrap_dims(spec.function, saved, spec.dims))) if saved.dim() else ()
    given: tuple[Tensor, ...] = (saved,)
    if lse is not None:
        grad, lse = (unsqueeze_reduced(t, dims, spec.keepdim) for t in (grad, lse))
        given = (saved, lse)
    dx = torch.empty_like(saved, dtype=dtype)
    triton_engine.launch_backward(spec.function, grad, given, dx, dims)
    return dx


_register("_softmax_backward", _parse_softmax)
_register("_logsumexp_backward", _parse_logsumexp)
_register("triton_backward", _parse_triton)
for _key in ("CPU", "CUDA", "XPU"):
    library.impl("triton_backward", _triton_kernel, _key)
