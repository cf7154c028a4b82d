"""The fast path of the plain call: one dim, engine "auto", and nothing but the raw operator needed.

`compute` and `write` ask what only Python can know, as little as it takes, and go straight into the dispatcher. What
somebody else has to see finds a kernel of its own there. An error is not the last word: the caller then takes the
route of all other calls, which says what is wrong, or serves the call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .autocast import widens
from .checks import FLOATS, TAKES, Default, normalise_dims
from .engines import NATIVE
from .ops import FAMILY, call_boxed, differentiable, empty, library

OUT_HANDLES = {name: getattr(torch.ops.onepass, f"_{name}").int_out._handle for name in (*FAMILY, "logsumexp")}
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode = torch.is_inference_mode_enabled
_torch_function_modes = torch._C._len_torch_function_stack
_torch_dispatch_modes = torch._C._len_torch_dispatch_stack
_increment_version = torch._C._increment_version


def compute(handle: Any, x: Any, dim: Any, option: Any) -> Tensor | None:
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
        and x.get_device() in NATIVE
        and not (x.requires_grad and _is_grad_enabled())
        and forward_ad._current_level < 0
    ):
        try:
            return call_boxed(handle, x, dim, option)
        except Exception:
            pass
    return None


def write(handle: Any, x: Any, dim: Any, option: Any, out: Any) -> bool:
    """Whether `out` has the result of a plain call, as of `compute`; `handle` is one of `OUT_HANDLES`.

    Where it has not, nothing is written.
    """
    if (
        _is_dynamo_compiling()  # first: a graph cannot hold the answers to some of the others
        or type(out) is not Tensor
        or _torch_dispatch_modes()
        or type(x) is not Tensor
        or not (type(dim) is int or type(dim) is Default)
        or _torch_function_modes()
        or x.get_device() not in NATIVE
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


def _refuse(*_: Any) -> None:
    raise NotImplementedError("onepass: not a plain call")


def _register(function: str) -> None:
    """The kernels of the plain call but the native ones: fake tensors, and who has to see the call after all.

    `option` is keepdim for logsumexp, else dtype.
    """
    name, lse = f"_{function}.int", function == "logsumexp"
    operator = getattr(torch.ops.onepass, function).default._op

    def options(option: Any) -> tuple[torch.dtype | None, bool]:
        return (None, bool(option)) if lse else (option, False)

    def fake(input: Tensor, dim: int, option: Any = None) -> Tensor:
        dtype, keepdim = options(option)
        normalise_dims(function, input, dim)  # refuses what the native kernels refuse: nobody else has looked yet
        if input.dtype not in FLOATS or dtype not in (None, *FLOATS):
            raise NotImplementedError(f"onepass: takes {TAKES}, got {input.dtype} and {dtype}")
        return empty(function, input, [dim], dtype, keepdim)

    def transformed(input: Tensor, dim: int, option: Any = None) -> Tensor:  # torch.func
        dims = normalise_dims(function, input, dim)
        return differentiable(function, input, dims, *options(option), "native", recorded=False)

    def autocast(input: Tensor, dim: int, option: Any = None) -> Tensor:
        dtype, keepdim = options(option)
        if widens(input):
            dtype = dtype or torch.float32
        return operator(input, [dim], keepdim, dtype=dtype) if lse else operator(input, [dim], dtype=dtype)

    torch.library.register_fake(f"onepass::{name}", fake, lib=library)
    library.impl(name, _refuse, "Tracer")  # torch.jit.trace writes the registered operator down, which has a gradient
    library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    library.impl(name, autocast, "AutocastCUDA")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # else torch looks here too who needs a gradient
    for key in ("Tracer", "FuncTorchDynamicLayerFrontMode", "Functionalize", "Negative"):
        library.impl(f"{name}_out", _refuse, key)
    library.impl(f"{name}_out", torch.library.fallthrough_kernel, "Autograd")


for _name in (*FAMILY, "logsumexp"):
    _register(_name)
