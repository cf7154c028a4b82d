"""A whole sweep: what is left to measure, each length in turn, then the file."""

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
from onepass.tools.bench.environment import sources_hash
from onepass.tools.tune import columns
from onepass.tools.tune.candidates import Candidate, Gpu, Kernel, candidates, kernels
from onepass.tools.tune.journal import Journal
from onepass.tools.tune.lengths import LENGTHS, row_counts
from onepass.tools.tune.measure import ALL, CudaMeter, Point, Progress
from onepass.tools.tune.table import build
from onepass.version import __version__

DTYPES = ("float32", "float16", "bfloat16")
STATIC_SHARED = 16 * 1024  # bytes of shared memory that a kernel declares at most, as in plan.h
KEPT = 8  # choices of a length that go into the file


@dataclass(frozen=True)
class Options:
    """What is measured: inputs of `mib` MiB, the median of `repeats` calls, rows and columns of `lengths` elements
    (None: those of each) of `dtypes`; softmax, for all functions that write rows, logsumexp, for those that do not,
    columns, for softmax over other dims, and column_gradients."""

    mib: int = 256
    repeats: int = 15
    lengths: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    functions: tuple[str, ...] = ALL

    def __post_init__(self) -> None:
        for name in ("mib", "repeats"):
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
            raise ValueError("float16 and bfloat16 have one table: name one of them")
        if not self.functions or any(function not in ALL for function in self.functions):
            got = ", ".join(map(str, self.functions)) or "none"
            raise ValueError(f"functions are {', '.join(ALL)}, which stand for the others; got {got}")
        if not self.points:
            raise ValueError(f"columns are of up to {columns.LONGEST} elements")

    @property
    def points(self) -> list[tuple[str, str, int, int]]:
        """(function, dtype, length, rows) in the order of measuring."""
        kinds = product(dict.fromkeys(self.dtypes), dict.fromkeys(self.functions))
        return [
            (function, dtype, n, rows)
            for dtype, function in kinds
            for n in self._lengths(function)
            for rows in _rows(function, n, getattr(torch, dtype).itemsize, self.mib)
        ]

    def _lengths(self, function: str) -> list[int]:
        if function not in columns.FUNCTIONS:
            return sorted(set(self.lengths or LENGTHS))
        return sorted({n for n in self.lengths or columns.LENGTHS if n <= columns.LONGEST})


def _rows(function: str, n: int, size: int, mib: int) -> list[int]:
    if function in columns.FUNCTIONS:
        return [prod(columns.shape_of(n, size, mib))]
    return row_counts(n, size, mib, function == "logsumexp")


def _candidates(function: str, dtype: str, n: int, rows: int, mib: int, gpu: Gpu) -> list[Candidate]:
    size = getattr(torch, dtype).itemsize
    if function not in columns.FUNCTIONS:
        return candidates(n, size, rows, gpu, function == "logsumexp")
    return columns.candidates(n, columns.shape_of(n, size, mib), size, columns.operands(function), gpu)


class Meter(Protocol):
    """What checks and times: `measure.CudaMeter`, or a fake."""

    def prepare(self, todo: Sequence[Kernel], report: Progress) -> None: ...

    def measure(self, function: str, dtype: str, n: int, rows: int, tried: Sequence[Candidate]) -> Point: ...


class Watcher(Protocol):
    """Told how a sweep goes on."""

    def compiled(self, done: int, total: int) -> None:
        """So many kernels are compiled."""

    def measured(self, point: Point | None, done: int, total: int) -> None:
        """So many lengths are measured, `point` now; None: by the sweep that this one goes on with."""


class Silent:
    """A watcher that says nothing."""

    def compiled(self, done: int, total: int) -> None:
        pass

    def measured(self, point: Point | None, done: int, total: int) -> None:
        pass


def sweep(
    gpu: Gpu,
    options: Options,
    path: Path,
    meter: Meter,
    base: store.Tables,
    use: Callable[[str, store.Tables], None],
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> store.TableFile:
    """Measure all lengths and write the file of tables.

    Args:
        base: the built-in tables, which stay for lengths that are not measured.
        use: takes (origin, tables) before they are written, and raises where they are unsound.
        fresh: do not go on with the journal of a sweep that was broken off.

    Raises:
        ValueError: a journal of another sweep. RuntimeError: a candidate's result is wrong, or the GPU fails.
    """
    watcher = watcher or Silent()
    points = options.points
    header = {
        "journal": store.VERSION,
        "gpu": gpu.name,
        "compute": gpu.compute,
        "multiprocessors": gpu.multiprocessors,
        "shared": gpu.shared,
        "onepass": __version__,
        "sources": sources_hash(),
        "torch": torch.__version__,
        "mib": options.mib,
        "repeats": options.repeats,
        "points": points,
    }
    journal = Journal(path.with_name(path.name + ".journal"), header, fresh)
    try:
        known = {(point.function, point.dtype, point.n, point.rows) for point in journal.points}
        total, left = len(points), [point for point in points if point not in known]
        tried = {point: _candidates(*point, options.mib, gpu) for point in left}
        watcher.measured(None, total - len(left), total)
        meter.prepare(kernels([(*of[:2], c.plan) for of, found in tried.items() for c in found]), watcher.compiled)
        for of in left:
            point = meter.measure(*of, tried[of])
            journal.add(point)
            watcher.measured(point, len(journal.points), total)
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        tables = build(journal.points, base, gpu)
        store.check_tables(tables)
        stored = store.TableFile(path, gpu.name, gpu.compute, gpu.multiprocessors, date, tables)
        use(stored.origin, tables)
        store.write(path, _content(stored, options, journal.points))
        journal.remove()
        return stored
    finally:
        journal.close()


def _content(stored: store.TableFile, options: Options, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "version": store.VERSION,
        "gpu": stored.gpu,
        "compute": stored.compute,
        "multiprocessors": stored.multiprocessors,
        "date": stored.date,
        "torch": torch.__version__,
        "onepass": __version__,
        "mib": options.mib,
        "repeats": options.repeats,
        "tables": stored.tables,
        "measured": [point.as_dict(KEPT) for point in sorted(points, key=lambda p: (p.function, p.dtype, p.n, p.rows))],
    }


def cuda_index(device: torch.device | str | None) -> int:
    """The number of the CUDA device that is to be tuned.

    Raises ValueError for another device, RuntimeError where there is none that the CUDA engine serves.

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
    """What the candidates depend on, of a CUDA device that is here."""
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024) - STATIC_SHARED
    return Gpu(*gpu_model(index), shared)  # all of compute 8.0 and later take cooperative launches


def tune(
    device: torch.device | str | None = None,
    options: Options | None = None,
    path: Path | None = None,
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> store.TableFile:
    """Measure which plan serves each row length fastest on a GPU, write the file of tables, and use it from now on.

    Args:
        device: a CUDA device; the current one where it is None.
        options: what is measured; all lengths with inputs of 256 MiB where it is None.
        path: of the file; `store.default_path` of the GPU where it is None.
        fresh: do not go on with a sweep that was broken off.
        watcher: told how it goes on.

    Raises:
        RuntimeError: no CUDA device, a wrong result, a GPU that fails. ValueError: another device, a journal of another
        sweep. OSError: the file cannot be written.

    >>> tune("cpu")
    Traceback (most recent call last):
    ValueError: takes a CUDA device, got 'cpu'
    """
    index = cuda_index(device)
    options = options or Options()
    gpu = gpu_of(index)
    path = path or store.default_path(gpu.name)
    base = native.tables()["tables"]
    with contextlib.suppress(ValueError):  # a file that is wrong, or not there yet, is what this is to mend
        load(gpu_model(index))  # so that what is in use is measured
    with torch.cuda.device(index):
        meter = CudaMeter(gpu, options.repeats, options.mib)

        def use(origin: str, tables: store.Tables) -> None:
            native.set_tables(gpu.name, origin, tables)

        return sweep(gpu, options, Path(os.path.abspath(path)), meter, base, use, fresh, watcher)
