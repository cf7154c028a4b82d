"""How the CUDA rungs are launched. Their sources are compiled by NVRTC for the GPU at hand when first needed.

The published code starts `rows / warps_of_a_block` blocks, rounded down: none at all for few rows. Here it is rounded
up.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from onepass import native
from onepass.tools.gallery.checks import DTYPES

__all__ = ["block", "blocks_for", "compile_options", "online", "warp"]

THREADS = 256
MOST_BLOCKS = 2**31 - 1  # of a launch; the kernels' loops take the rows beyond
_TYPES = ("float", "half_t", "bfloat16_t")  # of DTYPES, as types.cuh names them


def warp(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_warp.cu: as many warps as rows."""
    threads = threads or THREADS
    return _launch("warp", x, out, threads, blocks or blocks_for(x.shape[0], threads // 32), maxnreg)


def block(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_block.cu: as many blocks as rows."""
    return _launch("block", x, out, threads or THREADS, blocks or blocks_for(x.shape[0], 1), maxnreg)


def online(
    x: Tensor, out: Tensor, threads: int | None = None, blocks: int | None = None, maxnreg: int | None = None
) -> Tensor:
    """cuda_online.cu: as many blocks as rows."""
    return _launch("online", x, out, threads or THREADS, blocks or blocks_for(x.shape[0], 1), maxnreg)


def blocks_for(rows: int, rows_per_block: int) -> int:
    """Blocks for so many rows; the kernels' loops take what is beyond the most that a launch takes.

    >>> blocks_for(3, 8), blocks_for(9, 8), blocks_for(2**40, 1)
    (1, 2, 2147483647)
    """
    return min(-(-rows // rows_per_block), MOST_BLOCKS)


def compile_options(dtype: torch.dtype, maxnreg: int | None = None) -> tuple[str, ...]:
    """NVRTC's options for a rung's source."""
    return (f"-DTYPE={_TYPES[DTYPES.index(dtype)]}", *([f"--maxrregcount={maxnreg}"] if maxnreg else []))


@functools.cache
def _kernel(name: str, dtype: torch.dtype, maxnreg: int | None, device: int) -> int:
    options = "\n".join(compile_options(dtype, maxnreg))
    return native.load_kernel(f"cuda_{name}.cu", f"softmax_{name}", options, device)


def _launch(name: str, x: Tensor, out: Tensor, threads: int, blocks: int, maxnreg: int | None) -> Tensor:
    device = x.device.index
    kernel = _kernel(name, x.dtype, maxnreg, device)
    numbers = (x.shape[0], x.shape[1], x.stride(0), out.stride(0))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        arguments = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int64, numbers))
        native.launch_kernel(kernel, blocks, threads, stream, arguments)
    return out
