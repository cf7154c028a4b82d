"""The entry points of the engine: whether it can run, the layout of a call as rows by n, and the launch of its kernels.

This file imports triton only when a call needs a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..native import FUNCTIONS, REDUCTIONS
from .plan import Plan, plan_backward, plan_forward

__all__ = ["interpreting", "launch_backward", "launch_forward", "on_device", "unavailable"]

# Triton's name of the backend for a torch device type. torch calls AMD's GPUs "cuda" too.
_BACKENDS = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}
# bfloat16 and the asynchronous copies that Triton generates need Ampere or later. The kernels are compiled and tested
# for 8.0, 9.0, 10.0 and 12.0.
_MIN_CAPABILITY = (8, 0)
_DIFFERENTIABLE = tuple(name for name in FUNCTIONS if name != "state")  # the functions with gradients here


def launch_forward(
    function: str,
    x: Tensor,
    out: Tensor,
    dims: tuple[int, ...],
    *,
    plan: Plan | None = None,
) -> None:
    """Write ``function`` of ``x`` over ``dims`` to ``out``.

    ``function``: a name in ``FUNCTIONS``.
    ``x``: float64, float32, float16 or bfloat16, any strides, on a device for which ``unavailable`` returns None.
    ``out``: allocated by the caller, without two elements at one address. For the softmax family it has the shape of
    ``x`` and any of these dtypes (``x`` is rounded to it first), and may be ``x`` itself. For logsumexp it has the
    shape of ``x`` with size 1 in ``dims``, and the dtype of ``x``, or float32 for half types. For state it is two such
    planes (maxima, sums), float64 for float64, else float32.
    ``dims``: not negative, sorted, unique.
    ``plan`` forces a tier; ValueError if the plan does not support the call.
    """
    if function not in FUNCTIONS:
        raise ValueError(f"unknown function {function!r}; the Triton engine has {', '.join(FUNCTIONS)}")
    order = order_of(x.shape, x.stride(), dims)
    if plan is not None:
        plan.check(order.n)
    if out.numel() == 0:
        return
    reduces, planes = function in REDUCTIONS, function == "state"
    first = out[0] if planes else out
    if order.n == 0:  # rows without elements: log(0), a maximum of -inf, a sum of 0
        if planes:
            out.zero_()
        first.fill_(-float("inf"))
        return
    plan = plan or plan_forward(order.rows, order.n, x.dtype, out.dtype, properties_of(x.device))

    source, target = x, out
    x_strides, out_strides = (_two_strides(t.shape, t.stride(), order) for t in (x, first))
    if x_strides is None:
        source, x_strides = order.permuted(x).contiguous(), (order.n, 1)
    if out_strides is None:
        # The copy of the input is reused as the buffer of the result if possible.
        reusable = source is not x and not reduces and x.dtype == out.dtype
        shape = order.permuted(first).shape
        target = source if reusable else out.new_empty((2, *shape) if planes else shape)
        out_strides = (1 if reduces else order.n, 1)
    if planes:  # a state needs no stride along a row: in its place the kernel gets the stride between the planes
        out_strides = (out_strides[0], target.stride(0))
    layout = ((), ((x_strides[0],), (out_strides[0],)), (), ((x_strides[1],), (out_strides[1],)))
    launch_kernel(function, False, plan, (source, target, None, None), order, layout)
    if target is not out:
        for part, computed in zip(out, target, strict=True) if planes else ((out, target),):
            order.permuted(part).copy_(computed)


def launch_backward(
    function: str,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    dx: Tensor,
    dims: tuple[int, ...],
    *,
    plan: Plan | None = None,
) -> None:
    """Write the gradient of the input to ``dx``, from the upstream gradient ``grad``. No other tensor is allocated.

    ``function``: any but state.
    ``saved``: the result or, for logsumexp, the input and the result.
    ``grad``: of the result's shape. The result of logsumexp, and its gradient, have size 1 in ``dims``.
    ``dx``: of the input's shape, allocated by the caller. It has no two elements at one address, and shares no memory
    with the other tensors.
    All are float64, float32, float16 or bfloat16 (sums are float64 if ``grad`` or ``saved`` is, else float32; ``dx`` is
    rounded once), of any strides (0 too), on a device for which ``unavailable`` returns None.
    ``dims``: not negative, sorted, unique.
    ``plan`` forces a tier. ValueError if the plan does not support the call, or an argument is not as described.
    """
    _check(function, grad, saved, dx, dims)
    y, lse = saved[0], saved[1] if function == "logsumexp" else None
    order = order_of(y.shape, y.stride(), dims)
    if plan is not None:
        plan.check(order.n)
    if dx.numel() == 0:
        return
    plan = plan or plan_backward(order.rows, order.n, (y.dtype, grad.dtype, dx.dtype), properties_of(y.device))

    of_each = [y.stride(), dx.stride(), grad.stride()]
    if lse is not None:  # lse and its gradient have one value per row
        of_each[2:] = (tuple(0 if d in dims else step for d, step in enumerate(t.stride())) for t in (grad, lse))
    row_sizes, row_strides = levels_of(order.outer, y.shape, *of_each)
    sizes, strides = levels_of(order.reduced, y.shape, *of_each)
    if order.rows == 1:  # as with many rows, so that Triton compiles the same kernel (and rounds alike)
        row_strides = tuple((order.n * inner[0],) for inner in strides)
    layout = (row_sizes, row_strides, sizes, strides[:3])
    launch_kernel(function, True, plan, (y, dx, grad, lse), order, layout)


def _check(function: str, grad: Tensor, saved: tuple[Tensor, ...], dx: Tensor, dims: tuple[int, ...]) -> None:
    if function not in _DIFFERENTIABLE:
        raise ValueError(f"the Triton engine has gradients of {', '.join(_DIFFERENTIABLE)}, got {function!r}")
    names = ("input", "result") if function == "logsumexp" else ("result",)
    if len(saved) != len(names):
        raise ValueError(f"gradients of {function} need its {' and '.join(names)}, got {len(saved)} tensors")
    shape = saved[0].shape
    reduced = torch.Size(1 if d in dims else size for d, size in enumerate(shape)) if function == "logsumexp" else shape
    given = {"the result": (saved[-1], reduced), "its gradient": (grad, reduced), "the input's gradient": (dx, shape)}
    for name, (tensor, want) in given.items():
        if tensor.shape != want:
            raise ValueError(f"{name} has shape {list(want)} here, got {list(tensor.shape)}")
        if tensor.device != saved[0].device:
            raise ValueError(f"{name} is on {tensor.device}, what the forward saved on {saved[0].device}")


# Launch ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _kernel(function: str, backward: bool, plan: Plan, is_scored: bool = False) -> tuple[Any, dict[str, Any]]:
    """Imports triton. Returns the kernel of a plan and its compile-time arguments."""
    from . import epilogue, kernels, score

    of_score = score.SCORES.get(function, score.identity)
    policies = {"SCORE": of_score, "SCORE_BACKWARD": of_score, **epilogue.POLICIES[function][backward]}
    if is_scored:
        policies |= {"SCORE": score.scored, "SCORE_BACKWARD": score.scored_gradient}
    # FP fusion is set explicitly because its default is about to change. No result here depends on it.
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "enable_fp_fusion": True}
    return kernels.KERNELS[plan.tier], {**policies, **plan.constants(), **options}


def launch_kernel(
    function: str,
    backward: bool,
    plan: Plan,
    tensors: tuple[Any, ...],
    order: Order,
    layout: tuple[Any, ...],
    score: Any = (),
) -> None:
    """Launch a kernel over all rows, in several launches if the grid of one is too small. ``score`` is a Score of
    scored.py, or ()."""
    kernel, constants = _kernel(function, backward, plan, len(score) > 0)
    span = plan.grid * plan.rows
    with on_device(tensors[0].device):
        for first in range(0, order.rows, span):
            grid = (-(-min(span, order.rows - first) // plan.rows),)
            kernel[grid](*tensors, first, order.rows, order.n, *layout, score, **constants)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context that makes ``device`` current, which a Triton launch needs.

    On a CPU it silences NumPy, in which Triton's interpreter runs, and which would warn of every infinity in a kernel.
    """
    if device.type == "cpu":
        import numpy

        return numpy.errstate(all="ignore")
    return torch.get_device_module(device).device(device)


@functools.cache
def properties_of(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).get_device_properties(device)


# Layout: any tensor and dims as rows by n, cached because computing it takes longer than a launch ---------------------


class Order(NamedTuple):
    """The order in which a call walks the dims of its tensors: the dims of the rows, then those within a row."""

    outer: tuple[int, ...]
    reduced: tuple[int, ...]
    rows: int
    n: int

    def permuted(self, tensor: Tensor) -> Tensor:
        return tensor.permute(*self.outer, *self.reduced) if tensor.ndim else tensor


@functools.lru_cache(maxsize=4096)
def order_of(shape: torch.Size, strides: tuple[int, ...], dims: tuple[int, ...]) -> Order:
    """Rows and elements in memory order. No result depends on the order of the rows, or of the elements in a row."""
    by_stride = sorted(range(len(shape)), key=lambda d: -strides[d])
    outer, reduced = (tuple(d for d in by_stride if (d in dims) == inner) for inner in (False, True))
    return Order(outer, reduced, math.prod(shape[d] for d in outer), math.prod(shape[d] for d in reduced))


@functools.lru_cache(maxsize=4096)
def _two_strides(shape: torch.Size, strides: tuple[int, ...], order: Order) -> tuple[int, int] | None:
    """The strides, in elements, from row to row and within a row. None if the tensor should be copied first.

    It is copied if its rows (or the elements of a row) have no single stride, or if neighbouring rows are closer in
    memory than neighbouring elements of a row: a program that walks a row would use 4 bytes of every 32 that it reads.
    """
    levels = [levels_of(dims, shape, strides)[1][0] for dims in (order.outer, order.reduced)]
    if max(map(len, levels)) > 1:
        return None
    (row,), (element,) = levels
    # The number of elements per row of this tensor, which is 1 for the result of a reduction.
    n = math.prod(shape[d] for d in order.reduced)
    element = 1 if n == 1 else element
    if order.rows == 1:  # as with many rows, so that Triton compiles the same kernel (and rounds alike)
        return n * element, element
    return (row, element) if n == 1 or element <= max(row, 1) else None


@functools.lru_cache(maxsize=4096)
def levels_of(
    dims: tuple[int, ...], shape: torch.Size, *strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Merges ``dims``, outermost first, into as few levels as the strides of all tensors of a shape allow.

    Returns, innermost first, the sizes of all levels but the outermost, and for each tensor the strides of all levels.
    """
    sizes: list[int] = []
    levels: list[tuple[int, ...]] = []  # for each level, the strides of all tensors
    for d in reversed(dims):
        if shape[d] == 1:
            continue
        step = tuple(of[d] for of in strides)
        if sizes and step == tuple(inner * sizes[-1] for inner in levels[-1]):
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
            levels.append(step)
    return tuple(sizes[:-1]), tuple(zip(*levels, strict=True)) or ((0,),) * len(strides)


# Whether the engine can run -------------------------------------------------------------------------------------------


def unavailable(device: torch.device) -> str | None:
    """None if the Triton engine can run tensors of ``device``, else a sentence that says why not.

    A call for a CPU device never initialises a GPU, and imports triton only if ``TRITON_INTERPRET`` is set.

    >>> import torch
    >>> unavailable(torch.device("meta"))
    "the Triton engine serves GPU tensors, and CPU tensors under TRITON_INTERPRET=1; got device type 'meta'"
    """
    return _reason(device.type, device.index, interpreting())


def interpreting() -> bool:
    """Whether ``TRITON_INTERPRET`` turns Triton's interpreter on, by the values that Triton itself accepts."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _reason(kind: str, index: int | None, interpret: bool) -> str | None:
    if kind != "cpu" and kind not in _BACKENDS:
        return (
            f"the Triton engine serves GPU tensors, and CPU tensors under TRITON_INTERPRET=1; got device type {kind!r}"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'onepass[gpu]' brings it"
    if kind == "cpu" and not interpret:
        return "the Triton engine serves CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1"
    try:
        import triton
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot be imported: {error}"
    if interpret:
        return _why_no_interpreter(triton.__version__)
    return _why_no_backend(kind, index, triton.__version__)


def _why_no_interpreter(version: str) -> str | None:
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs NumPy, which is not installed"
    import numpy
    import triton

    from .kernels import KERNELS

    # Triton reads the variable only when it is imported and when a kernel is decorated.
    jitted = (triton.language.sum, *KERNELS.values())
    if any(isinstance(function, triton.runtime.JITFunction) for function in jitted):
        return "TRITON_INTERPRET was set after triton was imported: set it before Python starts"
    if TorchVersion(version) < "3.7" and TorchVersion(numpy.__version__) >= "2.4":
        return f"the interpreter of triton {version} runs no loop under NumPy {numpy.__version__}: it needs NumPy < 2.4"
    return None


def _why_no_backend(kind: str, index: int | None, version: str) -> str | None:
    from triton.backends import backends

    backend = _BACKENDS[kind]
    if backend not in backends:
        return f"triton {version} has no backend for {backend} GPUs; it has: {', '.join(sorted(backends)) or 'none'}"
    gpus = torch.get_device_module(kind)
    if not gpus.is_available():
        return f"torch {torch.__version__} sees no {kind} device"
    if index is not None and index >= gpus.device_count():
        return f"there is no device {kind}:{index}; torch sees {gpus.device_count()}"
    if backend == "nvidia":
        capability = gpus.get_device_capability(index)
        if capability < _MIN_CAPABILITY:
            minimum, got = ("{}.{}".format(*pair) for pair in (_MIN_CAPABILITY, capability))
            return f"the Triton engine needs compute capability {minimum} or later; {kind}:{index or 0} has {got}"
    return None
