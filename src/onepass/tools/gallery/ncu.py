"""Measures the bytes that reach DRAM with the GPU's own counters, which NVIDIA's Nsight Compute (`ncu`) reads.

ncu runs ncu_target.py, which calls each contestant once. It counts kernel by kernel and empties the caches before each,
so that a kernel finds only data in the L2 that it has read itself. Its report has one line per kernel.
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

__all__ = ["Counts", "Kernel", "Measurement", "NcuError", "find_ncu", "measure", "ncu_command", "parse_report"]

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARKER = "spin_kernel"  # part of the name of the kernel of torch.cuda._sleep, which ncu_target.py launches as a marker
TIMEOUT = 600  # seconds
INSTALL_PATHS = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NO_PERMISSION = (
    "this user may not read the GPU's counters; run as root, or let every user read them: "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


class NcuError(RuntimeError):
    """Nothing was measured; the message is one line with the reason."""


@dataclass(frozen=True)
class Kernel:
    """One launch: the bytes that it read from DRAM and wrote to DRAM, None if ncu gives no number."""

    name: str
    read: int | None
    written: int | None


@dataclass(frozen=True)
class Counts:
    """The kernels that one call launched, in order."""

    kernels: tuple[Kernel, ...]

    @property
    def read(self) -> int | None:
        """Bytes read by all kernels; None if one has no number, or if there is no kernel."""
        return _sum([kernel.read for kernel in self.kernels])

    @property
    def written(self) -> int | None:
        """Bytes written by all kernels, or None likewise."""
        return _sum([kernel.written for kernel in self.kernels])

    def ratio(self, minimum: int) -> float | None:
        """All bytes in units of `minimum` bytes; None if a number is missing."""
        return None if self.read is None or self.written is None else (self.read + self.written) / minimum


@dataclass(frozen=True)
class Measurement:
    """The counts by the name of the contestant; and the reasons why others were left out."""

    counts: dict[str, Counts] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def find_ncu() -> str | None:
    """The path of `ncu`: on the PATH, else where NVIDIA installs it, the newest version first; None without one."""
    found = shutil.which("ncu")
    if found:
        return found
    for pattern in INSTALL_PATHS:
        here = [path for path in glob.glob(pattern) if os.access(path, os.X_OK)]
        if here:
            return max(here, key=lambda path: [int(part) for part in re.findall(r"\d+", path)])
    return None


def ncu_command(ncu: str, log: str, names: Sequence[str], rows: int, n: int, dtype: str, index: int) -> list[str]:
    """The command line that measures `names` and writes ncu's report to the file `log`."""
    options = ["--config-file", "off"]  # ignores the user's settings for other work
    options += ["--target-processes", "application-only"]  # not the compilers that it starts
    options += ["--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}"]
    options += ["--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", log]
    target = [sys.executable, "-m", "onepass.tools.gallery.ncu_target", *names, str(rows), str(n), dtype, str(index)]
    return [ncu, *options, *target]


def measure(
    ncu: str, names: Sequence[str], rows: int, n: int, dtype: str, index: int = 0, timeout: float = TIMEOUT
) -> Measurement:
    """Counts the bytes that each of `names` reads from DRAM and writes to it.

    Args:
        ncu: path of Nsight Compute's command line.
        names: "copy", "torch", "onepass" and names of variants.
        rows, n: of the matrix.
        dtype: "float32", "float16" or "bfloat16".
        index: number of the GPU.
        timeout: seconds after which ncu is killed.

    Raises:
        NcuError: nothing was measured; the message is the reason in one line.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # the locale decides how digits are grouped
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes that outlives the measurement
    with tempfile.TemporaryDirectory(prefix="onepass-ncu-") as folder:
        log = Path(folder, "report.csv")
        status, out, err = _run(ncu_command(ncu, str(log), names, rows, n, dtype, index), environment, timeout)
        report = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    result = read_target_output(out)
    if result is None:
        raise NcuError(_failure_reason(report, out, err, status))
    try:
        counts = parse_report(report, result["marked"])
    except NcuError as error:
        raise NcuError(_failure_reason(report, out, err, status, str(error))) from None
    left_out = result["left_out"]
    return Measurement({name: value for name, value in counts.items() if name not in left_out}, left_out)


def _run(arguments: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[int, str, str]:
    """(exit status, stdout, stderr). A process that takes too long is killed together with its children."""
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


def read_target_output(out: str) -> dict[str, Any] | None:
    """The JSON that ncu_target.py prints as its last line."""
    for line in reversed(out.splitlines()):
        if line.startswith('{"marked": '):
            return json.loads(line)
    return None


def _failure_reason(report: str, out: str, err: str, status: int, otherwise: str = "") -> str:
    """Why there are no numbers, in one line."""
    lines = [line.strip() for text in (report, out, err) for line in text.splitlines() if line.strip()]
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        return _NO_PERMISSION
    last = [line.strip() for line in err.splitlines() if line.strip()][-1:]
    if last and "Traceback (most recent call last)" in err:
        return last[0]
    for mark in ("==ERROR==", "==WARNING=="):
        for line in lines:
            if line.startswith(mark):
                return f"ncu: {line.removeprefix(mark).strip()}"
    return otherwise or (last[0] if last else f"ncu ended with exit status {status}")


def parse_report(text: str, names: Sequence[str]) -> dict[str, Counts]:
    """The counts of each of `names` from ncu's report, `--csv --page raw`.

    The kernels of a contestant are those from its marker to the next; the markers come in the order of `names`.
    Bytes without a number ("n/a") are None.

    Raises:
        NcuError: the report has no table, lacks a counter, or has another number of markers.
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
        if not name:  # the line of units, which is the first one
            units = record
        elif MARKER in name:
            found.append([])
        elif found and row != head:
            read, written = (_parse_bytes(record.get(m, ""), units.get(m, "byte")) for m in (READ, WRITTEN))
            found[-1].append(Kernel(name, read, written))
    if len(found) != len(names):
        raise NcuError(f"ncu's report has {len(found)} markers for {len(names)} contestants")
    return {name: Counts(tuple(kernels)) for name, kernels in zip(names, found, strict=True)}


def _parse_bytes(text: str, unit: str) -> int | None:
    """
    >>> _parse_bytes("12,799,488", "byte"), _parse_bytes("12.5", "Mbyte"), _parse_bytes("n/a", "byte")
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
