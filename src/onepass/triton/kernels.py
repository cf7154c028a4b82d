"""The kernels, in two tiers, for a function and for its gradient.

Row tier: a program holds whole rows on the chip, so every element is read once and written once. A tile is ROWS rows by
BLOCK columns, BLOCK the power of two that covers a row. Short rows share a program: a program for each row of 16 would
leave 7 of 8 lanes of every warp idle.

Online tier: a row wider than a program can hold is streamed in chunks, twice (once for a reduction). A chunk is DEPTH
by LANES elements, each lane (a column of the chunk) keeps its own pair (m, l). With LANES as many elements as the
threads read at once, a lane lives in one thread: the loop merges without communication between threads, with one exp
per element and one more for every DEPTH of them; the lanes are merged once per row. The second pass walks the chunks
backwards, since the last ones read are the ones still in the cache.

A function sums up a row by its state, the maximum ``m`` and ``l = sum(exp(x - m))``; the state of nothing is
``(-inf, 0)``. A gradient (``g_ptr`` is given) sums up a row by one number, which is read (``lse_ptr``) or is
``l = sum(TERM(y, g))``; its ``m`` stays what it was. Special values need no branch of their own:

- ``base_of`` measures an all ``-inf`` part of a row from 0 instead of from ``-inf``, so that it stays ``(-inf, 0)`` and
  poisons nothing. A whole row of it ends as ``0 * (1 / 0) = NaN``, ``-inf - log(0) = NaN`` and ``log(0) = -inf``:
  what torch gives for softmax, log_softmax and logsumexp.
- A NaN is dropped by the maximum (``tl.max`` is IEEE maxNum) but not by the sum, so it poisons its row through ``l``.
- ``+inf`` gives ``inf - inf = NaN`` in the softmax family; the reductions measure it from 0 and get ``exp(inf) = inf``.

Tensors of a call come in the order x, out, g, lse. ``row_strides`` and ``strides`` have an entry for each of them.

``score`` is what scores are made of besides x (score.py), or () where that is nothing. In a function of such scores
``lse_ptr`` is where the logsumexp of each row goes. What a window hides is not read: loads are masked, and the first
pass of the online tier begins and ends with the chunks that the window reaches.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .score import (
    add_up,
    base_of,
    chunks_in_window,
    exponential,
    finish,
    offset,
    round_to,
    row_of,
    takes_part,
    total,
    two_sum,
)


@triton.jit
def load_scores(
    x_row, column, seen, read, sizes, strides, score, own, SCORE: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr
):
    """The scores of elements. An element is rounded to the dtype of the result first, as ``dtype=`` of torch does, and
    then converted to the accumulator's dtype. Lanes outside the mask read nothing. Their score is -inf."""
    if len(score) == 0:
        other = SCORE(tl.full((), -float("inf"), ACC))
        x = tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=other)
        return SCORE(round_to(x, TYPE).to(ACC))
    else:
        x = tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=0.0)
        return SCORE(round_to(x, TYPE).to(ACC), score, own, column, seen, read, sizes, TYPE)


@triton.jit
def load_saved(x_row, column, read, sizes, strides, score, SCORE: tl.constexpr, ACC: tl.constexpr):
    """What the forward saved of elements. Lanes outside the mask add nothing to the sum of a gradient."""
    if len(score) == 0:
        return SCORE(tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=0.0).to(ACC))
    else:
        other = 0.0 if len(score.whole) == 0 else -float("inf")
        return tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=other).to(ACC)


@triton.jit
def load_grad(g_row, column, inside, read, sizes, strides, score, ACC: tl.constexpr):
    """The gradients of results."""
    if len(score) > 0 and len(score.whole) > 0:
        read = inside
    return tl.load(g_row + offset(column, sizes, strides[2]), mask=read, other=0.0).to(ACC)


@triton.jit
def reduce_tile(m, x, g, score, AXIS: tl.constexpr, TERM: tl.constexpr, REDUCES: tl.constexpr, TYPE: tl.constexpr):
    """The maximum of a tile and ``m`` over an axis, and the sum of the tile. A gradient has no maximum. Where it is to
    know which rows of log_softmax have nothing, its ``m`` is -inf for these and 0 for others."""
    if g is None:
        m = tl.maximum(m, tl.max(x, AXIS, keep_dims=True))
        return m, add_up(exponential(x - base_of(m, REDUCES), TYPE), AXIS, TYPE)
    else:
        if len(score) > 0 and len(score.empty) > 0:
            m = tl.maximum(m, tl.max(tl.where(x == -float("inf"), x, 0.0), AXIS, keep_dims=True))
        return m, add_up(TERM(x, g), AXIS, TYPE)


@triton.jit
def absorb(m, high, low, x, g, score, TERM: tl.constexpr, REDUCES: tl.constexpr, TYPE: tl.constexpr):
    """Merge a tile, reduced over its first axis, into the pairs (m, l): one exp per element, one rescale per pair.
    l is high + low (``two_sum``)."""
    top, part = reduce_tile(m, x, g, score, 0, TERM, REDUCES, TYPE)
    if g is None:
        scale = exponential(m - base_of(top, REDUCES), TYPE)
        high, low = high * scale, low * scale
    high, low = two_sum(high, low, part, tl.zeros_like(part))
    return top, high, low


@triton.jit
def merge_lanes(m, high, low, g, REDUCES: tl.constexpr, TYPE: tl.constexpr):
    """Merge a vector of pairs into one."""
    l = total(high, low)
    top = tl.max(m, 1, keep_dims=True)
    if g is None:
        l = l * exponential(m - base_of(top, REDUCES), TYPE)
    return top, add_up(l, 1, TYPE)


# The first row and the count of rows are no reason for another variant of a kernel (Triton specialises on 1 and on
# multiples of 16).
@triton.jit(do_not_specialize=["first", "rows"])
def row_kernel(
    x_ptr,
    out_ptr,
    g_ptr,
    lse_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    sizes,
    strides,
    score,
    SCORE: tl.constexpr,
    SCORE_BACKWARD: tl.constexpr,
    TERM: tl.constexpr,
    ROW: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    TYPE: tl.constexpr = OUT if g_ptr is None else x_ptr.dtype.element_ty  # of the result
    GRAD: tl.constexpr = OUT if g_ptr is None else g_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() or GRAD.is_fp64() else tl.float32
    row = (first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    inside = (row < rows) & (column < n)
    own = None if len(score) == 0 else row_of(score, row, row < rows, row_sizes, ACC)
    seen, read = takes_part(score, own, column, inside, sizes)
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    g_row = None if g_ptr is None else g_ptr + offset(row, row_sizes, row_strides[2])

    if g_ptr is None:
        g = None
        x = load_scores(x_row, column, seen, read, sizes, strides, score, own, SCORE, TYPE, ACC)
    else:
        g = load_grad(g_row, column, inside, read, sizes, strides, score, ACC)
        if len(score) == 0 or lse_ptr is None:
            x = load_saved(x_row, column, read, sizes, strides, score, SCORE, ACC)
        else:
            x = load_scores(x_row, column, seen, read, sizes, strides, score, own, SCORE, TYPE, ACC)
    m = -float("inf")
    if lse_ptr is None or g_ptr is None:
        m, l = reduce_tile(m, x, g, score, 1, TERM, EPILOGUE is None, TYPE)
        if len(score) > 0 and g is None:
            m, l = finish(m, l, score, own, row, lse_ptr, row_sizes, row_strides, EPILOGUE is None, TYPE)
        numbers = ROW(m, l, TYPE)
    else:
        m = tl.load(lse_ptr + offset(row, row_sizes, row_strides[3]), mask=row < rows, other=0.0).to(ACC)
        numbers = (m,)

    out_row = out_ptr + offset(row, row_sizes, row_strides[1])
    if EPILOGUE is None:
        for k in tl.static_range(len(numbers)):
            tl.store(out_row + k * strides[1][0], round_to(numbers[k], OUT), mask=row < rows)
    else:
        y = EPILOGUE(x, g, numbers, TYPE)
        if g is not None:
            if len(score) == 0:
                y = SCORE_BACKWARD(y)
            else:
                y = SCORE_BACKWARD(y, x, m, numbers[0], score, own, column, seen, read, sizes, TYPE, OUT)
        tl.store(out_row + offset(column, sizes, strides[1]), round_to(y, OUT), mask=inside)


@triton.jit(do_not_specialize=["first", "rows"])
def online_kernel(
    x_ptr,
    out_ptr,
    g_ptr,
    lse_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    sizes,
    strides,
    score,
    SCORE: tl.constexpr,
    SCORE_BACKWARD: tl.constexpr,
    TERM: tl.constexpr,
    ROW: tl.constexpr,
    EPILOGUE: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    TYPE: tl.constexpr = OUT if g_ptr is None else x_ptr.dtype.element_ty  # of the result
    GRAD: tl.constexpr = OUT if g_ptr is None else g_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() or GRAD.is_fp64() else tl.float32
    row = first + tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    g_row = None if g_ptr is None else g_ptr + offset(row, row_sizes, row_strides[2])
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    chunks = tl.cdiv(n, DEPTH * LANES)
    own = None if len(score) == 0 else row_of(score, row, row < rows, row_sizes, ACC)

    if lse_ptr is None or g_ptr is None:
        m = tl.full((1, LANES), -float("inf"), ACC)
        high = tl.zeros((1, LANES), ACC)
        low = tl.zeros((1, LANES), ACC)
        first_chunk = 0
        end = chunks
        if len(score) > 0 and len(score.whole) == 0:
            index = first + tl.program_id(0).to(tl.int64)
            first_chunk, end = chunks_in_window(score, index, chunks, row_sizes, sizes, DEPTH * LANES)
        for chunk in range(first_chunk, end):
            # 64 bits: a row may be longer than 2^31 elements, or its stride may make it so.
            column = tl.cast(chunk, tl.int64) * (DEPTH * LANES) + tile
            seen, read = takes_part(score, own, column, column < n, sizes)
            if g_ptr is None:
                g = None
                x = load_scores(x_row, column, seen, read, sizes, strides, score, own, SCORE, TYPE, ACC)
            else:
                g = load_grad(g_row, column, column < n, read, sizes, strides, score, ACC)
                x = load_saved(x_row, column, read, sizes, strides, score, SCORE, ACC)
            m, high, low = absorb(m, high, low, x, g, score, TERM, EPILOGUE is None, TYPE)
        m, l = merge_lanes(m, high, low, g_row, EPILOGUE is None, TYPE)
        if len(score) > 0 and g_ptr is None:
            m, l = finish(m, l, score, own, row, lse_ptr, row_sizes, row_strides, EPILOGUE is None, TYPE)
        numbers = ROW(m, l, TYPE)
    else:
        m = tl.load(lse_ptr + offset(row, row_sizes, row_strides[3])).to(ACC)
        numbers = (m,)

    out_row = out_ptr + offset(row, row_sizes, row_strides[1])
    if EPILOGUE is None:
        for k in tl.static_range(len(numbers)):
            tl.store(out_row + k * strides[1][0], round_to(numbers[k], OUT))
    else:
        for chunk in range(chunks):
            column = tl.cast(chunks - 1 - chunk, tl.int64) * (DEPTH * LANES) + tile
            seen, read = takes_part(score, own, column, column < n, sizes)
            if g_ptr is None:
                g = None
                x = load_scores(x_row, column, seen, read, sizes, strides, score, own, SCORE, TYPE, ACC)
            else:
                g = load_grad(g_row, column, column < n, read, sizes, strides, score, ACC)
                if len(score) == 0 or lse_ptr is None:
                    x = load_saved(x_row, column, read, sizes, strides, score, SCORE, ACC)
                else:
                    x = load_scores(x_row, column, seen, read, sizes, strides, score, own, SCORE, TYPE, ACC)
            y = EPILOGUE(x, g, numbers, TYPE)
            if g_ptr is None:
                tl.store(
                    out_row + offset(column, sizes, strides[1]), round_to(y, OUT), mask=column < n, cache_modifier=".cs"
                )
            else:
                if len(score) == 0:
                    y = SCORE_BACKWARD(y)
                else:
                    y = SCORE_BACKWARD(y, x, m, numbers[0], score, own, column, seen, read, sizes, TYPE, OUT)
                tl.store(out_row + offset(column, sizes, strides[1]), round_to(y, OUT), mask=column < n)


KERNELS = {"row": row_kernel, "online": online_kernel}
