"""A launch of an emulated kernel on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from onepass.native import KernelLaunch

from .build import host, translated

__all__ = ["BACKWARDS", "DRAWN", "FORWARDS", "IN_STEP", "reach", "run"]

FORWARDS, BACKWARDS, DRAWN, IN_STEP = range(4)  # the order of threads (scheduler.h)
AT_ONCE, LATE = 0, 1  # when asynchronous copies and messages arrive; DRAWN: at random


@functools.cache
def _machine() -> ctypes.CDLL:
    machine = ctypes.CDLL(str(host()))
    machine.run_kernel.restype = ctypes.c_char_p
    return machine


def reach(tensor: Tensor) -> ctypes.c_int64:
    """The bytes from the tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return ctypes.c_int64((1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size())


def run(
    source: Path,
    name: str,
    options: tuple[str, ...],
    launch: KernelLaunch,
    arguments: Sequence[Tensor | int],
    written: Sequence[Tensor],
    order: int = DRAWN,
    lateness: int = DRAWN,
    seed: int = 0,
) -> None:
    """Runs the kernel `name` of a source file, compiled with NVRTC's `options`. `arguments` are CPU tensors and 64-bit
    integers.

    Raises RuntimeError if the kernel does not compile or has an instruction that the emulator does not support, if it
    accesses memory outside of its tensors, writes to a tensor that is not in `written`, or deadlocks.
    """
    library, machine = translated(source, "90", options, name), _machine()
    machine.set_way(seed, order, lateness)
    for tensor in sorted((a for a in arguments if isinstance(a, Tensor)), key=lambda t: not _is_in(t, written)):
        machine.add_range(ctypes.c_void_p(tensor.data_ptr()), reach(tensor), _is_in(tensor, written))
    values = [ctypes.c_int64(a.data_ptr() if isinstance(a, Tensor) else a) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    if wrong := machine.run_kernel(str(library).encode(), (ctypes.c_int * len(launch))(*launch), pointers):
        raise RuntimeError(wrong.decode())


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is each for each in tensors)
