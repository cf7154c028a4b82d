"""`onepass profile`: the tables of torch.profiler for torch's softmax, for ours and for variants of the gallery.

Each contestant is checked, warmed up and profiled; then a table shows all of them side by side.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.collect_env import cpu_name, free_bytes
from onepass.tools.bench.correctness import Checker, make_inputs, required_bytes
from onepass.tools.bench.gallery_providers import GalleryProvider
from onepass.tools.bench.provider import Provider
from onepass.tools.bench.registry import registry
from onepass.tools.bench.report import BASELINE, OURS, us_text
from onepass.tools.bench.runner import DeviceLost, recover, synchronise
from onepass.tools.gallery import VARIANTS, variant
from onepass.tools.terminal import table

__all__ = ["Options", "ProfileLine", "Profiler", "contestants", "run"]

ALL = "all"
OUTSIDE = "(outside torch's operators)"  # the CPU time of a contestant that is no operator of torch
WARMUP = 3  # calls before the profile: TorchScript observes the first, compiles at the second, and then runs the result
# CUPTI of CUDA 12.6 to 13.0 loses the first kernels of a profile, one more with every profile of a process. This many
# are launched after the profile is prepared and before it records: more than there are contestants.
SACRIFICED = 64
# Kineto's log and torch's warnings: "USDT:2026-11-21 06:44:04 ...", "[W1121 06:44:04 collection.cpp:942] ..."
_LOG = re.compile(rb"^(?:[A-Z]+:\d{4}-\d\d-\d\d |\[[WE]\d{3,} )")


@dataclass(frozen=True)
class Options:
    """`names` are variants of the gallery, or "all". `limit` is the number of rows of torch's table, `sort` its key."""

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
    """A contestant in the side-by-side table; each number is per call, and times are microseconds.

    `operators` counts what the host recorded. `kernel` and `operator` took the longest in all their runs together.
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
    chosen, excluded = [registry()[name] for name in (BASELINE, OURS)], {}
    for name in dict.fromkeys([*options.names, *(VARIANTS if ALL in options.names else ())]):
        if name == ALL:
            continue
        provider = GalleryProvider(variant(name))
        reason = provider.unavailable(options.device)
        reason = reason and f"cannot run on {options.device}: {reason}"
        reason = reason or provider.unsupported(options.case, options.dtype)
        if reason is None:
            chosen.append(provider)
        elif name in options.names:
            raise ValueError(f"{name}: {reason}")
        else:
            excluded[name] = reason
    return chosen, excluded


def run(options: Options, on: Console) -> tuple[int, list[ProfileLine]]:
    """Profiles, prints the tables, and returns the exit status and the lines of the side-by-side table.

    The status is 1 if a contestant was wrong or raised, or if the trace could not be written. Raises ValueError for an
    option that cannot be met, before anything runs.
    """
    import onepass

    chosen, excluded = contestants(options)
    need = required_bytes(options.case, options.dtype)
    need += max(provider.workspace(options.case, options.dtype) for provider in chosen)
    need += 256 << 20 if options.gpu else 0  # the buffer that is zeroed before each profile
    free, size = free_bytes(str(options.device)), f"{options.case.name} {options.dtype}"
    if need > free:
        raise ValueError(f"{size} needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {options.device}")
    where = f"{cpu_name()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(options.device) if options.gpu else where
    on.print(f"onepass {onepass.__version__}, torch {torch.__version__}, on {where}")
    for name, reason in excluded.items():
        on.print(f"  without {name}: {reason}")
    calls = f"{options.calls} calls" if options.calls > 1 else "1 call" if options.warmup else "call"
    calls = calls if options.warmup else f"the first {calls}"
    profiler = Profiler(options)
    right, found = list[Provider](), list[ProfileLine]()
    try:
        for provider in chosen:
            on.print(f"\n{provider.name}: {size} on {options.device}, {calls}")
            text, line = profiler.measure(provider)
            on.print(text, soft_wrap=True)
            found += [line] if line else []
            right += [provider] if line else []
    except DeviceLost as lost:
        on.print(f"stopped: {lost}")
        right = []
    status = int(len(right) < len(chosen))
    if found:
        show(found, options.gpu, on)
    if options.gpu and any(not line.kernels for line in found):
        # its warnings and errors; the rest of the log names stages
        why = [text for text in profiler.log if text.startswith(("WARNING", "ERROR", "["))]
        reason = why[-1] if why else "it does not say why"
        on.print(f"the profiler recorded no kernel where the table has 0: {reason}", soft_wrap=True)
    if options.trace and right:
        try:
            profiler.trace(right, options.trace)
            on.print(f"trace: {options.trace}")
        except OSError as error:
            on.print(f"no trace: {error}")
            status = 1
    return status, found


# The profiler


@contextlib.contextmanager
def capture_log(log: list[str]) -> Iterator[None]:
    """Appends what the profiler logs on stderr to the list; everything else still goes to stderr, at the end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            sys.stderr.flush()
            stderr = os.dup(2)
        except (OSError, AttributeError):  # stderr is closed, so that nothing can be logged
            yield
            return
        file = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            for text in file:
                if _LOG.match(text):
                    log.append(text.decode(errors="replace").strip())
                else:
                    os.write(2, text)


class Profiler:
    """Checks and profiles contestants on one matrix, over its last dim. `log` is what the profiler logged.

    Without warm-up, the first call is profiled, with everything that it loads.
    """

    def __init__(self, options: Options):
        self.options, self.device, self.gpu = options, options.device, options.gpu
        self.log: list[str] = []
        self.inputs = replace(make_inputs(options.case, options.dtype, self.device, 0), out=None)
        self.checker = Checker(self.inputs, 0)
        if self.gpu and self.device.index is not None:
            torch.cuda.set_device(self.device)
        with self._record(), record_function("first"):
            torch.empty(1)  # the first profile of a process adds 2 ms to the call in it

    @cached_property
    def clocks(self) -> timing.Cuda:
        return timing.Cuda(self.device)

    def measure(self, provider: Provider) -> tuple[str, ProfileLine | None]:
        """torch's table and the line of this contestant, or what is wrong with it and None. Raises DeviceLost."""
        options = self.options
        try:
            call = provider.prepare(self.inputs)
            for _ in range(WARMUP if options.warmup else 0):
                result = call()
            synchronise(self.device)
            if options.warmup and (wrong := self.checker.check(result)):
                return f"wrong: {wrong}", None
            with self._record() as prof:
                result = self._call(provider)
            if wrong := self.checker.check(result):
                return f"wrong: {wrong}", None
        except Exception as error:  # a contestant may raise anything; its line then says so
            return f"raised: {recover(self.device, provider.name, error)}", None
        sort = options.sort or ("self_cuda_time_total" if options.gpu else "self_cpu_time_total")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = prof.key_averages().table(sort_by=sort, row_limit=options.limit)
            return text.rstrip(), make_line(provider.name, prof.events() or (), options.calls)

    def trace(self, chosen: Sequence[Provider], file: str) -> None:
        """Writes one more profile, of all contestants in turn, as a Chrome trace. Raises OSError."""
        with self._record() as prof:
            for provider in chosen:
                self._call(provider)
                synchronise(self.device)
        file = os.path.realpath(file)  # the export renames a file to this name, which would replace a link
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"")  # raises the errors that Kineto only logs
        log: list[str] = []
        with capture_log(log):
            prof.export_chrome_trace(file)
        if not os.path.getsize(file):
            raise OSError(log[-1] if log else f"{file}: the profiler wrote nothing")

    def _call(self, provider: Provider) -> torch.Tensor:
        """The calls, each recorded under the contestant's name, since not every contestant is an operator of torch."""
        call = provider.prepare(self.inputs)
        for _ in range(self.options.calls):
            with record_function(provider.name):
                result = call()
        return result

    @contextlib.contextmanager
    def _record(self) -> Iterator[profile]:
        """A profile of what happens within. It ends when the GPU has finished."""
        prof = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.gpu])
        with capture_log(self.log):
            prof.prepare_trace()
        if self.gpu:
            for _ in range(SACRIFICED):
                self.clocks.flush[:1].zero_()
            self.clocks.spin_up(0.05)  # raises the clock rate and evicts the data from the L2
            synchronise(self.device)
        with capture_log(self.log):
            prof.start_trace()
        try:
            yield prof
            synchronise(self.device)
        finally:
            with capture_log(self.log):
                prof.stop_trace()


# The side-by-side table


def make_line(name: str, events: Iterable[Any], calls: int) -> ProfileLine:
    """The line of the contestant whose calls were recorded under `name`, from the events of torch.profiler."""
    events = list(events)
    annotations = {e.name for e in events if e.is_user_annotation}
    host = [e for e in events if e.device_type == DeviceType.CPU]
    # An annotation has an event on the device too, which spans all that it launched.
    device = [e for e in events if e.device_type != DeviceType.CPU and e.name not in annotations]
    kernels = [e for e in device if not e.name.startswith(("Memcpy", "Memset"))]
    by_kernel, by_operator = Counter[str](), Counter[str]()
    for e in kernels:
        by_kernel[e.name] += e.time_range.elapsed_us()
    for e in host:
        by_operator[OUTSIDE if e.is_user_annotation else e.name] += e.self_cpu_time_total
    return ProfileLine(
        name,
        kernels=len(kernels) / calls,
        device_us=sum(e.time_range.elapsed_us() for e in device) / calls,
        kernel=max(by_kernel, key=by_kernel.__getitem__, default=""),
        operators=sum(not e.is_user_annotation for e in host) / calls,
        host_us=sum(e.time_range.elapsed_us() for e in host if e.is_user_annotation and e.name == name) / calls,
        operator=max(by_operator, key=by_operator.__getitem__, default=""),
    )


def show(lines: Sequence[ProfileLine], gpu: bool, on: Console) -> None:
    """Prints the table and how to read it. "of torch's" is of the times on the device, if there is one."""
    times = {line.name: line.device_us if gpu else line.host_us for line in lines}
    baseline = times.get(BASELINE)
    head = ["contestant", *(["kernels", "device us"] if gpu else ["operators"]), "host us", "of torch's"]
    body = []
    for line in lines:
        count, slowest = (line.kernels, line.kernel) if gpu else (line.operators, line.operator)
        for noise in ("(anonymous namespace)::", "at::native::", "at::cuda::", "void "):
            slowest = slowest.replace(noise, "")
        time = times[line.name]
        device = [us_text(time) if time else "-"] if gpu else []
        ratio = f"{time / baseline:.2f}" if time and baseline else "-"
        body.append([line.name, f"{count:.4g}", *device, us_text(line.host_us), ratio, slowest or "-"])
    last = len(head)
    made = table([*head, "slowest kernel" if gpu else "slowest operator"], body, left={0, last}, fold=last)
    for row, line in zip(made.rows, lines, strict=True):
        row.style = "bold green" if times[line.name] and times[line.name] == min(filter(None, times.values())) else ""
    on.print("\neach number is per call" + ("; device time is of everything that ran on the GPU" if gpu else ""))
    on.print(made)
    on.print("host times include the cost of the profiler itself; `onepass bench` times without it", style="dim")
