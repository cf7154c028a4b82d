"""Runs cases: makes the data, checks every provider, and times those that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.collect_env import environment, free_bytes
from onepass.tools.bench.correctness import (
    Checker,
    Inputs,
    make_inputs,
    prepare_output,
    reference_bytes,
    replicate,
    required_bytes,
)
from onepass.tools.bench.progress import Progress
from onepass.tools.bench.provider import COPY, Provider, copy_of_input
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.timing import MIN_SAMPLES, Budget, Stats, mark_disturbed, slow_copies, spread_reason


class DeviceLost(RuntimeError):
    """A provider left the GPU in an error from which no later call recovers."""


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recover(device: torch.device, who: str, error: Exception) -> str:
    """The error of a provider in one line. Raises DeviceLost if the GPU does not respond any more."""
    try:
        synchronise(device)
    except Exception as lost:
        raise DeviceLost(f"{who} left the GPU unusable: {lost}") from error
    if device.type == "cuda":
        torch.cuda.empty_cache()
    text = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:300]


@dataclass
class _Entry:
    """A provider on a case: its row, the call that is timed, and one that allocates its result."""

    provider: Provider
    row: Row
    call: Callable[[], Any] = lambda: None
    allocating_call: Callable[[], Any] = lambda: None

    def set_times(self, stats: Stats, call_us: float | None, judge: bool) -> None:
        row = self.row
        row.median_us, row.p20_us, row.p80_us, row.min_us = stats.median, stats.p20, stats.p80, stats.smallest
        row.call_us, row.ok, row.disturbed = call_us, True, spread_reason(stats) if judge else None


def _right(entries: Sequence[_Entry]) -> list[_Entry]:
    return [entry for entry in entries if entry.row.error is None]


def _set_fractions(entries: Sequence[_Entry], input_us: float | None = None) -> None:
    copy_us = entries[0].row.median_us
    for row in (entry.row for entry in _right(entries)):
        if row.ok and row.median_us and copy_us:
            row.gbps, row.copy_fraction = row.bytes / row.median_us * 1e-3, copy_us / row.median_us
            row.input_copy_us = input_us


@dataclass
class Runner:
    """One run on one device. `results` grows case by case, so that an interrupted run has what it measured."""

    device: torch.device
    providers: Sequence[Provider]
    progress: Progress = field(default_factory=Progress)
    budget: Budget = timing.FULL
    seed: int = 0
    named: frozenset[str] = frozenset()  # providers to run even if another one runs the same engine
    free: Callable[[], int] | None = None  # free memory in bytes, measured by default
    graph: bool = False  # whether to measure the time in a CUDA graph too
    # Whether only calls into a given output are timed. On a CPU the smallest times count then, so no row is disturbed.
    kernels_only: bool = False

    def __post_init__(self) -> None:
        self.results = Results({**environment(str(self.device)), "seed": self.seed}, [])
        self.judge = self.budget.max_samples >= MIN_SAMPLES and not (self.kernels_only and self.device.type == "cpu")
        self.clocks: timing.Cuda | None = None
        if self.device.type == "cuda":
            self.clocks = self.make_clocks()

    def make_clocks(self) -> timing.Cuda | None:
        clocks = timing.Cuda(self.device)
        clocks.spin_up()
        return clocks

    def run(self, cases: Sequence[tuple[Case, str]]) -> Results:
        """Times each (case, dtype). Times disturbed cases once more at the end, and marks those disturbed again.

        Raises DeviceLost if the GPU does not respond any more.
        """
        groups: list[list[Row]] = []
        try:
            for case, dtype in cases:
                groups.append(self._run_case(case, dtype))
                self.results.rows.extend(groups[-1])
            slow = slow_copies(self.results.rows) if self.judge else {}
            retry = [i for i, rows in enumerate(groups) if any(r.disturbed or r.key() in slow for r in rows)]
            if retry:
                self.progress.retry(len(retry))
            for i in retry:
                groups[i] = self._run_case(*cases[i])
                self.results.rows[:] = [row for rows in groups for row in rows]
        finally:
            if self.judge:
                mark_disturbed(self.results.rows)
        return self.results

    def _run_case(self, case: Case, dtype: str) -> list[Row]:
        self.progress.start_case(case, dtype)
        chosen = (p for p in (COPY, *self.providers) if p.name not in case.without)
        entries = [_Entry(p, self._new_row(p, case, dtype)) for p in chosen]
        self._measure(entries, case, dtype)
        rows = [entry.row for entry in entries]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next case has other sizes and cannot reuse the cached blocks
        self.progress.finish_case(rows)
        return rows

    def _measure(self, entries: list[_Entry], case: Case, dtype: str) -> None:
        """Fills in the rows, and removes providers whose engine is run by another provider."""
        free = self.free() if self.free else free_bytes(str(self.device))
        free -= free // 10  # reserved for everything else
        need = required_bytes(case, dtype) + reference_bytes(case)
        if need > free:
            reason = f"skipped: needs {_size(need)}, {_size(free)} are free"
            self.progress.say(f"{case.name}, {dtype}: {reason}")
            for entry in entries:
                entry.row.error = reason
            return
        free -= need
        for entry in entries[1:]:
            takes, refusal = entry.provider.workspace(case, dtype), entry.provider.unsupported(case, dtype)
            refusal = "takes no scores" if case.scores and not entry.provider.takes_scores else refusal
            if refusal is not None:
                entry.row.error = f"unsupported: {refusal}"
            elif takes > free:
                self._fail(entry, f"skipped: takes {_size(takes)} more, {_size(free)} are free")
        self.progress.status("making data")
        inputs = make_inputs(case, dtype, self.device, self.seed)
        engines = set[str]()
        for entry in entries[:]:
            entry.row.strides = list(inputs.x.stride())
            with self._report_errors(entry):
                engine = entry.row.engine = entry.provider.engine(inputs) if entry.row.error is None else None
                if engine in engines and entry.row.provider not in self.named:
                    entries.remove(entry)
                engines.update([engine] if engine else [])
        self.progress.status("computing the reference")
        checker = Checker(inputs, self.seed)
        for entry in _right(entries):
            self._check(entry, checker, inputs)
        del checker
        right, copy, input_us = _right(entries), copy_of_input(inputs), None
        if self.clocks is None:
            input_us = self._time_cpu(right, copy)
        else:
            input_us = self.clocks.cold(copy, self.budget).median if copy else None
            self._time_cuda(right, self.clocks)
            if self.graph:
                self._time_graphs(_right(right), inputs, self.clocks, free)
        _set_fractions(entries, input_us)

    def _new_row(self, provider: Provider, case: Case, dtype: str) -> Row:
        shape, dim = list(case.shape), list(case.dim) if isinstance(case.dim, tuple) else case.dim
        out_dtype, direction = case.out_dtype or dtype, case.direction
        row = Row(case.suite, case.name, case.function, shape, [], dim, dtype, out_dtype, direction, provider.name)
        row.version, row.bytes = provider.version(), case.bytes(dtype)
        row.threads = torch.get_num_threads() if self.device.type == "cpu" else None
        return row

    def _check(self, entry: _Entry, checker: Checker, inputs: Inputs) -> None:
        """Checks every call that will be timed, with an output that holds no result yet. The copy is not checked."""
        self.progress.status(f"checking {entry.row.provider}")
        provider = entry.provider
        with self._report_errors(entry):
            entry.call = entry.allocating_call = provider.prepare(inputs)
            if provider is COPY:
                return
            if provider.writes_out(inputs) and not self.kernels_only:
                entry.allocating_call = provider.prepare(replace(inputs, out=None))
            for call in dict.fromkeys([entry.call, entry.allocating_call]):
                prepare_output(inputs, self.seed)
                wrong = checker.check(call(), provider.stepwise)
                synchronise(self.device)
                if wrong:
                    self._fail(entry, f"wrong: {wrong}")
                    return

    def _time_cpu(self, entries: Sequence[_Entry], copy: Callable[[], Any] | None) -> float | None:
        """Times all in turns: calls into a given output, then calls that allocate. Returns the input copy's time."""
        self.progress.status(f"timing {len(entries)} in turns")
        calls = {e.row.provider: e.call for e in entries} | ({"": copy} if copy else {})
        stats = timing.alternate(calls, self.budget)
        allocating: dict[str, Stats] = {}
        if not self.kernels_only:
            self.progress.status(f"timing {len(entries)} in turns, each result newly allocated")
            allocating = timing.alternate({e.row.provider: e.allocating_call for e in entries}, self.budget)
        for entry in entries:
            name = entry.row.provider
            entry.set_times(stats[name], allocating[name].median if allocating else None, self.judge)
        return stats[""].median if copy else None

    def _time_cuda(self, entries: Sequence[_Entry], clocks: timing.Cuda) -> None:
        """Times one after the other."""
        for entry in entries:
            self.progress.status(f"timing {entry.row.provider}")
            with self._report_errors(entry):
                stats = clocks.cold(entry.call, self.budget)
                call_us = None if self.kernels_only else clocks.back_to_back(entry.allocating_call, self.budget)
                entry.set_times(stats, call_us, self.judge)

    def _time_graphs(self, entries: Sequence[_Entry], inputs: Inputs, clocks: timing.Cuda, free: int) -> None:
        """Times all over the same buffers. A call that cannot be captured gets a reason instead of a time."""
        size = inputs.case.bytes(inputs.dtype)
        count = timing.buffer_count(clocks.l2, size)
        buffers: list[Inputs] = []
        for entry in entries:
            self.progress.status(f"timing {entry.row.provider} in a graph")
            takes = 0 if entry.provider is COPY else entry.provider.workspace(inputs.case, inputs.dtype)
            entry.row.graph_error = timing.cannot_capture(count, size, takes, free)
            if inputs.case.in_place:
                entry.row.graph_error = "in place, a replay would read what the one before it wrote"
            if entry.row.graph_error:
                continue
            try:
                buffers = buffers or replicate(inputs, count)
                calls = [entry.provider.prepare(buffer) for buffer in buffers]
                about = entry.row.median_us or 0.0
                entry.row.graph_us = timing.time_launch(self.device, calls, about, self.budget.seconds)
            except Exception as error:
                entry.row.graph_error = self._recover(entry, error)

    @contextmanager
    def _report_errors(self, entry: _Entry) -> Iterator[None]:
        """A context that stores any exception of a provider in its row."""
        try:
            yield
        except Exception as error:
            self._fail(entry, f"raised: {self._recover(entry, error)}")

    def _recover(self, entry: _Entry, error: Exception) -> str:
        return recover(self.device, f"{entry.row.provider} on {entry.row.case}", error)

    def _fail(self, entry: _Entry, error: str) -> None:
        entry.row.error = error[:300]
        self.progress.say(f"{entry.row.case}, {entry.row.dtype}, {entry.row.provider}: {entry.row.error}")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
