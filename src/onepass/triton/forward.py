"""The forward kernels, in two tiers.

Row tier: a program holds whole rows on the chip, so every element is read once and written once. A tile is ROWS rows by
BLOCK columns, BLOCK the power of two that covers a row. Short rows share a program: a program for each row of 16 would
leave 7 of 8 lanes of every warp idle.

Online tier: a row wider than a program can hold is streamed in chunks, twice (once for a reduction). A chunk is DEPTH
by LANES elements, each lane (a column of the chunk) keeps its own pair (m, l). With LANES as many elements as the
threads read at once, a lane lives in one thread: the loop merges without communication between threads, with one exp
per element and one more for every DEPTH of them; the lanes are merged once per row. The second pass walks the chunks
backwards, since the last ones read are the ones still in the cache.

Both sum up a row by its state, the maximum ``m`` and ``l = sum(exp(x - m))``; the state of nothing is ``(-inf, 0)``.
Special values need no branch of their own:

- ``base_of`` measures an all ``-inf`` part of a row from 0 instead of from ``-inf``, so that it stays ``(-inf, 0)`` and
  poisons nothing. A whole row of it ends as ``0 * (1 / 0) = NaN``, ``-inf - log(0) = NaN`` and ``log(0) = -inf``:
  what torch gives for softmax, log_softmax and logsumexp.
- A NaN is dropped by the maximum (``tl.max`` is IEEE maxNum) but not by the sum, so it poisons its row through ``l``.
- ``+inf`` gives ``inf - inf = NaN`` in the softmax family; the reductions measure it from 0 and get ``exp(inf) = inf``.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .epilogue import log_softmax, log_softmax_scale, softmax, softmax_scale, store_logsumexp, store_state
from .score import add_up, exponential, identity, load_score, negate, round_to, total, two_sum

# The score, the scale (None for a reduction) and the epilogue of each function.
POLICIES = {
    "softmax": {"SCORE": identity, "SCALE": softmax_scale, "EPILOGUE": softmax},
    "log_softmax": {"SCORE": identity, "SCALE": log_softmax_scale, "EPILOGUE": log_softmax},
    "softmin": {"SCORE": negate, "SCALE": softmax_scale, "EPILOGUE": softmax},
    "logsumexp": {"SCORE": identity, "SCALE": None, "EPILOGUE": store_logsumexp},
    "state": {"SCORE": identity, "SCALE": None, "EPILOGUE": store_state},
}


@triton.jit
def base_of(m, SCALE: tl.constexpr):
    """The point that exponentials are measured from: the maximum, or 0 where that would give inf - inf."""
    if SCALE is None:
        return tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def absorb(m, high, low, x, SCALE: tl.constexpr, OUT: tl.constexpr):
    """Merge the tile x, reduced over its first axis, into the pairs (m, l): one exp per element, one rescale per pair.
    l is high + low (``two_sum``)."""
    top = tl.maximum(m, tl.max(x, 0))
    base = base_of(top, SCALE)
    tile = add_up(exponential(x - base[None, :], OUT), 0, OUT)
    scale = exponential(m - base, OUT)
    high, low = two_sum(high * scale, low * scale, tile, tl.zeros_like(tile))
    return top, high, low


@triton.jit
def merge_lanes(m, high, low, SCALE: tl.constexpr, OUT: tl.constexpr):
    """Merge a vector of pairs into one."""
    top = tl.max(m, 0)
    return top, add_up(total(high, low) * exponential(m - base_of(top, SCALE), OUT), 0, OUT)


# The first row and the count of rows are no reason for another variant of a kernel, nor is the count of chunks (Triton
# specialises on 1 and on multiples of 16).
@triton.jit(do_not_specialize=["first", "rows"])
def rows_kernel(
    x_ptr,
    out_ptr,
    first,
    rows,
    n,
    x_row_stride,
    x_stride,
    out_row_stride,
    out_stride,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    row = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = (row < rows)[:, None] & (column < n)[None, :]

    x_at = x_ptr + (row * x_row_stride)[:, None] + (column * x_stride)[None, :]
    x = load_score(x_at, inside, SCORE, OUT)
    m = tl.max(x, 1)
    base = base_of(m, SCALE)
    d = x - base[:, None]
    e = exponential(d, OUT)
    l = add_up(e, 1, OUT)  # noqa: E741

    if SCALE is None:
        EPILOGUE(out_ptr + row * out_row_stride, out_stride, m, base, l, row < rows, OUT)
    else:
        scale, scale_low = SCALE(l, OUT)
        y = EPILOGUE(d, e, scale[:, None], scale_low[:, None], OUT)
        out_at = out_ptr + (row * out_row_stride)[:, None] + (column * out_stride)[None, :]
        tl.store(out_at, round_to(y, OUT), mask=inside)


@triton.jit(do_not_specialize=["first", "chunks"])
def online_kernel(
    x_ptr,
    out_ptr,
    first,
    n,
    chunks,
    x_row_stride,
    x_stride,
    out_row_stride,
    out_stride,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if OUT.is_fp64() else tl.float32
    row = first + tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    out_row = out_ptr + row * out_row_stride
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    m = tl.full((LANES,), -float("inf"), ACC)
    high = tl.zeros((LANES,), ACC)
    low = tl.zeros((LANES,), ACC)
    for chunk in range(chunks):
        # 64 bits: a row may be longer than 2^31 elements, or its stride may make it so.
        column = tl.cast(chunk, tl.int64) * (DEPTH * LANES) + tile
        m, high, low = absorb(m, high, low, load_score(x_row + column * x_stride, column < n, SCORE, OUT), SCALE, OUT)
    m, l = merge_lanes(m, high, low, SCALE, OUT)  # noqa: E741
    base = base_of(m, SCALE)

    if SCALE is None:
        EPILOGUE(out_row, out_stride, m, base, l, None, OUT)
    else:
        scale, scale_low = SCALE(l, OUT)
        for chunk in range(chunks):
            column = tl.cast(chunks - 1 - chunk, tl.int64) * (DEPTH * LANES) + tile
            d = load_score(x_row + column * x_stride, column < n, SCORE, OUT) - base
            y = EPILOGUE(d, exponential(d, OUT), scale, scale_low, OUT)
            tl.store(out_row + column * out_stride, round_to(y, OUT), mask=column < n, cache_modifier=".cs")


KERNELS = {"row": rows_kernel, "online": online_kernel}
