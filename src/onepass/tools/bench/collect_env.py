"""The machine, the versions and a hash of the kernels: what a results file records and `onepass info` prints."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "tools/gallery", "triton")  # kernels and plan tables; nothing else changes the time of a kernel
_BUILT = {".pyc", ".so", ".o", ".d"}


def environment(device: str) -> dict[str, Any]:
    """Describes this machine for runs on `device` ("cpu", "cuda", "cuda:1"). Unknown things are None."""
    import torch

    import onepass

    at = torch.device(device)
    record: dict[str, Any] = {
        "device": cpu_name(),
        "device_type": at.type,
        "driver": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "onepass": onepass.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": _native_status("isa", None),
        "platform": platform.platform(),
        "sources": sources_hash(),
        "load": load(),
    }
    if at.type == "cuda":
        properties = torch.cuda.get_device_properties(at)
        record["device"] = properties.name
        record["driver"] = driver()
        record["capability"] = f"{properties.major}.{properties.minor}"
        record["multiprocessors"] = properties.multi_processor_count
        record["l2_bytes"] = properties.L2_cache_size
    return record


def info() -> dict[str, Any]:
    """What `onepass info --json` prints: the environment, and per engine why it is not available, or None."""
    import torch

    import onepass

    return {
        "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        "package": str(PACKAGE),
        "cache": _native_status("cache"),
        "nvrtc": _native_status("nvrtc"),
        "engines": onepass.engines(),
    }


def info_text() -> str:
    """What `onepass info` prints."""
    about = info()
    e = about["environment"]
    commit = f", commit {e['commit'][:12]}{'+dirty' * e['commit'].endswith('+dirty')}" if e["commit"] else ""
    gpu = "none"
    if e["device_type"] == "cuda":
        gpu = f"{e['device']}, compute capability {e['capability']}, {e['multiprocessors']} multiprocessors, "
        gpu += f"L2 {e['l2_bytes'] / 2**20:.0f} MiB, driver {e['driver']}"
    facts = {
        "onepass": f"{e['onepass']}{commit}",
        "": f"in {PACKAGE}",
        "kernels": f"{e['sources'][:16]} (hash of their sources)",
        "cache": about["cache"],
        "torch": f"{e['torch']}, CUDA {e['cuda']}" if e["cuda"] else f"{e['torch']}, without CUDA",
        "triton": e["triton"] or "not installed",
        "NVRTC": about["nvrtc"],
        "python": f"{e['python']} on {e['platform']}",
        "CPU": f"{e['cpu']}, {e['threads']} threads, {_native_status('isa')}",
        "GPU": gpu,
    }
    lines = [f"{name:<9} {value}" for name, value in facts.items()]
    engines = {name: reason and f"not available: {reason}" for name, reason in about["engines"].items()}
    return "\n".join([*lines, "\nengines", *(f"  {name:<7} {why or 'ready'}" for name, why in engines.items())])


_RAISE = object()


def _native_status(name: str, default: Any = _RAISE) -> Any:
    """A status of the native library; if it is not built, `default`, or the reason in words."""
    from onepass import native

    try:
        return native.status(name)
    except RuntimeError as error:
        reason = str(error).removeprefix("onepass: ").splitlines()[0]
        return f"not available: {reason}" if default is _RAISE else default


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def sources_hash(package: Path = PACKAGE) -> str:
    """SHA-256 over path and bytes of every kernel source and plan table, sorted by path.

    Two results files with the same hash were made by the same kernels. Build products are not included.
    """
    digest = hashlib.sha256()
    files = (p for folder in SOURCES for p in (package / folder).rglob("*") if p.is_file())
    for path in sorted(files, key=lambda p: p.relative_to(package).as_posix()):
        if path.suffix in _BUILT or "__pycache__" in path.parts:
            continue
        name, data = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    return digest.hexdigest()


def commit(package: Path = PACKAGE) -> str | None:
    """The commit of the checkout that contains the package, with "+dirty" for changes; None outside a checkout."""
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src" / "onepass" != package:
        return None
    head = _output("git", "-C", str(package), "rev-parse", "--verify", "HEAD")
    if not head:
        return None
    return head + "+dirty" if _output("git", "-C", top, "status", "--porcelain", "--", "src") else head


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load() -> float | None:
    """The mean number of runnable processes in the last minute: above 0, others take time from the measurement."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver ("580.159.04")."""
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if text:
        return text.splitlines()[0].strip()
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and "." in w), None)


def free_bytes(device: str) -> int:
    """The memory that a run on `device` can still take."""
    import torch

    at = torch.device(device)
    if at.type == "cuda":
        unused = torch.cuda.memory_reserved(at) - torch.cuda.memory_allocated(at)
        return torch.cuda.mem_get_info(at)[0] + unused
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")] or free
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()  # the limit of a container
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            free.append(int(limit) - used + int(stat["inactive_file"]))  # the page cache can be reclaimed
    except (OSError, ValueError, KeyError):
        pass
    return max(min(free), 0)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
