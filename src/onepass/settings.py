"""The two switches of a thread: batch invariance, and which results torch.autocast makes float32."""

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
    """A setting of this thread that has the value `enabled` inside the context, and its earlier value after it."""

    _exchange: Callable[[int], int]  # sets the value of the setting and gives the one it had

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
    """In this context, in this thread, a row's bits are the same alone, among any number of rows, and wherever it lies.

    By default the CUDA engine looks at the number of rows (few long rows are spread over more of the GPU) and reads
    rows through aligned spans; both change the order in which a row is added up, and with it the last bit of a
    result. Here plans follow from the dtypes and the length of a row alone. Few long rows then take longer, and so do
    rows that begin within a 16-byte vector. Results are the same bits from run to run in either case.

    Args:
        enabled: False switches it off in the context, whatever `set_batch_invariant` has set.

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
    """Switch batch invariance on or off for all threads of this process; gives what it was.

    Args:
        enabled: as for `batch_invariant`, whose contexts go before it.

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
        # As autocast itself: a thread begins without it. An attribute of the object: one of the class has no guard in
        # torch.compile.
        self.keeps_half = False


_thread = _Thread()


def autocast_to_float32(x: Tensor) -> bool:
    """Whether torch.autocast has this tensor's softmax family give float32: of half tensors on a GPU, as it does for
    torch's. On a CPU torch leaves these functions alone."""
    return (
        x.dtype in HALF_DTYPES
        and x.device.type == "cuda"
        and torch.is_autocast_enabled("cuda")
        and not _thread.keeps_half
    )


class autocast_keeps_half(_Scope):
    """In this context, in this thread, torch.autocast leaves the softmax family alone: half in, half out.

    Under torch.autocast on a GPU, softmax, log_softmax, softmin and logsumexp of a half tensor give float32, as torch's
    do. The result then takes twice the memory, and is mostly cast back by the matrix product that follows. Rows are
    computed in float32 in either case: what is lost is one rounding of the result.

    `dtype=` goes before it, as it does before autocast: `softmax(x, dtype=x.dtype)` keeps the type of one call.

    Args:
        enabled: False gives float32 again within a context that does not.

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
