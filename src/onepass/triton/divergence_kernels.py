"""The kernels of divergences: the terms of rows of two tensors, and the gradients of both tensors from the gradients of
the terms (csrc/core/divergence_problem.h).

Tiles, m and l are as in loss_kernels.py. Each element of a tile keeps one or two more sums. The sums are relative to
the maxima so far, and are corrected when these grow. So classes of negligible probability cost no precision, and the
moment is exactly 0 if x is y.

- moment   for the KL divergence: the sum of exp(s - m) ((s - m) - (r - m_r)), where m_r is the m of r. The divergence
           is moment / l + log l_r - log l
- total    for a cross-entropy: the sum of t, the target probabilities
- apart    for a cross-entropy: the sum of t (m - s). The cross-entropy is apart + total * log l

The difference between a score and the maximum of no scores may be infinite. It must not be multiplied by a sum of 0.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .loss_kernels import add_score, merge, rounded_product, rows_of, score_of, tile_of, weight_of
from .score import exponential, number, offset, round_to


@triton.jit
def share_of(y, weight, numbers, ACC: tl.constexpr):
    """The weighted, smoothed target probabilities of classes."""
    if len(numbers.on_all) > 0:
        y = y * number(numbers.on_class, ACC) + number(numbers.on_all, ACC)
    return y * weight


@triton.jit(do_not_specialize=["first", "rows"])
def forward_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    terms_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    steps,
    numbers,
    IS_KL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() else tl.float32
    HIGHEST: tl.constexpr = 1.7976931348623157e308 if TYPE.is_fp64() else 3.4028234663852886e38
    row, exists = rows_of(first + tl.program_id(0).to(tl.int64), rows, ROWS, MULTIPLE)
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    y_row = y_ptr + offset(row, row_sizes, row_strides[1])
    factor = number(numbers.factor, ACC)

    local = tl.arange(0, BLOCK)[None, :]
    m = tl.full((ROWS, BLOCK), -HIGHEST, ACC)
    l = tl.zeros((ROWS, BLOCK), ACC)
    m_r, l_r, moment = m, l, l
    total, apart = l, l
    for tile in range(tl.cdiv(n, BLOCK)):
        start = tl.cast(tile, tl.int64) * BLOCK
        column = start + local
        in_row = local < tl.minimum(n - start, BLOCK).to(tl.int32)
        x = tl.load(x_row + column * steps[0], mask=exists & in_row, other=0.0).to(ACC)
        y = tl.load(y_row + column * steps[1], mask=exists & in_row, other=0.0).to(ACC)
        s = tl.where(in_row, score_of(x, factor, numbers, TYPE)[0], -float("inf"))
        rise = s - m
        if IS_KL:
            r = tl.where(in_row, rounded_product(y, factor), -float("inf"))
            rise_r = r - m_r
            before = moment + l * (tl.maximum(tl.minimum(rise_r, HIGHEST), 0.0) - tl.maximum(rise, 0.0))
            own = tl.minimum(rise, 0.0) - tl.minimum(rise_r, 0.0)
            m, l, grows, e, _ = add_score(m, l, s, TYPE)
            m_r, l_r, _, _, _ = add_score(m_r, l_r, r, TYPE)
            smaller = tl.where(grows, before, own)
            moment = tl.where(grows, own, before) + tl.where(e == 0.0, 0.0, e * smaller)
        else:
            t = share_of(y, weight_of(weight_ptr, column, in_row, ACC), numbers, ACC)
            m, l, grows, _, _ = add_score(m, l, s, TYPE)
            further = tl.where(grows, total * tl.minimum(rise, HIGHEST), t * -rise)
            apart += tl.where(in_row, further, 0.0)
            total += tl.where(in_row, t, 0.0)

    own_m, own_l, own_m_r = m, l, m_r  # one for each element of the tile
    m, l, log_l, e = merge(own_m, own_l, TYPE)
    plane = tl.cast(rows, tl.int64)
    terms = terms_ptr + row
    tl.store(terms, m, mask=exists)
    tl.store(terms + plane, log_l, mask=exists)
    if IS_KL:
        m_r, l_r, log_l_r, _ = merge(own_m_r, l_r, TYPE)
        moment += own_l * ((own_m - m) - (own_m_r - m_r))
        moment = tl.sum(tl.where(own_l * e == 0.0, 0.0, e * moment), 1, keep_dims=True)
        tl.store(terms + 2 * plane, moment / l + (log_l_r - log_l), mask=exists)
        tl.store(terms + 3 * plane, m_r, mask=exists)
        tl.store(terms + 4 * plane, log_l_r, mask=exists)
    else:
        apart = tl.sum(apart + total * tl.minimum(m - own_m, HIGHEST), 1, keep_dims=True)
        total = tl.sum(total, 1, keep_dims=True)
        tl.store(terms + 2 * plane, apart + total * log_l, mask=exists)
        tl.store(terms + 3 * plane, total, mask=exists)


@triton.jit
def log_p_of(s, terms, plane, exists):
    """The log-probabilities of scores from the planes m and log l."""
    m = tl.load(terms, mask=exists, other=0.0)
    return (s - m) - tl.load(terms + plane, mask=exists, other=0.0)


@triton.jit(do_not_specialize=["first", "rows"])
def backward_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    terms_ptr,
    grads_ptr,
    dx_ptr,
    dy_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    steps,
    numbers,
    IS_KL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() else tl.float32
    row, exists, start, local, in_row = tile_of(first, rows, n, ROWS, BLOCK, MULTIPLE)
    column = start + local
    inside = exists & in_row
    plane = tl.cast(rows, tl.int64)
    terms = terms_ptr + row
    grads = grads_ptr + row
    factor = number(numbers.factor, ACC)
    g = tl.load(grads + 2 * plane, mask=exists, other=0.0)
    x = tl.load(x_ptr + offset(row, row_sizes, row_strides[0]) + column * steps[0], mask=inside, other=0.0).to(ACC)
    s, slope = score_of(x, factor, numbers, TYPE)
    log_p = log_p_of(s, terms, plane, exists)
    p = exponential(log_p, TYPE)
    if IS_KL or dx_ptr is not None:
        y_row = y_ptr + offset(row, row_sizes, row_strides[1])
        y = tl.load(y_row + column * steps[1], mask=inside, other=0.0).to(ACC)
    if IS_KL:
        log_q = log_p_of(rounded_product(y, factor), terms + 3 * plane, plane, exists)
        if dx_ptr is not None:
            divergence = tl.load(terms + 2 * plane, mask=exists, other=0.0)
            ds = tl.where(p == 0.0, 0.0, g * p * ((log_p - log_q) - divergence))
        if dy_ptr is not None:
            dy = factor * g * (exponential(log_q, TYPE) - p)
    else:
        weight = weight_of(weight_ptr, column, in_row, ACC)
        if dx_ptr is not None:
            of_lse = g * tl.load(terms + 3 * plane, mask=exists, other=0.0)
            of_lse += tl.load(grads + plane, mask=exists, other=0.0)
            ds = p * of_lse - g * share_of(y, weight, numbers, ACC)
        if dy_ptr is not None:
            dy = -log_p * g * weight
            if len(numbers.on_class) > 0:
                dy *= number(numbers.on_class, ACC)
    if dx_ptr is not None:
        dx = dx_ptr + offset(row, row_sizes, row_strides[2]) + column * steps[2]
        tl.store(dx, round_to(ds * slope * factor, TYPE), mask=inside)
    if dy_ptr is not None:
        to = dy_ptr + offset(row, row_sizes, row_strides[3]) + column * steps[3]
        tl.store(to, round_to(dy, TYPE), mask=inside)


# Products -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "rows"])
def product_kernel(
    x_ptr,
    y_ptr,
    sums_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    steps,
    numbers,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """The sum of x y over each row."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty.is_fp64() else tl.float32
    row, exists = rows_of(first + tl.program_id(0).to(tl.int64), rows, ROWS, MULTIPLE)
    x_row = x_ptr + offset(row, row_sizes, row_strides[0])
    y_row = y_ptr + offset(row, row_sizes, row_strides[1])
    local = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(tl.cdiv(n, BLOCK)):
        start = tl.cast(tile, tl.int64) * BLOCK
        column = start + local
        inside = exists & (local < tl.minimum(n - start, BLOCK).to(tl.int32))
        x = tl.load(x_row + column * steps[0], mask=inside, other=0.0).to(ACC)
        total += x * tl.load(y_row + column * steps[1], mask=inside, other=0.0).to(ACC)
    tl.store(sums_ptr + row, tl.sum(total, 1, keep_dims=True), mask=exists)


@triton.jit(do_not_specialize=["first", "rows"])
def product_gradient_kernel(
    x_ptr,
    y_ptr,
    sums_ptr,
    dx_ptr,
    first,
    rows,
    n,
    row_sizes,
    row_strides,
    steps,
    numbers,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """x (y - sum of the row)."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if TYPE.is_fp64() else tl.float32
    row, exists, start, local, in_row = tile_of(first, rows, n, ROWS, BLOCK, MULTIPLE)
    column = start + local
    inside = exists & in_row
    x = tl.load(x_ptr + offset(row, row_sizes, row_strides[0]) + column * steps[0], mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + offset(row, row_sizes, row_strides[1]) + column * steps[1], mask=inside, other=0.0).to(ACC)
    dx = x * (y - tl.load(sums_ptr + row, mask=exists, other=0.0))
    to = dx_ptr + offset(row, row_sizes, row_strides[2]) + column * steps[2]
    tl.store(to, round_to(dx, TYPE), mask=inside)
