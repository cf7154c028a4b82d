"""The kernels of a function and of its gradient, in two tiers.

Row tier: a program holds whole rows on the chip, so every element is read once and written once. A tile is ROWS rows by
BLOCK columns, where BLOCK is the power of two that covers a row. Short rows share a program: with one program for each
row of 16, 7 of 8 lanes of every warp would be idle.

Online tier: a row that does not fit a program is streamed in chunks, twice (once for a reduction). A chunk is DEPTH by
LANES elements. Each lane (a column of the chunk) keeps its own pair (m, l). LANES is the number of elements that the
threads read at once, so a lane lives in one thread, and the loop needs no communication between threads. It takes one
exp per element and one more for every DEPTH elements. The lanes are merged once per row. The second pass walks the
chunks backwards, because the chunks that were read last are still in the cache.

A function reduces a row to its state, the maximum ``m`` and ``l = sum(exp(x - m))``. The state of no elements is
``(-inf, 0)``. A gradient (``g_ptr`` is given) reduces a row to one number, which is either read (``lse_ptr``) or
``l = sum(TERM(y, g))``; its ``m`` does not change. Special values need no branches:

- ``base_of`` subtracts 0 instead of ``-inf`` in a part of a row that is all ``-inf``, so that its state stays
  ``(-inf, 0)`` and makes no other part NaN. A row that is all ``-inf`` ends as ``0 * (1 / 0) = NaN``,
  ``-inf - log(0) = NaN`` and ``log(0) = -inf``: the results of torch's softmax, log_softmax and logsumexp.
- The maximum drops a NaN (``tl.max`` is IEEE maxNum) but the sum does not, so the NaN reaches the row's ``l``.
- ``+inf`` gives ``inf - inf = NaN`` in the softmax family; reductions subtract 0 from it and get ``exp(inf) = inf``.

Tensors of a call come in the order x, out, g, lse. ``row_strides`` and ``strides`` have an entry for each of them.

``score`` has the operands of scores besides x (score.py), or is () if there are none. In a function of such scores the
logsumexp of each row is written to ``lse_ptr``. Elements that a window hides are not read: loads are masked, and the
first pass of the online tier runs only over the chunks that the window reaches.
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
    then converted to the accumulator's dtype. Masked-out lanes read nothing, and their score is -inf."""
    if len(score) == 0:
        other = SCORE(tl.full((), -float("inf"), ACC))
        x = tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=other)
        return SCORE(round_to(x, TYPE).to(ACC))
    else:
        x = tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=0.0)
        return SCORE(round_to(x, TYPE).to(ACC), score, own, column, seen, read, sizes, TYPE)


@triton.jit
def load_saved(x_row, column, read, sizes, strides, score, SCORE: tl.constexpr, ACC: tl.constexpr):
    """The elements that the forward saved. Masked-out lanes add nothing to the sum of a gradient."""
    if len(score) == 0:
        return SCORE(tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=0.0).to(ACC))
    else:
        other = 0.0 if len(score.whole) == 0 else -float("inf")
        return tl.load(x_row + offset(column, sizes, strides[0]), mask=read, other=other).to(ACC)


@triton.jit
def load_grad(g_row, column, inside, read, sizes, strides, score, ACC: tl.constexpr):
    """The upstream gradients of elements."""
    if len(score) > 0 and len(score.whole) > 0:
        read = inside
    return tl.load(g_row + offset(column, sizes, strides[2]), mask=read, other=0.0).to(ACC)


@triton.jit
def reduce_tile(m, x, g, score, AXIS: tl.constexpr, TERM: tl.constexpr, REDUCES: tl.constexpr, TYPE: tl.constexpr):
    """The maximum of a tile and ``m`` over an axis, and the sum of the tile. A gradient has no maximum. If ``empty`` is
    set in ``score``, its ``m`` is -inf for rows of a log_softmax that are all -inf, and 0 for other rows."""
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
    """Merge the pairs (m, l) of all lanes into one."""
    l = total(high, low)
    top = tl.max(m, 1, keep_dims=True)
    if g is None:
        l = l * exponential(m - base_of(top, REDUCES), TYPE)
    return top, add_up(l, 1, TYPE)


# `first` and `rows` are not specialised, so that they do not compile more variants of a kernel (Triton specialises on 1
# and on multiples of 16).
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
    TYPE: tl.constexpr = OUT if g_ptr is None else x_ptr.dtype.element_ty  # the dtype of the forward's result
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
    TYPE: tl.constexpr = OUT if g_ptr is None else x_ptr.dtype.element_ty  # the dtype of the forward's result
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
            # 64 bits: a row, or its length times its stride, may be more than 2^31 elements.
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
