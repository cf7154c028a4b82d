"""What `patch` has in Python: the kernels of torch that were overridden, and the calls that are left to them.

The overriding kernels are C++ (csrc/patch.cpp). Each leaves what it does not serve to a private operator of the same
arguments and the reason, whose kernel is here: it notes the call and calls torch's own kernel.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from . import native
from .engines import resolve
from .gradients import library

_KEYS = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)
# The functions of a report, in the order in which they are counted in C++.
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "softmax backward", "log_softmax backward")
# aten's operators, by the function of a report. torch's logsumexp calls its own of out=, where a refusal is noted.
_OPERATORS = {
    "_softmax": "softmax",
    "_softmax.out": "softmax",
    "_log_softmax": "log_softmax",
    "_log_softmax.out": "log_softmax",
    "logsumexp": None,
    "logsumexp.out": "logsumexp",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax_backward_data": "log_softmax backward",
}

# What the reports of the active patches are told of a call that is left to torch: the function, and why.
observers: tuple[Callable[[str, str], None], ...] = ()
# torch's own kernels, by operator and key: those that were there when the last patch went on.
_torchs: dict[tuple[str, str], Any] = {}
# The types of what they raised, which C++ throws on by address.
_raised: set[type[BaseException]] = set()
# The last kernels of ours that were registered. One that is taken away may have been picked up by another thread, which
# is about to run it; torch alone would have freed it under that thread.
_kept: deque[Any] = deque(maxlen=1 << 16)


def override() -> None:
    """Have onepass compute the operators, on the devices that it has kernels for."""
    if not _torchs:
        _implement()
    for key in _KEYS:
        for aten in _OPERATORS:
            _torchs[aten, key] = torch.library.get_kernel(f"aten::{aten}", key)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(False)  # see _implement
    try:
        native.set_patch(True, "CUDA" in _KEYS)
    finally:
        torch.set_warn_always(always)
    for aten, key in _torchs:
        _kept.append(torch.library.get_kernel(f"aten::{aten}", key))


def give_back() -> None:
    """Have torch compute them again."""
    native.set_patch(False, "CUDA" in _KEYS)


def served() -> Counter[str]:
    """How many calls onepass computed since the start of the process, by function."""
    return Counter(dict(zip(FUNCTIONS, native.patch_served(len(FUNCTIONS)), strict=True)))


def _implement() -> None:
    # That a kernel is overridden torch says once in a process: here, where Python can ignore it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("_has_engine", _has_engine, "CUDA", allow_override=True)
    for key in _KEYS:
        for aten, function in _OPERATORS.items():
            library.impl(f"_left_{aten.lstrip('_')}", _left(aten, key, function), key, with_keyset=True)


def _has_engine(x: Tensor) -> bool:
    try:
        return resolve("auto", x.device) == "cuda"
    except RuntimeError:
        return False


def _left(aten: str, key: str, function: str | None) -> Callable[..., Tensor]:
    def kernel(keys: Any, reason: str, *args: Any, **out: Tensor) -> Tensor:
        with DisableTorchFunction():  # a subclass or a mode is not to see what is asked of a tensor
            if function:
                for note in observers:
                    note(function, reason.format(args[0]))
            try:
                return _torchs[aten, key].call_boxed(keys, *args, **out)
            except BaseException as error:  # which the C++ kernel raises again
                _raised.add(type(error))
                native.patch_raised(type(error), str(error))
                return out.get("out", args[0])

    return kernel
