"""Whether the Triton engine can serve a device here, and the reason where it cannot."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["unavailable"]

# Triton's own name of the backend that serves a torch device type; torch calls AMD's GPUs "cuda" too.
_BACKENDS = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}
# bfloat16 and the asynchronous copies that Triton generates start with Ampere; the kernels are compiled and tested
# for 8.0, 9.0, 10.0 and 12.0.
_LEAST_CAPABILITY = (8, 0)


def unavailable(device: torch.device) -> str | None:
    """None where the Triton engine can run tensors of ``device``, else why not, in a sentence.

    A CPU device never initialises a GPU, and never imports triton unless ``TRITON_INTERPRET`` asks for it.

    >>> import torch
    >>> unavailable(torch.device("meta"))
    "the Triton engine serves GPU tensors, and CPU tensors under TRITON_INTERPRET=1; got device type 'meta'"
    """
    return _reason(device.type, device.index, interpreting())


def interpreting() -> bool:
    """Whether the environment asks for Triton's interpreter (the words that Triton itself takes)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _reason(kind: str, index: int | None, interpret: bool) -> str | None:
    if kind != "cpu" and kind not in _BACKENDS:
        return (
            f"the Triton engine serves GPU tensors, and CPU tensors under TRITON_INTERPRET=1; got device type {kind!r}"
        )
    if kind == "cpu" and not interpret:
        return "the Triton engine serves CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        import triton
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot be imported: {error}"
    if interpret:
        return _no_interpreter(triton.__version__)
    return _no_backend(kind, index, triton.__version__)


def _no_interpreter(version: str) -> str | None:
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs NumPy, which is not installed"
    import numpy
    import triton

    from .launch import kernels

    # Triton reads the variable when it is imported and when a kernel is decorated; afterwards it is too late.
    jitted = (triton.language.sum, *kernels().values())
    if any(isinstance(function, triton.runtime.JITFunction) for function in jitted):
        return "TRITON_INTERPRET was set after triton was imported: set it before Python starts"
    if _numbers(version) < (3, 7) and _numbers(numpy.__version__) >= (2, 4):
        return f"the interpreter of triton {version} runs no loop under NumPy {numpy.__version__}: it needs NumPy < 2.4"
    return None


def _no_backend(kind: str, index: int | None, version: str) -> str | None:
    from triton.backends import backends

    backend = _BACKENDS[kind]
    if backend not in backends:
        return f"triton {version} has no backend for {backend} GPUs; it has: {', '.join(sorted(backends)) or 'none'}"
    gpus = torch.get_device_module(kind)
    if not gpus.is_available():
        return f"torch {torch.__version__} sees no {kind} device"
    if index is not None and index >= gpus.device_count():
        return f"there is no device {kind}:{index}; torch sees {gpus.device_count()}"
    if backend == "nvidia":
        capability = gpus.get_device_capability(index)
        if capability < _LEAST_CAPABILITY:
            least, got = ("{}.{}".format(*pair) for pair in (_LEAST_CAPABILITY, capability))
            return f"the Triton engine needs compute capability {least} or later; {kind}:{index or 0} has {got}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
