"""A whole sweep: measures each length in turn, makes tables from the times, and writes the file."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path

import torch

from onepass import native
from onepass import tables as store
from onepass._engines import unavailable
from onepass.tables import gpu_model, load
from onepass.tools.tune.candidates import Gpu, candidates, kernels
from onepass.tools.tune.sizes import COLUMN_LENGTHS, FUNCTIONS, LENGTHS, LONGEST, is_columns, shapes
from onepass.tools.tune.table import build
from onepass.tools.tune.timing import CudaTimer, Measurement, Progress
from onepass.version import __version__

SAVED_CHOICES = 8  # of each length, in the file
Point = tuple[str, str, int, tuple[int, int]]  # function, dtype, length, shape (`sizes.shapes`)
Measured = Callable[[Measurement, int, int], None]  # (the last measurement, done, total)


@dataclass(frozen=True)
class Options:
    """The measurements of a sweep.

    Inputs have `size_mib` MiB, and a time is the median of `repeats` calls. Rows and columns have `lengths` elements,
    None for the default lengths of each.
    """

    size_mib: int = 256
    repeats: int = 15
    lengths: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    functions: tuple[str, ...] = FUNCTIONS

    def __post_init__(self) -> None:
        if self.lengths is not None and not all(2 <= n <= 2**24 for n in self.lengths or (0,)):
            raise ValueError(f"lengths are whole numbers from 2 to 2**24, got {self.lengths}")
        if not set(self.dtypes) <= {"float32", "float16", "bfloat16"} or {"float16", "bfloat16"} <= set(self.dtypes):
            got = ", ".join(self.dtypes)
            raise ValueError(f"dtypes are float32, and float16 or bfloat16, which share a table; got {got}")
        if not set(self.functions) <= set(FUNCTIONS):
            got = ", ".join(self.functions)
            raise ValueError(f"functions are {', '.join(FUNCTIONS)}, which stand for the others; got {got}")
        if not self.points:
            raise ValueError(f"columns have up to {LONGEST} elements")

    @property
    def points(self) -> list[Point]:
        """What is measured, in order."""
        return [
            (function, dtype, n, shape)
            for dtype, function in product(dict.fromkeys(self.dtypes), dict.fromkeys(self.functions))
            for n in sorted(set(self.lengths or (COLUMN_LENGTHS if is_columns(function) else LENGTHS)))
            if n <= LONGEST or not is_columns(function)
            for shape in shapes(function, n, getattr(torch, dtype).itemsize, self.size_mib)
        ]


def sweep(
    gpu: Gpu,
    options: Options,
    path: Path,
    timer: CudaTimer,
    base: store.Tables,
    use: Callable[[str, store.Tables], None],
    on_compiled: Progress,
    on_measured: Measured,
) -> store.TableFile:
    """Measure all lengths and write the file of tables.

    Args:
        base: the built-in tables, which stay for lengths that are not measured.
        use: takes (origin, tables) before they are written, and raises an error if they are invalid.

    Raises:
        RuntimeError: the result of a candidate is wrong, or the GPU fails.
    """
    tried = {
        (function, dtype, n, shape): candidates(function, n, shape, getattr(torch, dtype).itemsize, gpu)
        for function, dtype, n, shape in options.points
    }
    planned = [(*point[:2], candidate.plan) for point, found in tried.items() for candidate in found]
    timer.prepare(kernels(planned), on_compiled)
    measured: list[Measurement] = []
    for point, found in tried.items():
        measured.append(timer.measure(*point, found))
        on_measured(measured[-1], len(measured), len(tried))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tables = build(measured, base, gpu)
    stored = store.TableFile(path, gpu.name, gpu.compute, gpu.multiprocessors, date, tables)
    use(stored.origin, tables)
    measured.sort(key=lambda m: (m.function, m.dtype, m.n, m.rows))
    content = {key: value for key, value in stored._asdict().items() if key != "path"}
    about = {"torch": torch.__version__, "onepass": __version__, "mib": options.size_mib, "repeats": options.repeats}
    saved = [measurement.as_dict(SAVED_CHOICES) for measurement in measured]
    store.write(path, {"version": store.VERSION, **content, **about, "measured": saved})
    return stored


def cuda_index(device: torch.device | str | None) -> int:
    """The number of the CUDA device to tune.

    Raises ValueError for another device, RuntimeError if there is none that the CUDA engine serves.

    >>> cuda_index("cpu")
    Traceback (most recent call last):
    ValueError: takes a CUDA device, as cuda or cuda:0, got 'cpu'
    """
    try:
        chosen = torch.device("cuda" if device is None else device)
    except RuntimeError:
        chosen = torch.device("cpu")
    if chosen.type != "cuda":
        raise ValueError(f"takes a CUDA device, as cuda or cuda:0, got {str(device)!r}")
    reason = unavailable("cuda", chosen)
    if reason is not None:
        raise RuntimeError(f"nothing to measure: {reason}")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"no {str(chosen)!r} here: there are {torch.cuda.device_count()} GPUs")
    return index


def tune(
    index: int, options: Options, path: Path | None, on_compiled: Progress, on_measured: Measured
) -> store.TableFile:
    """Measure which plan serves each row length fastest on a GPU, write the file of tables, and use it from now on.

    Args:
        index: the number of the CUDA device.
        path: the file to write; None for `tables.default_path` of the GPU.
        on_compiled, on_measured: receive the progress.

    Raises:
        RuntimeError: a wrong result, a GPU that fails. OSError: the file cannot be written.
    """
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    gpu = Gpu(*gpu_model(index), shared)  # all GPUs of compute capability 8.0 and later support cooperative launches
    path = Path(os.path.abspath(path or store.default_path(gpu.name)))
    base = native.tables()["tables"]
    with contextlib.suppress(ValueError):  # a sweep replaces a file that is wrong or missing
        load(gpu_model(index))  # so that the tables in use are measured too
    with torch.cuda.device(index):
        timer = CudaTimer(gpu, options.repeats)
        return sweep(gpu, options, path, timer, base, partial(native.set_tables, gpu.name), on_compiled, on_measured)
