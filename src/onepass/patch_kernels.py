"""What `patch` has in Python: the kernels of torch that were overridden, and the calls that go to them.

The overriding kernels are C++ (torch/aten_override.cpp). A call that such a kernel does not serve goes to a private
operator, which takes the same arguments and the reason. The kernel of that operator is here: it notes the call and
calls torch's own kernel. One more kernel is Python alone: that of logsumexp where autograd records, because torch's
formula starts from the rounded result.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import native
from .engines import resolve
from .gradients import library, positive
from .ops import call

_KEYS = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)
# The functions of a report, in the order in which they are counted in C++.
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "softmax backward", "log_softmax backward")
# Why torch computes a call, by the numbers of C++ (Reason in torch/aten_override.h), with {0} for the first tensor.
_OFF = 0
_REASONS = (
    "",
    "arguments that onepass does not take",  # most of which torch refuses, in its own words
    "dtype {0.dtype}",
    "no native engine serves this {0.device.type} device",
    "out= of another shape, dtype or device than the result",
    "out= that shares memory with the input or with itself",
    "an error of onepass",
)
# aten's operators, by the function of a report.
_OPERATORS = {
    "_softmax": "softmax",
    "softmax.int_out": "softmax",
    "_log_softmax": "log_softmax",
    "log_softmax.int_out": "log_softmax",
    "logsumexp": "logsumexp",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax_backward_data": "log_softmax backward",
}
_HALVES = (torch.float16, torch.bfloat16)
_KINDS = (Tensor, torch.nn.Parameter)

# What the reports of the active patches are told of a call that torch computes: the function, and why.
observers: tuple[Callable[[str, str], None], ...] = ()
_on = False
# The kernels that were there before ours, by operator and key.
_before: dict[tuple[str, str], Any] = {}
# The types of what they raised, which C++ throws on by address.
_raised: set[type[BaseException]] = set()


def switch(on: bool) -> None:
    """Have onepass compute the operators from now on, or torch. The first call installs the kernels, which stay."""
    global _on
    if not _before:
        _install()
    _on = on
    native.switch_patch(on)


def served() -> Counter[str]:
    """How many calls onepass computed since the start of the process, by function."""
    return Counter(dict(zip(FUNCTIONS, native.patch_served(len(FUNCTIONS)), strict=True)))


def _install() -> None:
    for key in _KEYS:
        for aten in _OPERATORS:
            _before[aten, key] = torch.library.get_kernel(f"aten::{aten}", key)
    torchs = [key in _KEYS and all(_is_torchs(aten, key) for aten in _OPERATORS) for key in ("CPU", "CUDA")]
    always = torch.is_warn_always_enabled()
    # That a kernel is overridden torch says once in a process: here, where Python can ignore it.
    torch.set_warn_always(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                library.impl("_has_engine", _has_engine, "CUDA", allow_override=True)
            for key in _KEYS:
                for aten, function in _OPERATORS.items():
                    library.impl(f"_torch_{aten.lstrip('_')}", _torchs(aten, key, function), key, with_keyset=True)
                _aten.impl("logsumexp", _recording(f"Autograd{key}"), f"Autograd{key}", with_keyset=True)
            native.install_patch("CUDA" in _KEYS, *torchs)
    finally:
        torch.set_warn_always(always)


_aten = torch.library.Library("aten", "IMPL")  # whose kernels live as long as it does


def _is_torchs(aten: str, key: str) -> bool:
    """Whether the kernel of an operator that is in force for a key is torch's: by the file it was registered in."""
    table = torch._C._dispatch_dump_table(f"aten::{aten}").splitlines()
    return any(line.startswith(f"{key}: ") and "/aten/src/ATen/Register" in line for line in table)


def _has_engine(x: Tensor) -> bool:
    try:
        return resolve("auto", x.device) == "cuda"
    except RuntimeError:
        return False


def _torchs(aten: str, key: str, function: str) -> Callable[..., Tensor]:
    def kernel(keys: Any, reason: int, *args: Any, **out: Tensor) -> Tensor:
        with DisableTorchFunction():  # a subclass or a mode is not to see what is asked of a tensor
            if reason != _OFF:
                for note in observers:
                    note(function, _REASONS[reason].format(args[0]))
            try:
                return _before[aten, key].call_boxed(keys, *args, **out)
            except BaseException as error:  # which the C++ kernel raises again
                _raised.add(type(error))
                native.patch_raised(type(error), str(error))
                return out.get("out", args[0])

    return kernel


def _recording(key: str) -> Callable[..., Tensor]:
    """The kernel of logsumexp above autograd: torch's, but for halves that autograd, and nobody else, looks on."""
    torchs = torch.library.get_kernel("aten::logsumexp", key).call_boxed
    count = FUNCTIONS.index("logsumexp")

    def kernel(keys: Any, x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
        if not _on:
            return torchs(keys, x, dim, keepdim)
        with DisableTorchFunction():
            if not (x.dtype in _HALVES and _is_recorded(x) and _takes(x, dim)):
                return torchs(keys, x, dim, keepdim)
            result = call("logsumexp", x, positive(dim, x.dim()), None, keepdim, "native")
            native.patch_count(count)
            return result

    return kernel


def _is_recorded(x: Tensor) -> bool:
    """Whether a call with x is recorded by eager autograd, and by nothing else, which is to see torch's operator."""
    return (
        x.requires_grad
        and torch.is_grad_enabled()
        and type(x) in _KINDS
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._get_tracing_state()
    )


def _takes(x: Tensor, dim: Sequence[int]) -> bool:
    """Whether onepass takes a call, as C++ finds it out for those without a gradient."""
    bound = x.dim() or 1
    return (
        x.layout is torch.strided
        and 0 < len({d % bound for d in dim}) == len(dim)
        and all(-bound <= d < bound for d in dim)
        and (x.is_cpu or (x.is_cuda and _has_engine(x)))
    )
