"""Runs cases: makes the data, checks every provider, times those that are right, and tells a reporter as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from onepass.tools.bench import graph, timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.check import Checker, reference_bytes
from onepass.tools.bench.disturbed import SAMPLES, mark, slow_copies, spread
from onepass.tools.bench.environment import environment, free_bytes
from onepass.tools.bench.providers import COPY, Provider, Refused, copy_of_input
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.timing import Budget
from onepass.tools.bench.work import Work, copies, make, needed_bytes


class Reporter(Protocol):
    """What a run tells while it goes. `report.py` has the live table and the plain lines."""

    def case(self, case: Case, dtype: str) -> None:
        """A case is begun."""

    def again(self, count: int) -> None:
        """So many cases are begun once more, since something disturbed them."""

    def status(self, text: str) -> None:
        """What is being done to it."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Its rows, complete."""

    def say(self, text: str) -> None:
        """Something to know: a case that is skipped, a provider that is wrong."""


class Silent:
    def case(self, case: Case, dtype: str) -> None: ...
    def again(self, count: int) -> None: ...
    def status(self, text: str) -> None: ...
    def rows(self, rows: Sequence[Row]) -> None: ...
    def say(self, text: str) -> None: ...


class DeviceLost(RuntimeError):
    """A provider left the GPU in an error from which no later call recovers."""


@dataclass
class Runner:
    """One run on one device. `results` grows case by case, so that a run that is broken off has what it measured."""

    device: torch.device
    providers: Sequence[Provider]
    reporter: Reporter = field(default_factory=Silent)
    budget: Budget = timing.FULL
    seed: int = 0
    forced: frozenset[str] = frozenset()  # engines to run even where "auto" takes the same
    free: Callable[[], int] | None = None
    graph: bool = False  # whether the time in a CUDA graph is measured too

    def __post_init__(self) -> None:
        self.results = Results(environment(str(self.device)), [])
        self.results.environment["seed"] = self.seed
        self.clocks: timing.Cuda | None = None
        if self.device.type == "cuda":
            self.clocks = timing.Cuda(self.device)
            self.clocks.spin_up()

    def run(self, cases: Sequence[tuple[Case, str]]) -> Results:
        """Times each (case, dtype), and those that something disturbed once more at the end; what is disturbed again is
        marked. Raises DeviceLost where the GPU does not answer any more."""
        groups: list[list[Row]] = []
        try:
            for case, dtype in cases:
                groups.append(self._reported(case, dtype))
                self.results.rows.extend(groups[-1])
            again = self._disturbed(groups)
            if again:
                self.reporter.again(len(again))
            for i in again:
                groups[i] = self._reported(*cases[i])
                self.results.rows[:] = [row for rows in groups for row in rows]
        finally:
            if self.budget.most >= SAMPLES:
                mark(self.results.rows)
        return self.results

    def _disturbed(self, groups: Sequence[Sequence[Row]]) -> list[int]:
        slow = slow_copies(self.results.rows) if self.budget.most >= SAMPLES else {}
        return [i for i, rows in enumerate(groups) if any(r.disturbed or r.key() in slow for r in rows)]

    def _reported(self, case: Case, dtype: str) -> list[Row]:
        self.reporter.case(case, dtype)
        rows = self._case(case, dtype)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next case has other sizes: what is kept of this one would add to them
        self.reporter.rows(rows)
        return rows

    def _case(self, case: Case, dtype: str) -> list[Row]:
        free = self.free() if self.free else free_bytes(str(self.device))
        free -= free // 10  # what is left for everything else
        entries = [_Entry(p, self._row(p, case, dtype)) for p in [COPY, *self.providers]]
        rows = [e.row for e in entries]
        need = needed_bytes(case, dtype) + reference_bytes(case)
        if need > free:
            reason = f"skipped: needs {_size(need)}, {_size(free)} are free"
            self.reporter.say(f"{case.name}, {dtype}: {reason}")
            for row in rows:
                row.error = reason
            return rows
        for entry in entries:
            if not entry.provider.limit:
                self._admit(entry, case, dtype, free - need)
        self.reporter.status("making data")
        work = make(case, dtype, self.device, self.seed)
        for row in rows:
            row.strides = list(work.x.stride())
        entries = self._drop_doubles([e for e in entries if e.row.error is None], work, rows)
        self.reporter.status("computing the reference")
        checker = Checker(work, self.seed)
        for entry in entries:
            self._check(entry, checker, work)
        del checker
        right = [e for e in entries if e.row.error is None]
        whole = copy_of_input(work)
        input_us: float | None = None
        if self.clocks is None:
            self.reporter.status(f"timing {len(right)} in turns")
            calls = {e.row.provider: e.call for e in right} | ({"": whole} if whole else {})
            for name, stats in timing.alternate(calls, self.budget).items():
                if name:
                    next(e for e in right if e.row.provider == name).set(stats)
                else:
                    input_us = stats.median
            self.reporter.status(f"timing {len(right)} in turns, each result newly allocated")
            for name, stats in timing.alternate({e.row.provider: e.fresh for e in right}, self.budget).items():
                next(e for e in right if e.row.provider == name).row.call_us = stats.median
        else:
            input_us = self.clocks.cold(whole, self.budget).median if whole else None
            for e in right:
                self.reporter.status(f"timing {e.row.provider}")
                self._time_cuda(e, self.clocks)
            if self.graph:
                self._time_graphs([e for e in right if e.row.ok], work, self.clocks, free - need)
        copy_us = rows[0].median_us
        for row in rows:
            if row.ok and row.median_us and copy_us:
                row.gbps = row.bytes / row.median_us * 1e-3
                row.copy_fraction = copy_us / row.median_us
                row.input_copy_us = input_us
        return rows

    def _row(self, provider: Provider, case: Case, dtype: str) -> Row:
        return Row(
            suite=case.suite,
            case=case.name,
            function=case.function,
            shape=list(case.shape),
            strides=[],
            dim=list(case.dim) if isinstance(case.dim, tuple) else case.dim,
            dtype=dtype,
            out_dtype=case.out_dtype or dtype,
            direction=case.direction,
            provider=provider.name,
            version=provider.version(),
            threads=torch.get_num_threads() if self.device.type == "cpu" else None,
            bytes=case.bytes(dtype),
        )

    def _admit(self, entry: _Entry, case: Case, dtype: str, free: int) -> None:
        """Leaves out, aloud, what the provider does not take or what does not fit."""
        reason = entry.provider.supports(case, dtype)
        takes = entry.provider.workspace(case, dtype)
        if reason is not None:
            entry.row.error = f"unsupported: {reason}"
        elif takes > free:
            entry.row.error = f"skipped: takes {_size(takes)} more, {_size(free)} are free"
            self.reporter.say(f"{case.name}, {dtype}, {entry.row.provider}: {entry.row.error}")

    def _drop_doubles(self, entries: list[_Entry], work: Work, rows: list[Row]) -> list[_Entry]:
        """Names the engine of each, and leaves out a forced engine where "auto" takes that very engine."""
        kept: list[_Entry] = []
        for entry in entries:
            try:
                entry.row.engine = entry.provider.engine(work)
            except Exception as error:  # a provider may raise anything, and is then shown with what it raised
                entry.fail("raised", error)
                self._shout(entry)
                continue
            name, engine = entry.row.provider, entry.row.engine
            double = engine is not None and any(e.row.engine == engine for e in kept)
            if double and name not in self.forced:
                rows.remove(entry.row)
            else:
                kept.append(entry)
        return kept

    def _check(self, entry: _Entry, checker: Checker, work: Work) -> None:
        """Every call that will be timed, into a poisoned output. The copy has no definition to be compared with."""
        self.reporter.status(f"checking {entry.row.provider}")
        entry.prepare(work)
        calls = dict.fromkeys([entry.call, entry.fresh])
        for call in calls if not entry.row.error and not entry.provider.limit else ():
            try:
                checker.poison()
                verdict = checker.check(call())
                self._synchronise()
            except Refused as error:
                entry.row.error = f"unsupported: {error}"
                return
            except Exception as error:
                entry.fail("raised", error)
                self._after_error(entry)
                break
            if not verdict.ok:
                entry.row.error = f"wrong: {verdict}"
                break
        if entry.row.error:
            self._shout(entry)

    def _time_cuda(self, entry: _Entry, clocks: timing.Cuda) -> None:
        try:
            stats = clocks.cold(entry.call, self.budget)
            entry.row.call_us = clocks.back_to_back(entry.fresh, self.budget)
        except Exception as error:
            entry.fail("raised", error)
            self._after_error(entry)
            self._shout(entry)
            return
        entry.set(stats)

    def _time_graphs(self, entries: Sequence[_Entry], work: Work, clocks: timing.Cuda, free: int) -> None:
        """All over the same buffers. What cannot be captured has no graph time, and a reason in its place."""
        size = work.case.bytes(work.dtype)
        count = graph.buffers(clocks.l2, size)
        works: list[Work] = []
        for entry in entries:
            self.reporter.status(f"timing {entry.row.provider} in a graph")
            takes = 0 if entry.provider.limit else entry.provider.workspace(work.case, work.dtype)
            entry.row.graph_error = graph.refusal(count, size, takes, free)
            if entry.row.graph_error:
                continue
            try:
                works = works or copies(work, count)
                calls = [entry.provider.prepare(w) for w in works]
                clock = graph.GraphClock(self.device)
                entry.row.graph_us = clock.time(calls, entry.row.median_us or 0.0, self.budget.seconds)
            except Exception as error:
                entry.row.graph_error = _told(error)
                self._after_error(entry)

    def _after_error(self, entry: _Entry) -> None:
        """Goes on only if the GPU still answers."""
        try:
            self._synchronise()
        except Exception as error:
            raise DeviceLost(f"{entry.row.provider} left the GPU unusable on {entry.row.case}: {error}") from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _shout(self, entry: _Entry) -> None:
        row = entry.row
        self.reporter.say(f"{row.case}, {row.dtype}, {row.provider}: {row.error}")


@dataclass
class _Entry:
    """A provider on a case: its row, and its calls once they are made."""

    provider: Provider
    row: Row
    call: Callable[[], Any] = lambda: None
    fresh: Callable[[], Any] = lambda: None

    def prepare(self, work: Work) -> None:
        try:
            self.call = self.provider.prepare(work)
            own = self.provider.limit or not self.provider.writes(work)
            self.fresh = self.call if own else self.provider.prepare(work.fresh())
        except Exception as error:
            self.fail("raised", error)

    def set(self, stats: timing.Stats) -> None:
        self.row.median_us, self.row.p20_us, self.row.p80_us = stats.median, stats.p20, stats.p80
        self.row.ok, self.row.disturbed = True, spread(stats)

    def fail(self, how: str, error: BaseException) -> None:
        self.row.error = f"{how}: {_told(error)}"[:300]


def _told(error: BaseException) -> str:
    """One line of an exception."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:300]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
