"""The functions users know from torch: same values, same argument order, same keyword names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autocast import widens
from .checks import FLOATS, check_input, check_out, normalise_dims, result_dtype
from .engines import resolve
from .ops import HANDLES, call, call_boxed, call_out, reduced_shape
from .plain import OUT_HANDLES, is_plain, write

__all__ = ["log_softmax", "logsumexp", "softmax", "softmin"]

Dim = int | Sequence[int]
Type = torch.dtype
_SOFTMAX, _LOG_SOFTMAX, _SOFTMIN, _LOGSUMEXP = (
    HANDLES[name] for name in ("softmax", "log_softmax", "softmin", "logsumexp")
)
_SOFTMAX_OUT, _LOG_SOFTMAX_OUT, _SOFTMIN_OUT, _LOGSUMEXP_OUT = (
    OUT_HANDLES[name] for name in ("softmax", "log_softmax", "softmin", "logsumexp")
)


def _family(function: str, x: Tensor, dim: Dim, dtype: torch.dtype | None, out: Tensor | None, engine: str) -> Tensor:
    check_input(function, x)
    dims = normalise_dims(function, x, dim)
    if dtype is None and out is None and widens(x):
        dtype = torch.float32  # in the kernel, not by a cast before it
    result = result_dtype(function, x, dtype)
    if out is not None:
        check_out(function, x, out, list(x.shape), result)
    chosen = resolve(engine, x.device)
    if x.dtype not in FLOATS:
        x = x.to(result)
    if out is None:
        return call(function, x, dims, dtype, False, chosen)
    call_out(function, x, dims, dtype, False, chosen, out)
    return out


def softmax(
    input: Tensor,
    dim: Dim = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """exp(input) / sum(exp(input)) over `dim`, without overflow, as `torch.softmax`.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16; integers with `dtype`.
        dim: the dim along which the result sums to 1, or a tuple of dims.
        dtype: the result's dtype. The input is rounded to it first, in registers, as torch does. Half types are
            computed in float32, so `dtype=torch.float32` of a half input costs no extra pass.
        out: takes the result: the input's shape, the result's dtype; `input` itself for in place. It is never resized.
        engine: "auto", or "cpu", "cuda", "triton" to force one.

    Returns:
        A tensor of the input's shape and layout (the strides of `torch.empty_like(input)`). A row of all -inf, or with
        a +inf, is NaN, and so is its gradient (docs/gradients.md); a NaN poisons its own row only.

    Raises:
        IndexError: `dim` is out of range. RuntimeError: a dim twice, an `out` of another dtype or device or overlapping
        the input, an engine that cannot run. NotImplementedError: a dtype or layout that is not served. TypeError,
        ValueError: an argument of the wrong kind, an `out` of another shape, an unknown engine.

    The state of a row, the pair (maximum, sum of exponentials), is that of Milakov & Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).

    >>> import torch, onepass
    >>> onepass.softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    >>> x = torch.zeros(2, 4)
    >>> onepass.softmax(x, dim=(0, 1), out=x)[0]
    tensor([0.1250, 0.1250, 0.1250, 0.1250])
    """
    if engine == "auto" and (dtype is None or type(dtype) is Type):
        if out is not None:
            if write(_SOFTMAX_OUT, input, dim, dtype, out):
                return out
        elif is_plain(input, dim):
            try:
                return call_boxed(_SOFTMAX, input, dim, dtype)
            except Exception:  # what is wrong, the way below says
                pass
    return _family("softmax", input, dim, dtype, out, engine)


def log_softmax(
    input: Tensor,
    dim: Dim = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """log(softmax(input)) over `dim`, computed as (input - max) - log(sum), as `torch.log_softmax`.

    Arguments, result and errors are those of `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.log_softmax(torch.zeros(3, 4), dim=0)[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """
    if engine == "auto" and (dtype is None or type(dtype) is Type):
        if out is not None:
            if write(_LOG_SOFTMAX_OUT, input, dim, dtype, out):
                return out
        elif is_plain(input, dim):
            try:
                return call_boxed(_LOG_SOFTMAX, input, dim, dtype)
            except Exception:  # what is wrong, the way below says
                pass
    return _family("log_softmax", input, dim, dtype, out, engine)


def softmin(
    input: Tensor,
    dim: Dim = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """softmax(-input) over `dim`, negated in registers, as `torch.nn.functional.softmin`.

    Arguments, result and errors are those of `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.softmin(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    if engine == "auto" and (dtype is None or type(dtype) is Type):
        if out is not None:
            if write(_SOFTMIN_OUT, input, dim, dtype, out):
                return out
        elif is_plain(input, dim):
            try:
                return call_boxed(_SOFTMIN, input, dim, dtype)
            except Exception:  # what is wrong, the way below says
                pass
    return _family("softmin", input, dim, dtype, out, engine)


def logsumexp(
    input: Tensor, dim: Dim, keepdim: bool = False, *, out: Tensor | None = None, engine: str = "auto"
) -> Tensor:
    """log(sum(exp(input))) over `dim`, without overflow, as `torch.logsumexp`.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16; integers are taken as
            the default dtype.
        dim: the dim to reduce, or a tuple of dims.
        keepdim: whether the result keeps the reduced dims, with size 1.
        out: takes the result. It is never resized and shares no memory with the input.
        engine: "auto", or "cpu", "cuda", "triton" to force one.

    Returns:
        A tensor of the input's dtype. Over an empty dim, or a row of all -inf, it is -inf; with a +inf, it is +inf. The
        gradient of such a row is NaN at each infinity that is its maximum.

    Raises:
        As `onepass.softmax`; TypeError for complex input.

    >>> import torch, onepass
    >>> onepass.logsumexp(torch.zeros(2, 10), dim=1)
    tensor([2.3026, 2.3026])
    """
    if engine == "auto" and type(keepdim) is bool:
        if out is not None:
            if write(_LOGSUMEXP_OUT, input, dim, keepdim, out):
                return out
        elif is_plain(input, dim):
            try:
                return call_boxed(_LOGSUMEXP, input, dim, keepdim)
            except Exception:  # what is wrong, or an integer dtype: the way below knows
                pass
    function = "logsumexp"
    check_input(function, input)
    dims = normalise_dims(function, input, dim)
    if not isinstance(keepdim, bool):
        raise TypeError(f"onepass.logsumexp(): keepdim must be a bool, got {keepdim!r}")
    x: Any = input if input.dtype in FLOATS else input.to(torch.get_default_dtype())
    if out is not None:
        check_out(function, input, out, reduced_shape(input.shape, dims if input.dim() else [], keepdim), x.dtype)
    chosen = resolve(engine, input.device)
    if out is None:
        return call(function, x, dims, torch.float32 if widens(x) else None, keepdim, chosen)
    call_out(function, x, dims, None, keepdim, chosen, out)
    return out
