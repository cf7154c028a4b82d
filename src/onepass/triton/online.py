"""The online tier: a row wider than a program can hold is streamed in chunks, twice (once for logsumexp and state).

A chunk is DEPTH by LANES elements, each lane (a column of the chunk) keeps its own pair (m, l). With LANES as many
elements as the threads read at once, a lane lives in one thread: the loop merges without a word between threads, with
one exp an element and one more for every DEPTH of them; the lanes are folded once a row. The second pass walks
the chunks backwards, since the last ones read are the ones still in the cache.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .state import absorb, exponential, finish, fold, guard, load, narrow, scale_of, store_reduced


# The count of chunks is no reason for another variant of the kernel (Triton specialises on 1 and on multiples of 16).
@triton.jit(do_not_specialize=["chunks"])
def online_kernel(
    x_ptr,
    out_ptr,
    n,
    chunks,
    x_row_stride,
    x_stride,
    out_row_stride,
    out_stride,
    FUNCTION: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if OUT.is_fp64() else tl.float32
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    out_row = out_ptr + row * out_row_stride
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    m = tl.full((LANES,), -float("inf"), ACC)
    total = tl.zeros((LANES,), ACC)
    rest = tl.zeros((LANES,), ACC)
    for chunk in range(chunks):
        # 64 bits: a row may be longer than 2^31 elements, or its stride may make it so.
        column = tl.cast(chunk, tl.int64) * (DEPTH * LANES) + tile
        x = load(x_row + column * x_stride, column < n, OUT, FUNCTION == "softmin")
        m, total, rest = absorb(m, total, rest, x, 0, FUNCTION, OUT)
    m, total = fold(m, total, rest, FUNCTION, OUT)
    base = guard(m, FUNCTION)

    if FUNCTION == "logsumexp" or FUNCTION == "state":
        store_reduced(out_row, out_stride, m, base, total, None, FUNCTION, OUT)
    else:
        scale, rest = scale_of(total, FUNCTION, OUT)
        for chunk in range(chunks):
            column = tl.cast(chunks - 1 - chunk, tl.int64) * (DEPTH * LANES) + tile
            d = load(x_row + column * x_stride, column < n, OUT, FUNCTION == "softmin") - base
            y = finish(d, exponential(d, OUT), scale, rest, FUNCTION, OUT)
            tl.store(out_row + column * out_stride, narrow(y, OUT), mask=column < n, cache_modifier=".cs")
