"""`patch`: torch's own softmax family computed by onepass, whatever name it is called by.

All names of the family, from `Tensor.softmax` to `nn.Softmin` and `F.cross_entropy`, end in a few aten operators. What
is overridden here are the kernels of these operators, for the CPU and for CUDA. Whatever lies above a kernel (autograd
and its formulas but one, torch.func, autocast, fake tensors, dispatch modes) stays torch's, and so do all other
operators. The kernels are installed by the first patch and stay; later ones switch them on and off.
"""

import threading
from collections import Counter
from types import TracebackType

from . import patch_kernels as kernels

__all__ = ["Report", "patch"]


_counting = threading.Lock()


class Report:
    """What became of the calls of torch's softmax family while a `patch(report=True)` was on; `str` gives a table.

    The functions are "softmax" (softmin and everything else that torch makes of a softmax among them), "log_softmax",
    "logsumexp", "softmax backward" and "log_softmax backward".
    """

    def __init__(self) -> None:
        self._left: Counter[tuple[str, str]] = Counter()
        # The counts of the process (that are never set back) from whose start on they are ours, and those of before it.
        self._start: Counter[str] | None = None
        self._before: Counter[str] = Counter()

    def _note(self, function: str, reason: str) -> None:
        with _counting:
            self._left[function, reason] += 1

    def _switch(self, on: bool) -> None:
        with _counting:
            self._before = self._served()
            self._start = kernels.served() if on else None

    def _served(self) -> Counter[str]:
        return self._before if self._start is None else self._before + (kernels.served() - self._start)

    @property
    def served(self) -> dict[str, int]:
        """How many calls onepass computed, by function."""
        with _counting:
            return dict(self._served())

    @property
    def left(self) -> dict[tuple[str, str], int]:
        """How many calls were left to torch, by function and reason."""
        with _counting:
            return dict(self._left)

    def __str__(self) -> str:
        served = [(function, str(n), "onepass") for function, n in self.served.items()]
        left = [(function, str(n), f"torch: {reason}") for (function, reason), n in self.left.items()]
        rows = sorted([*served, *left], key=lambda row: (row[0], row[2]))
        return "\n".join(f"{function:<22}{n:>8}  {by}" for function, n, by in [("function", "calls", "by"), *rows])


class patch:
    """torch's softmax family is computed by onepass from this call on, until `restore()` or the end of the context.

    `torch.softmax`, `log_softmax`, `logsumexp`, their methods of Tensor, `torch.nn.functional` (`softmin`,
    `cross_entropy`, `gumbel_softmax` too), `torch.nn` and `torch.special`, under whatever name they were imported and
    from C++ too: the CPU and CUDA kernels of the aten operators they end in are overridden. It holds for all threads of
    the process. Graphs that TorchInductor compiled have no such operators, and are as they were.

    Results have torch's dtype, shape and strides (contiguous), gradients of any order are recorded by torch (that of
    logsumexp of halves by onepass, from the unrounded result). What onepass does not serve is computed by torch's own
    kernel: integers and complex numbers, for example. Contexts nest; torch computes again when the last patch is
    restored.

    Args:
        report: whether `report` counts the calls, by function, and why some were left to torch.

    Attributes:
        report: a `Report`, or None.

    Raises:
        TypeError: `report` is no bool.

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

    def __init__(self, *, report: bool = False):
        if not isinstance(report, bool):
            raise TypeError(f"onepass.patch(): report must be a bool, got {report!r}")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.restore()


_lock = threading.RLock()
_active: list[patch] = []


def _switch(which: patch, on: bool) -> None:
    """`which` is among the active patches, or is not; onepass computes while there are any."""
    with _lock:
        if on == (which in _active):
            return
        if which.report:
            which.report._switch(on)
        if on:
            _active.append(which)
        else:
            _active.remove(which)
        kernels.observers = tuple(p.report._note for p in _active if p.report)
        kernels.switch(bool(_active))
