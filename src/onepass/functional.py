"""Drop-in functions of torch: the same values, the same argument order, the same keyword names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Unpack

from . import score_gradients  # noqa: F401 (it gives the operators of scores their derivatives)
from ._engines import _ready_devices, resolve
from .ops import HANDLES, OUT_HANDLES, call, call_boxed, call_out, reduced_shape
from .ragged_layouts import RAGGED, call_ragged
from .scored import call_scored, score_at_once, score_into
from .scores import ScoreOptions, check_scores
from .settings import autocast_to_float32
from .validation import (
    DROPPED,
    FLOATS,
    HALF_DTYPES,
    LAST,
    PYTHON_TYPES,
    Default,
    Spec,
    check_dtype,
    check_input,
    check_keepdim,
    check_memory,
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
_MOST_DIMS = 64  # the most dims of a tensor that the operators take
NO_SCORES: Mapping[str, Any] = {}


def _make_call(function: str) -> Callable[[Any, Any, Any, Any, Any], Tensor]:
    """Returns call(x, dim, option, out, engine) for `function`. `option` is `dtype`, or `keepdim` for logsumexp.

    The fast path takes a plain tensor and one dim if nothing traces, records or transforms the call. It checks only
    what the operator cannot see from C++. The operator returns None (False with `out`) if it does not take the call.
    Then the slow path takes the call or raises an error that says what is wrong with it.
    """
    handle, out_handle = HANDLES[function], OUT_HANDLES[function]

    def call(x: Any, dim: Any, option: Any, out: Any, engine: Any) -> Tensor:
        if (
            not _is_dynamo_compiling()  # must be first: Dynamo cannot trace some of the checks below
            and engine == "auto"
            and type(x) is Tensor
            and (type(dim) is int or type(dim) is Default)
            and -_MOST_DIMS <= dim < _MOST_DIMS
            and not _torch_function_modes()
            and x.get_device() in _ready_devices
            and not (x.requires_grad and _is_grad_enabled())
            and forward_ad._current_level < 0
        ):
            if out is None:
                y = call_boxed(handle, x, dim, option)
                if y is not None:
                    return y
            elif (
                type(out) is Tensor
                and not _torch_dispatch_modes()
                and not (out.requires_grad and _is_grad_enabled())
                and (not out.is_inference() or _is_inference_mode())
                and call_boxed(out_handle, x, dim, option, out)
            ):
                _increment_version((out,))  # so that a backward that saved `out` finds that it was overwritten
                return out
        return _check_and_call(function, x, dim, option, out, engine)

    return call


_CALLS = {function: _make_call(function) for function in HANDLES}
_softmax, _log_softmax, _softmin, _logsumexp = (
    _CALLS[function] for function in ("softmax", "log_softmax", "softmin", "logsumexp")
)


def _call_with_scores(
    function: str, x: Any, dim: Any, option: Any, out: Any, engine: Any, scores: Mapping[str, Any]
) -> Tensor:
    """A call with arguments of scores, which both paths check in Python."""
    if (
        not _is_dynamo_compiling()
        and engine == "auto"
        and out is None
        and not option  # neither a dtype nor keepdim
        and type(x) is Tensor
        and (type(dim) is int or type(dim) is Default)
        and -x.dim() <= dim < x.dim()
        and x.dtype in FLOATS
        and x.layout is torch.strided
        and x.get_device() in _ready_devices
    ):
        dims = [dim % x.dim()]
        y = score_at_once(function, x, dims, *check_scores(function, x, dims, scores))
        if y is not None:
            return y
    return _check_and_call(function, x, dim, option, out, engine, scores)


def _check_and_call(
    function: str, x: Any, dim: Any, option: Any, out: Any, engine: Any, scores: Mapping[str, Any] = NO_SCORES
) -> Tensor:
    """The slow path."""
    if isinstance(x, Tensor) and x.layout in RAGGED:
        return call_ragged(function, x, dim, option, out, engine, scores, _check_and_call)
    check_input(function, x)
    dims = normalize_dims(function, x, dim)
    side, numbers = check_scores(function, x, dims, scores) if scores else (None, None)
    lse, own = function == "logsumexp", x.dtype
    is_float = own in FLOATS
    dtype, keepdim = (None, option) if lse else (option, False)
    if not lse and not (is_float and dtype is None):
        check_dtype(function, x, dtype)
    if dtype is None and out is None and own in HALF_DTYPES and autocast_to_float32(x):
        dtype = torch.float32  # the kernel converts as it reads, so no cast is launched before it
    computed: Any = own if is_float else torch.get_default_dtype() if lse else dtype
    if out is not None:
        shape = reduced_shape(x.shape, dims if x.dim() else [], keepdim) if lse else list(x.shape)
        check_out(function, x, out, shape, result_dtype(function, computed, dtype), side or ())
    if x.dim() > _MOST_DIMS > sum(size != 1 for size in x.shape) and not lse and numbers is None:
        return _without_ones(function, x, dims, dtype, out, engine)
    spec = Spec(function, dims, dtype, keepdim, resolve(engine, x.device))
    if not is_float:
        x = x.to(computed)
    if numbers is not None and side is not None:
        if out is None:
            return call_scored(x, side, spec, numbers)
        if not torch.compiler.is_compiling():  # a graph cannot hold these checks
            check_memory(function, x, out)
            if not _torch_dispatch_modes() and score_into(x, side, spec, numbers, out):
                _increment_version((out,))
                return out
        return out.copy_(call_scored(x, side, spec, numbers))
    if out is None:
        return call(x, spec)
    call_out(x, spec, out)
    return out


def _without_ones(function: str, x: Tensor, dims: list[int], dtype: Any, out: Tensor | None, engine: str) -> Tensor:
    """A call with more dims than the operators take, on a view whose dims of size 1 are squeezed out, all but one."""
    others = [d for d, size in enumerate(x.shape) if size != 1]
    reduced = [others.index(d) for d in dims if d in others] or [-1]
    into = None if out is None else out.squeeze().unsqueeze(-1)
    y = _check_and_call(function, x.squeeze().unsqueeze(-1), reduced, dtype, into, engine)
    return y.view(x.shape) if out is None else out


def _other_spellings(function: str, dim: Any, axis: Any, dtype: Any, stacklevel: Any) -> tuple[Any, Any]:
    """(dim, dtype) of a call that gives `axis`, a dtype that is no torch.dtype, or a dtype after the `_stacklevel`."""
    if type(dtype) is int and (stacklevel is None or isinstance(stacklevel, (torch.dtype, type))):
        dtype = stacklevel  # both by position, in the order of torch.nn.functional
    if isinstance(dtype, type):
        dtype = PYTHON_TYPES.get(dtype, dtype)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"onepass.{function}(): dtype must be a torch.dtype, got {dtype!r}")
    return either(function, "dim", dim, "axis", axis), dtype


def softmax(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
    **scores: Unpack[ScoreOptions],
) -> Tensor:
    """exp(input) / sum(exp(input)) over `dim`, without overflow, as `torch.softmax`.

    Args:
        input: a strided tensor of any shape and strides: float64, float32, float16, bfloat16, or integers with `dtype`.
            Also a jagged nested tensor, a sparse_csr tensor if `dim` is its columns (docs/segments.md), or a DTensor.
        dim: the dim along which the result sums to 1, or a tuple of dims.
        dtype: the result's dtype; `float` is float64. The input is rounded to it first, in registers, as torch does.
            Half types are computed in float32, so `dtype=torch.float32` of a half input costs no extra pass.
        _stacklevel: ignored. `torch.nn.functional.softmax` has it before dtype, so an int given by position as dtype
            is taken as the `_stacklevel` if a dtype or None follows it.
        out: the tensor to write to, of the input's shape and the result's dtype. It may be `input` itself (in-place).
            It is never resized.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        axis: another name of `dim`.
        scores: keyword arguments that change the input before the softmax, in the same pass and in this order
            (docs/scores.md). `scale`: a factor, a number or a tensor with one value per row. `softcap`: c, for
            c * tanh(s / c). `bias`: a tensor to add. `alibi`: a slope per head; slope * |distance of query and key| is
            subtracted. `mask`: a bool tensor, True where an element takes part. `causal`: whether later keys are hidden
            from a query. `window`: (left, right), how many keys a query sees before and after its own. `offset`: the
            position of the first query among the keys; None aligns the last query with the last key. `sink`: a number
            or a tensor with one value per row, the score of one more element, which has no place in the result.
            `empty`: "nan" or "zero", the result of a row that has no score above -inf. Queries and keys are the last
            two dims. Tensors broadcast.

    Returns:
        A tensor of the input's shape and layout (the strides of `torch.empty_like(input)`). A row that is all -inf or
        has a +inf is NaN, and its gradient is NaN too (docs/gradients.md). A NaN makes only its own row NaN.

    Raises:
        IndexError: `dim` is out of range. RuntimeError: a dim is given twice; `out` has another dtype or device or
        partly overlaps the input; `out` is given while a gradient is recorded or under `torch.vmap`; the engine cannot
        run. NotImplementedError: a dtype or layout that is not supported, or `out` in forward-mode AD. TypeError,
        ValueError: an argument of the wrong kind or given twice, `out` of another shape, an unknown engine.

    The state of a row, the pair (maximum, sum of exponentials), is from Milakov & Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).

    >>> import torch, onepass
    >>> onepass.softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    >>> x = torch.zeros(2, 4)
    >>> onepass.softmax(x, dim=(0, 1), out=x)[0]
    tensor([0.1250, 0.1250, 0.1250, 0.1250])
    >>> onepass.softmax(torch.tensor([0.0, 2.0, 9.0]), scale=0.5, mask=torch.tensor([True, True, False]))
    tensor([0.2689, 0.7311, 0.0000])
    """
    if type(axis) is not Default or (dtype is not None and type(dtype) is not Dtype):
        dim, dtype = _other_spellings("softmax", dim, axis, dtype, _stacklevel)
    if scores:
        return _call_with_scores("softmax", input, dim, dtype, out, engine, scores)
    return _softmax(input, dim, dtype, out, engine)


def log_softmax(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
    **scores: Unpack[ScoreOptions],
) -> Tensor:
    """log(softmax(input)) over `dim`, computed as (input - max) - log(sum), as `torch.log_softmax`.

    The arguments, the result and the errors are as in `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.log_softmax(torch.zeros(3, 4), dim=0)[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """
    if type(axis) is not Default or (dtype is not None and type(dtype) is not Dtype):
        dim, dtype = _other_spellings("log_softmax", dim, axis, dtype, _stacklevel)
    if scores:
        return _call_with_scores("log_softmax", input, dim, dtype, out, engine, scores)
    return _log_softmax(input, dim, dtype, out, engine)


def softmin(
    input: Tensor,
    dim: Dim = LAST,
    dtype: Dtype | type[float] | None = None,
    _stacklevel: Any = 3,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim = LAST,
    **scores: Unpack[ScoreOptions],
) -> Tensor:
    """softmax(-input) over `dim`, negated in registers, as `torch.nn.functional.softmin`.

    The arguments, the result and the errors are as in `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.softmin(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    if type(axis) is not Default or (dtype is not None and type(dtype) is not Dtype):
        dim, dtype = _other_spellings("softmin", dim, axis, dtype, _stacklevel)
    if scores:
        return _call_with_scores("softmin", input, dim, dtype, out, engine, scores)
    return _softmin(input, dim, dtype, out, engine)


def logsumexp(
    input: Tensor,
    dim: Dim | None = None,
    keepdim: bool = DROPPED,
    *,
    out: Tensor | None = None,
    engine: str = "auto",
    axis: Dim | None = None,
    keepdims: bool = DROPPED,
    **scores: Unpack[ScoreOptions],
) -> Tensor:
    """log(sum(exp(input))) over `dim`, without overflow, as `torch.logsumexp`.

    Args:
        input: a strided tensor of any shape and strides, float64, float32, float16 or bfloat16. Integers are converted
            to the default dtype.
        dim: the dim to reduce, or a tuple of dims.
        keepdim: whether the result keeps the reduced dims, with size 1.
        out: the tensor to write to. It is never resized. It may not share memory with the input.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        axis, keepdims: other names of `dim` and `keepdim`.
        scores: as `onepass.softmax` takes them.

    Returns:
        A tensor of the input's dtype. It is -inf for an empty dim or a row that is all -inf, and +inf for a row with a
        +inf. The gradient of a row whose maximum is an infinity is NaN at each element that equals the maximum.

    Raises:
        As `onepass.softmax`, and TypeError for complex input.

    >>> import torch, onepass
    >>> onepass.logsumexp(torch.zeros(2, 10), dim=1)
    tensor([2.3026, 2.3026])
    """
    if axis is not None or type(keepdims) is not Default or type(keepdim) not in (bool, Default):
        dim = either("logsumexp", "dim", dim, "axis", axis, type(None))
        keepdim = check_keepdim("logsumexp", keepdim, keepdims)
    if scores:
        return _call_with_scores("logsumexp", input, dim, keepdim is True, out, engine, scores)
    return _logsumexp(input, dim, keepdim is True, out, engine)
