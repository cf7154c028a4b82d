"""triton-persistent: as many programs as the GPU holds at once, each with several rows.

Idea: start the programs once and keep them. A program takes every P-th row, P the number of programs, and its loop is
software-pipelined: while it computes a row, the next ones are on their way into shared memory. P is multiprocessors
x occupancy, and the occupancy follows from the registers and the shared memory of the compiled kernel; kernel and P
are cached for the next call.

Traffic: reads MN, writes MN.

Limit: memory; the tile must cover the row, as in triton-row, and so many tiles as there are stages must fit the
shared memory: 4, or 2 on a GPU with less than 200000 bytes of it, or fewer for rows that leave no room.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from onepass.tools.gallery import triton_row
from onepass.tools.gallery.launch_params import tile_size, triton_launch
from onepass.tools.gallery.occupancy import Gpu, occupancy
from onepass.triton.launch import interpreting

__all__ = ["refuses", "softmax"]

WARPS = 8


@triton.jit
def softmax_persistent(
    x_ptr, out_ptr, x_row_stride, out_row_stride, rows, n, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    # 64 bits: a row's number plus the step may exceed 2^31, and row * stride does in a matrix of 8 GB
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=column < n, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, 0))
        y = numerator / tl.sum(numerator, 0)
        tl.store(out_ptr + row * out_row_stride + column, y.to(out_ptr.dtype.element_ty), mask=column < n)


def refuses(rows: int, n: int, dtype: torch.dtype) -> str | None:
    return triton_row.refuses(1, n, dtype)


_cache: dict[Any, tuple[Any, int, int]] = {}


def softmax(
    x: Tensor, out: Tensor, block_size: int = 0, programs: int = 0, num_stages: int = 0, **options: int
) -> Tensor:
    rows, n = x.shape
    block = tile_size("triton-persistent", n, block_size)
    numbers = (x.stride(0), out.stride(0), rows, n)
    with triton_launch("triton-persistent", x.device, **{"num_warps": WARPS, **options}) as launch:
        if interpreting():
            softmax_persistent[(min(programs or 4, rows),)](x, out, *numbers, block, num_stages or 1)
            return out
        # Triton specialises a kernel for properties of the arguments, and a compiled kernel does not check them again:
        # a kernel for rows of 784 elements, a multiple of 16, must not be launched for 781.
        properties = tuple((v % 16 == 0, v == 1, v < 2**31) for v in numbers)
        aligned = (x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0)
        key = (x.device, x.dtype, block, num_stages, *launch.items(), properties, aligned)
        if key not in _cache:
            _cache[key] = _compile(x, out, numbers, block, num_stages, launch)
        kernel, stages, resident = _cache[key]
        kernel[(min(programs or resident, rows), 1, 1)](x, out, *numbers, block, stages)
    return out


def _compile(
    x: Tensor, out: Tensor, numbers: tuple[int, ...], block: int, stages: int, launch: dict[str, int]
) -> tuple[Any, int, int]:
    """(the compiled kernel, its stages, the programs of it that the GPU holds at once)."""
    gpu = _gpu(x.device)
    for count in [stages] if stages else range(4 if gpu.shared_memory > 200_000 else 2, 0, -1):
        kernel = softmax_persistent.warmup(x, out, *numbers, block, count, grid=(1,), **launch)
        try:
            kernel._init_handles()  # loads the kernel, so that its number of registers is known
        except OutOfResources as error:
            failure = error
            continue
        resident = occupancy(gpu, kernel.n_regs, kernel.metadata.shared, kernel.metadata.num_warps)
        return kernel, count, gpu.multiprocessors * resident
    raise ValueError(f"triton-persistent: a tile of {block} in {stages or 1} stages does not fit this GPU: {failure}")


@functools.cache
def _gpu(device: torch.device) -> Gpu:
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    index = torch.cuda.current_device() if device.index is None else device.index
    found = driver.utils.get_device_properties(index)
    return Gpu(
        multiprocessors=found["multiprocessor_count"],
        registers=found["max_num_regs"],
        shared_memory=found["max_shared_mem"],
        threads=torch.cuda.get_device_properties(index).max_threads_per_multi_processor,
        warp_size=target.warp_size,
        arch=str(target.arch),
    )
