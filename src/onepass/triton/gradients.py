"""The gradients of rows in Triton. Every function has the shape of its forward with another state, one number a row:

    softmax      dx = y * (g - s)        s = sum(g * y)
    softmin      dx = y * (s - g)        s = sum(g * y)
    log_softmax  dx = g - exp(y) * s     s = sum(g)
    logsumexp    dx = g * exp(x - s)     s the result, saved by the forward

Tiers are those of the forward: a row that a program holds is read once; a longer one is streamed in chunks, once for
its number and once, backwards, for the result. Special values need no branch: these are the plain formulas.

Offsets are sums over levels of (size, stride), as many as the strides of a call need, so that nothing is copied first:
a gradient expanded from one number has stride 0.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .state import add_up, exponential, narrow, two_sum


@triton.jit
def offset(index, sizes, strides):
    """Where in memory ``index`` is. Levels are innermost first; the size of the outermost is not needed."""
    at = tl.zeros_like(index)
    for level in tl.static_range(len(sizes)):
        at += index % sizes[level] * strides[level]
        index = index // sizes[level]
    return at + index * strides[len(sizes)]


@triton.jit
def widened(pointers, mask, ACC: tl.constexpr):
    """Values in the accumulator's type; lanes outside the mask read nothing and add nothing to a sum."""
    return tl.load(pointers, mask=mask, other=0.0).to(ACC)


@triton.jit
def term(y, g, FUNCTION: tl.constexpr):
    """What an element adds to its row's number."""
    return g if FUNCTION == "log_softmax" else g * y


@triton.jit
def gradient(y, g, s, FUNCTION: tl.constexpr):
    if FUNCTION == "softmax":
        return y * (g - s)
    elif FUNCTION == "softmin":
        return y * (s - g)
    elif FUNCTION == "log_softmax":
        return g - exponential(y, y.dtype) * s
    else:
        return g * exponential(y - s, y.dtype)


# The first row and the count of rows are no reason for another variant of the kernel (nor that of chunks, below).
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
    FUNCTION: tl.constexpr,
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
    y, g = widened(y_at, inside, ACC), widened(g_at, inside, ACC)
    if FUNCTION == "logsumexp":
        s = widened(lse_ptr + offset(row, row_sizes, lse_row), row < rows, ACC)
    else:
        s = add_up(term(y, g, FUNCTION), 1, Y)

    dx_at = dx_ptr + offset(row, row_sizes, dx_row)[:, None] + offset(column, sizes, dx_in)[None, :]
    tl.store(dx_at, narrow(gradient(y, g, s[:, None], FUNCTION), dx_ptr.dtype.element_ty), mask=inside)


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
    FUNCTION: tl.constexpr,
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

    if FUNCTION == "logsumexp":
        s = tl.load(lse_ptr + offset(row, row_sizes, lse_row)).to(ACC)
    else:
        total = tl.zeros((LANES,), ACC)
        rest = tl.zeros((LANES,), ACC)
        for chunk in range(chunks):
            # 64 bits: a row may be longer than 2^31 elements, or its stride may make it so.
            column = tl.cast(chunk, tl.int64) * (DEPTH * LANES) + tile
            y = widened(y_at + offset(column, sizes, y_in), column < n, ACC)
            g = widened(g_at + offset(column, sizes, g_in), column < n, ACC)
            part = add_up(term(y, g, FUNCTION), 0, Y)
            total, rest = two_sum(total, rest, part, tl.zeros_like(part))
        s = add_up(tl.where(tl.abs(total) == float("inf"), total, total + rest), 0, Y)

    for chunk in range(chunks):
        column = tl.cast(chunks - 1 - chunk, tl.int64) * (DEPTH * LANES) + tile
        y = widened(y_at + offset(column, sizes, y_in), column < n, ACC)
        g = widened(g_at + offset(column, sizes, g_in), column < n, ACC)
        dx = narrow(gradient(y, g, s, FUNCTION), dx_ptr.dtype.element_ty)
        tl.store(dx_at + offset(column, sizes, dx_in), dx, mask=column < n)
