"""Measures the bytes that reach DRAM with the GPU's own counters, which NVIDIA's Nsight Compute (`ncu`) reads.

ncu runs `python -m onepass.tools.gallery.ncu NAMES... M N DTYPE INDEX`. That process makes the matrix and calls every
contestant until it is compiled. Then it switches the profiler on, and calls each contestant once more, after a kernel
that marks the begin of its own. ncu counts kernel by kernel and empties the caches before each, so that a kernel finds
only data in the L2 that it has read itself. Its report has one line per kernel.

ncu sees kernels but no memcpy, so that the copy is a kernel here: y = x * 1.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Counts", "Kernel", "Measurement", "NcuError", "count_calls", "find_ncu", "measure", "parse_report"]

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARKER = "spin_kernel"  # part of the name of the kernel of torch.cuda._sleep
WARMUP_CALLS = 3  # before the call that is counted: TorchScript fuses after two
INSTALL_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")
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
    """The kernels that one call launched, in order, and the bytes of all of them; None if a number is missing."""

    kernels: tuple[Kernel, ...]

    @property
    def read(self) -> int | None:
        return _sum([kernel.read for kernel in self.kernels])

    @property
    def written(self) -> int | None:
        return _sum([kernel.written for kernel in self.kernels])

    def ratio(self, minimum: int) -> float | None:
        """All bytes in units of `minimum` bytes."""
        return None if self.read is None or self.written is None else (self.read + self.written) / minimum


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class Measurement:
    """The counts by the name of the contestant; and the reasons why others were left out."""

    counts: dict[str, Counts] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


# ncu as a process ------------------------------------------------------------------------------------------------


def find_ncu() -> str | None:
    """The path of `ncu`: on the PATH, else where NVIDIA installs it, the newest version first; None without one."""
    folders = [os.environ.get("PATH", os.defpath)]
    for pattern in INSTALL_FOLDERS:
        folders += sorted(glob.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path)], reverse=True)
    return shutil.which("ncu", path=os.pathsep.join(folders))


def measure(
    ncu: str, names: Sequence[str], rows: int, n: int, dtype: str, index: int = 0, timeout: float = 600
) -> Measurement:
    """Counts the bytes that each of `names` ("copy", "torch", "onepass", variants) reads from DRAM and writes to it on
    GPU number `index`. `ncu` is the path of Nsight Compute's command line, which is killed after `timeout` seconds.
    Raises NcuError.
    """
    command = [ncu, "--config-file", "off"]  # ignores the user's settings for other work
    command += ["--target-processes", "application-only"]  # not the compilers that it starts
    command += ["--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}"]
    command += ["--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file"]
    target = [sys.executable, "-m", "onepass.tools.gallery.ncu", *names, str(rows), str(n), dtype, str(index)]
    with tempfile.TemporaryDirectory(prefix="onepass-ncu-") as folder:
        log = Path(folder, "report.csv")
        status, out, err = _run([*command, str(log), *target], timeout)
        report = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    results = [line for line in out.splitlines() if line.startswith('{"marked": ')]
    try:
        if not results:
            raise NcuError("")
        result = json.loads(results[-1])
        counts = parse_report(report, result["marked"])
    except NcuError as error:
        last = err.strip().rpartition("\n")[2] or f"ncu ended with exit status {status}"
        raise NcuError(_failure_reason(report, out, err) or str(error) or last) from None
    left_out = result["left_out"]
    return Measurement({name: value for name, value in counts.items() if name not in left_out}, left_out)


def _run(command: Sequence[str], timeout: float) -> tuple[int, str, str]:
    """(exit status, stdout, stderr). A process that takes too long is killed together with its children."""
    environment = {**os.environ, "LC_ALL": "C"}  # the locale decides how digits are grouped
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes that outlives the measurement
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(
            command, env=environment, text=True, errors="replace", start_new_session=True, **pipes
        )
    except OSError as error:
        raise NcuError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NcuError(f"ncu was not done after {timeout:.0f} seconds") from None
        raise
    return process.returncode, out, err


def _failure_reason(report: str, out: str, err: str) -> str:
    """Why there are no numbers, in one line, by what the processes printed."""
    lines = [line.strip() for text in (report, out, err) for line in text.splitlines() if line.strip()]
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        return _NO_PERMISSION
    if "Traceback (most recent call last)" in err:
        return err.strip().splitlines()[-1].strip()
    for mark in ("==ERROR==", "==WARNING=="):
        for line in lines:
            if line.startswith(mark):
                return f"ncu: {line.removeprefix(mark).strip()}"
    return ""


def parse_report(text: str, names: Sequence[str]) -> dict[str, Counts]:
    """The counts of each of `names` from ncu's report, `--csv --page raw --print-units base`.

    The kernels of a contestant are those from its marker to the next; the markers come in the order of `names`.
    Bytes without a number ("n/a") are None. Raises NcuError for a report of another form.
    """
    table = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    for column in ("Kernel Name", READ, WRITTEN):
        if column not in (table.fieldnames or ()):
            raise NcuError(f"ncu's report has no {column}")
    found: list[list[Kernel]] = []
    for record in table:
        name, numbers = record["Kernel Name"], (record[READ] or "", record[WRITTEN] or "")
        if not name:  # the line of units, which is the first one
            if numbers != ("byte", "byte"):
                raise NcuError(f"ncu's report counts bytes in {' and '.join(numbers)}")
        elif MARKER in name:
            found.append([])
        elif found and name != "Kernel Name":
            found[-1].append(Kernel(name, *map(_parse_bytes, numbers)))
    if len(found) != len(names):
        raise NcuError(f"ncu's report has {len(found)} markers for {len(names)} contestants")
    return {name: Counts(tuple(kernels)) for name, kernels in zip(names, found, strict=True)}


def _parse_bytes(text: str) -> int | None:
    """
    >>> _parse_bytes("12,799,488"), _parse_bytes("n/a")
    (12799488, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return round(value) if math.isfinite(value) else None


# The process that ncu watches ------------------------------------------------------------------------------------


def count_calls(names: Sequence[str], x: Tensor) -> dict[str, Any]:
    """Makes each call once, after a marker, while ncu counts. Returns what the process prints: the names of the marked
    calls, and by name why others have no counts."""
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            calls[name] = _find_call(name, x, out)
            for _ in range(WARMUP_CALLS):
                calls[name]()
            torch.cuda.synchronize()
        except Exception as error:  # compilers and launches raise various types; the others are still counted
            calls.pop(name, None)
            left_out[name] = _describe(name, error)
            torch.cuda.empty_cache()
    torch.cuda.profiler.start()
    for name, call in calls.items():
        torch.cuda._sleep(1)  # the marker
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            left_out[name] = _describe(name, error)
    torch.cuda.profiler.stop()
    return {"marked": list(calls), "left_out": left_out}


def _find_call(name: str, x: Tensor, out: Tensor) -> Callable[[], Any]:
    import onepass
    from onepass.tools.gallery.variants import variant

    if name == "copy":
        return lambda: torch.mul(x, 1, out=out)
    if name in ("torch", "onepass"):
        return lambda: (torch if name == "torch" else onepass).softmax(x, 1, out=out)
    chosen = variant(name)
    return lambda: chosen(x, out=out if chosen.takes_out else None)


def _describe(name: str, error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0].removeprefix(f"{name}: ")


def main(arguments: Sequence[str]) -> None:
    """Takes NAMES... M N DTYPE INDEX, the last the number of the GPU; prints one line of JSON."""
    *names, rows, n, dtype, index = arguments
    torch.cuda.set_device(int(index))
    x = torch.empty(int(rows), int(n), dtype=getattr(torch, dtype), device="cuda").normal_()
    print("\n" + json.dumps(count_calls(names, x)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
