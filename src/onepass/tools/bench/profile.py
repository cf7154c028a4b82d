"""`onepass profile`: the tables of torch.profiler for torch's softmax, for ours and for variants of the gallery.

Each contestant is checked, warmed up and profiled; then a table shows all of them side by side.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.collect_env import cpu_name, free_bytes
from onepass.tools.bench.correctness import Checker
from onepass.tools.bench.inputs import make_inputs, required_bytes
from onepass.tools.bench.providers import Call, Provider, registry
from onepass.tools.bench.providers.gallery import GalleryProvider
from onepass.tools.bench.runner import DeviceLost, one_line
from onepass.tools.bench.text_table import BASELINE, OURS, us_text
from onepass.tools.gallery import VARIANTS, variant
from onepass.tools.terminal import plain_table, rich_table, terminal

__all__ = ["Options", "ProfileLine", "Profiler", "contestants", "run"]

ALL = "all"
OUTSIDE = "(outside torch's operators)"  # where a contestant that is no operator of torch spends its host time
WARMUP = 3  # calls before the profile: TorchScript observes the first, compiles at the second, and then runs the result
# CUPTI of CUDA 12.6 to 13.0 loses the first kernels of a profile, one more with every profile of a process. This many
# are launched after the profile is prepared and before it records: more than there are contestants.
SACRIFICED = 64
# Kineto's log and torch's warnings: "USDT:2026-11-21 06:44:04 ...", "[W1121 06:44:04 collection.cpp:942] ..."
_LOG = re.compile(r"^(?:[A-Z]+:\d{4}-\d\d-\d\d |\[[WE]\d{3,} )")


@dataclass(frozen=True)
class Options:
    """The options of `onepass profile`.

    `names` are variants of the gallery, or "all". `limit` is the number of rows of torch's table, and `sort` a key that
    it takes; the default is the self time, on a GPU that of the GPU.
    """

    rows: int
    n: int
    device: torch.device
    dtype: str = "float32"
    names: tuple[str, ...] = ()
    calls: int = 1
    limit: int = 10
    sort: str | None = None
    warmup: bool = True
    trace: str | None = None

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def case(self) -> Case:
        return Case("profile", f"{self.rows}x{self.n}", (self.rows, self.n), dtypes=(self.dtype,))


@dataclass(frozen=True)
class ProfileLine:
    """A contestant in the side-by-side table; each number is per call. Times are microseconds.

    `kernels` and `device_us` are of a GPU. `operators` counts what the host recorded. `kernel` and `operator` took the
    longest in all their runs together.
    """

    name: str
    kernels: float
    device_us: float
    kernel: str
    operators: float
    host_us: float
    operator: str


# The run


def contestants(options: Options) -> tuple[list[Provider], dict[str, str]]:
    """torch, onepass and the named variants, in this order; and by name why "all" excludes others.

    Raises ValueError for an unknown variant, or for a named one that cannot run on the device or on the shape.
    """
    chosen: dict[str, Provider] = {name: registry()[name] for name in (BASELINE, OURS)}
    excluded: dict[str, str] = {}
    every = VARIANTS if ALL in options.names else ()
    for name in [name for name in (*options.names, *every) if name != ALL]:
        provider = GalleryProvider(variant(name))
        reason = provider.unavailable(options.device)
        if reason is not None:
            reason = f"cannot run on {options.device}: {reason}"
        else:
            reason = provider.unsupported(options.case, options.dtype)
        if reason is None:
            chosen[name] = provider
        elif name in options.names:
            raise ValueError(f"{name}: {reason}")
        else:
            excluded[name] = reason
    return list(chosen.values()), excluded


def run(options: Options, say: Callable[[str], None] = print) -> tuple[int, list[ProfileLine]]:
    """Profiles, prints the tables, and returns the exit status and the lines of the side-by-side table.

    The status is 1 if a contestant was wrong or raised, or if the trace could not be written.

    Raises ValueError for an option that cannot be met, before anything runs.
    """
    import onepass

    chosen, excluded = contestants(options)
    _check_memory(options, chosen)
    where = f"{cpu_name()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(options.device) if options.gpu else where
    say(f"onepass {onepass.__version__}, torch {torch.__version__}, on {where}")
    for name, reason in excluded.items():
        say(f"  without {name}: {reason}")
    calls = f"{options.calls} calls" if options.calls > 1 else "1 call"
    if not options.warmup:
        calls = f"the first {calls}" if options.calls > 1 else "the first call"
    sort = options.sort or ("self_cuda_time_total" if options.gpu else "self_cpu_time_total")
    profiler = Profiler(options.case, options.dtype, options.device, options.calls, options.warmup)
    right, found, status = list[Provider](), list[ProfileLine](), 0
    try:
        for provider in chosen:
            say(f"\n{provider.name}: {options.case.name} {options.dtype} on {options.device}, {calls}")
            error, table, line = profiler.measure(provider, sort, options.limit)
            if line is None:
                say(error or "")
                status = 1
            else:
                say(table)
                found.append(line)
                right.append(provider)
    except DeviceLost as lost:
        say(f"stopped: {lost}")
        right, status = [], 1
    if found:
        show(found, options.gpu, say)
    if options.gpu and any(not line.kernels for line in found):
        # its warnings and errors; the rest of the log names stages
        why = [text for text in profiler.log if text.startswith(("WARNING", "ERROR", "["))]
        say(f"the profiler recorded no kernel where the table has 0: {why[-1] if why else 'it does not say why'}")
    if options.trace and right:
        try:
            profiler.trace(right, options.trace)
            say(f"trace: {options.trace}")
        except OSError as error:
            say(f"no trace: {error}")
            status = 1
    return status, found


def _check_memory(options: Options, chosen: Sequence[Provider]) -> None:
    """Raises ValueError for a matrix that does not fit into memory."""
    need = required_bytes(options.case, options.dtype)
    need += max(provider.workspace(options.case, options.dtype) for provider in chosen)
    need += 256 << 20 if options.gpu else 0  # the buffer that is zeroed before each profile
    free = free_bytes(str(options.device))
    if need > free:
        size = f"{options.case.name} {options.dtype}"
        raise ValueError(f"{size} needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {options.device}")


# The profiler


@contextlib.contextmanager
def capture_log() -> Iterator[list[str]]:
    """Collects what the profiler logs on stderr into the list; everything else still goes to stderr, at the end."""
    log: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _flush_stderr()
            stderr = os.dup(2)
        except OSError:  # stderr is closed, so that nothing can be logged
            yield log
            return
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield log
            finally:
                _flush_stderr()
                os.dup2(stderr, 2)
                os.close(stderr)
                file.seek(0)
                for text in file:
                    if _LOG.match(text.decode(errors="replace")):
                        log.append(text.decode(errors="replace").strip())
                    else:
                        os.write(2, text)


def _flush_stderr() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


class Profiler:
    """Checks and profiles contestants on one matrix, a case over the last dim.

    Without `warmup`, the first call is profiled, with everything that it loads. `log` is what the profiler logged.
    """

    def __init__(self, case: Case, dtype: str, device: torch.device, calls: int = 1, warmup: bool = True):
        self.device, self.calls, self.warmup = device, calls, warmup
        self.gpu = device.type == "cuda"
        self.log: list[str] = []
        self.inputs = make_inputs(case, dtype, device, 0).without_out()
        with self._on_device(), self._record(), record_function("first"):
            torch.empty(1)  # the first profile of a process adds 2 ms to the call in it

    @cached_property
    def checker(self) -> Checker:
        return Checker(self.inputs, 0)

    @cached_property
    def clocks(self) -> timing.Cuda:
        return timing.Cuda(self.device)

    def measure(self, provider: Provider, sort: str, limit: int) -> tuple[str | None, str, ProfileLine | None]:
        """What is wrong, or None; torch's table, with `limit` rows sorted by `sort`; and the line of this contestant.

        Raises DeviceLost if the contestant leaves the GPU in an error from which no later call recovers.
        """
        with self._on_device():
            try:
                call = provider.prepare(self.inputs)
                error = self._warm_up(call) if self.warmup else None
                if error is None:
                    with self._record() as prof:
                        result = self._call(provider.name, call)
                    error = self._check(result)
            except Exception as raised:  # a contestant may raise anything; its line then says so
                error = self._recover(provider, raised)
        if error is not None:
            return error, "", None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = prof.key_averages().table(sort_by=sort, row_limit=limit)
            line = make_line(provider.name, prof.events() or (), self.calls)
        return None, text.rstrip(), line

    def trace(self, chosen: Sequence[Provider], file: str) -> None:
        """Writes one more profile, of all contestants in turn, as a Chrome trace. Raises OSError."""
        with self._on_device(), self._record() as prof:
            for provider in chosen:
                self._call(provider.name, provider.prepare(self.inputs))
                self._synchronise()
        file = os.path.realpath(file)  # the export renames a file to this name, which would replace a link
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"")  # raises the errors that Kineto only logs
        with capture_log() as log:
            prof.export_chrome_trace(file)
        if not os.path.getsize(file):
            raise OSError(log[-1] if log else f"{file}: the profiler wrote nothing")

    def _warm_up(self, call: Call) -> str | None:
        error = self._check(call())
        for _ in range(WARMUP - 1 if error is None else 0):
            call()
        self._synchronise()
        return error

    def _call(self, name: str, call: Call) -> Tensor:
        """The calls, each recorded under the contestant's name, since not every contestant is an operator of torch."""
        for _ in range(self.calls):
            with record_function(name):
                result = call()
        return result

    @contextlib.contextmanager
    def _record(self) -> Iterator[profile]:
        """A profile of what happens within. It ends when the GPU has finished."""
        prof = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])])
        with self._logged():
            prof.prepare_trace()
        if self.gpu:
            for _ in range(SACRIFICED):
                self.clocks.flush[:1].zero_()
            self.clocks.spin_up(0.05)  # raises the clock rate and evicts the data from the L2
            self._synchronise()
        with self._logged():
            prof.start_trace()
        try:
            yield prof
            self._synchronise()
        finally:
            with self._logged():
                prof.stop_trace()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with capture_log() as log:
            yield
        self.log += log

    def _check(self, result: Tensor) -> str | None:
        checked = self.checker.check(result)
        return None if checked.ok else f"wrong: {checked}"

    def _recover(self, provider: Provider, error: Exception) -> str:
        try:
            self._synchronise()
        except Exception as lost:
            raise DeviceLost(f"{provider.name} left the GPU unusable: {lost}") from error
        if self.gpu:
            torch.cuda.empty_cache()
        return f"raised: {one_line(error)}"

    def _synchronise(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.gpu else contextlib.nullcontext()


# The side-by-side table


def make_line(name: str, events: Iterable[Any], calls: int) -> ProfileLine:
    """The line of the contestant whose calls were recorded under `name`, from the events of torch.profiler."""
    events = list(events)
    annotations = {e.name for e in events if e.is_user_annotation}
    host = [e for e in events if e.device_type == DeviceType.CPU]
    # An annotation has an event on the device too, which spans all that it launched.
    device = [e for e in events if e.device_type != DeviceType.CPU and e.name not in annotations]
    return ProfileLine(
        name,
        kernels=sum(not e.name.startswith(("Memcpy", "Memset")) for e in device) / calls,
        device_us=sum(e.time_range.elapsed_us() for e in device) / calls,
        kernel=_longest(
            (e.name, e.time_range.elapsed_us()) for e in device if not e.name.startswith(("Memcpy", "Memset"))
        ),
        operators=sum(not e.is_user_annotation for e in host) / calls,
        host_us=sum(e.time_range.elapsed_us() for e in host if e.is_user_annotation and e.name == name) / calls,
        operator=_longest((OUTSIDE if e.is_user_annotation else e.name, e.self_cpu_time_total) for e in host),
    )


def _longest(times: Iterable[tuple[str, float]]) -> str:
    total: dict[str, float] = {}
    for name, us in times:
        total[name] = total.get(name, 0.0) + us
    return max(total, key=lambda name: total[name]) if total else ""


def shorten(name: str, width: int) -> str:
    """A kernel's name in at most `width` characters: without torch's namespaces, then without its middle.

    >>> shorten("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*, float const*)", 40)
    'cunn_SoftMaxForward...at*, float const*)'
    """
    for noise in ("(anonymous namespace)::", "at::native::", "at::cuda::"):
        name = name.replace(noise, "")
    name = name.removeprefix("void ")
    if len(name) <= width:
        return name
    room = max(width - 3, 2)
    return f"{name[: room - room // 2]}...{name[len(name) - room // 2 :]}"


def cells(lines: Sequence[ProfileLine], gpu: bool, width: int = 10_000) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of the table. The last column is as wide as `width` permits, but at least 20 characters.

    "of torch's" is the time relative to torch's, on the device or, without a GPU, on the host.
    """
    times = [line.device_us if gpu else line.host_us for line in lines]
    baseline = next((time for line, time in zip(lines, times, strict=True) if line.name == "torch"), 0.0)
    if gpu:
        heads = ["contestant", "kernels", "device us", "host us", "of torch's", "slowest kernel"]
    else:
        heads = ["contestant", "operators", "host us", "of torch's", "slowest operator"]
    rows = []
    for line, time in zip(lines, times, strict=True):
        count, slowest = (line.kernels, line.kernel) if gpu else (line.operators, line.operator)
        row = [line.name, f"{count:.4g}", *([us_text(time) if time else "-"] if gpu else []), us_text(line.host_us)]
        rows.append([*row, f"{time / baseline:.2f}" if time and baseline else "-", slowest])
    taken = sum(max(map(len, column)) + 2 for column in list(zip(heads, *rows, strict=True))[:-1])
    for row in rows:
        row[-1] = shorten(row[-1], max(width - taken, 20)) or "-"
    return heads, rows


def show(lines: Sequence[ProfileLine], gpu: bool, say: Callable[[str], None] = print) -> None:
    """Prints the table and how to read it."""
    title = "each number is per call" + ("; device time is of everything that ran on the GPU" if gpu else "")
    note = "host times include the cost of the profiler itself; `onepass bench` times without it"
    console = terminal()
    # rich draws its table 7 characters wider: a blank at each edge and between two columns
    width = console.width - 7 if console else shutil.get_terminal_size((120, 24)).columns
    heads, rows = cells(lines, gpu, width)
    left = {0, len(heads) - 1}
    if console is None:
        say(f"\n{title}\n{plain_table(heads, rows, left)}\n{note}")
        return
    table = rich_table(heads, rows, left, title=title)
    times = [line.device_us if gpu else line.host_us for line in lines]
    if any(times):
        table.rows[times.index(min(filter(None, times)))].style = "bold green"
    console.print()
    console.print(table)
    console.print(note, style="dim", markup=False)
