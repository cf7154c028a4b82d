"""What a call may be given: every refusal comes from here, before anything is launched or overwritten.

Where torch raises, the error has torch's type; elsewhere it is a TypeError or a ValueError. Each says what was got and
what is taken.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from .overlap import overlap, self_overlap

FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
HALVES = frozenset((torch.float16, torch.bfloat16))
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
TAKES = "float32, float64, float16 and bfloat16"


def check_input(function: str, x: Any) -> None:
    """A strided real tensor; its dtype may still be an integer's."""
    if not isinstance(x, Tensor):
        raise TypeError(f"onepass.{function}(): input must be a Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise NotImplementedError(f"onepass.{function}(): takes dense strided tensors, got {got}")
    if x.dtype not in FLOATS and x.dtype not in INTEGERS:
        error = TypeError if x.is_complex() and function == "logsumexp" else NotImplementedError
        raise error(f"onepass.{function}(): takes {TAKES} (and integers), got {x.dtype}")


def normalise_dims(function: str, x: Tensor, dim: Any) -> list[int]:
    """`dim`, an int or a sequence of ints, as a list of unique dims from 0 up."""
    rank = x.dim() or 1
    if type(dim) is int and -rank <= dim < rank:
        return [dim % rank]
    try:
        if isinstance(dim, bool):  # an int to Python, an error to torch
            raise TypeError
        given = [operator.index(dim)] if not isinstance(dim, (tuple, list)) else [operator.index(d) for d in dim]
    except TypeError:
        raise TypeError(f"onepass.{function}(): dim must be an int or a tuple of ints, got {dim!r}") from None
    if not given and isinstance(dim, (tuple, list)):
        return list(range(rank)) if x.dim() else [0]
    dims = []
    for d in given:
        if not -rank <= d < rank:
            raise IndexError(
                f"onepass.{function}(): dim must be in [{-rank}, {rank - 1}] for shape {list(x.shape)}, got {d}"
            )
        dims.append(d % rank)
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"onepass.{function}(): each dim may appear once, got {dim!r} for shape {list(x.shape)}")
    return dims


def result_dtype(function: str, x: Tensor, dtype: Any) -> torch.dtype:
    """The dtype of the softmax family's result; checks `dtype`."""
    if dtype is None:
        if x.dtype not in FLOATS:
            raise NotImplementedError(f"onepass.{function}(): of {x.dtype} needs dtype=, one of {TAKES}")
        return x.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"onepass.{function}(): dtype must be a torch.dtype, got {dtype!r}")
    if dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{function}(): dtype must be one of {TAKES}, got {dtype}")
    return dtype


def reduces_to(function: str, x: torch.dtype, y: torch.dtype) -> bool:
    """Whether logsumexp or state of `x` gives `y`: a state the dtype that rows are computed in, logsumexp its input's
    or, of half types, that one too."""
    wide = torch.float64 if x is torch.float64 else torch.float32
    return y is wide or (function == "logsumexp" and y is x)


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie one wholly behind the other, as they mostly do. False says nothing."""
    if not (a.is_contiguous() and b.is_contiguous()) or a.device.type == "meta":
        return False
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start + a.nbytes <= b_start or b_start + b.nbytes <= a_start


def check_out(function: str, x: Tensor, out: Any, shape: list[int], dtype: torch.dtype) -> None:
    """`out` can take the result as it is: it is never resized, and never half under the input."""
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
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        which = "the input" if x.requires_grad else "out"
        raise RuntimeError(
            f"onepass.{function}(): out= has no gradient, but {which} requires one; "
            "call it without out=, or under torch.no_grad()"
        )
    if torch.compiler.is_compiling():
        return  # a graph has no addresses, and its calls are functionalised: an overlap does no harm there
    if out.is_neg():
        raise RuntimeError(f"onepass.{function}(): out is a negated view; give its resolve_neg()")
    if self_overlap(out):
        raise RuntimeError(
            f"onepass.{function}(): elements of out share memory (strides {out.stride()}); clone() it first"
        )
    if x is not out and _apart(x, out):
        return
    shared = overlap(x, out)
    if shared == "partial" or (shared == "same" and function == "logsumexp" and x.numel() > 1):
        raise RuntimeError(
            f"onepass.{function}(): out must be the input itself or share no memory with it; they overlap"
        )
