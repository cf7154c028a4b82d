"""A pair for each element of a tile, merged once at the end of a row. Check it with

TRITON_INTERPRET=1 onepass gallery check pairs.py --device cpu
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr, x_stride, y_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + column
        x = tl.load(x_ptr + row * x_stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(m, x)
        base = tl.where(larger == -float("inf"), 0.0, larger)
        l = l * tl.exp(m - base) + tl.exp(x - base)  # no reduction, and no barrier, in the loop
        m = larger
    whole = tl.max(m, 0)
    total = tl.sum(l * tl.exp(m - tl.where(whole == -float("inf"), 0.0, whole)), 0)
    for start in range(0, n, BLOCK):
        i = start + column
        x = tl.load(x_ptr + row * x_stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - whole) / total
        tl.store(y_ptr + row * y_stride + i, y.to(y_ptr.dtype.element_ty), mask=i < n)


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(x.shape[1]))
    kernel[(len(x),)](x, y, x.stride(0), y.stride(0), x.shape[1], block)
    return y
