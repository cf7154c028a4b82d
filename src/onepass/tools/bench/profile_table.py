"""The side-by-side table of `onepass profile`: what a profile recorded as `Event`s, an `Event` list as a `Line`.

No profiler is needed here, and no GPU: `records` alone reads torch's events, by their attributes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

from onepass.tools.bench.table import us_text

__all__ = ["Event", "Line", "cells", "line", "plain", "records", "short", "show"]

OUTSIDE = "(outside torch's operators)"  # where a contestant that is no operator of torch spends its time on the host
_WIDTH = 120  # of a table that goes to no terminal


@dataclass(frozen=True)
class Event:
    """Something recorded: on the device what ran there, on the host an operator, a runtime call or an annotation.

    `us` is microseconds from its begin to its end, `self_us` those of them that lie in no other event within it.
    """

    name: str
    on_device: bool
    annotation: bool
    us: float
    self_us: float


@dataclass(frozen=True)
class Line:
    """A contestant, each number that of one call. Times are microseconds; `kernels` and `device_us` are of a GPU.

    `operators` counts what the host recorded; `kernel` and `operator` are what took the longest in all its runs.
    """

    name: str
    kernels: float
    device_us: float
    kernel: str
    operators: float
    host_us: float
    operator: str


def records(events: Iterable[Any]) -> list[Event]:
    """The events of a torch.profiler profile, `profile.events()`."""
    return [
        Event(
            event.name,
            event.device_type != DeviceType.CPU,
            bool(event.is_user_annotation),
            event.time_range.elapsed_us(),
            event.self_cpu_time_total,
        )
        for event in events
    ]


def line(name: str, events: Sequence[Event], calls: int) -> Line:
    """The line of the contestant whose calls were recorded under the annotation `name`.

    >>> call = Event("mine", on_device=False, annotation=True, us=30.0, self_us=20.0)
    >>> launch = Event("cuLaunchKernel", on_device=False, annotation=False, us=10.0, self_us=10.0)
    >>> kernel = Event("my_kernel", on_device=True, annotation=False, us=7.0, self_us=0.0)
    >>> line("mine", [call, launch, kernel, call, launch, kernel], calls=2)  # doctest: +NORMALIZE_WHITESPACE
    Line(name='mine', kernels=1.0, device_us=7.0, kernel='my_kernel',
         operators=1.0, host_us=30.0, operator="(outside torch's operators)")
    """
    annotations = {event.name for event in events if event.annotation}
    host = [event for event in events if not event.on_device]
    # An annotation has an event on the device too, over all that it launched.
    device = [e for e in events if e.on_device and not e.annotation and e.name not in annotations]
    kernels = [event for event in device if not event.name.startswith(("Memcpy", "Memset"))]
    within = [(OUTSIDE if event.annotation else event.name, event.self_us) for event in host]
    return Line(
        name,
        kernels=len(kernels) / calls,
        device_us=sum(event.us for event in device) / calls,
        kernel=_longest((event.name, event.us) for event in device),
        operators=sum(not event.annotation for event in host) / calls,
        host_us=sum(event.us for event in host if event.annotation and event.name == name) / calls,
        operator=_longest(within),
    )


def _longest(times: Iterable[tuple[str, float]]) -> str:
    total: dict[str, float] = {}
    for name, us in times:
        total[name] = total.get(name, 0.0) + us
    return max(total, key=lambda name: total[name]) if total else ""


def short(name: str, width: int) -> str:
    """A kernel's name in at most `width` characters: without what all of torch's have, then without its middle.

    >>> short("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>(float*, float const*)", 40)
    'cunn_SoftMaxForward...at*, float const*)'
    """
    for noise in ("(anonymous namespace)::", "at::native::", "at::cuda::"):
        name = name.replace(noise, "")
    name = name.removeprefix("void ")
    if len(name) <= width:
        return name
    room = max(width - 3, 2)
    return f"{name[: room - room // 2]}...{name[len(name) - room // 2 :]}"


def cells(lines: Sequence[Line], gpu: bool, width: int = 10_000) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of the side-by-side table, the last column as wide as `width` leaves, 20 characters at least.

    "of torch's" is the time over torch's, on the device or, without a GPU, on the host.
    """
    torchs = next((_time(each, gpu) for each in lines if each.name == "torch"), 0.0)
    if gpu:
        heads = ["contestant", "kernels", "device us", "host us", "of torch's", "slowest kernel"]
    else:
        heads = ["contestant", "operators", "host us", "of torch's", "slowest operator"]
    rows = []
    for each in lines:
        time = _time(each, gpu)
        count, slowest = (each.kernels, each.kernel) if gpu else (each.operators, each.operator)
        row = [each.name, f"{count:.4g}", *([us_text(time) if time else "-"] if gpu else []), us_text(each.host_us)]
        rows.append([*row, f"{time / torchs:.2f}" if time and torchs else "-", slowest])
    taken = sum(max(len(row[i]) for row in [heads, *rows]) + 2 for i in range(len(heads) - 1))
    for row in rows:
        row[-1] = short(row[-1], max(width - taken, 20)) or "-"
    return heads, rows


def _time(each: Line, gpu: bool) -> float:
    return each.device_us if gpu else each.host_us


def plain(lines: Sequence[Line], gpu: bool, width: int = _WIDTH) -> str:
    """The table in ASCII."""
    heads, rows = cells(lines, gpu, width)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    text = []
    for row in [heads, ["-" * w for w in widths], *rows]:
        ends = (0, len(row) - 1)
        joined = (c.ljust(w) if i in ends else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        text.append("  ".join(joined).rstrip())
    return "\n".join(text)


def show(lines: Sequence[Line], gpu: bool, say: Callable[[str], None] = print) -> None:
    """The table and how to read it; in colour on a terminal that has rich."""
    title = "each number is of one call" + ("; device time is of what ran on the GPU" if gpu else "")
    note = "host times hold what the profiler itself costs; `onepass bench` times without it"
    if sys.stdout.isatty():
        try:
            _coloured(lines, gpu, title, note)
            return
        except ImportError:
            pass
    say(f"\n{title}\n{plain(lines, gpu, shutil.get_terminal_size((_WIDTH, 24)).columns)}\n{note}")


def _coloured(lines: Sequence[Line], gpu: bool, title: str, note: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    heads, rows = cells(lines, gpu, console.width)
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i in (0, len(heads) - 1) else "right", no_wrap=True)
    timed = [_time(each, gpu) for each in lines if _time(each, gpu)]
    for each, row in zip(lines, rows, strict=True):
        best = bool(timed) and _time(each, gpu) == min(timed)
        made.add_row(*(Text(cell) for cell in row), style="bold green" if best else "")
    console.print()
    console.print(made)
    console.print(Text(note, style="dim"))
