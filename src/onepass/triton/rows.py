"""The row tier: a program holds whole rows on the chip, so every element is read once and written once.

A tile is ROWS rows by BLOCK columns, BLOCK the power of two that covers a row. Short rows share a program: a program
for each row of 16 would leave 7 of 8 lanes of every warp idle.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .state import add_up, exponential, finish, guard, load, narrow, scale_of, store_reduced


# The count of rows is no reason for another variant of the kernel (Triton specialises on 1 and on multiples of 16).
@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x_ptr,
    out_ptr,
    rows,
    n,
    x_row_stride,
    x_stride,
    out_row_stride,
    out_stride,
    FUNCTION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < rows)[:, None] & (column < n)[None, :]

    x_at = x_ptr + (row * x_row_stride)[:, None] + (column * x_stride)[None, :]
    x = load(x_at, inside, OUT, FUNCTION == "softmin")
    m = tl.max(x, 1)
    base = guard(m, FUNCTION)
    d = x - base[:, None]
    e = exponential(d, OUT)
    total = add_up(e, 1, OUT)

    if FUNCTION == "logsumexp" or FUNCTION == "state":
        store_reduced(out_ptr + row * out_row_stride, out_stride, m, base, total, row < rows, FUNCTION, OUT)
    else:
        scale, rest = scale_of(total, FUNCTION, OUT)
        y = finish(d, e, scale[:, None], rest[:, None], FUNCTION, OUT)
        out_at = out_ptr + (row * out_row_stride)[:, None] + (column * out_stride)[None, :]
        tl.store(out_at, narrow(y, OUT), mask=inside)
