"""triton-online: rows of any length, in chunks.

Idea: a row that does not fit on the chip is read in chunks. The program keeps the maximum of the chunks so far and the
sum relative to it; a chunk with a larger maximum rescales the sum by exp(old - new) (Milakov and Gimelshein,
arXiv:1805.02867). Then the row is read once more, and each element is written.

Traffic: reads 2MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L2.

Limit: memory: three passes over it instead of two, which is 0.67 of a copy's speed if the second read misses the L2.
With few rows most of the GPU is idle, since each row has one program.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.tools.gallery.launch_params import triton_launch

__all__ = ["refuses", "softmax"]

BLOCK, WARPS, STAGES = 4096, 8, 2  # the longest chunk


@triton.jit
def softmax_online(x_ptr, out_ptr, x_row_stride, out_row_stride, n, chunks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    out_row = out_ptr + row * out_row_stride
    maximum = -float("inf")
    total = 0.0
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        column = tl.cast(chunk, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < n, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, 0))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # where all so far are -inf, -inf - -inf would be NaN
        total = total * tl.exp(maximum - base) + tl.sum(tl.exp(x - base), 0)
        maximum = larger
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        column = tl.cast(chunk, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < n, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - maximum) / total
        tl.store(out_row + column, y.to(out_ptr.dtype.element_ty), mask=column < n)


def refuses(rows: int, n: int, dtype: torch.dtype) -> str | None:
    if rows > 2**31 - 1:
        return f"each row is a program, and a launch takes 2147483647 of them; got M = {rows}"
    return None


def softmax(
    x: Tensor, out: Tensor, block_size: int = 0, num_warps: int = WARPS, num_stages: int = STAGES, **options: int
) -> Tensor:
    rows, n = x.shape
    block = block_size or min(BLOCK, triton.next_power_of_2(n))
    numbers = (x.stride(0), out.stride(0), n, triton.cdiv(n, block))
    with triton_launch("triton-online", x.device, num_warps=num_warps, **options) as launch:
        softmax_online[(rows,)](x, out, *numbers, block, num_stages, **launch)
    return out
