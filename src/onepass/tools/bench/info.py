"""What `onepass info` prints."""

from __future__ import annotations

from typing import Any

from onepass.tools.bench.environment import PACKAGE, environment


def text() -> str:
    """The environment, the engines, and where compiled kernels are kept."""
    import onepass

    e = _environment()
    commit = f", commit {e['commit'][:12]}{'+dirty' * e['commit'].endswith('+dirty')}" if e["commit"] else ""
    cuda = f", CUDA {e['cuda']}" if e["cuda"] else ", without CUDA"
    gpu = "none"
    if e["device_type"] == "cuda":
        gpu = f"{e['device']}, compute capability {e['capability']}, {e['multiprocessors']} multiprocessors, "
        gpu += f"L2 {e['l2_bytes'] / 2**20:.0f} MiB, driver {e['driver']}"
    said = {
        "onepass": f"{onepass.__version__}{commit}",
        "": f"in {PACKAGE}",
        "kernels": f"{e['sources'][:16]} (hash of their sources)",
        "cache": _native("cache"),
        "torch": f"{e['torch']}{cuda}",
        "triton": e["triton"] or "not installed",
        "NVRTC": _native("nvrtc"),
        "python": f"{e['python']} on {e['platform']}",
        "CPU": f"{e['cpu']}, {e['threads']} threads, {_native('isa')}",
        "GPU": gpu,
    }
    lines = [f"{name:<9} {value}" for name, value in said.items()]
    lines.append("\nengines")
    for name, reason in onepass.engines().items():
        lines.append(f"  {name:<7} {'ready' if reason is None else f'not here: {reason}'}")
    return "\n".join(lines)


def data() -> dict[str, Any]:
    """The same for programs: the environment as a results file has it, why each engine is not here or None."""
    import onepass

    of = {"package": str(PACKAGE), "cache": _native("cache"), "nvrtc": _native("nvrtc")}
    return {"environment": _environment(), **of, "engines": onepass.engines()}


def _environment() -> dict[str, Any]:
    import torch

    return environment("cuda" if torch.cuda.is_available() else "cpu")


def _native(what: str) -> str:
    """What the native core says of itself, or why it cannot."""
    from onepass import native

    try:
        return native.status(what)
    except RuntimeError as error:
        return f"not here: {str(error).removeprefix('onepass: ').splitlines()[0]}"
