"""Calls the C++ variants, which are part of the native library, and the CUDA variants, which NVRTC compiles for the GPU
at hand when they are first needed.

The published code starts `rows / warps_per_block` blocks, rounded down: no block at all for few rows. Here the number
is rounded up.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from onepass import native

__all__ = ["blocks_for", "cpu_online", "cpu_threepass", "cuda_block", "cuda_online", "cuda_warp", "nvrtc_options"]

MAX_BLOCKS = 2**31 - 1  # in a launch; the loops of the kernels take the rows beyond
_NAMES = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}  # in types.cuh; order of cpu.h


def _arguments(x: Tensor, out: Tensor) -> list[Any]:
    numbers = (x.shape[0], x.shape[1], x.stride(0), out.stride(0))
    return [*(ctypes.c_void_p(t.data_ptr()) for t in (x, out)), *map(ctypes.c_int64, numbers)]


def _call(name: str, x: Tensor, out: Tensor) -> Tensor:
    native.call(f"onepass_gallery_{name}", list(_NAMES).index(x.dtype), *_arguments(x, out))
    return out


def _launch(name: str, x: Tensor, out: Tensor, threads: int = 256, blocks: int = 0, maxnreg: int = 0) -> Tensor:
    device = x.device.index
    kernel = _kernel(name, x.dtype, maxnreg, device)
    blocks = blocks or blocks_for(x.shape[0], threads // 32 if name == "cuda_warp" else 1)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        native.launch_kernel(kernel, blocks, threads, stream, _arguments(x, out))
    return out


def blocks_for(rows: int, rows_per_block: int) -> int:
    """The blocks that these rows need, or as many as a launch takes.

    >>> blocks_for(3, 8), blocks_for(9, 8), blocks_for(2**40, 1)
    (1, 2, 2147483647)
    """
    return min(-(-rows // rows_per_block), MAX_BLOCKS)


def nvrtc_options(dtype: torch.dtype, maxnreg: int = 0) -> tuple[str, ...]:
    """NVRTC's options for the source of a variant."""
    return (f"-DTYPE={_NAMES[dtype]}", *([f"--maxrregcount={maxnreg}"] if maxnreg else []))


@functools.cache
def _kernel(name: str, dtype: torch.dtype, maxnreg: int, device: int) -> int:
    options = "\n".join(nvrtc_options(dtype, maxnreg))
    return native.load_kernel(f"{name}.cu", name.replace("cuda", "softmax"), options, device)


cpu_threepass, cpu_online = (functools.partial(_call, name) for name in ("cpu_threepass", "cpu_online"))
cuda_warp, cuda_block, cuda_online = (
    functools.partial(_launch, name) for name in ("cuda_warp", "cuda_block", "cuda_online")
)
