"""The operators that finish rows whose state is known: parts of a row, chunks of a stream, shards.

`onepass::finish` computes results from elements and the state of their whole row. For a gradient,
`onepass::gradient_sum` computes a sum over the row, and `onepass::gradient_finish` computes dx from that sum. Each
operator reads its operands once. States and sums have size 1 in the dims of the row, and the accumulator's dtype.

`onepass::merge_states` merges the states of two or more parts. It returns the planes m, log(l), 1 / l and l of whole
rows, which `finish_planes` takes. log(l) and 1 / l are NaN if m is infinite, because a row that is all -inf or has a
+inf has no result.

    function      finish              gradient_sum    gradient_finish
    softmax       exp(x - m) / l      sum(g y)        y (g - sum)
    log_softmax   x - m - log(l)      sum(g)          g - exp(y) sum

Derivatives of a higher order, and those of function transforms, come from plain torch arithmetic.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import triton as triton_engine
from .autograd import needs_no_autograd
from .loss_arithmetic import DivergenceSpec
from .loss_ops import _is_eager, _laid_out, implement
from .native import library
from .scored import _accumulator, _BelowAutograd, _is_transformed

__all__ = ["finish_planes", "finish_rows", "gradient_finish", "gradient_sum", "merge_states"]

_CALL = "int[] dim, str function"
library.define("merge_states(Tensor parts, str engine) -> Tensor")  # (parts, 2, ...) to (4, ...)
library.define(f"finish(Tensor x, Tensor m, Tensor l, {_CALL}, ScalarType? dtype, str engine) -> Tensor")
library.define(f"gradient_sum(Tensor grad, Tensor y, {_CALL}, str engine) -> Tensor")
library.define(f"gradient_finish(Tensor grad, Tensor y, Tensor sum, {_CALL}, ScalarType dtype, str engine) -> Tensor")
_ops = torch.ops.onepass
_merge_operator, _finish_operator = _ops.merge_states.default, _ops.finish.default
_sum_operator, _gradient_operator = _ops.gradient_sum.default, _ops.gradient_finish.default
_exp_kernel, _exp_out_kernel, _shares_kernel, _product_kernel, _product_gradient_kernel, _merge_kernel = (
    functools.partial(torch._C._dispatch_call_boxed, op._handle)
    for op in (
        _ops._logsumexp_backward.default,
        _ops._logsumexp_backward.out,
        _ops._divergence_backward_kernel.default,
        _ops._product_kernel.default,
        _ops._product_backward_kernel.default,
        _ops._merge_states_kernel.default,
    )
)


def _is_alone(*tensors: Tensor) -> bool:
    """Whether nothing traces, transforms or records a call. Then its kernels can be called directly, which saves the
    dispatcher's two calls back into Python."""
    return _is_eager(*tensors) and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def finish_rows(
    x: Tensor, m: Tensor, l: Tensor, dims: list[int], function: str, dtype: torch.dtype | None, engine: str
) -> Tensor:
    """The results of a checked call, in `dtype` or else the dtype of x."""
    which = _finish if _is_alone(x, m, l) else _finish_operator
    return which(x, m, l, dims, function, dtype, engine)


def merge_states(parts: Tensor, engine: str) -> Tensor:
    """The planes of whole rows, (4, ...), from the states of their parts, (parts, 2, ...). The parts are merged in
    order. The result has no derivative."""
    return _merge(parts, engine) if _is_alone(parts) else _merge_operator(parts, engine)


def finish_planes(
    x: Tensor,
    planes: Tensor,
    dims: list[int],
    function: str,
    dtype: torch.dtype | None,
    engine: str,
    out: Tensor | None = None,
) -> Tensor:
    """`finish_rows` from the planes of `merge_states`, without a derivative."""
    if not _is_alone(x, planes):
        y = _finish_operator(x, planes[0], planes[3], dims, function, dtype, engine)
        return y if out is None else out.copy_(y)
    return _finish_from(x if dtype is None else x.to(dtype), planes, dims, function, engine, out)


def gradient_sum(grad: Tensor, y: Tensor, dims: list[int], function: str, engine: str) -> Tensor:
    """The sum over each row that its gradient needs, with size 1 in `dims`."""
    which = _sum if _is_alone(grad, y) else _sum_operator
    return which(grad, y, dims, function, engine)


def gradient_finish(
    grad: Tensor, y: Tensor, total: Tensor, dims: list[int], function: str, dtype: torch.dtype, engine: str
) -> Tensor:
    """The gradient of the input from `total`, the result of `gradient_sum` for whole rows."""
    which = _gradient if _is_alone(grad, y, total) else _gradient_operator
    return which(grad, y, total, dims, function, dtype, engine)


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _wide(t: Tensor) -> Tensor:
    return t.to(_accumulator(t.dtype, t.dtype))


def _finish_arithmetic(
    x: Tensor, m: Tensor, l: Tensor, dims: list[int], function: str, dtype: torch.dtype | None, engine: str
) -> Tensor:
    apart = _wide(x) - m
    l = l.masked_fill(m.isinf(), torch.nan)  # a row that is all -inf or has a +inf has no result
    return (apart.exp() / l if function == "softmax" else apart - l.log()).to(dtype or x.dtype)


def _sum_arithmetic(grad: Tensor, y: Tensor, dims: list[int], function: str, engine: str) -> Tensor:
    return (_wide(grad) * _wide(y) if function == "softmax" else _wide(grad)).sum(dims, keepdim=True)


def _gradient_arithmetic(
    grad: Tensor, y: Tensor, total: Tensor, dims: list[int], function: str, dtype: torch.dtype, engine: str
) -> Tensor:
    grad, y = _wide(grad), _wide(y)
    return (y * (grad - total) if function == "softmax" else grad - y.exp() * total).to(dtype)


def _merge_arithmetic(parts: Tensor, engine: str) -> Tensor:
    m, l = parts.unbind(1)
    top = m.amax(0)
    terms = l * (m - top.masked_fill(top.isinf(), 0)).exp()
    l = functools.reduce(torch.add, terms.unbind(0))  # in an order that does not depend on the number of rows
    known = l.masked_fill(top.isinf(), torch.nan)
    return torch.stack((top, known.log(), known.reciprocal(), l))


# Kernels --------------------------------------------------------------------------------------------------------------
# Mostly kernels of other functions with suitable arguments. exp(x - m) / l is the gradient of a logsumexp with the
# result m and the upstream gradient 1 / l. For a cross-entropy with probabilities y and the upstream gradient -1, the
# gradient of y is x - m - log(l), and that of x is y - exp(x - m - log(l)) * sum. The sum of g y, and y (g - sum), have
# kernels of their own.


def _finish(
    x: Tensor, m: Tensor, l: Tensor, dims: list[int], function: str, dtype: torch.dtype | None, engine: str
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _finish_from(x, _merge(torch.stack((m, l)).unsqueeze(0), engine), dims, function, engine)


def _finish_from(
    x: Tensor, planes: Tensor, dims: list[int], function: str, engine: str, out: Tensor | None = None
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x) if out is None else out
    if function == "softmax" and engine != "triton":
        with _BelowAutograd():
            if out is None:
                return _exp_kernel(planes[2], x, planes[0], dims, True)
            _exp_out_kernel(planes[2], x, planes[0], dims, True, out=out)
        return out
    if function == "softmax":
        made: Tensor | None = _ops.triton_backward(planes[2], x, planes[0], "logsumexp", dims, x.dtype, True)
    else:

        def launch(dim: int, x: Tensor, y: Tensor) -> bool:
            return _launch_shares(x, x, planes, None, None, y, dim, engine)

        made = _in_one_dim(launch, dims, x)
    if made is None:
        made = _finish_arithmetic(x, planes[0], planes[3], dims, function, None, engine)
    return _laid_out(made, x) if out is None else out.copy_(made)


def _merge(parts: Tensor, engine: str) -> Tensor:
    parts = parts.contiguous()
    if not parts.is_cuda or engine == "triton" or not parts.numel():
        return _merge_arithmetic(parts, engine)
    planes = parts.new_empty((4, *parts.shape[2:]))
    _merge_kernel(parts, planes)
    return planes


def _sum(grad: Tensor, y: Tensor, dims: list[int], function: str, engine: str) -> Tensor:
    if function == "log_softmax" or not y.numel():
        return _wide(grad.sum(dims, keepdim=True, dtype=_accumulator(grad.dtype, grad.dtype)))
    total = _sum_fake(grad, y, dims, function, engine)
    dim, *operands = _with_one_dim(dims, y, grad.to(y.dtype))
    launch: Callable[..., bool] = triton_engine.launch_product if engine == "triton" else _product_kernel
    return total if launch(*operands, total, dim) else _sum_arithmetic(grad, y, dims, function, engine)


def _gradient(
    grad: Tensor, y: Tensor, total: Tensor, dims: list[int], function: str, dtype: torch.dtype, engine: str
) -> Tensor:
    if not y.numel():
        return torch.empty_like(y, dtype=dtype)

    def launch(dim: int, y: Tensor, grad: Tensor, dx: Tensor) -> bool:
        if function == "log_softmax":
            return _launch_shares(y, grad, total.new_zeros((4, *total.shape)), -total, dx, None, dim, engine)
        if engine == "triton":
            return triton_engine.launch_product_gradient(y, grad, total, dx, dim)
        return bool(_product_gradient_kernel(y, grad, total, dx, dim))

    if dtype is not y.dtype:  # compute in the wider dtype and round once
        y = _wide(y)
    made = _in_one_dim(launch, dims, y, grad.to(y.dtype))
    if made is None:
        made = _laid_out(_gradient_arithmetic(grad, y, total, dims, function, y.dtype, engine), y)
    return made.to(dtype)


def _launch_shares(
    x: Tensor,
    y: Tensor,
    terms: Tensor,
    of_lse: Tensor | None,
    dx: Tensor | None,
    dy: Tensor | None,
    dim: int,
    engine: str,
) -> bool:
    """Launches the backward of a cross-entropy with probabilities y and the upstream gradient -1."""
    grads = torch.full((3, terms.numel() // 4), -1, dtype=terms.dtype, device=terms.device)
    if of_lse is not None:
        grads[1] = of_lse.flatten()
    tensors = x, y, None, terms.reshape(4, -1), grads, dx, dy
    spec = DivergenceSpec(dim, False, engine=engine)
    if engine == "triton":
        return triton_engine.launch_divergence_backward(*tensors, spec)
    return bool(_shares_kernel(*tensors, *spec[:-1]))


def _with_one_dim(dims: list[int], *tensors: Tensor) -> tuple[Any, ...]:
    """Merges `dims` of the tensors into one. Returns that dim and the tensors."""
    if not tensors[0].dim():
        return 0, *(t.unsqueeze(0) for t in tensors)
    if len(dims) == 1:
        return dims[0], *tensors
    last = tuple(range(-len(dims), 0))
    merged = [t.movedim(dims, last).flatten(-len(dims)) for t in tensors]
    return merged[0].dim() - 1, *merged


def _in_one_dim(launch: Callable[..., bool], dims: list[int], *tensors: Tensor) -> Tensor | None:
    """The result that `launch(dim, *tensors, result)` writes, with `dims` merged into one. None if it has no kernel."""
    like, count = tensors[0], len(dims)
    dim, *operands = _with_one_dim(dims, *tensors)
    made = torch.empty_like(operands[0])
    if not launch(dim, *operands, made):
        return None
    if not like.dim():
        return made.squeeze(0)
    if count == 1:
        return made
    apart = made.unflatten(-1, [like.shape[d] for d in dims]).movedim(tuple(range(-count, 0)), dims)
    return _laid_out(apart, like)


# Registrations --------------------------------------------------------------------------------------------------------


class FinishFunction(torch.autograd.Function):
    """A finish with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Tensor, l: Tensor, *spec: Any) -> Tensor:
        with _BelowAutograd():
            y = _finish_operator(x, m, l, *spec)
        ctx.dims, ctx.function, ctx.x_dtype = spec[0], spec[1], x.dtype
        ctx.save_for_backward(y, l)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, l = ctx.saved_tensors
        dx = grad * y if ctx.function == "softmax" else grad
        dm = dl = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dm = -_wide(dx).sum(ctx.dims, keepdim=True).to(l.dtype)
            dl = dm / l
        return dx.to(ctx.x_dtype), dm, dl, None, None, None, None


def _finish_autograd(x: Tensor, m: Tensor, l: Tensor, *spec: Any) -> Tensor:
    if needs_no_autograd(x, m, l):
        with _BelowAutograd():
            return _finish_operator(x, m, l, *spec)
    if _is_transformed():
        return _finish_arithmetic(x, m, l, *spec)
    return FinishFunction.apply(x, m, l, *spec)


def _differentiable(operator: Any, arithmetic: Any) -> Any:
    """The autograd kernel of an operator: `arithmetic`, if derivatives are needed, else `operator`."""

    def autograd(*given: Any) -> Tensor:
        if needs_no_autograd(*(t for t in given if isinstance(t, Tensor))):
            with _BelowAutograd():
                return operator(*given)
        return arithmetic(*given)

    return autograd


def _sum_fake(grad: Tensor, y: Tensor, dims: list[int], function: str, engine: str) -> Tensor:
    shape = [1 if any(d == i for i in dims) else size for d, size in enumerate(y.shape)]
    return y.new_empty(shape, dtype=_accumulator(y.dtype, y.dtype))


implement(
    "merge_states",
    torch._disable_dynamo(_merge),
    _differentiable(_merge_operator, _merge_arithmetic),
    lambda parts, engine: parts.new_empty((4, *parts.shape[2:])),
)
implement(
    "finish",
    torch._disable_dynamo(_finish),
    _finish_autograd,
    lambda x, m, l, dims, function, dtype, engine: torch.empty_like(x, dtype=dtype),
)
implement("gradient_sum", torch._disable_dynamo(_sum), _differentiable(_sum_operator, _sum_arithmetic), _sum_fake)
implement(
    "gradient_finish",
    torch._disable_dynamo(_gradient),
    _differentiable(_gradient_operator, _gradient_arithmetic),
    lambda grad, y, total, dims, function, dtype, engine: torch.empty_like(y, dtype=dtype),
)
