"""A whole sweep: measures each length in turn, makes tables of the times, and writes the file."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from onepass import native
from onepass import tables as store
from onepass._engines import unavailable
from onepass.tables import gpu_model, load
from onepass.tools.tune import columns
from onepass.tools.tune.candidates import Candidate, Gpu, Kernel, candidates, kernels
from onepass.tools.tune.sizes import LENGTHS, row_counts
from onepass.tools.tune.table import build
from onepass.tools.tune.timing import ALL, CudaTimer, Measurement, Progress
from onepass.version import __version__

DTYPES = ("float32", "float16", "bfloat16")
SAVED_CHOICES = 8  # of each length, in the file


@dataclass(frozen=True)
class Options:
    """The measurements of a sweep.

    Inputs have `size_mib` MiB, and a time is the median of `repeats` calls. Rows and columns have `lengths` elements,
    None for the default lengths of each. Of the functions, softmax stands for all that write rows, logsumexp for those
    that do not, columns for softmax over other dims, and columns_backward for its gradient.
    """

    size_mib: int = 256
    repeats: int = 15
    lengths: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    functions: tuple[str, ...] = ALL

    def __post_init__(self) -> None:
        for name in ("size_mib", "repeats"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is a whole number, at least 1; got {value!r}")
        if self.lengths is not None and not self.lengths:
            raise ValueError("no lengths")
        for n in self.lengths or ():
            if type(n) is not int or not 2 <= n <= 2**24:
                raise ValueError(f"a length is a whole number from 2 to 2**24, got {n!r}")
        if not self.dtypes or any(dtype not in DTYPES for dtype in self.dtypes):
            raise ValueError(f"dtypes are {', '.join(DTYPES)}; got {', '.join(map(str, self.dtypes)) or 'none'}")
        if {"float16", "bfloat16"} <= set(self.dtypes):
            raise ValueError("float16 and bfloat16 share a table: name one of them")
        if not self.functions or any(function not in ALL for function in self.functions):
            got = ", ".join(map(str, self.functions)) or "none"
            raise ValueError(f"functions are {', '.join(ALL)}, which stand for the others; got {got}")
        if not self.points:
            raise ValueError(f"columns have up to {columns.LONGEST} elements")

    @property
    def points(self) -> list[tuple[str, str, int, int]]:
        """(function, dtype, length, rows) in the order of measuring."""
        return [
            (function, dtype, n, rows)
            for dtype, function in product(dict.fromkeys(self.dtypes), dict.fromkeys(self.functions))
            for n in self._lengths(function)
            for rows in _row_counts(function, n, getattr(torch, dtype).itemsize, self.size_mib)
        ]

    def _lengths(self, function: str) -> list[int]:
        if function not in columns.FUNCTIONS:
            return sorted(set(self.lengths or LENGTHS))
        return sorted({n for n in self.lengths or columns.LENGTHS if n <= columns.LONGEST})


def _row_counts(function: str, n: int, size: int, size_mib: int) -> list[int]:
    if function in columns.FUNCTIONS:
        return [prod(columns.shape_of(n, size, size_mib))]
    return row_counts(n, size, size_mib, function == "logsumexp")


def _candidates(function: str, dtype: str, n: int, rows: int, size_mib: int, gpu: Gpu) -> list[Candidate]:
    size = getattr(torch, dtype).itemsize
    if function not in columns.FUNCTIONS:
        return candidates(n, size, rows, gpu, function == "logsumexp")
    return columns.candidates(n, columns.shape_of(n, size, size_mib), size, function, gpu)


class Timer(Protocol):
    """Checks and times plans: `timing.CudaTimer`, or a fake."""

    def prepare(self, todo: Sequence[Kernel], report: Progress) -> None: ...

    def measure(self, function: str, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Measurement: ...


class ProgressListener:
    """Receives the progress of a sweep. This one ignores it."""

    def compiled(self, done: int, total: int) -> None:
        """So many kernels are compiled."""

    def measured(self, measurement: Measurement, done: int, total: int) -> None:
        """So many lengths are measured, the last with this result."""


def sweep(
    gpu: Gpu,
    options: Options,
    path: Path,
    timer: Timer,
    base: store.Tables,
    use: Callable[[str, store.Tables], None],
    listener: ProgressListener | None = None,
) -> store.TableFile:
    """Measure all lengths and write the file of tables.

    Args:
        base: the built-in tables, which stay for lengths that are not measured.
        use: takes (origin, tables) before they are written, and raises if they are unsound.

    Raises:
        RuntimeError: the result of a candidate is wrong, or the GPU fails.
    """
    listener = listener or ProgressListener()
    tried = {point: _candidates(*point, options.size_mib, gpu) for point in options.points}
    planned = [(*point[:2], candidate.plan) for point, found in tried.items() for candidate in found]
    timer.prepare(kernels(planned), listener.compiled)
    measured: list[Measurement] = []
    for point, found in tried.items():
        measured.append(timer.measure(*point, found))
        listener.measured(measured[-1], len(measured), len(tried))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tables = build(measured, base, gpu)
    store.check_tables(tables)
    stored = store.TableFile(path, gpu.name, gpu.compute, gpu.multiprocessors, date, tables)
    use(stored.origin, tables)
    store.write(path, _content(stored, options, measured))
    return stored


def _content(stored: store.TableFile, options: Options, measured: Sequence[Measurement]) -> dict[str, Any]:
    ordered = sorted(measured, key=lambda m: (m.function, m.dtype, m.n, m.rows))
    return {
        "version": store.VERSION,
        "gpu": stored.gpu,
        "compute": stored.compute,
        "multiprocessors": stored.multiprocessors,
        "date": stored.date,
        "torch": torch.__version__,
        "onepass": __version__,
        "mib": options.size_mib,
        "repeats": options.repeats,
        "tables": stored.tables,
        "measured": [measurement.as_dict(SAVED_CHOICES) for measurement in ordered],
    }


def cuda_index(device: torch.device | str | None) -> int:
    """The number of the CUDA device to tune.

    Raises ValueError for another device, RuntimeError if there is none that the CUDA engine serves.

    >>> cuda_index("cpu")
    Traceback (most recent call last):
    ValueError: takes a CUDA device, got 'cpu'
    """
    try:
        chosen = torch.device("cuda" if device is None else device)
    except RuntimeError:
        raise ValueError(f"takes a CUDA device, as cuda or cuda:0, got {device!r}") from None
    if chosen.type != "cuda":
        raise ValueError(f"takes a CUDA device, got {str(chosen)!r}")
    reason = unavailable("cuda", chosen)
    if reason is not None:
        raise RuntimeError(f"nothing to measure: {reason}")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"no {str(chosen)!r} here: there are {torch.cuda.device_count()} GPUs")
    return index


def gpu_of(index: int) -> Gpu:
    """The properties of a CUDA device that decide the candidates."""
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return Gpu(*gpu_model(index), shared)  # all of compute 8.0 and later take cooperative launches


def tune(
    device: torch.device | str | None = None,
    options: Options | None = None,
    path: Path | None = None,
    listener: ProgressListener | None = None,
) -> store.TableFile:
    """Measure which plan serves each row length fastest on a GPU, write the file of tables, and use it from now on.

    Args:
        device: a CUDA device; None for the current one.
        options: the measurements; None for all lengths with inputs of 256 MiB.
        path: of the file; None for `tables.default_path` of the GPU.
        listener: receives the progress.

    Raises:
        RuntimeError: no CUDA device, a wrong result, a GPU that fails. ValueError: another device.
        OSError: the file cannot be written.

    >>> tune("cpu")
    Traceback (most recent call last):
    ValueError: takes a CUDA device, got 'cpu'
    """
    index = cuda_index(device)
    options = options or Options()
    gpu = gpu_of(index)
    path = path or store.default_path(gpu.name)
    base = native.tables()["tables"]
    with contextlib.suppress(ValueError):  # a sweep replaces a file that is wrong or missing
        load(gpu_model(index))  # so that the tables in use are measured too
    with torch.cuda.device(index):
        timer = CudaTimer(gpu, options.repeats, options.size_mib)

        def use(origin: str, tables: store.Tables) -> None:
            native.set_tables(gpu.name, origin, tables)

        return sweep(gpu, options, Path(os.path.abspath(path)), timer, base, use, listener)
