"""The state of a row, for rows that are computed in parts: merging two states, and computing results from a state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._engines import resolve
from .ops import call, reduced_shape
from .scored import _accumulator
from .settings import autocast_to_float32
from .state_ops import finish_rows
from .validation import (
    DROPPED,
    FLOATS,
    HALF_DTYPES,
    LAST,
    Spec,
    check_dtype,
    check_input,
    check_keepdim,
    either,
    normalize_dims,
)

__all__ = ["State", "finish", "merge", "state"]


class State(NamedTuple):
    """The state of every row of a tensor: `m`, the maximum, and `l`, the sum of exp(x - m).

    Both have one shape, dtype and device. The state of no elements is (-inf, 0). `exp(x - m) / l` is the softmax of a
    row, `x - m - log(l)` its log_softmax.

    >>> import torch, onepass
    >>> whole = onepass.state(torch.tensor([[0.0, 0.0], [3.0, -torch.inf]]))
    >>> whole.m, whole.l
    (tensor([0., 3.]), tensor([2., 1.]))
    """

    m: Tensor
    l: Tensor

    def logsumexp(self) -> Tensor:
        """m + log(l), the logsumexp of the rows, in the dtype of the state.

        -inf for a row that is all -inf or empty, +inf for a row with a +inf, NaN for a row with a NaN.

        >>> import torch, onepass
        >>> onepass.state(torch.zeros(2, 10)).logsumexp()
        tensor([2.3026, 2.3026])
        """
        return self.m + self.l.log()


def state(
    input: Tensor,
    dim: int | Sequence[int] = LAST,
    keepdim: bool = DROPPED,
    *,
    engine: str = "auto",
    axis: int | Sequence[int] = LAST,
    keepdims: bool = DROPPED,
) -> State:
    """The state of every row: the maximum m over `dim`, and l = sum(exp(input - m)), in one read of the input.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16. Integers are converted
            to the default dtype.
        dim: the dim to reduce, or a tuple of dims.
        keepdim: whether the result keeps the reduced dims, with size 1.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        axis, keepdims: other names of `dim` and `keepdim`.

    Returns:
        A `State(m, l)`, float64 for float64 and float32 for all other dtypes. m and l share one storage. The state of a
        row that is all -inf or empty is (-inf, 0), that of a row with a +inf is (inf, inf). If a row has a NaN, l is
        NaN and m is the maximum of its other elements (-inf if there is none).

        The gradient is that of m = torch.amax(input), evenly shared among equal maxima, and of l = sum(exp(input - m)),
        where an infinite m is a constant.

    Raises:
        IndexError: `dim` is out of range. RuntimeError: a dim is given twice, or the engine cannot run.
        NotImplementedError: an unsupported dtype or layout. TypeError, ValueError: an argument of the wrong kind, an
        unknown engine.

    Source: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> import torch, onepass
    >>> onepass.state(torch.tensor([1.0, 3.0, 3.0, -torch.inf]))
    State(m=tensor(3.), l=tensor(2.1353))
    """
    check_input("state", input)
    dims = normalize_dims("state", input, either("state", "dim", dim, "axis", axis))
    keepdim = check_keepdim("state", keepdim, keepdims)
    spec = Spec("state", dims, None, keepdim, resolve(engine, input.device))
    planes = call(input if input.dtype in FLOATS else input.to(torch.get_default_dtype()), spec)
    return State(planes[0], planes[1])  # indexing is faster than select()


def merge(a: State, b: State) -> State:
    """The state of two parts of a row together, from the state of each part: elementwise, for every row at once.

    Merging is associative and commutative up to rounding, and (-inf, 0) is its identity. So the parts of a row may be
    merged in any order: `functools.reduce(onepass.merge, parts)`.

    Args:
        a, b: two states, or pairs (m, l), of floating tensors on one device, whose shapes broadcast.

    Returns:
        State(m, l) with m = max(a.m, b.m) and l = a.l * exp(a.m - m) + b.l * exp(b.m - m), where an infinite m is not
        subtracted: (-inf, 0) merged with itself is (-inf, 0). A +inf in either m gives (inf, inf). A NaN in either l
        gives NaN.

    Raises:
        TypeError: an argument is no pair of floating tensors. ValueError: shapes that do not broadcast. RuntimeError:
        two devices.

    >>> import torch, onepass
    >>> x = torch.randn(4, 1000)
    >>> whole = onepass.merge(onepass.state(x[:, :300]), onepass.state(x[:, 300:]))
    >>> torch.testing.assert_close(whole.logsumexp(), onepass.logsumexp(x, 1))
    """
    a_m, a_l = _pair("merge", "a", a)
    b_m, b_l = _pair("merge", "b", b)
    tensors = (a_m, a_l, b_m, b_l)
    if len({t.device for t in tensors}) > 1:
        raise RuntimeError(f"onepass.merge(): both states must be on one device, got {a_m.device} and {b_m.device}")
    try:
        torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        raise ValueError(
            f"onepass.merge(): shapes must broadcast, got {list(a_m.shape)}, {list(a_l.shape)} and "
            f"{list(b_m.shape)}, {list(b_l.shape)}"
        ) from None
    m = torch.maximum(a_m, b_m)
    base = m.masked_fill(m.isinf(), 0)  # avoids -inf - -inf and inf - inf, which are NaN
    return State(m, a_l * (a_m - base).exp() + b_l * (b_m - base).exp())


def finish(
    input: Tensor,
    state: State,
    function: str = "softmax",
    dim: int | Sequence[int] = -1,
    *,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor:
    """The softmax of a part of each row, for example of a chunk of a stream, from the state of the whole rows.

    With the state of whole rows from `onepass.state` and `onepass.merge`, the chunks of a row need not be in memory
    together. Each chunk is read twice, once for the state and once here.

    Args:
        input: a part of each row, of any length: a strided tensor, float64, float32, float16 or bfloat16, or integers
            with `dtype`.
        state: the `State` of the whole rows, or a pair (m, l). It has the shape of the input without the reduced dims,
            or with size 1 there.
        function: "softmax", "log_softmax" or "logsumexp". For "logsumexp" only the dtype of the input is used.
        dim: the dim of the rows, or a tuple of dims.
        dtype: the result's dtype. The input is rounded to it first, as in `onepass.softmax`.
        engine: "auto", or "cpu", "cuda", "triton" to force one.

    Returns:
        exp(input - m) / l or input - m - log(l), of the input's shape and layout, or m + log(l), of the state's shape.
        For an element of -inf the softmax is 0 and the log_softmax -inf. A row that is all -inf or has a +inf is NaN,
        as in `onepass.softmax`. The result has gradients for the input and for the state.

    Raises:
        ValueError: an unknown function, a state of another shape. TypeError: the state is no pair of floating tensors.
        RuntimeError: two devices, an engine that cannot run. Also the errors of `onepass.softmax`.

    Source: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

    >>> import functools, torch, onepass
    >>> chunks = torch.zeros(2, 10).split(4, dim=1)
    >>> whole = functools.reduce(onepass.merge, (onepass.state(chunk) for chunk in chunks))
    >>> [onepass.finish(chunk, whole)[0] for chunk in chunks]
    [tensor([0.1000, 0.1000, 0.1000, 0.1000]), tensor([0.1000, 0.1000, 0.1000, 0.1000]), tensor([0.1000, 0.1000])]
    >>> onepass.finish(chunks[0], whole, "logsumexp")
    tensor([2.3026, 2.3026])
    """
    check_input("finish", input)
    if function not in ("softmax", "log_softmax", "logsumexp"):
        raise ValueError(
            f"onepass.finish(): function must be 'softmax', 'log_softmax' or 'logsumexp', got {function!r}"
        )
    dims = normalize_dims("finish", input, dim)
    check_dtype("finish", input, dtype)
    m, l = _pair("finish", "state", state)
    kept, dropped = (reduced_shape(input.shape, dims, keepdim) for keepdim in (True, False))
    if m.shape != l.shape or list(m.shape) not in (kept, dropped):
        raise ValueError(
            f"onepass.finish(): the state has the shape {dropped} or {kept} for an input of shape "
            f"{list(input.shape)}, got {list(m.shape)} and {list(l.shape)}"
        )
    if not m.device == l.device == input.device:
        raise RuntimeError(
            f"onepass.finish(): the state must be on {input.device}, as the input is, got {m.device} and {l.device}"
        )
    if dtype is None and autocast_to_float32(input):
        dtype = torch.float32
    to = dtype or input.dtype
    wide = _accumulator(to, to)
    if function == "logsumexp":
        return (m.to(wide) + l.to(wide).log()).to(to)
    if to is not torch.float32 or input.dtype not in HALF_DTYPES:  # kernels convert half types to float32 themselves
        input = input.to(to)
    x = input if input.dim() else input.unsqueeze(0)
    m, l = (t.to(wide).reshape(kept or [1]) for t in (m, l))
    y = finish_rows(x, m, l, dims, function, None if to is input.dtype else to, resolve(engine, input.device))
    return y if input.dim() else y.squeeze(0)


def _pair(function: str, name: str, given: State) -> tuple[Tensor, Tensor]:
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given):
        if all(part.is_floating_point() for part in given):
            return given[0], given[1]
        got = f"dtypes {given[0].dtype} and {given[1].dtype}"
    else:
        got = repr(type(given).__name__)
    raise TypeError(f"onepass.{function}(): {name} must be a State, or a pair (m, l) of floating tensors, got {got}")
