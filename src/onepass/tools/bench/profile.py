"""One run of `onepass profile`: torch.profiler's tables of torch's softmax, of ours and of rungs of the gallery.

`profiler.py` makes a profile of each, `profile_table.py` puts them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onepass.tools.bench.cases import Case
from onepass.tools.bench.environment import cpu_name, free_bytes
from onepass.tools.bench.profile_table import Line, show
from onepass.tools.bench.profiler import Contestant, Profiler
from onepass.tools.bench.run import DeviceLost
from onepass.tools.bench.work import needed_bytes
from onepass.tools.gallery import VARIANTS, variant

__all__ = ["ALL", "Choices", "contestants", "run"]

ALL = "all"


@dataclass(frozen=True)
class Choices:
    """The options of `onepass profile`.

    `names` are rungs, or "all"; `limit` is the rows of torch's table, and `sort` a key that it takes, or None for the
    self time, on a GPU the GPU's.
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


def contestants(choices: Choices) -> tuple[list[Contestant], dict[str, str]]:
    """torch, onepass and the rungs that are named, in this order; and why "all" leaves out the others, by name.

    Raises:
        ValueError: for an unknown rung, or one that is named and cannot run on the device or does not take the shape.
    """
    import onepass

    every = VARIANTS if ALL in choices.names else ()
    chosen = {
        "torch": Contestant("torch", lambda x: torch.softmax(x, -1)),
        "onepass": Contestant("onepass", lambda x: onepass.softmax(x, -1)),
    }
    left_out: dict[str, str] = {}
    for each in [variant(name) for name in (*choices.names, *every) if name != ALL]:
        reason = each.unavailable(choices.device)
        if reason is not None:
            reason = f"cannot run on {choices.device}: {reason}"
        else:
            reason = each.refuses(choices.rows, choices.n, getattr(torch, choices.dtype))
        if reason is None:
            chosen[each.name] = Contestant(each.name, each)
        elif each.name in choices.names:
            raise ValueError(f"{each.name}: {reason}")
        else:
            left_out[each.name] = reason
    return list(chosen.values()), left_out


def run(choices: Choices, say: Callable[[str], None] = print, lines: list[Line] | None = None) -> int:
    """Profiles, says the tables, and puts the lines of the last one into `lines`, where it is given.

    Returns the exit status: 1 where a contestant was wrong or raised, or the trace could not be written.

    Raises:
        ValueError: for a choice that cannot be met, before anything runs.
    """
    chosen, left_out = contestants(choices)
    _fits(choices, chosen)
    _introduce(choices, left_out, say)
    sort = choices.sort or ("self_cuda_time_total" if choices.gpu else "self_cpu_time_total")
    profiler = Profiler(choices.case, choices.dtype, choices.device, choices.calls, choices.warmup)
    right, lines, status = list[Contestant](), [] if lines is None else lines, 0
    try:
        for contestant in chosen:
            say(f"\n{contestant.name}: {choices.case.name} {choices.dtype} on {choices.device}, {_count(choices)}")
            error, text, line = profiler.profiled(contestant, sort, choices.limit)
            if line is None:
                say(error or "")
                status = 1
            else:
                say(text)
                lines.append(line)
                right.append(contestant)
    except DeviceLost as lost:
        say(f"stopped: {lost}")
        right, status = [], 1
    if lines:
        show(lines, choices.gpu, say)
    if choices.gpu and any(not line.kernels for line in lines):
        # its warnings and errors; the rest of the log is stages
        why = [text for text in profiler.logged if text.startswith(("WARNING", "ERROR", "["))]
        say(f"the profiler recorded no kernel where there is a 0: {why[-1] if why else 'it does not say why'}")
    if choices.trace and right:
        try:
            profiler.trace(right, choices.trace)
            say(f"trace: {choices.trace}")
        except OSError as error:
            say(f"no trace: {error}")
            status = 1
    return status


def _fits(choices: Choices, chosen: Sequence[Contestant]) -> None:
    """Raises ValueError for a matrix that memory does not hold."""
    need = needed_bytes(choices.case, choices.dtype)
    need += 256 << 20 if choices.gpu else 0  # what is zeroed before each profile
    if any(c.name.startswith("naive") for c in chosen):
        need += 4 * 4 * choices.rows * choices.n  # intermediates in float32
    free = free_bytes(str(choices.device))
    if need > free:
        size = f"{choices.case.name} {choices.dtype}"
        raise ValueError(f"{size} needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {choices.device}")


def _introduce(choices: Choices, left_out: dict[str, str], say: Callable[[str], None]) -> None:
    import onepass

    if choices.gpu:
        where = torch.cuda.get_device_name(choices.device)
    else:
        where = f"{cpu_name()}, {torch.get_num_threads()} threads"
    say(f"onepass {onepass.__version__}, torch {torch.__version__}, on {where}")
    for name, reason in left_out.items():
        say(f"  without {name}: {reason}")


def _count(choices: Choices) -> str:
    if choices.calls == 1:
        return "1 call" if choices.warmup else "the first call"
    return f"{choices.calls} calls" if choices.warmup else f"the first {choices.calls} calls"
