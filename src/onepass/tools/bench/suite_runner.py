"""The base class for runs of suites with their own data, calls and definition, such as losses and segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onepass.tools.bench.cases import Case
from onepass.tools.bench.provider import COPY, Provider
from onepass.tools.bench.runner import Runner, _Entry, _right, _set_fractions

Call = Callable[[], Any]


class SuiteRunner(Runner):
    """A run whose subclass defines the calls, the expected results and the limit."""

    def make(self, case: Case, dtype: str, generator: torch.Generator) -> Any:
        """The data of a case."""
        raise NotImplementedError

    def expect(self, data: Any) -> Any:
        """The expected result."""
        raise NotImplementedError

    def limit(self, data: Any) -> Call:
        """The copy that is the limit."""
        raise NotImplementedError

    def calls(self, provider: Any, data: Any) -> Sequence[Call]:
        """The call to time, and last a call that allocates its result, which may be the same call."""
        raise NotImplementedError

    def compare(self, provider: Any, data: Any, got: Any, expected: Any) -> str | None:
        """What is wrong with the result of a call, or None."""
        raise NotImplementedError

    def _measure(self, entries: list[_Entry], case: Case, dtype: str) -> None:
        for entry in entries[1:]:
            refusal = entry.provider.unsupported(case, dtype)
            if refusal is not None:
                entry.row.error = f"unsupported: {refusal}"
        self.progress.status("making data and the reference")
        try:
            data = self.make(case, dtype, torch.Generator(self.device).manual_seed(self.seed))
            expected = self.expect(data)
        except torch.OutOfMemoryError:
            for entry in entries:
                self._fail(entry, "skipped: the memory does not hold the data and the reference")
            return
        for entry in _right(entries):
            self.progress.status(f"checking {entry.row.provider}")
            entry.row.strides = list(data.x.stride())
            with self._report_errors(entry):
                self._set_calls(entry, data, expected)
        del expected
        right = _right(entries)
        if self.clocks is None:
            self._time_cpu(right, None)
        else:
            self._time_cuda(right, self.clocks)
        _set_fractions(entries)

    def _set_calls(self, entry: _Entry, data: Any, expected: Any) -> None:
        provider: Provider = entry.provider
        calls = [self.limit(data)] if provider is COPY else self.calls(provider, data)
        entry.call, entry.allocating_call = calls[0], calls[-1]
        for call in calls if provider is not COPY else ():
            if wrong := self.compare(provider, data, call(), expected):
                self._fail(entry, f"wrong: {wrong}")
                return
