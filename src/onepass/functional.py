"""The functions users know from torch: same values, same argument order, same keyword names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._engines import _ready_devices, resolve
from .ops import HANDLES, OUT_HANDLES, call, call_boxed, call_out, reduced_shape
from .settings import autocast_to_float32
from .validation import (
    DROPPED,
    FLOATS,
    LAST,
    PYTHON_TYPES,
    Default,
    check_input,
    check_keepdim,
    check_out,
    either,
    normalize_dims,
    result_dtype,
)

__all__ = ["log_softmax", "logsumexp", "softmax", "softmin"]

Dim = int | Sequence[int]
Dtype = torch.dtype
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode = torch.is_inference_mode_enabled
_torch_function_modes = torch._C._len_torch_function_stack
_torch_dispatch_modes = torch._C._len_torch_dispatch_stack
_increment_version = torch._C._increment_version
_MOST_DIMS = 64  # of a tensor that the operators take
_SOFTMAX, _LOG_SOFTMAX, _SOFTMIN, _LOGSUMEXP = (
    HANDLES[name] for name in ("softmax", "log_softmax", "softmin", "logsumexp")
)
_SOFTMAX_OUT, _LOG_SOFTMAX_OUT, _SOFTMIN_OUT, _LOGSUMEXP_OUT = (
    OUT_HANDLES[name] for name in ("softmax", "log_softmax", "softmin", "logsumexp")
)


def try_fast(handle: Any, x: Any, dim: Any, option: Any) -> Tensor | None:
    """The result of a plain call of `x` and `dim`, whatever they are; None where it is not one. `handle` is one of
    `HANDLES`, `option` is keepdim for logsumexp, else dtype.

    Not asked is what the operator itself refuses (a dim out of range, a dtype, a layout), nor what has a kernel of its
    own: autocast, torch.func, torch.jit.trace, fake and meta tensors.
    """
    if (
        type(x) is Tensor
        and (type(dim) is int or type(dim) is Default)
        and not _is_dynamo_compiling()
        and not _torch_function_modes()
        and x.get_device() in _ready_devices
        and not (x.requires_grad and _is_grad_enabled())
        and forward_ad._current_level < 0
    ):
        try:
            return call_boxed(handle, x, dim, option)
        except Exception:
            pass
    return None


def try_fast_out(handle: Any, x: Any, dim: Any, option: Any, out: Any) -> bool:
    """Whether `out` has the result of a plain call, as of `try_fast`; `handle` is one of `OUT_HANDLES`.

    Where it has not, nothing is written.
    """
    if (
        _is_dynamo_compiling()  # first: a graph cannot hold the answers to some of the others
        or type(out) is not Tensor
        or _torch_dispatch_modes()
        or type(x) is not Tensor
        or not (type(dim) is int or type(dim) is Default)
        or _torch_function_modes()
        or x.get_device() not in _ready_devices
        or ((x.requires_grad or out.requires_grad) and _is_grad_enabled())
        or forward_ad._current_level >= 0
    ):
        return False
    try:
        out._version  # noqa: B018  (an inference tensor has none; to ask is_inference() takes twice as long)
    except RuntimeError:
        if not _is_inference_mode():
            return False
    try:
        call_boxed(handle, x, dim, option, out)
    except Exception:
        return False
    _increment_version((out,))  # who saved it for a backward must learn that it was overwritten
    return True


def _family(
    function: str, x: Tensor, dim: Any, dtype: Any, stacklevel: Any, out: Tensor | None, engine: str, axis: Any
) -> Tensor:
    """Any call of a function of the family."""
    ours = _FUNCTIONS[function]
    if type(dtype) is int and (stacklevel is None or isinstance(stacklevel, (torch.dtype, type))):
        spelled: Any = stacklevel  # by position, as torch.nn.functional has the two
    else:
        spelled = PYTHON_TYPES.get(dtype, dtype) if isinstance(dtype, type) else dtype
    if type(axis) is not Default or spelled is not dtype:  # the call may be a plain one after all
        return ours(x, either(function, "dim", dim, "axis", axis), spelled, out=out, engine=engine)
    check_input(function, x)
    dims = normalize_dims(function, x, dim)
    if dtype is None and out is None and autocast_to_float32(x):
        dtype = torch.float32  # in the kernel, not by a cast before it
    result = result_dtype(function, x, dtype)
    if out is not None:
        check_out(function, x, out, list(x.shape), result)
    if x.dim() > _MOST_DIMS > sum(size != 1 for size in x.shape):
        return _without_ones(ours, x, dims, dtype, out, engine)
    chosen = resolve(engine, x.device)
    if x.dtype not in FLOATS:
        x = x.to(result)
    if out is None:
        return call(function, x, dims, dtype, False, chosen)
    call_out(function, x, dims, dtype, False, chosen, out)
    return out


def _without_ones(ours: Any, x: Tensor, dims: list[int], dtype: Any, out: Tensor | None, engine: str) -> Tensor:
    """A call of more dims than the operators take, by a view without those of size 1, but for one."""
    kept = [d for d, size in enumerate(x.shape) if size != 1]
    reduced = [kept.index(d) for d in dims if d in kept] or [-1]
    into = None if out is None else out.squeeze().unsqueeze(-1)
    y = ours(x.squeeze().unsqueeze(-1), reduced, dtype, out=into, engine=engine)
    return y.view(x.shape) if out is None else out


def softmax(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
) -> Tensor:
    """exp(input) / sum(exp(input)) over `dim`, without overflow, as `torch.softmax`.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16; integers with `dtype`.
        dim: the dim along which the result sums to 1, or a tuple of dims.
        dtype: the result's dtype, `float` for float64. The input is rounded to it first, in registers, as torch does.
            Half types are computed in float32, so `dtype=torch.float32` of a half input costs no extra pass.
        _stacklevel: ignored, as in `torch.nn.functional.softmax`. That has it before dtype: by position an int
            is taken for it where a dtype, or None, follows.
        out: takes the result: the input's shape, the result's dtype; `input` itself for in place. It is never resized.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        axis: another name of `dim`.

    Returns:
        A tensor of the input's shape and layout (the strides of `torch.empty_like(input)`). A row of all -inf, or with
        a +inf, is NaN, and so is its gradient (docs/gradients.md); a NaN poisons its own row only.

    Raises:
        IndexError: `dim` is out of range. RuntimeError: a dim twice, an `out` of another dtype or device or overlapping
        the input, an `out` where a gradient is recorded or under `torch.vmap`, an engine that cannot run.
        NotImplementedError: a dtype or layout that is not served, an `out` in forward-mode AD. TypeError, ValueError:
        an argument of the wrong kind or given twice, an `out` of another shape, an unknown engine.

    The state of a row, the pair (maximum, sum of exponentials), is that of Milakov & Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).

    >>> import torch, onepass
    >>> onepass.softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    >>> x = torch.zeros(2, 4)
    >>> onepass.softmax(x, dim=(0, 1), out=x)[0]
    tensor([0.1250, 0.1250, 0.1250, 0.1250])
    """
    if engine == "auto" and type(axis) is Default and (dtype is None or type(dtype) is Dtype):
        if out is None:
            if (y := try_fast(_SOFTMAX, input, dim, dtype)) is not None:
                return y
        elif try_fast_out(_SOFTMAX_OUT, input, dim, dtype, out):
            return out
    return _family("softmax", input, dim, dtype, _stacklevel, out, engine, axis)


def log_softmax(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
) -> Tensor:
    """log(softmax(input)) over `dim`, computed as (input - max) - log(sum), as `torch.log_softmax`.

    Arguments, result and errors are those of `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.log_softmax(torch.zeros(3, 4), dim=0)[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """
    if engine == "auto" and type(axis) is Default and (dtype is None or type(dtype) is Dtype):
        if out is None:
            if (y := try_fast(_LOG_SOFTMAX, input, dim, dtype)) is not None:
                return y
        elif try_fast_out(_LOG_SOFTMAX_OUT, input, dim, dtype, out):
            return out
    return _family("log_softmax", input, dim, dtype, _stacklevel, out, engine, axis)


def softmin(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
) -> Tensor:
    """softmax(-input) over `dim`, negated in registers, as `torch.nn.functional.softmin`.

    Arguments, result and errors are those of `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.softmin(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    if engine == "auto" and type(axis) is Default and (dtype is None or type(dtype) is Dtype):
        if out is None:
            if (y := try_fast(_SOFTMIN, input, dim, dtype)) is not None:
                return y
        elif try_fast_out(_SOFTMIN_OUT, input, dim, dtype, out):
            return out
    return _family("softmin", input, dim, dtype, _stacklevel, out, engine, axis)


def logsumexp(
    input: Tensor,
    dim: Dim | None = None,
    keepdim: bool = DROPPED,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim | None = None,
    keepdims: bool = DROPPED,
) -> Tensor:
    """log(sum(exp(input))) over `dim`, without overflow, as `torch.logsumexp`.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16; integers are taken as
            the default dtype.
        dim: the dim to reduce, or a tuple of dims.
        keepdim: whether the result keeps the reduced dims, with size 1.
        out: takes the result. It is never resized and shares no memory with the input.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        axis, keepdims: other names of `dim` and `keepdim`.

    Returns:
        A tensor of the input's dtype. Over an empty dim, or a row of all -inf, it is -inf; with a +inf, it is +inf. The
        gradient of such a row is NaN at each infinity that is its maximum.

    Raises:
        As `onepass.softmax`; TypeError for complex input.

    >>> import torch, onepass
    >>> onepass.logsumexp(torch.zeros(2, 10), dim=1)
    tensor([2.3026, 2.3026])
    """
    if engine == "auto" and axis is None and type(keepdims) is Default and type(keepdim) in (bool, Default):
        if out is None:
            if (y := try_fast(_LOGSUMEXP, input, dim, keepdim is True)) is not None:
                return y
        elif try_fast_out(_LOGSUMEXP_OUT, input, dim, keepdim is True, out):
            return out
    function = "logsumexp"
    if axis is not None or type(keepdims) is not Default:  # other spellings, of a call that may be a plain one
        dim, keepdim = (
            either(function, "dim", dim, "axis", axis, type(None)),
            check_keepdim(function, keepdim, keepdims),
        )
        return logsumexp(input, dim, keepdim, out=out, engine=engine)
    check_input(function, input)
    dims = normalize_dims(function, input, dim)
    keepdim = check_keepdim(function, keepdim, DROPPED)
    x: Any = input if input.dtype in FLOATS else input.to(torch.get_default_dtype())
    if out is not None:
        check_out(function, input, out, reduced_shape(input.shape, dims if input.dim() else [], keepdim), x.dtype)
    chosen = resolve(engine, input.device)
    if out is None:
        return call(function, x, dims, torch.float32 if autocast_to_float32(x) else None, keepdim, chosen)
    call_out(function, x, dims, None, keepdim, chosen, out)
    return out


_FUNCTIONS: dict[str, Any] = {"softmax": softmax, "log_softmax": log_softmax, "softmin": softmin}
