"""What `onepass info` prints."""

from __future__ import annotations

from onepass.bench.environment import PACKAGE, environment


def text() -> str:
    import torch

    import onepass

    e = environment("cuda" if torch.cuda.is_available() else "cpu")
    head = {
        "onepass": f"{onepass.__version__}" + (f" ({e['commit'][:12]})" if e["commit"] else ""),
        "at": str(PACKAGE),
        "torch": e["torch"] + (f", CUDA {e['cuda']}" if e["cuda"] else ", no CUDA"),
        "triton": e["triton"] or "not installed",
        "python": f"{e['python']}, {e['platform']}",
        "cpu": f"{e['cpu']}, {e['threads']} threads",
        "gpu": "none",
        "sources": e["sources"][:16],
    }
    if e["device_type"] == "cuda":
        head["gpu"] = f"{e['device']} (sm_{e['capability'].replace('.', '')}, driver {e['driver']})"
        head["gpu"] += f", {e['multiprocessors']} multiprocessors, L2 {e['l2_bytes'] / 2**20:.0f} MiB"
    lines = [f"{name:<9} {value}" for name, value in head.items()]
    lines.append("engines")
    for name, reason in onepass.engines().items():
        lines.append(f"  {name:<7} {'ready' if reason is None else f'cannot run here: {reason}'}")
    return "\n".join(lines)
