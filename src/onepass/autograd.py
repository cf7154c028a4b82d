"""Gradients of every order: the first by one fused operator, the next by the same operator and pointwise arithmetic.

A gradient has the routes of a call (ops.py): nothing asks for its own gradient -> the operator alone; create_graph,
function transforms and forward-mode AD -> `TransformBackward`; compiling, and tensor subclasses -> the registered
operator, which a graph keeps by name. What has no such operator is plain arithmetic (decompositions.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad, is_legacy_batchedtensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from . import (
    decompositions,
    native,  # noqa: F401  (loads the operators)
)
from .triton import operators  # noqa: F401  (defines that of its gradients)
from .validation import reduces_to

__all__ = ["backward", "library", "needs_no_autograd", "tangent", "wrap_dims"]


_NUMBERS = {"softmax": 0, "log_softmax": 1, "softmin": 2}  # of functions, as the operator takes them
_NAMES = {number: function for function, number in _NUMBERS.items()}
_FAMILY = torch.ops.onepass._softmax_backward.default
_LOGSUMEXP = torch.ops.onepass._logsumexp_backward.default
_TRITON = torch.ops.onepass.triton_backward.default
_HANDLES = _FAMILY._handle, _LOGSUMEXP._handle
_call_boxed = torch._C._dispatch_call_boxed  # straight into the dispatcher, as functional.py has it
_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # past the Python kernels that record, 3 us a call
_KINDS = (Tensor, torch.nn.Parameter)
# The devices whose gradients are fused, and those of tensors without data.
FUSED = frozenset(
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("onepass::_softmax_backward", device.upper())
) | {"meta"}
_CUDA = "cuda" in FUSED


def _dtypes_match(g: Tensor, t: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether `t`, g or one of `saved`, is of a dtype that goes with g's: g's own, which the result has too, or of
    logsumexp's input one that gives it."""
    return t.dtype is g.dtype or (len(saved) == 2 and t is saved[0] and reduces_to("logsumexp", t.dtype, g.dtype))


def _can_call_kernel(g: Tensor, saved: Sequence[Tensor], engine: str) -> bool:
    """Whether nothing but the engine's operator is needed: memory that it can read, and nobody who looks on."""
    dtype = g.dtype
    records = torch.is_grad_enabled()
    for t in (g, *saved):
        if (
            type(t) not in _KINDS
            or not (t.is_cpu or (_CUDA and t.is_cuda) or engine == "triton")
            or (t.dtype is not dtype and not _dtypes_match(g, t, saved))
            or t.layout is not torch.strided
            or (records and t.requires_grad)
            or is_legacy_batchedtensor(t)
        ):
            return False
    return forward_ad._current_level < 0 and peek_interpreter_stack() is None and not torch.compiler.is_compiling()


def _has_fused_backward(g: Tensor, saved: Sequence[Tensor], engine: str) -> bool:
    """Whether the operator takes these. Not those of torch.autograd.grad(is_grads_batched=True), which it would take
    one by one; nor what hooks on saved tensors have given another dtype."""
    return (g.device.type in FUSED or engine == "triton") and all(
        _dtypes_match(g, t, saved) and t.layout is torch.strided and not is_legacy_batchedtensor(t) for t in (g, *saved)
    )


def backward(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype, engine: str
) -> Tensor:
    """The input's gradient, of dtype `to`, from the result's; `saved` is the input if the function reduces, and the
    result. `engine` is the one of the forward."""
    if function == "state":
        return decompositions.gradient(function, g, saved, dims, keepdim, to)
    if _can_call_kernel(g, saved, engine):
        return _call_backward_kernel(function, g, saved, dims, keepdim, to, engine)
    if not _has_fused_backward(g, saved, engine):
        return decompositions.gradient(function, g, saved, dims, keepdim, to)
    if torch.compiler.is_compiling() or any(type(t) not in _KINDS for t in (g, *saved)):
        return _registered_backward(function, g, saved, dims, keepdim, to, engine)
    x, lse = (*saved, None)[:2]
    return TransformBackward.apply(g, x, lse, function, dims, keepdim, to, engine)


def _call_backward_kernel(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype, engine: str
) -> Any:
    with _BelowAutograd():
        if engine == "triton":
            return _registered_backward(function, g, saved, dims, keepdim, to, engine)
        if function == "logsumexp":
            return _call_boxed(_HANDLES[1], g, *saved, dims, keepdim)
        return _call_boxed(_HANDLES[0], g, saved[0], _NUMBERS[function], dims, to)


def _registered_backward(
    function: str, g: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype, engine: str
) -> Tensor:
    if engine == "triton":
        x, lse = (*saved, None)[:2]
        return _TRITON(g, x, lse, function, dims, to, keepdim)
    if function == "logsumexp":
        return _LOGSUMEXP(g, *saved, dims, keepdim)
    return _FAMILY(g, saved[0], _NUMBERS[function], dims, to)


def tangent(
    function: str, t: Tensor, saved: Sequence[Tensor], dims: list[int], keepdim: bool, to: torch.dtype, engine: str
) -> Tensor:
    """The result's tangent, of dtype `to`, from the input's; for the jvp of an autograd.Function."""

    def of(t: Tensor, *saved: Tensor) -> Tensor:
        if function in ("softmax", "softmin"):  # whose Jacobian is symmetric
            return backward(function, t.to(saved[0].dtype), saved, dims, keepdim, to, engine)
        return decompositions.tangent(function, t, saved, dims, keepdim, to)

    return _one_level_out(of, t, *saved)


def _one_level_out(compute: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`compute` of tensors as the transform around the current one sees them.

    torch runs a jvp with forward mode off at all levels: to a jvp of that jvp (of torch.func) it would be a constant.
    """
    if peek_interpreter_stack() is None:
        return compute(*tensors)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
        result = compute(*(None if t is None else _unwrap_for_grad(t, level) for t in tensors))
    return _wrap_for_grad(result, level)


class TransformBackward(torch.autograd.Function):
    """A gradient that has gradients: `saved` is `x` alone for the softmax family, `x` and `lse` for logsumexp."""

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        lse: Tensor | None,
        function: str,
        dims: list[int],
        keepdim: bool,
        to: torch.dtype,
        engine: str,
    ) -> Tensor:
        return _call_backward_kernel(function, g, (x,) if lse is None else (x, lse), dims, keepdim, to, engine)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, lse, ctx.function, ctx.dims, ctx.keepdim, ctx.to, ctx.engine = inputs
        kept = (g, x) if lse is None else (g, x, lse)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, *saved = ctx.saved_tensors
        dg, *dsaved = decompositions.gradient_of_gradient(ctx.function, v, g, saved, ctx.dims, ctx.keepdim)
        if dg is None and ctx.needs_input_grad[0]:
            dg = backward(ctx.function, v.to(g.dtype), saved, ctx.dims, ctx.keepdim, g.dtype, ctx.engine)
        return dg, *(*dsaved, None)[:2], None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        function, dims, keepdim, to, engine = ctx.function, ctx.dims, ctx.keepdim, ctx.to, ctx.engine
        count = len(ctx.saved_tensors)

        def of(*tensors: Tensor) -> Any:
            (g, *saved), (tg, *tsaved) = tensors[:count], tensors[count:]
            through_saved = decompositions.gradient_tangent(function, g, saved, tsaved, dims, keepdim, to)
            if tg is None:
                return through_saved
            through_g = backward(function, tg, saved, dims, keepdim, to, engine)
            return through_g if through_saved is None else through_g + through_saved

        return _one_level_out(of, *ctx.saved_tensors, *tangents[:count])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], g: Tensor, x: Tensor, lse: Tensor | None, *rest: Any
    ) -> tuple[Tensor, int]:
        function, dims, keepdim, to, engine = rest

        def batched(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        g, x = batched(g, in_dims[0]), batched(x, in_dims[1])
        lse = None if lse is None else batched(lse, in_dims[2])
        if x.dim() > 1 or not dims:
            dims = [d + 1 for d in dims]
            return TransformBackward.apply(g, x, lse, function, dims, keepdim, to, engine), 0
        # A batch of 0-d tensors: the one dim of each is not there to name.
        g, x = (g if lse is not None else g.unsqueeze(1)), x.unsqueeze(1)
        return TransformBackward.apply(g, x, lse, function, [1], False, to, engine).reshape(-1), 0


# Registrations ------------------------------------------------------------------------------------------------------

library = torch.library.Library("onepass", "FRAGMENT")


@torch.library.register_fake("onepass::_softmax_backward", lib=library)
def _(grad: Tensor, y: Tensor, function: int, dim: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_like(y, dtype=dtype)


@torch.library.register_fake("onepass::_logsumexp_backward", lib=library)
def _(grad: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return torch.empty_like(x)


def needs_no_autograd(*tensors: Tensor | None) -> bool:
    """Whether nobody asks an operator of these for a gradient, a tangent or a transform of it."""
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        return False
    return not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors)


def wrap_dims(dims: Sequence[int], rank: int) -> list[int]:
    """Dims from 0 up; the operator itself refuses one that is there twice."""
    bound = max(rank, 1)
    for d in dims:
        if not -bound <= d < bound:
            raise RuntimeError(f"onepass: dim {d} is out of range for a tensor of {rank} dims")
    return [d % bound for d in dims]


def _family(grad: Tensor, y: Tensor, function: int, dim: list[int], dtype: torch.dtype) -> Tensor:
    if needs_no_autograd(grad, y) or function not in _NAMES:  # which the operator itself refuses
        with _BelowAutograd():
            return _FAMILY(grad, y, function, dim, dtype)
    dims = wrap_dims(dim, y.dim())
    return TransformBackward.apply(grad, y, None, _NAMES[function], dims, True, dtype, "native")


def _logsumexp(grad: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if needs_no_autograd(grad, x, lse):
        with _BelowAutograd():
            return _LOGSUMEXP(grad, x, lse, dim, keepdim)
    dims = wrap_dims(dim, x.dim())
    return TransformBackward.apply(grad, x, lse, "logsumexp", dims, keepdim, x.dtype, "native")


def _triton(
    grad: Tensor, saved: Tensor, lse: Tensor | None, function: str, dim: list[int], dtype: torch.dtype, keepdim: bool
) -> Tensor:
    if needs_no_autograd(grad, saved, lse):
        with _BelowAutograd():
            return _TRITON(grad, saved, lse, function, dim, dtype, keepdim)
    dims = wrap_dims(dim, saved.dim())
    return TransformBackward.apply(grad, saved, lse, function, dims, keepdim, dtype, "triton")


for _name, _kernel in (
    ("_softmax_backward", _family),
    ("_logsumexp_backward", _logsumexp),
    ("triton_backward", _triton),
):
    for _key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(_name, _kernel, _key)
