"""The checks of a call's arguments. Every error is raised here, before anything is launched or overwritten.

If torch raises an error for the same call, the error has torch's type; otherwise it is a TypeError or a ValueError.
Each message says what was got and what is accepted.
"""

import ctypes
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from . import native

FLOATS = frozenset(native.DTYPES)
HALF_DTYPES = frozenset((torch.float16, torch.bfloat16))
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
TAKES = "float32, float64, float16 and bfloat16"
PYTHON_TYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}  # as dtypes


class Spec(NamedTuple):
    """The checked arguments of a call except its tensors. All code between the public functions and engines uses it."""

    function: str
    dims: list[int]  # from 0 up, unique
    dtype: torch.dtype | None = None  # the argument `dtype=`, or the dtype that autocast asks for
    keepdim: bool = False
    engine: str = "native"  # "triton"; any other name is the native core, which goes by the tensor's device


class Default(int):
    """The default of an argument that has two names. Its type differs from that of an equal value from the caller."""


LAST: Any = Default(-1)
DROPPED: Any = Default(False)


def either(function: str, name: str, value: Any, other: str, alias: Any, default: type = Default) -> Any:
    """The value of an argument that has two names, of which the caller may give only one. A value of the type `default`
    was not given by the caller."""
    if type(alias) is default:
        return value
    if type(value) is not default:
        raise TypeError(f"onepass.{function}(): {other} is another name of {name}, got both")
    return alias


def check_keepdim(function: str, keepdim: Any, keepdims: Any) -> bool:
    keepdim = either(function, "keepdim", keepdim, "keepdims", keepdims)
    if type(keepdim) is Default:
        return False
    if not isinstance(keepdim, bool):
        raise TypeError(f"onepass.{function}(): keepdim must be a bool, got {keepdim!r}")
    return keepdim


def check_input(function: str, x: Any) -> None:
    """Checks that `x` is a strided real tensor. Its dtype may still be an integer's."""
    if not isinstance(x, Tensor):
        raise TypeError(f"onepass.{function}(): input must be a Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise NotImplementedError(f"onepass.{function}(): takes dense strided tensors, got {got}")
    if x.dtype not in FLOATS and x.dtype not in INTEGERS:
        error = TypeError if x.is_complex() and function == "logsumexp" else NotImplementedError
        raise error(f"onepass.{function}(): takes {TAKES} (and integers), got {x.dtype}")


def is_dtensor(t: Any) -> bool:
    """Whether `t` is a DTensor, without importing torch.distributed.tensor, which takes a second."""
    return hasattr(t, "full_tensor")


def refuse_dtensors(function: str, *tensors: Any) -> None:
    """Raises an error for DTensors, in functions whose calls never reach the handlers of DTensors (dtensor.py)."""
    if any(is_dtensor(t) for t in tensors):
        raise NotImplementedError(
            f"onepass.{function}(): takes no DTensor here; give the local tensor, DTensor.to_local()"
        )


def normalize_dims(function: str, x: Tensor, dim: Any) -> list[int]:
    """`dim`, an int or a sequence of ints, as a list of unique dims from 0 up; an empty sequence means all dims."""
    if type(dim) is Default:
        dim = -1  # torch 2.11 cannot trace a comparison of a subclass of int
    if type(dim) is int:
        return wrap_dims(function, x, (dim,))
    try:
        if isinstance(dim, bool):  # an int in Python, an error in torch
            raise TypeError
        dims = list(map(operator.index, dim if isinstance(dim, (tuple, list)) else [dim]))
    except TypeError:
        raise TypeError(f"onepass.{function}(): dim must be an int or a tuple of ints, got {dim!r}") from None
    return wrap_dims(function, x, dims) if dims else list(range(x.dim() or 1))


def wrap_dims(function: str, x: Tensor, dims: Sequence[int]) -> list[int]:
    """Dims from 0 up. A tensor without dims has the one dim 0, as in torch."""
    rank = x.dim() or 1
    wrapped = []
    for d in dims:
        if not -rank <= d < rank:
            raise IndexError(
                f"onepass.{function}(): dim must be in [{-rank}, {rank - 1}] for shape {list(x.shape)}, got {d}"
            )
        wrapped.append(d % rank)
    if len(wrapped) > 1 and len(set(wrapped)) != len(wrapped):
        raise RuntimeError(
            f"onepass.{function}(): each dim may appear once, got {tuple(dims)} for shape {list(x.shape)}"
        )
    return wrapped


def check_dtype(function: str, x: Tensor, dtype: Any) -> None:
    """Checks that a softmax of `x` can have `dtype`. None is the dtype of the input, or of autocast."""
    if dtype is None:
        if x.dtype not in FLOATS:
            raise NotImplementedError(f"onepass.{function}(): of {x.dtype} needs dtype=, one of {TAKES}")
    elif not isinstance(dtype, torch.dtype):
        raise TypeError(f"onepass.{function}(): dtype must be a torch.dtype, got {dtype!r}")
    elif dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{function}(): dtype must be one of {TAKES}, got {dtype}")


# The dtype of a result ------------------------------------------------------------------------------------------------


def result_dtype(function: str, x: torch.dtype, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of the result for an input of dtype `x` and the argument `dtype=`. A state has the accumulator's dtype:
    that in which rows are computed."""
    if function == "state":
        return torch.float64 if x is torch.float64 else torch.float32
    return x if dtype is None else dtype


def reduces_to(function: str, x: torch.dtype, y: torch.dtype) -> bool:
    """Whether a reduction of `x` can return `y`: the dtype of a state or, for logsumexp, also the input's dtype."""
    return y is result_dtype("state", x) or (function == "logsumexp" and y is x)


# Whether tensors share memory (csrc/core/memory_overlap.h) -----------------------------------------------------------


def overlap(a: Tensor, b: Tensor) -> Literal["none", "same", "partial"]:
    """How the memory of two strided tensors overlaps.

    "same": they address the same elements in the same order (equal address, sizes, element size, and strides where
    the size is above 1), so that an element-wise kernel may write one while it reads the other. "none": no byte is
    shared. "partial": some byte is shared, or a search of 10,000 steps did not rule it out. Shapes and dtypes may be
    any.

    >>> import torch
    >>> x = torch.zeros(4, 4)
    >>> overlap(x, x), overlap(x, x.t()), overlap(x[::2], x[1::2]), overlap(x[:-1], x[1:])
    ('same', 'partial', 'none', 'partial')
    """
    if a.device != b.device:
        return "none"
    if a.device.type == "meta" and a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return "none"  # meta storages have no address to compare
    if a.is_contiguous() and b.is_contiguous() and a.device.type != "meta":  # needs no search: a tenth of the time
        first, second = a.data_ptr(), b.data_ptr()
        if first + a.nbytes <= second or second + b.nbytes <= first:
            return "none"
    return ("none", "same", "partial")[native.call("onepass_overlap", *_extent(a), *_extent(b))]


def self_overlap(t: Tensor) -> bool:
    """Whether two indices of a strided tensor address the same element, as in an expanded tensor.

    Also True if a search of 10,000 steps did not rule it out.

    >>> import torch
    >>> x = torch.zeros(10)
    >>> self_overlap(x.expand(3, 10)), self_overlap(x.as_strided((3, 3), (2, 1))), self_overlap(x.view(2, 5).t())
    (True, True, False)
    """
    return not t.is_contiguous() and bool(native.call("onepass_self_overlap", *_extent(t)))


def _extent(t: Tensor) -> tuple[Any, ...]:
    """A tensor as the C functions take it: address, bytes of an element, rank, sizes, strides."""
    start = int(t.storage_offset()) * t.element_size() if t.device.type == "meta" else t.data_ptr()
    int64s = ctypes.c_int64 * max(t.dim(), 1)
    return ctypes.c_uint64(start), t.element_size(), t.dim(), int64s(*t.shape), int64s(*t.stride())


# `out` ---------------------------------------------------------------------------------------------------------------


def has_tangent(*tensors: Tensor) -> bool:
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def check_inference(function: str, out: Tensor) -> None:
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"onepass.{function}(): out is an inference tensor, and is written in torch.inference_mode() alone; "
            "clone() it first"
        )


def check_memory(function: str, x: Tensor, out: Tensor) -> None:
    """Checks the memory of `out` as the native operators do (csrc/torch/ops.cpp)."""
    if self_overlap(out):
        raise RuntimeError(f"onepass.{function}(): elements of out share memory; clone() it first")
    shared = overlap(x, out)
    if shared == "partial" or (shared == "same" and function == "logsumexp" and x.numel() > 1):
        raise RuntimeError(
            f"onepass.{function}(): out must be the input itself or share no memory with it; they overlap"
        )


def check_out(
    function: str, x: Tensor, out: Any, shape: list[int], dtype: torch.dtype, side: Iterable[Tensor | None] = ()
) -> None:
    """Checks that `out` can hold the result without resizing. The operators check whether it overlaps the input. `side`
    has other tensors that the result is computed from."""
    if not isinstance(out, Tensor):
        raise TypeError(f"onepass.{function}(): out must be a Tensor, got {type(out).__name__}")
    if out.layout is not torch.strided or out.is_nested:
        raise RuntimeError(f"onepass.{function}(): out must be a strided tensor, got layout {out.layout}")
    if out.device != x.device:
        raise RuntimeError(f"onepass.{function}(): out must be on {x.device}, as the input is, got {out.device}")
    if out.dtype != dtype:
        raise RuntimeError(f"onepass.{function}(): the result is {dtype}, got an out of {out.dtype}")
    if list(out.shape) != shape:
        raise ValueError(
            f"onepass.{function}(): the result has shape {shape} and out is never resized, got {list(out.shape)}"
        )
    others = [t for t in side if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, out, *others)):
        which = "the input" if x.requires_grad else "out" if out.requires_grad else "an argument"
        raise RuntimeError(
            f"onepass.{function}(): out= has no gradient, but {which} requires one; "
            "call it without out=, or under torch.no_grad()"
        )
    if torch.compiler.is_compiling():
        return  # the operator makes the checks below when the graph runs
    if out.is_neg():
        raise RuntimeError(f"onepass.{function}(): out is a negated view; give its resolve_neg()")
    check_inference(function, out)
    if has_tangent(x, out, *others):
        raise NotImplementedError(f"onepass.{function}(): out= has no forward-mode gradient; call it without out=")
    for t in (x, out, *others):
        while _functorch.is_functorch_wrapped_tensor(t):
            if _functorch.is_batchedtensor(t):
                raise RuntimeError(f"onepass.{function}(): out= has no batching rule for vmap; call it without out=")
            t = _functorch.get_unwrapped(t)
