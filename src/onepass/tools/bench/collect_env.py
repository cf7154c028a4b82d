"""The machine, the versions and a hash of the kernels: what a results file records and `onepass info` prints."""

from __future__ import annotations

import hashlib
import os
import platform
import re
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
        "isa": _native_status("isa"),
        "platform": platform.platform(),
        "sources": sources_hash(),
        "load": round(os.getloadavg()[0], 2),  # runnable processes in the last minute, which take time from the run
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
    """What `onepass info` prints: what `info` has, in words."""
    about = info()
    e = about["environment"]
    head, dirty, _ = (e["commit"] or "").partition("+dirty")
    gpu = "none"
    if e["device_type"] == "cuda":
        gpu = f"{e['device']}, compute capability {e['capability']}, {e['multiprocessors']} multiprocessors, "
        gpu += f"L2 {e['l2_bytes'] / 2**20:.0f} MiB, driver {e['driver']}"
    facts = {
        "onepass": e["onepass"] + (f", commit {head[:12]}{dirty}" if head else ""),
        "": f"in {PACKAGE}",
        "kernels": f"{e['sources'][:16]} (hash of their sources)",
        "cache": about["cache"],
        "torch": f"{e['torch']}, CUDA {e['cuda']}" if e["cuda"] else f"{e['torch']}, without CUDA",
        "triton": e["triton"] or "not installed",
        "NVRTC": about["nvrtc"],
        "python": f"{e['python']} on {e['platform']}",
        "CPU": f"{e['cpu']}, {e['threads']} threads, {e['isa']}",
        "GPU": gpu,
    }
    lines = [f"{name:<9} {value}" for name, value in facts.items()]
    engines = {name: reason and f"not available: {reason}" for name, reason in about["engines"].items()}
    return "\n".join([*lines, "\nengines", *(f"  {name:<7} {why or 'ready'}" for name, why in engines.items())])


def _native_status(name: str) -> Any:
    """A status of the native library; if it is not built, the reason in words."""
    from onepass import native

    try:
        return native.status(name)
    except RuntimeError as error:
        return f"not available: {str(error).removeprefix('onepass: ').splitlines()[0]}"


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def sources_hash(package: Path = PACKAGE) -> str:
    """SHA-256 over path and bytes of every kernel source and plan table: two files with one hash are of one kernel."""
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
    names = re.findall(r"^model name\s*: (.*)", _read("/proc/cpuinfo"), re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The version of NVIDIA's driver ("580.159.04")."""
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions = re.findall(r"\d+\.[\d.]+", text or _read("/proc/driver/nvidia/version"))
    return versions[0] if versions else None


def free_bytes(device: str) -> int:
    """The memory that a run on `device` can still take."""
    import torch

    at = torch.device(device)
    if at.type == "cuda":
        unused = torch.cuda.memory_reserved(at) - torch.cuda.memory_allocated(at)
        return torch.cuda.mem_get_info(at)[0] + unused
    available = re.search(r"^MemAvailable: *(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free = int(available[1]) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = "/sys/fs/cgroup/memory"
    limit, used, stat = (_read(f"{group}.{name}") for name in ("max", "current", "stat"))  # the limit of a container
    cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    if limit.strip().isdigit() and used and cache:
        free = min(free, int(limit) - int(used) + int(cache[1]))  # the page cache can be reclaimed
    return max(free, 0)


def _read(file: str) -> str:
    """The text of a system file, "" if it does not exist."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
