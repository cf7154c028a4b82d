"""Calls the C++ variants, which are part of the native library, and the CUDA variants, which NVRTC compiles for the GPU
at hand when they are first needed, or which the emulator runs on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass import native
from onepass.tools.gallery.cuda_launches import H200, LAUNCHES, LIMITS, TYPE_NAMES, Launch, Processor

__all__ = ["CudaVariant", "cpu_online", "cpu_threepass", "run_on_gpu"]


def _call(name: str, x: Tensor, out: Tensor) -> Tensor:
    numbers = (x.shape[0], x.shape[1], x.stride(0), out.stride(0))
    arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in (x, out)), *map(ctypes.c_int64, numbers)]
    native.call(f"onepass_gallery_{name}", list(TYPE_NAMES).index(x.dtype), *arguments)  # their order is that of cpu.h
    return out


cpu_threepass, cpu_online = (functools.partial(_call, name) for name in ("cpu_threepass", "cpu_online"))


def run_on_gpu(launch: Launch) -> None:
    """Launches on the current stream of the device of the first tensor."""
    device = launch.written[0].device.index
    kernel = _kernel(launch.source, launch.name, launch.options, device)
    arguments: list[Any] = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in launch.arguments
    ]
    with torch.cuda.device(device):
        native.launch_kernel(kernel, launch.numbers, torch.cuda.current_stream(device).cuda_stream, arguments)


@functools.cache
def _kernel(source: str, name: str, options: tuple[str, ...], device: int) -> int:
    return native.load_kernel(source, name, "\n".join(options), device)


@functools.cache
def processor(device: int) -> Processor:
    """The properties of a GPU that launches depend on."""
    about = torch.cuda.get_device_properties(device)
    return Processor(about.multi_processor_count, getattr(about, "shared_memory_per_block_optin", 48 * 1024))


class CudaVariant:
    """A CUDA variant by its name: called with tensors of a GPU, or emulated with tensors of the CPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, *tensors: Tensor, on: Processor, **given: int) -> Launch:
        return LAUNCHES[self.name](*tensors, on, **given)

    def __call__(self, *tensors: Tensor, **given: int) -> Tensor:
        run_on_gpu(self.launch(*tensors, on=processor(tensors[0].device.index), **given))
        return tensors[-1]

    def emulate(self, *tensors: Tensor, **given: int) -> Tensor:
        from onepass.tools.emulator import run

        launch = self.launch(*tensors, on=H200._replace(multiprocessors=4), **given)
        source = Path(__file__).with_name(launch.source)
        run(source, launch.name, launch.options, launch.numbers, launch.arguments, launch.written)
        return tensors[-1]

    def refuses(self, rows: int, n: int, dtype: torch.dtype) -> str | None:
        """Why the idea does not take a matrix of that shape, or None."""
        if self.name not in LIMITS:
            return None
        limit = LIMITS[self.name](dtype, processor(0) if torch.cuda.is_available() else H200)
        name = str(dtype).removeprefix("torch.")
        return f"takes rows of at most {limit} elements of {name}; got N = {n}" if n > limit else None


def __getattr__(name: str) -> CudaVariant:
    """`cuda_warp` and so on."""
    if (variant := name.replace("_", "-")) in LAUNCHES:
        return CudaVariant(variant)
    raise AttributeError(name)
