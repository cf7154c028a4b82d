"""`patch` makes onepass compute torch's own softmax family, by whatever name it is called.

All names of the family, from `Tensor.softmax` to `nn.Softmin` and `F.cross_entropy`, call a few aten operators. This
file overrides the CPU and CUDA kernels of these operators. All layers above a kernel stay torch's: torch.func,
autocast, fake tensors, dispatch modes, autograd and its decompositions (with two exceptions, below). All other
operators stay torch's too. The first patch installs the kernels for good; later ones switch them on and off.
"""

import importlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import native
from ._engines import resolve
from .autograd import PLAIN_TYPES
from .contrib import pyg
from .losses import cross_entropy
from .native import library
from .ops import call
from .settings import autocast_to_float32
from .validation import FLOATS, HALF_DTYPES, Spec, is_dtensor, wrap_dims

__all__ = ["Report", "patch"]

_counting = threading.Lock()


class Report:
    """Counts the calls of torch's softmax family while a `patch(report=True)` is on. `str` makes a table of it.

    The functions are "softmax" (which includes softmin and all else that torch computes by a softmax), "log_softmax",
    "logsumexp", "softmax backward", "log_softmax backward" and "cross_entropy", whose backward is not counted.
    """

    def __init__(self) -> None:
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._before: Counter[str] = Counter()  # calls of earlier periods; while on, less the count at the start
        self._on = False

    def _switch(self, on: bool) -> None:
        with _counting:
            self._before.update({function: -n if on else n for function, n in _served().items()})
            self._on = on

    def _served(self) -> Counter[str]:
        return self._before + (_served() if self._on else Counter())

    @property
    def served(self) -> dict[str, int]:
        """The number of calls that onepass computed, by function."""
        with _counting:
            return dict(self._served())

    @property
    def fallbacks(self) -> dict[tuple[str, str], int]:
        """The number of calls that torch computed, by function and reason."""
        with _counting:
            return dict(self._fallbacks)

    def __str__(self) -> str:
        served = [(function, str(n), "onepass") for function, n in self.served.items()]
        fallbacks = [(function, str(n), f"torch: {reason}") for (function, reason), n in self.fallbacks.items()]
        rows = sorted([*served, *fallbacks], key=lambda row: (row[0], row[2]))
        return "\n".join(f"{function:<22}{n:>8}  {by}" for function, n, by in [("function", "calls", "by"), *rows])


class patch:
    """Makes onepass compute torch's softmax family from this call on, until `restore()` or the end of the context.

    It overrides the CPU and CUDA kernels of the aten operators that the family calls: `torch.softmax`, `log_softmax`,
    `logsumexp`, their Tensor methods, and the functions and modules of `torch.nn.functional` (`softmin`,
    `cross_entropy` and `gumbel_softmax` too), `torch.nn` and `torch.special`. It does not matter under which name they
    were imported, and calls from C++ are included. It applies to all threads of the process. Graphs that TorchInductor
    compiled do not call these operators, so they do not change.

    Results have torch's dtype, shape and strides (contiguous). torch records gradients of any order; onepass records
    those of cross_entropy, and of logsumexp of half types. torch's own kernels compute the calls that onepass does not
    support, for example of integers and complex numbers. A DTensor is computed as in onepass's own functions, which
    gather no rows. Contexts nest; torch computes again when the last patch is restored.

    Args:
        report: whether `report` counts the calls by function, and the reasons why torch computed some of them.
        pyg: whether to replace `torch_geometric.utils.softmax` by `onepass.contrib.pyg.softmax` too, in all modules of
            torch_geometric. Then GATConv and all other layers with attention over edges use it. It is not counted.

    Attributes:
        report: a `Report`, or None.

    Raises:
        TypeError: `report` or `pyg` is no bool. ImportError: there is no torch_geometric.

    >>> import torch, onepass
    >>> with onepass.patch(report=True) as patched:
    ...     y = torch.zeros(2, 4).softmax(-1)
    ...     z = torch.logsumexp(torch.zeros(3, dtype=torch.int64), 0)
    >>> print(patched.report)
    function                 calls  by
    logsumexp                    1  torch: dtype torch.int64
    softmax                      1  onepass
    >>> handle = onepass.patch()  # or from here on
    >>> handle.restore()
    """

    def __init__(self, *, report: bool = False, pyg: bool = False):
        for name, value in (("report", report), ("pyg", pyg)):
            if not isinstance(value, bool):
                raise TypeError(f"onepass.patch(): {name} must be a bool, got {value!r}")
        self._pyg = _pyg_softmax() if pyg else None
        self.report = Report() if report else None
        self._depth = 0
        _switch(self, True)

    def restore(self) -> None:
        """End this patch; torch computes again if it was the last one. A second call does nothing."""
        _switch(self, False)

    def __enter__(self) -> "patch":
        self._depth += 1
        _switch(self, True)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.restore()


_lock = threading.RLock()
_active: list[patch] = []


def _switch(which: patch, on: bool) -> None:
    """Adds `which` to the active patches, or removes it. onepass computes while any patch is active."""
    with _lock:
        if on == (which in _active):
            return
        if which.report:
            which.report._switch(on)
        if on:
            _active.append(which)
        else:
            _active.remove(which)
        if which._pyg and on:
            _replace_in_pyg(which._pyg, pyg.softmax)
        elif which._pyg and not any(p._pyg for p in _active):
            _replace_in_pyg(pyg.softmax, which._pyg)
        global _reports
        _reports = tuple(p.report for p in _active if p.report)
        _compute_here(bool(_active))


# PyTorch Geometric ----------------------------------------------------------------------------------------------------


def _pyg_softmax() -> Callable[..., Tensor]:
    """torch_geometric's own softmax."""
    before = next((p._pyg for p in _active if p._pyg), None)
    return before or importlib.import_module("torch_geometric.utils").softmax


def _replace_in_pyg(old: Callable[..., Tensor], new: Callable[..., Tensor]) -> None:
    """Replaces `old` by `new` in every module of torch_geometric that has it under the name softmax."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_geometric" and vars(module).get("softmax") is old:
            vars(module)["softmax"] = new


# The kernels ----------------------------------------------------------------------------------------------------------
# The overriding kernels are C++ (torch/aten_override.cpp). If such a kernel does not support a call, it calls a private
# operator with the same arguments and a reason. The kernel of the private operator is in this file: it counts the call
# and calls torch's own kernel. Two overriding kernels are Python: logsumexp under autograd, because torch's formula for
# the gradient uses the rounded result, and cross_entropy_loss, because torch computes it by a log_softmax in memory.

_KEYS = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)
# The functions of a report, in the order in which they are counted in C++.
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "softmax backward", "log_softmax backward")
# Why torch computes a call, indexed by Reason of torch/aten_override.h. {0} is the first tensor.
_OFF = 0
_REASONS = (
    "",
    "arguments that onepass does not take",  # torch raises its own errors for most of them
    "dtype {0.dtype}",
    "no native engine serves this {0.device.type} device",
    "out= of another shape, dtype or device than the result",
    "out= that shares memory with the input or with itself",
    "an error of onepass",
)
_WATCHED = "a transform, mode, subclass or trace that sees torch's operators"
# aten operators, and the function that a report counts them as.
_OPERATORS = {
    "_softmax": "softmax",
    "softmax.int_out": "softmax",
    "_log_softmax": "log_softmax",
    "log_softmax.int_out": "log_softmax",
    "logsumexp": "logsumexp",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax_backward_data": "log_softmax backward",
}

_reports: tuple[Report, ...] = ()  # of the active patches
_on = False
_followers: list[Callable[[bool], object]] = []  # functions that are called with the new _on
# The lock for changes of _on. A thread may import nothing while it has this lock: another thread may wait for the lock
# during the import of a module that calls `follow_switch`.
_switching = threading.Lock()
_cross_entropies = 0  # calls that onepass computed since the start of the process
# The kernels that onepass's replaced, by operator and dispatch key.
_before: dict[tuple[str, str], Any] = {}
# The types of the exceptions that these kernels raised. C++ refers to them by address, so they must stay alive.
_raised: set[type[BaseException]] = set()


def _compute_here(on: bool) -> None:
    """Makes onepass compute the operators from now on, or torch. The first call installs the kernels for good."""
    global _on
    if not _before:
        _install()
    with _switching:
        _on = on
        native.call("onepass_patch_switch", on)
        for do in _followers:
            do(on)


def follow_switch(do: Callable[[bool], object]) -> None:
    """Calls `do(on)` now and whenever patches are switched on or off."""
    with _switching:
        _followers.append(do)
        do(_on)


def is_on() -> bool:
    return _on


def _served() -> Counter[str]:
    """The number of calls that onepass computed since the start of the process, by function."""
    counts = zip(FUNCTIONS, native.patch_served(len(FUNCTIONS)), strict=True)
    return Counter({**dict(counts), "cross_entropy": _cross_entropies})


def _install() -> None:
    for key in _KEYS:
        for aten in _OPERATORS:
            _before[aten, key] = torch.library.get_kernel(f"aten::{aten}", key)
    torchs = [key in _KEYS and all(_is_torchs(aten, key) for aten in _OPERATORS) for key in ("CPU", "CUDA")]
    always = torch.is_warn_always_enabled()
    # torch warns once in a process that a kernel is overridden. Trigger the warning here, where Python can ignore it.
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
                # With the key of autograd: a kernel below it would tell compilers not to decompose the operator.
                _aten.impl("cross_entropy_loss", _cross_entropy(f"Autograd{key}"), f"Autograd{key}", with_keyset=True)
            native.install_patch("CUDA" in _KEYS, *torchs)
    finally:
        torch.set_warn_always(always)


_aten = torch.library.Library("aten", "IMPL")  # kernels registered with it live as long as it does


def _is_torchs(aten: str, key: str) -> bool:
    """Whether an operator's active kernel for a dispatch key is torch's, judged by the file that registered it."""
    table = torch._C._dispatch_dump_table(f"aten::{aten}").splitlines()
    return any(line.startswith(f"{key}: ") and "/aten/src/ATen/Register" in line for line in table)


def _has_engine(x: Tensor) -> bool:
    try:
        return resolve("auto", x.device) == "cuda"
    except RuntimeError:
        return False


def serves(x: Tensor) -> bool:
    """Whether onepass supports tensors of this dtype and device."""
    return x.dtype in FLOATS and (x.is_cpu or (x.is_cuda and _has_engine(x)))


def _note(function: str, reason: str) -> None:
    """Counts a call that torch computes, in all reports."""
    with _counting:
        for report in _reports:
            report._fallbacks[function, reason] += 1


def _torchs(aten: str, key: str, function: str) -> Callable[..., Tensor]:
    def kernel(keys: Any, reason: int, *args: Any, **out: Tensor) -> Tensor:
        with DisableTorchFunction():  # subclasses and modes must not see the accesses to tensors below
            if reason != _OFF and _reports:
                _note(function, _REASONS[reason].format(args[0]))
            try:
                return _before[aten, key].call_boxed(keys, *args, **out)
            except BaseException as error:  # the C++ kernel raises it again
                _raised.add(type(error))
                native.patch_raised(type(error), str(error))
                return out.get("out", args[0])

    return kernel


def _recording(key: str) -> Callable[..., Tensor]:
    """The autograd kernel of logsumexp. It calls torch's own, except for half types that only eager autograd records,
    and for DTensors, because the gradient of torch's may gather their rows."""
    torchs = torch.library.get_kernel("aten::logsumexp", key).call_boxed
    count = FUNCTIONS.index("logsumexp")

    def kernel(keys: Any, x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
        if not _on:
            return torchs(keys, x, dim, keepdim)
        with DisableTorchFunction():
            if not (_is_recorded(x) and _takes(x, dim)):
                return torchs(keys, x, dim, keepdim)
            result = call(x, Spec("logsumexp", wrap_dims("logsumexp", x, dim), None, keepdim))
            native.call("onepass_patch_count", count)
            return result

    return kernel


def _is_recorded(x: Tensor) -> bool:
    """Whether onepass records the gradient of a logsumexp of x. It records a half type only if eager autograd alone
    records the call: transforms, modes and traces have to see torch's operator."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    if is_dtensor(x):
        return serves(x)
    return x.dtype in HALF_DTYPES and type(x) in PLAIN_TYPES and not _is_watched()


def _is_watched() -> bool:
    """Whether something other than eager autograd has to see torch's operators: a transform, a mode or a trace."""
    return not (
        forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._get_tracing_state()
    )


def _takes(x: Tensor, dim: Sequence[int]) -> bool:
    """Whether onepass supports a call of logsumexp: the check that C++ makes for calls without a gradient."""
    bound = x.dim() or 1
    return (
        x.layout is torch.strided
        and 0 < len({d % bound for d in dim}) == len(dim)
        and all(-bound <= d < bound for d in dim)
        and (x.is_cpu or (x.is_cuda and _has_engine(x)))
    )


def _cross_entropy(key: str) -> Callable[..., Tensor]:
    """The autograd kernel of cross_entropy_loss, which torch itself computes by log_softmax and nll_loss."""
    torchs = torch.library.get_kernel("aten::cross_entropy_loss", key).call_boxed

    def kernel(
        keys: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        global _cross_entropies
        if _on:
            with DisableTorchFunction():
                reason = _why_not(x, target, weight)
                if not reason:
                    try:
                        given = weight, ignore_index, ("none", "mean", "sum")[reduction], label_smoothing
                        loss: Any = cross_entropy(x, target, *given)
                    except (IndexError, RuntimeError, TypeError, ValueError):  # torch then raises its own error
                        reason = _REASONS[6]
                    else:
                        with _counting:
                            _cross_entropies += 1
                        return loss
                if _reports:
                    _note("cross_entropy", reason)
        return torchs(keys, x, target, weight, reduction, ignore_index, label_smoothing)

    return kernel


def _why_not(x: Tensor, target: Tensor, weight: Tensor | None) -> str:
    """Why torch computes a cross-entropy; "" if onepass computes it or raises an error for it."""
    if _is_watched() or not {type(x), type(target), type(weight)} <= {*PLAIN_TYPES, NoneType}:
        return _WATCHED
    if x.dtype not in FLOATS:
        return _REASONS[2].format(x)
    if not (x.is_cpu or (x.is_cuda and _has_engine(x))):
        return _REASONS[3].format(x)
    widens = x.is_cuda and x.dtype in HALF_DTYPES and torch.is_autocast_enabled("cuda")
    if (
        not x.numel()
        or target.dtype is not (x.dtype if target.shape == x.shape else torch.int64)
        or (weight is not None and weight.dtype is not x.dtype and not (widens and weight.dtype is torch.float32))
        or widens is not autocast_to_float32(x)  # autocast_keeps_half does not apply to torch's functions
    ):
        return _REASONS[1]
    return ""
