"""Launches the CUDA variants. NVRTC compiles their sources for the GPU at hand when they are first needed.

The published code starts `rows / warps_per_block` blocks, rounded down: no block at all for few rows. Here the number
is rounded up.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from onepass import native

__all__ = ["block", "blocks_for", "nvrtc_options", "online", "warp"]

THREADS = 256
MAX_BLOCKS = 2**31 - 1  # in a launch; the loops of the kernels take the rows beyond
_TYPES = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}  # names of types.cuh


def warp(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_warp.cu: as many warps as rows."""
    return _launch("warp", x, out, threads, blocks or blocks_for(x.shape[0], (threads or THREADS) // 32), maxnreg)


def block(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_block.cu: as many blocks as rows."""
    return _launch("block", x, out, threads, blocks or blocks_for(x.shape[0], 1), maxnreg)


def online(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_online.cu: as many blocks as rows."""
    return _launch("online", x, out, threads, blocks or blocks_for(x.shape[0], 1), maxnreg)


def blocks_for(rows: int, rows_per_block: int) -> int:
    """The blocks that these rows need, or as many as a launch takes.

    >>> blocks_for(3, 8), blocks_for(9, 8), blocks_for(2**40, 1)
    (1, 2, 2147483647)
    """
    return min(-(-rows // rows_per_block), MAX_BLOCKS)


def nvrtc_options(dtype: torch.dtype, maxnreg: int | None = None) -> tuple[str, ...]:
    """NVRTC's options for the source of a variant."""
    return (f"-DTYPE={_TYPES[dtype]}", *([f"--maxrregcount={maxnreg}"] if maxnreg else []))


@functools.cache
def _kernel(name: str, dtype: torch.dtype, maxnreg: int | None, device: int) -> int:
    options = "\n".join(nvrtc_options(dtype, maxnreg))
    return native.load_kernel(f"cuda_{name}.cu", f"softmax_{name}", options, device)


def _launch(name: str, x: Tensor, out: Tensor, threads: int | None, blocks: int, maxnreg: int | None) -> Tensor:
    device = x.device.index
    kernel = _kernel(name, x.dtype, maxnreg, device)
    numbers = (x.shape[0], x.shape[1], x.stride(0), out.stride(0))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        arguments = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int64, numbers))
        native.launch_kernel(kernel, blocks, threads or THREADS, stream, arguments)
    return out
