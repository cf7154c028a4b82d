"""The kernels of losses: the terms of rows, and the gradient of the input from the gradients of the terms
(csrc/core/loss_problem.h).

A tile is ROWS rows by BLOCK classes; either may be adjacent in memory. In the forward a program walks its rows tile by
tile. Each element of the tile keeps its own sums, which are merged once, after the last tile, so that the loop has no
communication between threads. A score takes one exponential: if it is at most the maximum m so far, it adds exp(s - m)
to the sum, otherwise the sums so far are multiplied by exp(m - s). In the backward a program has one tile.

- m        the maximum
- l        the sum of exp(s - m)
- moment   for the entropy, the sum of exp(s - m) (s - m): the entropy is log l - moment / l
- lean     for the spread, the sum of weight (s - r), r the score of class 0: the spread is W ((m - r) + log l) - lean

The maximum of no scores is the lowest finite number, so that no difference is inf - inf in rows with -inf. r is 0 if
class 0 is masked out by a large number. A product with an exponential of 0 counts as 0, even if the other factor is
infinite.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .score import exponential, number, offset, round_to, tanh


@triton.jit
def rows_of(program, rows, ROWS: tl.constexpr, MULTIPLE: tl.constexpr):
    """The rows of a program, and whether they exist. The comparison tells Triton that rows exist in groups of MULTIPLE,
    so that it may use vector loads."""
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    return row, row // MULTIPLE < rows // MULTIPLE


@triton.jit
def tile_of(first, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr):
    """The tile of a program in the backward: (rows, whether they exist, the first class, the column of each element in
    the tile, whether that column is in the row)."""
    program = first + tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(n, BLOCK)
    row, exists = rows_of(program // tiles, rows, ROWS, MULTIPLE)
    start = program % tiles * BLOCK
    local = tl.arange(0, BLOCK)[None, :]
    return row, exists, start, local, local < tl.minimum(n - start, BLOCK).to(tl.int32)


@triton.jit
def rounded_product(a, b):
    """A product that is rounded and not fused with a following addition. So equal numbers have equal scores, and equal
    sums of scores, in all places of the code."""
    return tl.fma(a, b, 0.0)


@triton.jit
def add_score(m, l, s, TYPE: tl.constexpr):
    """Adds a score to each m and l. Returns (m, l, whether the score is the new maximum, e, log e) with e = exp(-|s -
    m|). A new maximum multiplies the old sum by e; any other score adds e to it. m drops a NaN, l keeps it."""
    d = -tl.abs(s - m)
    e = exponential(d, TYPE)
    grows = s > m
    return tl.maximum(m, s), tl.where(grows, rounded_product(l, e) + 1.0, l + e), grows, e, d


@triton.jit
def merge(m, l, TYPE: tl.constexpr):
    """(m, l, log l) of rows, from m and l of each element of a tile, and the factor by which the element's sums are to
    be multiplied."""
    top = tl.max(m, 1, keep_dims=True)
    e = exponential(m - top, TYPE)
    l = tl.sum(rounded_product(l, e), 1, keep_dims=True)
    m = tl.where(l == 0.0, -float("inf"), top)
    log_l = tl.where(tl.abs(m) == float("inf"), float("nan"), tl.log(l))  # torch gives NaN for the whole row
    return m, l, log_l, e


@triton.jit
def factor_of(scale_ptr, row, exists, numbers, ACC: tl.constexpr):
    factor = number(numbers.factor, ACC)
    if scale_ptr is not None:
        factor = factor * tl.load(scale_ptr + row, mask=exists, other=0.0)
    return factor


@triton.jit
def score_of(x, factor, numbers, TYPE: tl.constexpr):
    """The scores of elements, and their derivatives in x * factor."""
    s = rounded_product(x, factor)
    slope = 1.0
    if len(numbers.softcap) > 0:
        softcap = number(numbers.softcap, s.dtype)
        t = tanh(s / softcap, TYPE)
        s = softcap * t
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def weight_of(weight_ptr, place, exists, ACC: tl.constexpr):
    if weight_ptr is None:
        return tl.full((), 1.0, ACC)
    else:
        return tl.load(weight_ptr + place, mask=exists, other=0.0)


@triton.jit
def sum_of_weights(weight_sum_ptr, n, ACC: tl.constexpr):
    if weight_sum_ptr is None:
        return tl.cast(n, ACC)
    else:
        return tl.load(weight_sum_ptr)


@triton.jit
def place_of(y, start, BLOCK: tl.constexpr):
    """The columns of classes y in a tile, as int32; -1 for a class that is not in the tile."""
    place = y - start
    return tl.where((place >= 0) & (place < BLOCK), place, -1).to(tl.int32)


@triton.jit(do_not_specialize=["first", "rows", "ignore_index"])
def forward_kernel(
    x_ptr,
    result_ptr,
    terms_ptr,
    index_ptr,
    weight_ptr,
    weight_sum_ptr,
    scale_ptr,
    first,
    rows,
    n,
    picks,
    ignore_index,
    row_sizes,
    row_strides,
    steps,
    numbers,
    IS_CROSS: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if TYPE.is_fp64() else -3.4028234663852886e38
    row, exists = rows_of(first + tl.program_id(0).to(tl.int64), rows, ROWS, MULTIPLE)
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    factor = factor_of(scale_ptr, row, exists, numbers, ACC)
    if SPREAD:
        r = score_of(tl.load(x_row, mask=exists, other=0.0).to(ACC), factor, numbers, TYPE)[0]
        r = tl.where(tl.abs(r) < 3e4, r, 0.0)

    local = tl.arange(0, BLOCK)[None, :]
    m = tl.full((ROWS, BLOCK), LOWEST, ACC)
    l = tl.zeros((ROWS, BLOCK), ACC)
    moment = tl.zeros((ROWS, BLOCK), ACC)
    lean = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(tl.cdiv(n, BLOCK)):
        start = tl.cast(tile, tl.int64) * BLOCK
        column = start + local
        in_row = local < tl.minimum(n - start, BLOCK).to(tl.int32)
        x = tl.load(x_row + column * steps[0], mask=exists & in_row, other=0.0).to(ACC)
        s = score_of(x, factor, numbers, TYPE)[0]
        if SPREAD:
            lean += tl.where(in_row, weight_of(weight_ptr, column, in_row, ACC) * (s - r), 0.0)
        s = tl.where(in_row, s, -float("inf"))
        before = l
        m, l, grows, e, d = add_score(m, l, s, TYPE)
        if ENTROPY:
            part = tl.where(e == 0.0, 0.0, e * tl.where(grows, moment + before * d, d))
            moment = tl.where(grows, part, moment + part)

    own_m, own_l = m, l  # one for each element of the tile
    m, l, log_l, e = merge(own_m, own_l, TYPE)
    if ENTROPY:
        moment = tl.sum(tl.where(e == 0.0, 0.0, e * (moment + own_l * (own_m - m))), 1, keep_dims=True)

    plane = tl.cast(rows, tl.int64)
    terms = terms_ptr + row
    tl.store(terms, m, mask=exists)
    tl.store(terms + plane, log_l, mask=exists)
    terms += 2 * plane
    if SPREAD:
        weights = sum_of_weights(weight_sum_ptr, n, ACC)
        spread = weights * ((m - r) + log_l) - tl.sum(lean, 1, keep_dims=True)
        if not IS_CROSS:
            tl.store(terms, spread, mask=exists)
            terms += plane
    if ENTROPY:
        tl.store(terms, log_l - moment / l, mask=exists)
        terms += plane
    if index_ptr is not None:
        for k in range(picks):
            y = tl.load(index_ptr + row * picks + k, mask=exists, other=-1)
            valid = (y >= 0) & (y < n)
            x = tl.load(x_row + y * steps[0], mask=valid, other=0.0).to(ACC)
            s = score_of(x, factor, numbers, TYPE)[0]
            loss = tl.where(valid, log_l - (s - m), float("nan"))
            if IS_CROSS:
                loss *= number(numbers.on_class, ACC) * weight_of(weight_ptr, y, valid, ACC)
                if SPREAD:
                    loss += number(numbers.on_all, ACC) * spread
                if len(numbers.z_loss) > 0:
                    loss += number(numbers.z_loss, ACC) * (m + log_l) * (m + log_l)
                loss = tl.where(y == ignore_index, 0.0, loss)
                if result_ptr is not None:
                    tl.store(result_ptr + row, round_to(loss, result_ptr.dtype.element_ty), mask=exists)
            tl.store(terms + k * plane, loss, mask=exists)


@triton.jit(do_not_specialize=["first", "rows", "ignore_index"])
def backward_kernel(
    x_ptr,
    dx_ptr,
    terms_ptr,
    index_ptr,
    weight_ptr,
    weight_sum_ptr,
    scale_ptr,
    grads_ptr,
    total_ptr,
    grad_lse_ptr,
    first,
    rows,
    n,
    picks,
    ignore_index,
    row_sizes,
    row_strides,
    steps,
    numbers,
    IS_CROSS: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
    GRADS_PER_ROW: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    OUT: tl.constexpr = dx_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() else tl.float32
    row, exists, start, local, in_row = tile_of(first, rows, n, ROWS, BLOCK, MULTIPLE)
    column = start + local
    inside = exists & in_row
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    factor = factor_of(scale_ptr, row, exists, numbers, ACC)
    x = tl.load(x_row + column * steps[0], mask=inside, other=0.0).to(ACC)
    s, slope = score_of(x, factor, numbers, TYPE)

    plane = tl.cast(rows, tl.int64)
    m = tl.load(terms_ptr + row, mask=exists, other=0.0)
    log_l = tl.load(terms_ptr + plane + row, mask=exists, other=0.0)
    log_p = (s - m) - log_l
    p = exponential(log_p, OUT)
    if SPREAD:
        weight = weight_of(weight_ptr, column, in_row, ACC)
        weights = sum_of_weights(weight_sum_ptr, n, ACC)
    if IS_CROSS:
        g = tl.load(grads_ptr + (row if GRADS_PER_ROW else row * 0), mask=exists, other=0.0).to(ACC)
        if total_ptr is not None:
            g = g / tl.load(total_ptr)
        y = tl.load(index_ptr + row, mask=exists, other=-1)
        own = weight_of(weight_ptr, y, (y >= 0) & (y < n), ACC) * number(numbers.on_class, ACC)
        of_lse = own
        if SPREAD:
            of_lse += number(numbers.on_all, ACC) * weights
        if len(numbers.z_loss) > 0:
            of_lse += 2.0 * number(numbers.z_loss, ACC) * (m + log_l)
        of_lse = g * of_lse
        if grad_lse_ptr is not None:
            of_lse += tl.load(grad_lse_ptr + row, mask=exists, other=0.0)
        ds = p * of_lse - tl.where(local == place_of(y, start, BLOCK), g * own, 0.0)
        if SPREAD:
            ds -= g * number(numbers.on_all, ACC) * weight
        ds = tl.where(y == ignore_index, 0.0, ds)
    else:
        grads = grads_ptr + plane + row
        of_lse = tl.load(grads, mask=exists, other=0.0)
        grads += plane
        of_class = tl.zeros((ROWS, BLOCK), ACC)
        if SPREAD:
            g = tl.load(grads, mask=exists, other=0.0)
            of_lse += g * weights
            of_class += g * weight
            grads += plane
        if ENTROPY:
            entropy = tl.load(terms_ptr + (3 if SPREAD else 2) * plane + row, mask=exists, other=0.0)
            g = tl.load(grads, mask=exists, other=0.0)
            of_class += tl.where(p == 0.0, 0.0, g * p * (log_p + entropy))
            grads += plane
        if index_ptr is not None:
            for k in range(picks):
                g = tl.load(grads + k * plane, mask=exists, other=0.0)
                y = tl.load(index_ptr + row * picks + k, mask=exists, other=-1)
                of_lse += g
                of_class += tl.where(local == place_of(y, start, BLOCK), g, 0.0)
        ds = p * of_lse - of_class

    dx = dx_ptr + offset(row, row_sizes, row_strides[1]) + column * steps[1]
    tl.store(dx, round_to(ds * slope * factor, OUT), mask=inside)
