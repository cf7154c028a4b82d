"""How each CUDA variant is launched: its source, the constants that it is compiled with, blocks and threads.

The published code starts `rows / warps_per_block` blocks, rounded down: no block at all for few rows. Here the number
is rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.native import KernelLaunch

__all__ = ["H200", "LAUNCHES", "LIMITS", "Launch", "Processor", "blocks_for", "nvrtc_options", "rows_launch"]

MAX_BLOCKS = 2**31 - 1  # in a launch; the loops of the kernels take the rows beyond
DECLARED = 1024  # bytes of shared memory that a block takes in addition to its rows
TYPE_NAMES = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}  # in types.cuh


class Processor(NamedTuple):
    """The properties of a GPU that launches depend on: multiprocessors, and bytes of shared memory per block."""

    multiprocessors: int
    shared: int


H200 = Processor(132, 232448)


@dataclass
class Launch:
    """A launch of the function `name` of a CUDA source. `written` lists the `arguments` that it writes."""

    source: str
    name: str
    options: tuple[str, ...]
    numbers: KernelLaunch
    arguments: list[Tensor | int]
    written: list[Tensor] = field(default_factory=list)


def blocks_for(rows: int, rows_per_block: int) -> int:
    """The number of blocks that these rows need, at most as many as a launch takes.

    >>> blocks_for(3, 8), blocks_for(9, 8), blocks_for(2**40, 1)
    (1, 2, 2147483647)
    """
    return min(-(-rows // rows_per_block), MAX_BLOCKS)


def nvrtc_options(dtype: torch.dtype, maxnreg: int = 0, **constants: int) -> tuple[str, ...]:
    """NVRTC's options for the source of a variant; `constants` are macros.

    >>> nvrtc_options(torch.float16, ITEMS=4)
    ('-DTYPE=half_t', '-DITEMS=4')
    """
    options = (f"-DTYPE={TYPE_NAMES[dtype]}", *(f"-D{name}={value}" for name, value in constants.items()))
    return (*options, *([f"--maxrregcount={maxnreg}"] if maxnreg else []))


def rows_launch(
    name: str, x: Tensor, out: Tensor, numbers: KernelLaunch, options: tuple[str, ...], source: str = ""
) -> Launch:
    """A launch of a kernel `name` (x, y, rows, n, x_stride, y_stride), from `source` or from the variant's file."""
    arguments = [x, out, *x.shape, x.stride(0), out.stride(0)]
    return Launch(source or f"{name.replace('softmax', 'cuda')}.cu", name, options, numbers, arguments, [out])


def _plain(
    name: str, threads_per_row: int, x: Tensor, out: Tensor, on: Processor, threads: int = 256, blocks: int = 0,
    maxnreg: int = 0,
) -> Launch:  # fmt: skip
    """A launch in which `threads_per_row` threads, or if that is 0 a whole block, take a row."""
    blocks = blocks or blocks_for(x.shape[0], threads // (threads_per_row or threads))
    return rows_launch(f"softmax_{name}", x, out, KernelLaunch(blocks, threads), nvrtc_options(x.dtype, maxnreg))


def _auto(x: Tensor, out: Tensor, on: Processor, **given: int) -> Launch:
    return LAUNCHES["cuda-warp" if x.shape[1] <= 1024 else "cuda-block"](x, out, on, **given)


# With vectors of 16 bytes -----------------------------------------------------------------------------------------


def _up(count: int, to: int) -> int:
    return -(-count // to) * to


def _per_vector(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def vectors_of(x: Tensor) -> int:
    """The number of 16-byte vectors that a row of `x` touches: more if rows begin within a vector.

    >>> vectors_of(torch.zeros(2, 8)), vectors_of(torch.zeros(1, 9)), vectors_of(torch.zeros(2, 9))
    (2, 3, 3)
    """
    v, n = _per_vector(x.dtype), x.shape[1]
    whole = x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % v == 0)
    return -(-n // v) if whole else (n + 2 * v - 2) // v


def _share(vectors: int, each: int, most_threads: int) -> int:
    """The number of threads that share `vectors`: a multiple of 32, so that each thread has up to `each` vectors."""
    return min(max(_up(-(-vectors // each), 32), 32), most_threads)


def _items(vectors: int, threads: int, limit: int) -> int:
    """The vectors of each thread. Raises ValueError if they are more than its registers hold."""
    items = max(-(-vectors // threads), 1)
    if items > limit + 1:  # one more if rows begin within a vector
        raise ValueError(f"{threads} threads hold {limit * threads} vectors of 16 bytes; a row has {vectors}")
    return items


def _registers(x: Tensor, out: Tensor, on: Processor, threads: int = 0, blocks: int = 0) -> Launch:
    vectors, most = vectors_of(x), 32 // _per_vector(x.dtype)  # of 32 elements
    threads = threads or _share(vectors, most // 2 if vectors <= 128 * most else most, 1024)
    options = nvrtc_options(x.dtype, ITEMS=_items(vectors, threads, most))
    return rows_launch("softmax_registers", x, out, KernelLaunch(blocks or blocks_for(len(x), 1), threads), options)


def _rows(x: Tensor, out: Tensor, on: Processor, threads: int = 256, blocks: int = 0) -> Launch:
    vectors, v = vectors_of(x), _per_vector(x.dtype)
    lanes = min(1 << (-(-vectors * v // 16) - 1).bit_length(), 32)  # of 16 elements each, or more if 32 are too few
    options = nvrtc_options(x.dtype, LANES=lanes, ITEMS=_items(vectors, lanes, 32 // v))
    return rows_launch(
        "softmax_rows", x, out, KernelLaunch(blocks or blocks_for(len(x), threads // lanes), threads), options
    )


def _async(x: Tensor, out: Tensor, on: Processor, threads: int = 0, blocks: int = 0) -> Launch:
    threads = threads or _share(vectors_of(x), 4, 1024)
    shared = 2 * 16 * (-(-x.shape[1] // _per_vector(x.dtype)) + 1)
    resident = on.multiprocessors * max(min(2048 // threads, on.shared // (shared + DECLARED)), 1)
    turns = -(-len(x) // resident)  # rows of a block: about the same for all blocks
    numbers = KernelLaunch(blocks or -(-len(x) // turns), threads, shared=shared)
    return rows_launch("softmax_async", x, out, numbers, nvrtc_options(x.dtype))


def _cluster(x: Tensor, out: Tensor, on: Processor) -> Launch:
    vectors, v = vectors_of(x), _per_vector(x.dtype)
    cluster = min(max(1 << (-(-vectors * v // 4096) - 1).bit_length(), 2), 8)  # 16 elements of 256 threads
    part = -(-vectors // cluster)
    threads = _share(part, 16 // v, 512)
    blocks = min(len(x), MAX_BLOCKS // cluster) * cluster
    options = nvrtc_options(x.dtype, ITEMS=_items(part, threads, 64 // v), CLUSTER=cluster)
    return rows_launch("softmax_cluster", x, out, KernelLaunch(blocks, threads, cluster), options)


def _grid(x: Tensor, out: Tensor, on: Processor) -> Launch:
    vectors, most = vectors_of(x), 16
    needed = min(-(-vectors // (512 * most)), on.multiprocessors)  # so that registers hold the row
    useful = min(-(-vectors // 128), on.multiprocessors // len(x))  # so that every multiprocessor has a part
    share = max(needed, useful, 1)
    groups = min(on.multiprocessors // share, len(x))
    threads = _share(-(-vectors // share), 8, 512)
    items = min(-(-vectors // (share * threads)), most)
    blocks = groups * share
    pairs = torch.empty(-(-len(x) // groups) * blocks, 2, device=x.device)
    launch = rows_launch(
        "softmax_grid", x, out, KernelLaunch(blocks, threads, cooperative=True), nvrtc_options(x.dtype, ITEMS=items)
    )
    launch.arguments += [pairs, share]
    launch.written.append(pairs)
    return launch


def _columns(x: Tensor, out: Tensor, on: Processor, threads: int = 0, blocks: int = 0) -> Launch:
    tiles = -(-x.shape[1] // (8 * _per_vector(x.dtype)))
    threads = threads or _share(len(x) * 8, 4, 512 if tiles > on.multiprocessors else 1024)
    numbers = KernelLaunch(blocks or min(tiles, MAX_BLOCKS), threads)
    return rows_launch("softmax_columns", x, out, numbers, nvrtc_options(x.dtype))


def _backward(y: Tensor, grad: Tensor, out: Tensor, on: Processor) -> Launch:
    vectors = vectors_of(y)
    threads = _share(vectors, 4, 512)
    return Launch(
        "cuda_backward.cu",
        "softmax_backward",
        nvrtc_options(y.dtype, ITEMS=_items(vectors, threads, 8)),
        KernelLaunch(blocks_for(len(y), 1), threads),
        [y, grad, out, *y.shape, y.stride(0), grad.stride(0), out.stride(0)],
        [out],
    )


LAUNCHES: dict[str, Callable[..., Launch]] = {
    "cuda-warp": partial(_plain, "warp", 32),
    "cuda-block": partial(_plain, "block", 0),
    "cuda-online": partial(_plain, "online", 0),
    "cuda-auto": _auto,
    "cuda-vector": partial(_plain, "vector", 0),
    "cuda-registers": _registers,
    "cuda-rows": _rows,
    "cuda-async": _async,
    "cuda-cluster": _cluster,
    "cuda-grid": _grid,
    "cuda-columns": _columns,
    "cuda-backward": _backward,
}

# The longest row, in elements of a dtype.
LIMITS: dict[str, Callable[[torch.dtype, Processor], int]] = {
    "cuda-registers": lambda dtype, on: 1024 * 32,
    "cuda-rows": lambda dtype, on: 32 * 32,
    "cuda-async": lambda dtype, on: ((on.shared - DECLARED) // 32 - 1) * _per_vector(dtype),
    "cuda-cluster": lambda dtype, on: 8 * 512 * 64,
    "cuda-backward": lambda dtype, on: 512 * 8 * _per_vector(dtype),
}
