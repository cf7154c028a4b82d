"""Batch invariance: a row's bits do not depend on the rows beside it."""

from types import TracebackType

from . import native

__all__ = ["batch_invariant", "is_batch_invariant", "set_batch_invariant"]

_UNSET, _ASK = -1, 2


class batch_invariant:
    """In this context, in this thread, a row's bits are the same alone, among any number of rows, and wherever it lies.

    By default the CUDA engine looks at the number of rows (few long rows are spread over more of the GPU) and reads
    rows through aligned windows; both change the order in which a row is added up, and with it the last bit of a
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

    def __init__(self, enabled: bool = True):
        if not isinstance(enabled, bool):
            raise TypeError(f"onepass.batch_invariant(): enabled must be a bool, got {enabled!r}")
        self._enabled = enabled
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(native.set_invariant(self._enabled, scoped=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native.set_invariant(self._before.pop(), scoped=True)


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
