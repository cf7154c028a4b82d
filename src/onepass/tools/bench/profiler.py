"""torch.profiler over single contestants: checked first, warmed up, and with the profiler's own noise kept away."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.check import Checker
from onepass.tools.bench.profile_table import Line, line, records
from onepass.tools.bench.run import DeviceLost
from onepass.tools.bench.work import make

__all__ = ["Contestant", "Profiler", "quiet"]

WARMUP = (
    3  # calls before the profile: TorchScript watches the first, compiles at the second, and runs that from then on
)
# CUPTI of CUDA 12.6 to 13.0 loses the first kernels of a profile, one more with every profile of a process. These
# many are spent on it, after the profile is prepared and before it records: more than there are contestants.
SPENT = 64
# Kineto's log, and torch's warnings: "USDT:2026-11-21 06:44:04 ...", "[W1121 06:44:04 collection.cpp:942] ..."
_LOG = re.compile(r"^(?:[A-Z]+:\d{4}-\d\d-\d\d |\[[WE]\d{3,} )")


@dataclass(frozen=True)
class Contestant:
    """A softmax of the rows of a matrix that allocates its result."""

    name: str
    call: Callable[[Tensor], Tensor]


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Within, what the profiler logs goes into the list that is given, at the end. All else goes to stderr, then."""
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _flush()
            stderr = os.dup(2)
        except OSError:  # closed: then nothing is told
            yield said
            return
        with tempfile.TemporaryFile() as kept:
            os.dup2(kept.fileno(), 2)
            try:
                yield said
            finally:
                _flush()
                os.dup2(stderr, 2)
                os.close(stderr)
                kept.seek(0)
                for text in kept:
                    if _LOG.match(text.decode(errors="replace")):
                        said.append(text.decode(errors="replace").strip())
                    else:
                        os.write(2, text)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


class Profiler:
    """Checks and profiles contestants on one matrix, whose data depends on its shape alone.

    Args:
        case: a softmax over the last dim.
        dtype: torch's name of the dtype.
        device: a CPU or a GPU.
        calls: calls in a profile.
        warmup: whether there are calls before; without, the first call is profiled, with all that it loads.

    `logged` is what the profiler logged.
    """

    def __init__(self, case: Case, dtype: str, device: torch.device, calls: int = 1, warmup: bool = True):
        self.device, self.calls, self.warmup = device, calls, warmup
        self.gpu = device.type == "cuda"
        self.logged: list[str] = []
        self.work = make(case, dtype, device, 0)
        self.work.out = None  # each call allocates its own
        with self._on_device(), self._recording(), record_function("first"):
            torch.empty(1)  # a process's first profile costs the call in it 2 ms more, whosever it is

    @cached_property
    def checker(self) -> Checker:
        return Checker(self.work, 0)

    @cached_property
    def clocks(self) -> timing.Cuda:
        return timing.Cuda(self.device)

    def profiled(self, contestant: Contestant, sort: str, limit: int) -> tuple[str | None, str, Line | None]:
        """What is wrong, or None; and where nothing is, torch's table and the line of the side-by-side table.

        Args:
            contestant: who.
            sort: a key that torch's table takes.
            limit: the rows of torch's table.

        Raises:
            DeviceLost: where the contestant leaves the GPU in an error from which no later call recovers.
        """
        with self._on_device():
            try:
                error = self._warm_up(contestant) if self.warmup else None
                if error is None:
                    with self._recording() as prof:
                        result = self._calls(contestant)
                    error = self._wrong(result)
            except Exception as raised:  # a contestant may raise anything, and is then shown with what it raised
                error = self._raised(contestant, raised)
        if error is not None:
            return error, "", None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = prof.key_averages().table(sort_by=sort, row_limit=limit)
            events = records(prof.events() or ())
        return None, text.rstrip(), line(contestant.name, events, self.calls)

    def trace(self, chosen: Sequence[Contestant], file: str) -> None:
        """One more profile, of all of them one after the other, into a Chrome trace. Raises OSError."""
        with self._on_device(), self._recording() as prof:
            for contestant in chosen:
                self._calls(contestant)
                self._synchronise()
        file = os.path.realpath(file)  # it is renamed to: a link stays one
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"")  # raises what Kineto only logs
        with quiet() as said:
            prof.export_chrome_trace(file)
        if not os.path.getsize(file):
            raise OSError(said[-1] if said else f"{file}: the profiler wrote nothing")

    def _warm_up(self, contestant: Contestant) -> str | None:
        error = self._wrong(contestant.call(self.work.x))
        for _ in range(WARMUP - 1 if error is None else 0):
            contestant.call(self.work.x)
        self._synchronise()
        return error

    def _calls(self, contestant: Contestant) -> Tensor:
        """The calls, each under the contestant's name, so that one which is no operator of torch has a line too."""
        for _ in range(self.calls):
            with record_function(contestant.name):
                result = contestant.call(self.work.x)
        return result

    @contextlib.contextmanager
    def _recording(self) -> Iterator[profile]:
        """A profile of what is done within. Everything on the GPU is waited for before it ends."""
        prof = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])])
        with quiet() as said:
            prof.prepare_trace()
        self.logged += said
        if self.gpu:
            for _ in range(SPENT):
                self.clocks.flush[:1].zero_()
            self.clocks.spin_up(0.05)  # up to the clock rate of a busy GPU; and none of the data is left in the L2
            self._synchronise()
        with quiet() as said:
            prof.start_trace()
        self.logged += said
        try:
            yield prof
            self._synchronise()
        finally:
            with quiet() as said:
                prof.stop_trace()
            self.logged += said

    def _wrong(self, result: Tensor) -> str | None:
        verdict = self.checker.check(result)
        return None if verdict.ok else f"wrong: {verdict}"

    def _raised(self, contestant: Contestant, error: Exception) -> str:
        try:
            self._synchronise()
        except Exception as lost:
            raise DeviceLost(f"{contestant.name} left the GPU unusable: {lost}") from error
        if self.gpu:
            torch.cuda.empty_cache()
        said = (str(error).strip() or repr(error)).splitlines()[0]
        return f"raised: {type(error).__name__}: {said}"

    def _synchronise(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.gpu else contextlib.nullcontext()
