"""triton-row: one program per row.

Idea: a program loads its whole row once, keeps it in registers, and does all five steps there. Triton's tiles have a
power of two elements, so the row is padded with -inf, which changes neither the maximum nor the sum. Longer rows
get more warps: 4, from a tile of 2048 on 8, from 4096 on 16.

Traffic: reads MN, writes MN.

Limit: memory, for rows of a middle length. Short rows leave lanes idle (a tile of 256 is 2 elements per thread)
and each pays the start of a program; a row just above a power of two is half padding; and a tile has to fit the
registers of a multiprocessor, so that rows of more than 65536 elements are not taken.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.tools.gallery.launch_params import MAX_TILE, tile_size, triton_launch

__all__ = ["refuses", "softmax"]


@triton.jit
def softmax_row(x_ptr, out_ptr, x_row_stride, out_row_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride exceeds 2^31 in a matrix of 8 GB
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=column < n, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, 0))
    y = numerator / tl.sum(numerator, 0)
    tl.store(out_ptr + row * out_row_stride + column, y.to(out_ptr.dtype.element_ty), mask=column < n)


def refuses(rows: int, n: int, dtype: torch.dtype) -> str | None:
    if n > MAX_TILE:
        return f"a row must fit the registers of a multiprocessor, {MAX_TILE} elements; got N = {n}"
    if rows > 2**31 - 1:
        return f"each row is a program, and a launch takes 2147483647 of them; got M = {rows}"
    return None


def softmax(x: Tensor, out: Tensor, block_size: int = 0, num_warps: int = 0, **options: int) -> Tensor:
    rows, n = x.shape
    block = tile_size("triton-row", n, block_size)
    warps = num_warps or (16 if block >= 4096 else 8 if block >= 2048 else 4)
    with triton_launch("triton-row", x.device, num_warps=warps, **options) as launch:
        softmax_row[(rows,)](x, out, x.stride(0), out.stride(0), n, block, **launch)
    return out
