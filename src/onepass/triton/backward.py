"""The kernels of gradients. Each has the shape of its forward with another state, one number per row:

    softmax      dx = y * (g - s)        s = sum(g * y)
    softmin      dx = y * (s - g)        s = sum(g * y)
    log_softmax  dx = g - exp(y) * s     s = sum(g)
    logsumexp    dx = g * exp(x - s)     s the result, saved by the forward

The tiers are those of the forward: a row that a program holds is read once; a longer one is streamed in chunks, once
for its number and once, backwards, for the result. Special values need no branch: these are the plain expressions.

Offsets are sums over levels of (size, stride), as many as the strides of a call need, so that nothing is copied first:
a gradient expanded from one number has stride 0.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .epilogue import (
    log_softmax_gradient,
    logsumexp_gradient,
    product,
    result_gradient,
    softmax_gradient,
    softmin_gradient,
)
from .score import add_up, round_to, total, two_sum

# The term that an element adds to the number of its row (None for logsumexp, which reads it), and the epilogue.
POLICIES = {
    "softmax": {"TERM": product, "EPILOGUE": softmax_gradient},
    "log_softmax": {"TERM": result_gradient, "EPILOGUE": log_softmax_gradient},
    "softmin": {"TERM": product, "EPILOGUE": softmin_gradient},
    "logsumexp": {"TERM": None, "EPILOGUE": logsumexp_gradient},
}


@triton.jit
def offset(index, sizes, strides):
    """The place of ``index`` in memory. Levels are innermost first; the size of the outermost is not needed."""
    at = tl.zeros_like(index)
    for level in tl.static_range(len(sizes)):
        at += index % sizes[level] * strides[level]
        index = index // sizes[level]
    return at + index * strides[len(sizes)]


@triton.jit
def load_as(pointers, mask, ACC: tl.constexpr):
    """Values in the accumulator's dtype; lanes outside the mask read nothing and add nothing to a sum."""
    return tl.load(pointers, mask=mask, other=0.0).to(ACC)


# As in forward.py, the first row and the counts of rows and of chunks are no reason for another variant of a kernel.
@triton.jit(do_not_specialize=["first", "rows"])
def rows_backward_kernel(
    y_ptr,
    g_ptr,
    lse_ptr,
    dx_ptr,
    first,
    rows,
    n,
    row_sizes,
    y_row,
    g_row,
    lse_row,
    dx_row,
    sizes,
    y_in,
    g_in,
    dx_in,
    TERM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    Y: tl.constexpr = y_ptr.dtype.element_ty
    G: tl.constexpr = g_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if Y.is_fp64() or G.is_fp64() else tl.float32
    row = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < rows)[:, None] & (column < n)[None, :]

    y_at = y_ptr + offset(row, row_sizes, y_row)[:, None] + offset(column, sizes, y_in)[None, :]
    g_at = g_ptr + offset(row, row_sizes, g_row)[:, None] + offset(column, sizes, g_in)[None, :]
    y, g = load_as(y_at, inside, ACC), load_as(g_at, inside, ACC)
    if TERM is None:
        s = load_as(lse_ptr + offset(row, row_sizes, lse_row), row < rows, ACC)
    else:
        s = add_up(TERM(y, g), 1, Y)

    dx_at = dx_ptr + offset(row, row_sizes, dx_row)[:, None] + offset(column, sizes, dx_in)[None, :]
    tl.store(dx_at, round_to(EPILOGUE(y, g, s[:, None]), dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "chunks"])
def online_backward_kernel(
    y_ptr,
    g_ptr,
    lse_ptr,
    dx_ptr,
    first,
    n,
    chunks,
    row_sizes,
    y_row,
    g_row,
    lse_row,
    dx_row,
    sizes,
    y_in,
    g_in,
    dx_in,
    TERM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    Y: tl.constexpr = y_ptr.dtype.element_ty
    G: tl.constexpr = g_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if Y.is_fp64() or G.is_fp64() else tl.float32
    row = first + tl.program_id(0).to(tl.int64)
    y_at = y_ptr + offset(row, row_sizes, y_row)
    g_at = g_ptr + offset(row, row_sizes, g_row)
    dx_at = dx_ptr + offset(row, row_sizes, dx_row)
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    if TERM is None:
        s = tl.load(lse_ptr + offset(row, row_sizes, lse_row)).to(ACC)
    else:
        high = tl.zeros((LANES,), ACC)
        low = tl.zeros((LANES,), ACC)
        for chunk in range(chunks):
            # 64 bits: a row may be longer than 2^31 elements, or its stride may make it so.
            column = tl.cast(chunk, tl.int64) * (DEPTH * LANES) + tile
            y = load_as(y_at + offset(column, sizes, y_in), column < n, ACC)
            g = load_as(g_at + offset(column, sizes, g_in), column < n, ACC)
            part = add_up(TERM(y, g), 0, Y)
            high, low = two_sum(high, low, part, tl.zeros_like(part))
        s = add_up(total(high, low), 0, Y)

    for chunk in range(chunks):
        column = tl.cast(chunks - 1 - chunk, tl.int64) * (DEPTH * LANES) + tile
        y = load_as(y_at + offset(column, sizes, y_in), column < n, ACC)
        g = load_as(g_at + offset(column, sizes, g_in), column < n, ACC)
        dx = round_to(EPILOGUE(y, g, s), dx_ptr.dtype.element_ty)
        tl.store(dx_at + offset(column, sizes, dx_in), dx, mask=column < n)


KERNELS = {"row": rows_backward_kernel, "online": online_backward_kernel}
