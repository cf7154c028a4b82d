"""The two settings of a thread: batch invariance, and whether torch.autocast makes results float32."""

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from . import native
from .validation import HALF_DTYPES

__all__ = ["autocast_keeps_half", "autocast_to_float32", "batch_invariant", "is_batch_invariant", "set_batch_invariant"]

_UNSET, _ASK = -1, 2


class _Scope:
    """A context that gives a setting of this thread the value `enabled`, and restores the earlier value at its end."""

    _exchange: Callable[[int], int]  # sets the value of the setting and returns the old one

    def __init__(self, enabled: bool = True):
        if not isinstance(enabled, bool):
            raise TypeError(f"onepass.{type(self).__name__}(): enabled must be a bool, got {enabled!r}")
        self._enabled = enabled
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(self._exchange(self._enabled))

    def __exit__(self, *error: object) -> None:
        self._exchange(self._before.pop())


class batch_invariant(_Scope):
    """A context in which, for this thread, the bits of a row's result depend neither on other rows nor on its address.

    By default the CUDA engine chooses a plan by the number of rows (few long rows are spread over more of the GPU) and
    reads rows with aligned vector loads. Both change the order in which a row is summed, and so the last bit of a
    result. In this context a plan depends only on the dtypes and the length of a row. Few long rows then take longer,
    and so do rows that do not begin at a multiple of 16 bytes. Results have the same bits from run to run in either
    case.

    Args:
        enabled: False switches batch invariance off in the context, whatever `set_batch_invariant` has set.

    Raises:
        TypeError: `enabled` is no bool.

    >>> import torch, onepass
    >>> x = torch.randn(8, 1000)
    >>> with onepass.batch_invariant():
    ...     all_rows, one_row = onepass.softmax(x, -1), onepass.softmax(x[3], -1)
    >>> torch.equal(all_rows[3], one_row)
    True
    """

    _exchange = staticmethod(functools.partial(native.set_invariant, scoped=True))


def set_batch_invariant(enabled: bool) -> bool:
    """Switch batch invariance on or off for all threads of this process, and return the old value.

    Args:
        enabled: as for `batch_invariant`. Inside such a context the context's value applies.

    Raises:
        TypeError: `enabled` is no bool.

    >>> import onepass
    >>> onepass.set_batch_invariant(True), onepass.is_batch_invariant()
    (False, True)
    >>> onepass.set_batch_invariant(False), onepass.is_batch_invariant()
    (True, False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"onepass.set_batch_invariant(): enabled must be a bool, got {enabled!r}")
    return bool(native.set_invariant(enabled, scoped=False))


def is_batch_invariant() -> bool:
    """Whether calls of this thread are batch invariant now.

    >>> import onepass
    >>> with onepass.batch_invariant():
    ...     onepass.is_batch_invariant()
    True
    """
    scoped = native.set_invariant(_ASK, scoped=True)
    return bool(native.set_invariant(_ASK, scoped=False) if scoped == _UNSET else scoped)


class _Thread(threading.local):
    def __init__(self) -> None:
        # Every thread begins with False, as with autocast itself. It is an attribute of the instance, because
        # torch.compile does not guard attributes of a class.
        self.keeps_half = False


_thread = _Thread()


def autocast_to_float32(x: Tensor) -> bool:
    """Whether torch.autocast makes the softmax family return float32 for this tensor. It does so for half tensors on a
    GPU, as for torch's functions. On a CPU torch.autocast does not change these functions."""
    return (
        x.dtype in HALF_DTYPES
        and x.device.type == "cuda"
        and torch.is_autocast_enabled("cuda")
        and not _thread.keeps_half
    )


class autocast_keeps_half(_Scope):
    """A context in which, for this thread, torch.autocast does not change the softmax family: half in, half out.

    Under torch.autocast on a GPU, softmax, log_softmax, softmin and logsumexp of a half tensor return float32, as
    torch's do. The result then takes twice the memory, and usually the next matrix product casts it back. Rows are
    computed in float32 in either case, so this context costs only one rounding of the result.

    `dtype=` overrides it, as it overrides autocast: `softmax(x, dtype=x.dtype)` keeps the dtype of one call.

    Args:
        enabled: False makes the results float32 again inside another such context.

    Raises:
        TypeError: `enabled` is no bool.

    >>> import torch, onepass
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> scores = torch.zeros(2, 4, dtype=torch.bfloat16, device=device)
    >>> with torch.autocast(device, torch.bfloat16), onepass.autocast_keeps_half():
    ...     onepass.softmax(scores, -1).dtype
    torch.bfloat16
    """

    @staticmethod
    def _exchange(value: int) -> int:
        before, _thread.keeps_half = _thread.keeps_half, bool(value)
        return before
