"""torch.autocast: which results of half tensors are float32, and how to keep them half."""

import threading
from types import TracebackType

import torch
from torch import Tensor

from .checks import HALVES

__all__ = ["autocast_keeps_half", "widens"]


class _Thread(threading.local):
    def __init__(self) -> None:
        # As autocast itself: a thread begins without it. An attribute of the object: one of the class has no guard in
        # torch.compile.
        self.keeps_half = False


_thread = _Thread()


def widens(x: Tensor) -> bool:
    """Whether torch.autocast has this tensor's softmax family give float32: of half tensors on a GPU, as it does for
    torch's. On a CPU torch leaves these functions alone."""
    return (
        x.dtype in HALVES and x.device.type == "cuda" and torch.is_autocast_enabled("cuda") and not _thread.keeps_half
    )


class autocast_keeps_half:
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

    def __init__(self, enabled: bool = True):
        if not isinstance(enabled, bool):
            raise TypeError(f"onepass.autocast_keeps_half(): enabled must be a bool, got {enabled!r}")
        self._enabled = enabled
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(_thread.keeps_half)
        _thread.keeps_half = self._enabled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.keeps_half = self._before.pop()
