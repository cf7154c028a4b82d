"""Which engine serves a device, and the reason if an engine cannot."""

import functools

import torch

from . import native
from . import triton as triton_engine
from .tables import load_once

ENGINES = ("cpu", "cuda", "triton")
# The devices for which "auto" is known to be a native engine, by Tensor.get_device(): -1 is the CPU. A CUDA device is
# added at its first call. For devices in this set the engine need not be resolved again.
_ready_devices = {-1}


def _first_line(error: Exception) -> str:
    return str(error).removeprefix("onepass: ").splitlines()[0]


@functools.cache
def _cuda_unavailable(index: int | None) -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"needs compute capability 8.0 or later, the device has {major}.{minor}"
    try:
        native.status("driver")
        native.status("compiler")
    except RuntimeError as error:
        return _first_line(error)
    return None


def unavailable(engine: str, device: torch.device) -> str | None:
    """None if `engine` can serve tensors of `device`, else a sentence with the reason why it cannot."""
    if engine == "triton":
        return triton_engine.unavailable(device)
    if engine == "cuda" and device.type == "cuda":
        return _cuda_unavailable(device.index)
    return None if engine == device.type else f"serves {engine.upper()} tensors, got a tensor on {device}"


@functools.cache
def _best(device: torch.device) -> str:
    if device.type in ("cpu", "meta"):
        return "cpu"
    reasons = {}
    for engine in ("cuda", "triton"):  # Triton last: checking it imports it, which takes 0.12 s
        reason = unavailable(engine, device)
        if reason is None:
            if engine == "cuda":
                load_once(device.index)
                if device.index is not None:
                    _ready_devices.add(device.index)
            return engine
        reasons[engine] = reason
    said = "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
    raise RuntimeError(f"onepass: no engine serves a tensor on a {device.type} device ({said})")


def _auto(device: torch.device) -> str:
    return _best(device)


def _refusal(engine: str, device: torch.device) -> str | None:
    """As `unavailable`, before a call: it also loads the tables of the GPU into the CUDA engine."""
    reason = unavailable(engine, device)
    if reason is None and engine == "cuda":
        load_once(device.index)
    return reason


# Makes Dynamo take the results of these functions as constants and not trace into them. This is the attribute that
# torch.compiler.assume_constant_result sets, without the 2.7 s that importing the compiler takes.
_auto._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolve(engine: str, device: torch.device) -> str:
    """The engine that serves a call: "cpu", "cuda" or "triton".

    Raises ValueError for an unknown name, and for a file of tables (`onepass tune`) that is wrong. Raises RuntimeError,
    with the reason, if a named engine cannot run.
    """
    if engine == "auto":
        return _auto(device)
    if engine not in ENGINES:
        raise ValueError(f"onepass: engine must be 'auto', 'cpu', 'cuda' or 'triton', got {engine!r}")
    reason = _refusal(engine, device)
    if reason is not None:
        raise RuntimeError(f"onepass: engine {engine!r} cannot run a tensor on {device}: {reason}")
    return engine


def engines() -> dict[str, str | None]:
    """The engines and whether they can run here: name -> None if the engine is usable, else the reason why not.

    >>> import onepass
    >>> onepass.engines()["cpu"] is None
    True
    """
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    answer: dict[str, str | None] = {"cpu": None}
    answer["cuda"] = _cuda_unavailable(gpu.index if gpu else None)
    answer["triton"] = triton_engine.unavailable(gpu or torch.device("cpu"))
    return answer
