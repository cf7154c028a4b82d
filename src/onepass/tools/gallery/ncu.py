"""The measured traffic: bytes that reach DRAM, by the GPU's own counters, which NVIDIA's Nsight Compute (`ncu`) reads.

ncu runs measure.py, which calls each contestant once. It counts kernel by kernel and empties the caches before each, so
that a kernel finds nothing in the L2 but what it has read itself; its report has one line a kernel.
"""

from __future__ import annotations

import csv
import glob
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Counted", "Kernel", "Measured", "NcuError", "command", "find_ncu", "measure", "parse"]

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARKER = "spin_kernel"  # in the name of the kernel of torch.cuda._sleep, which measure.py marks with
TIMEOUT = 600  # seconds
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class NcuError(RuntimeError):
    """Nothing was measured; the message is one line that says why."""


@dataclass(frozen=True)
class Kernel:
    """One launch: bytes that it read from DRAM and wrote to it, None where ncu gives no number."""

    name: str
    read: int | None
    written: int | None


@dataclass(frozen=True)
class Counted:
    """The kernels that one call launched, in order."""

    kernels: tuple[Kernel, ...]

    @property
    def read(self) -> int | None:
        """Bytes read by all of them; None where one has no number, or where there is none."""
        return _total([kernel.read for kernel in self.kernels])

    @property
    def written(self) -> int | None:
        """Bytes written, likewise."""
        return _total([kernel.written for kernel in self.kernels])

    def ratio(self, least: int) -> float | None:
        """Both, in units of `least` bytes; None where a number is missing."""
        return None if self.read is None or self.written is None else (self.read + self.written) / least


@dataclass(frozen=True)
class Measured:
    """What was counted, by the contestant's name; and who was left out, with the reason."""

    counted: dict[str, Counted] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def find_ncu() -> str | None:
    """The path of `ncu`: on the PATH, else where NVIDIA installs it, the newest version first; None without one."""
    found = shutil.which("ncu")
    if found:
        return found
    for pattern in PLACES:
        here = [path for path in glob.glob(pattern) if os.access(path, os.X_OK)]
        if here:
            return max(here, key=lambda path: [int(part) for part in re.findall(r"\d+", path)])
    return None


def command(ncu: str, log: str, names: Sequence[str], rows: int, n: int, dtype: str, index: int) -> list[str]:
    """The command line that measures `names` and leaves ncu's report in the file `log`."""
    options = ["--config-file", "off"]  # whatever the user keeps for other work
    options += ["--target-processes", "application-only"]  # not the compilers that it starts
    options += ["--profile-from-start", "off"]
    options += ["--metrics", f"{READ},{WRITTEN}"]
    options += ["--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", log]
    child = [sys.executable, "-m", "onepass.tools.gallery.measure", *names, str(rows), str(n), dtype, str(index)]
    return [ncu, *options, *child]


def measure(
    ncu: str, names: Sequence[str], rows: int, n: int, dtype: str, index: int = 0, timeout: float = TIMEOUT
) -> Measured:
    """Counts what each of `names` reads from DRAM and writes to it.

    Args:
        ncu: path of Nsight Compute's command line.
        names: "copy", "torch", "onepass" and names of rungs.
        rows, n: of the matrix.
        dtype: "float32", "float16" or "bfloat16".
        index: number of the GPU.
        timeout: seconds after which it is given up.

    Raises:
        NcuError: where nothing was measured, with the reason in one line.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # digits are grouped by the locale
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes that outlives the counting
    with tempfile.TemporaryDirectory(prefix="onepass-ncu-") as folder:
        log = Path(folder, "report.csv")
        status, out, err = _run(command(ncu, str(log), names, rows, n, dtype, index), environment, timeout)
        report = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = _said(out)
    if said is None:
        raise NcuError(_reason(report, out, err, status))
    try:
        counted = parse(report, said["marked"])
    except NcuError as error:
        raise NcuError(_reason(report, out, err, status, str(error))) from None
    left_out = said["left_out"]
    return Measured({name: value for name, value in counted.items() if name not in left_out}, left_out)


def _run(arguments: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[int, str, str]:
    """(exit status, stdout, stderr). What is given up is ended with all that it has started."""
    try:
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NcuError(f"{arguments[0]} cannot be run: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NcuError(f"ncu was not done after {timeout:.0f} seconds") from None
        raise
    return process.returncode, out, err


def _said(out: str) -> dict[str, Any] | None:
    """The last line of the second process: its JSON."""
    for line in reversed(out.splitlines()):
        if line.startswith('{"marked": '):
            return json.loads(line)
    return None


def _reason(report: str, out: str, err: str, status: int, otherwise: str = "") -> str:
    """Why there are no numbers, in one line."""
    every = [line.strip() for text in (report, out, err) for line in text.splitlines() if line.strip()]
    if any("ERR_NVGPUCTRPERM" in line for line in every):
        return (
            "this user may not read the GPU's counters; run as root, or let every user read them: "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    last = [line.strip() for line in err.splitlines() if line.strip()][-1:]
    if last and "Traceback (most recent call last)" in err:
        return last[0]
    for mark in ("==ERROR==", "==WARNING=="):
        for line in every:
            if line.startswith(mark):
                return f"ncu: {line.removeprefix(mark).strip()}"
    return otherwise or (last[0] if last else f"ncu ended with exit status {status}")


def parse(text: str, names: Sequence[str]) -> dict[str, Counted]:
    """ncu's report, `--csv --page raw`, as the counts of each of `names`.

    The kernels of a contestant are those from its marker to the next; the markers come in the order of `names`.
    Bytes without a number ("n/a") are None.

    Raises:
        NcuError: where the report has no table, lacks a counter, or has another number of markers.
    """
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    at = next((i for i, row in enumerate(table) if "Kernel Name" in row), None)
    if at is None:
        raise NcuError("ncu's report has no table of kernels")
    head = table[at]
    for metric in (READ, WRITTEN):
        if metric not in head:
            raise NcuError(f"ncu's report has no {metric}")
    units: dict[str, str] = {}
    found: list[list[Kernel]] = []
    for row in table[at + 1 :]:
        record = dict(zip(head, row, strict=False))
        name = record["Kernel Name"]
        if not name:  # the line of units, the first one
            units = record
        elif MARKER in name:
            found.append([])
        elif found and row != head:
            read, written = (_bytes(record.get(m, ""), units.get(m, "byte")) for m in (READ, WRITTEN))
            found[-1].append(Kernel(name, read, written))
    if len(found) != len(names):
        raise NcuError(f"ncu's report has {len(found)} marks, for {len(names)} contestants")
    return {name: Counted(tuple(kernels)) for name, kernels in zip(names, found, strict=True)}


def _bytes(text: str, unit: str) -> int | None:
    """
    >>> _bytes("12,799,488", "byte"), _bytes("12.5", "Mbyte"), _bytes("n/a", "byte")
    (12799488, 12500000, None)
    """
    scale = re.fullmatch(r"([KMGT]?)(?:byte|B)", unit)
    if scale is None:
        raise NcuError(f"ncu's report counts bytes in {unit!r}")
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return round(value * _SCALE[scale[1]]) if math.isfinite(value) else None
