"""The kernels that `patch` puts in the place of torch's, and what they leave to torch, with the reason.

A kernel is called below autograd, with the arguments of its aten operator, and gives a contiguous result as torch's
does. Each is made of two functions of these arguments: `refusal` tells why a call goes to the kernel that was there
before, and `serve` computes the others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from .checks import FLOATS, HALVES
from .engines import NATIVE, resolve
from .ops import reduced_shape
from .overlap import overlap, self_overlap

_ops = torch.ops.onepass
_call_boxed = torch._C._dispatch_call_boxed  # straight into the dispatcher, as plain.py has it
_KEYS = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)

# The reports of the active patches.
observers: tuple[Callable[[str, str], None], ...] = ()


def _kernel(
    name: str, notes_refusals: bool, refusal: Callable[..., str], serve: Callable[..., Tensor], torchs: Any
) -> Callable[..., Tensor]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        with DisableTorchFunction():  # a subclass or a mode is not to see what is asked of a tensor
            reason = refusal(*args, **kwargs)
            if not reason:
                try:
                    result = serve(*args, **kwargs)
                except RuntimeError:  # out of memory, say: torch raises what its users catch
                    reason = "an error of onepass"
            if observers and (notes_refusals or not reason):
                for note in observers:
                    note(name, reason)
            return torchs.call_boxed(keys, *args, **kwargs) if reason else result

    return kernel


# What is served -----------------------------------------------------------------------------------------------------

_ARGUMENTS = "arguments that onepass does not take"  # most of which torch refuses, in its own words


def _refusal(x: Tensor, dims: Sequence[int]) -> str:
    """Why a call over `dims` of `x` is left to torch; empty where it is served."""
    if x.dtype not in FLOATS:
        return f"dtype {x.dtype}"
    rank = x.dim() or 1
    for dim in dims:
        if not -rank <= dim < rank:
            return _ARGUMENTS
    index = x.get_device()
    if index not in NATIVE and not _has_engine(x.device):
        return f"no native engine serves this {x.device.type} device"
    # There, other dims are gathered by copies, which takes longer than torch.
    if index >= 0 and not are_last(x.shape, dims):
        return "on CUDA, a dim that is not the last"
    return ""


def _has_engine(device: torch.device) -> bool:
    try:
        return resolve("auto", device) in ("cpu", "cuda")
    except RuntimeError:
        return False


def are_last(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a contiguous tensor of `shape` has the elements of a row over `dims` behind each other.

    >>> are_last((5, 3, 4), (-1,)), are_last((5, 3, 4), (1,)), are_last((5, 3, 1), (1,)), are_last((5, 3, 4), (2, 1))
    (True, False, True, True)
    """
    reduced = {dim % (len(shape) or 1) for dim in dims}
    within = False
    for dim, size in enumerate(shape):
        if size != 1:
            if within and dim not in reduced:
                return False
            within = dim in reduced
    return True


def _out_refusal(x: Tensor, out: Tensor, shape: Sequence[int], dtype: torch.dtype, in_place: bool = False) -> str:
    if out.shape != torch.Size(shape) or out.dtype is not dtype or out.device != x.device:
        return "out= of another shape, dtype or device than the result"
    shared = overlap(x, out)
    if self_overlap(out) or shared == "partial" or (shared == "same" and not in_place):
        return "out= that shares memory with the input or with itself"
    return ""


# softmax and log_softmax --------------------------------------------------------------------------------------------


def _softmax_refusal(x: Tensor, dim: int, half_to_float: bool) -> str:
    if half_to_float and not (x.is_cuda and x.dtype in HALVES):
        return _ARGUMENTS
    return _refusal(x, (dim,))


def _softmax_out_refusal(x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> str:
    dtype = torch.float32 if half_to_float else x.dtype
    return _softmax_refusal(x, dim, half_to_float) or _out_refusal(x, out, x.shape, dtype, in_place=True)


def _softmax(handle: Any, handle_out: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else x.dtype
    shape, contiguous = x.shape, x.is_contiguous()
    if not contiguous and not _has_rows(x, dim):
        x, contiguous = x.contiguous(), True
    if contiguous and 1 not in shape and 0 not in shape:
        return _call_boxed(handle, x, dim, dtype)
    # Into memory given, as the result would have the strides of x, which are any for dims of size 1.
    return _softmax_out(handle_out, x, dim, half_to_float, out=torch.empty(shape, dtype=dtype, device=x.device))


def _softmax_out(handle: Any, x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> Tensor:
    _call_boxed(handle, x if x.is_cpu else x.contiguous(), dim, out.dtype, out)
    return out


def _has_rows(x: Tensor, dim: int) -> bool:
    """Whether rows lie flat on the CPU, where they are read as they are: 0.4 to 0.7 of the time with a copy before.

    Of other layouts the copy is the quicker part: 0.35 to 0.55 of the time of reading them as they are.
    """
    return x.is_cpu and dim in (-1, x.dim() - 1) and x.stride(-1) == 1


# logsumexp ----------------------------------------------------------------------------------------------------------


def _logsumexp_refusal(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> str:
    rank = x.dim() or 1
    if len(dims) != 1 and (not dims or len({dim % rank for dim in dims}) < len(dims)):
        return _ARGUMENTS
    return _refusal(x, dims)


def _logsumexp_out_refusal(x: Tensor, dims: Sequence[int], keepdim: bool = False, *, out: Tensor) -> str:
    reason = _logsumexp_refusal(x, dims)
    if reason:
        return reason
    shape = reduced_shape(x.shape, [dim % (x.dim() or 1) for dim in dims], keepdim)
    return _out_refusal(x, out, shape, x.dtype)


def _logsumexp(handle: Any, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    return _call_boxed(handle, x if x.is_cpu else x.contiguous(), dims, keepdim)


def _logsumexp_out(handle: Any, x: Tensor, dims: Sequence[int], keepdim: bool = False, *, out: Tensor) -> Tensor:
    _call_boxed(handle, x if x.is_cpu else x.contiguous(), dims, keepdim, out=out)
    return out


# Gradients ----------------------------------------------------------------------------------------------------------


def _backward_refusal(g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> str:
    if g.dtype is not y.dtype or g.shape != y.shape or g.device != y.device:
        return _ARGUMENTS
    return _refusal(y, (dim,))


def _backward(handle: Any, number: int, g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return _call_boxed(handle, g, y.contiguous(), number, [dim], input_dtype)


# The table ----------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, bool, Callable[..., str], Callable[..., Tensor]]


def _family(function: str, number: int) -> tuple[Row, ...]:
    operator = getattr(_ops, f"_{function}")
    handle, out, gradient = (op._handle for op in (operator.int, operator.int_out, _ops._softmax_backward.default))
    return (
        (f"_{function}", f"_{function}.int", function, True, _softmax_refusal, partial(_softmax, handle, out)),
        (f"_{function}.out", f"_{function}.int_out", function, True, _softmax_out_refusal, partial(_softmax_out, out)),
        (
            f"_{function}_backward_data",
            "_softmax_backward",
            f"{function} backward",
            True,
            _backward_refusal,
            partial(_backward, gradient, number),
        ),
    )


_LOGSUMEXP, _LOGSUMEXP_OUT = _ops._logsumexp.default._handle, _ops.logsumexp.out._handle

# aten's operator, that of onepass it needs a kernel of, its name in reports, whether refusals are noted, and the two
# functions. torch's logsumexp calls its own of out=, where a refusal is noted.
_TABLE: tuple[Row, ...] = (
    *_family("softmax", 0),  # the numbers of functions as the operator of gradients takes them
    *_family("log_softmax", 1),
    ("logsumexp", "_logsumexp", "logsumexp", False, _logsumexp_refusal, partial(_logsumexp, _LOGSUMEXP)),
    (
        "logsumexp.out",
        "logsumexp.out",
        "logsumexp",
        True,
        _logsumexp_out_refusal,
        partial(_logsumexp_out, _LOGSUMEXP_OUT),
    ),
)

# The last kernels of ours that were registered. One that is taken away may have been picked up by another thread, which
# waits for Python's lock before it runs; torch alone would have freed it under that thread.
_kept: deque[Any] = deque(maxlen=1 << 16)


def override(library: torch.library.Library) -> None:
    """Register the kernels of all operators in `library`, for the devices that onepass has a kernel for."""
    for key in _KEYS:
        for aten, needs, name, notes_refusals, refusal, serve in _TABLE:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"onepass::{needs}", key):
                torchs = torch.library.get_kernel(f"aten::{aten}", key)
                kernel = _kernel(name, notes_refusals, refusal, serve, torchs)
                library.impl(aten, kernel, key, with_keyset=True, allow_override=True)
                _kept.append(torch.library.get_kernel(f"aten::{aten}", key))
