"""Scores: how a kernel transforms every element that it reads (its prologue). And the arithmetic that kernels share."""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The interpreter (3.6 to 3.9) differs from every GPU in two roundings. It truncates float32 to bfloat16 instead of
# rounding to nearest even. It rounds a fused multiply-add twice, so the residual of a division cannot be computed.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, OUT: tl.constexpr):
    """x rounded to the dtype OUT. A double is converted to a half type through float32, as in torch."""
    if x.dtype != OUT and OUT.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    if INTERPRETED and x.dtype == tl.float32 and OUT.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(OUT)


@triton.jit
def exponential(d, OUT: tl.constexpr):
    """exp(d), as exact as the dtype of the result needs. exp(-inf) = 0 and exp(inf) = inf exactly.

    ``tl.exp`` of a float32 is ``ex2.approx(d * log2e)``: the rounding of the product alone is |d| / 2 ulp (40 ulp at
    d = -80). A half type does not need more. A float32 result is exp2(f) * 2^j with f = (d - j * ln 2) * log2e, where
    ln 2 is in two terms, |f| <= 1/2, and f is rounded once if the hardware fuses the multiply-add. Below 2^-126.5 it is
    0, because 2^-127 is built as 0.
    """
    # Constants are local, because Triton compares every global constant with its old value at each launch.
    LOG2_E: tl.constexpr = 1.4426950408889634
    # ln 2 in two terms (Cephes): the first has 9 significant bits, so j * LN2_HIGH is exact for every |j| <= 2^15.
    LN2_HIGH: tl.constexpr = 0.693359375
    LOG2_LOW: tl.constexpr = -2.12194440054690583e-4 * 1.4426950408889634  # the second term, times log2e
    # Adding 1.5 * 2^23 rounds a float32 to an integer, which is then in the low bits. 127 is the exponent's bias.
    ROUND: tl.constexpr = 12582912.0 + 127.0
    if OUT.is_fp32():
        shifted = tl.minimum(tl.maximum(d * LOG2_E, -127.0), 128.0) + ROUND
        j = shifted - ROUND
        f = (d - j * LN2_HIGH) * LOG2_E - j * LOG2_LOW
        scale = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        return tl.exp2(f) * scale
    else:
        return tl.exp(d)


@triton.jit
def two_sum(a, a_low, b, b_low):
    """a + b in two terms: the rounded sum, and its rounding error (Knuth's TwoSum)."""
    high = a + b
    part = high - a
    return high, a_low + b_low + ((a - (high - part)) + (b - part))


@triton.jit
def total(high, low):
    """A sum of two terms as one number. If the sum is infinite the second term is ignored."""
    return tl.where(tl.abs(high) == float("inf"), high, high + low)


@triton.jit
def add_up(e, AXIS: tl.constexpr, OUT: tl.constexpr):
    """The sum over an axis. Its error affects every element of a row, so results of full precision compensate rounding
    errors: a plain sum over 2047 doubles was off by 3 ulp. Half types use a plain sum.
    """
    if OUT.primitive_bitwidth == 16:
        return tl.sum(e, AXIS, keep_dims=True)
    else:
        high, low = tl.reduce((e, tl.zeros_like(e)), AXIS, two_sum, keep_dims=True)
        return total(high, low)


@triton.jit
def base_of(m, REDUCES: tl.constexpr):
    """The number to subtract before exponentials: the maximum, or 0 if the maximum would give inf - inf."""
    if REDUCES:
        return tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def tanh(v, OUT: tl.constexpr):
    """tanh(v). For half results an absolute error of 1e-7 is enough, which exp alone gives. Other results use Cephes'
    approximations near 0.
    """
    if OUT.primitive_bitwidth == 16:
        return 1.0 - 2.0 / (tl.exp(2.0 * v) + 1.0)
    else:
        z = v * v
        if v.dtype.is_fp64():
            p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
            q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
            near = p / q
        else:
            near = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
            near = (near * z + 1.33314422036e-1) * z - 3.33332819422e-1
        return tl.where(tl.abs(v) < 0.625, near * z * v + v, 1.0 - 2.0 / (exponential(2.0 * v, v.dtype) + 1.0))


@triton.jit
def offset(index, sizes, strides):
    """The offset of ``index`` in memory: a sum over levels of (size, stride), innermost first. A call has as many
    levels as its strides need, so that no tensor is copied first. The size of the outermost level is not needed."""
    at = tl.zeros_like(index)
    for level in tl.static_range(len(sizes)):
        at += index % sizes[level] * strides[level]
        index = index // sizes[level]
    return at + index * strides[len(sizes)]


# Scores of an element alone -------------------------------------------------------------------------------------------
# The score of an element; also the gradient of the element from the gradient of its score. `SCORE(-inf)` is the element
# whose score is -inf.


@triton.jit
def identity(x):
    return x


@triton.jit
def negate(x):
    return -x


SCORES = {"softmin": negate}  # all other functions: identity


# Scores from other tensors and from positions -------------------------------------------------------------------------
# `score` is a scored.Score, or () if a score depends on the element alone. A field that a call does not have is (), and
# the kernel is compiled without it. (Not None: Triton 3.6 does not support a tuple with a None.)


class Row(NamedTuple):
    """The operands that the scores of a row share: columns with an entry per row of a tile, or 0 if there is none."""

    exists: Any
    factor: Any
    distance: Any  # the distance k - q of the first element
    bias: Any  # the address of the row in the bias; likewise below
    alibi: Any
    mask: Any
    input: Any


@triton.jit
def number(value, ACC: tl.constexpr):
    """A number of a score. Triton passes a float as float32, so kernels of doubles get the bits of the double."""
    if ACC.is_fp64():
        return tl.cast(value[0], tl.int64).to(tl.float64, bitcast=True)
    else:
        return value[0]


@triton.jit
def integer(value):
    """An integer of a score, which is passed multiplied by 16."""
    return (tl.cast(value[0], tl.int64) >> 4).to(tl.int32)


@triton.jit
def row_start(operand, row, row_sizes):
    """The addresses of rows in a side tensor; 0 if there is no such tensor."""
    if len(operand) == 0:
        return 0
    else:
        return operand.data + offset(row, row_sizes, operand.row_strides)


@triton.jit
def load_beside(start, operand, column, mask, sizes, exists, other):
    """Elements of a side tensor, or one element per row if the tensor is constant within a row."""
    if len(operand.strides) == 0:
        return tl.load(start, mask=exists, other=other)
    else:
        return tl.load(start + offset(column, sizes, operand.strides), mask=mask, other=other)


@triton.jit
def row_of(score, row, exists, row_sizes, ACC: tl.constexpr):
    """The `Row` of rows."""
    factor = number(score.factor, ACC)
    if len(score.scale) > 0:
        factor = factor * tl.load(row_start(score.scale, row, row_sizes), mask=exists, other=0.0).to(ACC)
    distance = 0
    if len(score.distance) > 0:
        distance = offset(row, row_sizes, score.distance.row_strides)
    bias, alibi = row_start(score.bias, row, row_sizes), row_start(score.alibi, row, row_sizes)
    mask, input = row_start(score.mask, row, row_sizes), row_start(score.input, row, row_sizes)
    return Row(exists, factor, distance, bias, alibi, mask, input)


@triton.jit
def distance_of(score, own, column, sizes):
    """The distance k - q of the key and the query of elements."""
    return (own.distance + offset(column, sizes, score.distance.strides)).to(tl.int32)


@triton.jit
def takes_part(score, own, column, inside, sizes):
    """Two masks: the elements in the window of their row, and the elements to read, which are the vectors that overlap
    the window."""
    # Of so many neighbouring elements all are read or none, so that loads may be of 16 bytes for every type.
    VECTOR: tl.constexpr = 16
    seen = inside
    read = inside
    if len(score) > 0 and len(score.distance) > 0:
        distance = distance_of(score, own, column, sizes)
        near = distance
        reach = 0
        if len(sizes) == 0:
            near = distance_of(score, own, column // VECTOR * VECTOR + VECTOR // 2, sizes)
            reach = VECTOR // 2
        if len(score.least) > 0:
            seen &= distance >= integer(score.least)
            read &= near + reach >= integer(score.least)
        if len(score.most) > 0:
            seen &= distance <= integer(score.most)
            read &= near - reach <= integer(score.most)
    return seen, read


@triton.jit
def chunks_in_window(score, row, chunks, row_sizes, sizes, SIZE: tl.constexpr):
    """The first chunk of a row that its window reaches, and the end of these chunks. All chunks if the elements of a
    row are not consecutive keys."""
    first = tl.cast(0, tl.int64)
    end = tl.cast(chunks, tl.int64)
    if len(score.distance) > 0 and len(sizes) == 0:
        distance = offset(row, row_sizes, score.distance.row_strides)
        has_keys = tl.cast(score.distance.strides[0], tl.int64) == 1
        if len(score.least) > 0:
            first = tl.where(has_keys, tl.maximum(integer(score.least) - distance, 0) // SIZE, first)
        if len(score.most) > 0:
            columns = tl.maximum(integer(score.most) - distance + 1, 0)
            end = tl.where(has_keys, tl.minimum(tl.cdiv(columns, SIZE), end), end)
    return first, end


@triton.jit
def scored(x, score, own, column, seen, read, sizes, TYPE: tl.constexpr):
    """The scores of elements, -inf for masked-out elements."""
    s = x * own.factor
    if len(score.softcap) > 0:
        softcap = number(score.softcap, s.dtype)
        s = softcap * tanh(s / softcap, TYPE)
    if len(score.bias) > 0:
        s += load_beside(own.bias, score.bias, column, read, sizes, own.exists, 0.0).to(s.dtype)
    if len(score.alibi) > 0:
        distance = distance_of(score, own, column, sizes) - integer(score.offset)
        slope = load_beside(own.alibi, score.alibi, column, read, sizes, own.exists, 0.0).to(s.dtype)
        s -= slope * tl.abs(distance).to(s.dtype)
    if len(score.mask) > 0:
        seen &= load_beside(own.mask, score.mask, column, read, sizes, own.exists, False)
    return tl.where(seen, s, -float("inf"))


@triton.jit
def finish(m, l, score, own, row, lse_ptr, row_sizes, row_strides, REDUCES: tl.constexpr, TYPE: tl.constexpr):
    """The states of rows with their sinks. Writes their logsumexp to ``lse_ptr`` if that is given. With ``empty``, a
    row without a score above -inf gets a state that makes its softmax 0."""
    if len(score.sink) > 0:
        sink = number(score.sink, m.dtype)
    if len(score.sinks) > 0:
        sink = tl.load(row_start(score.sinks, row, row_sizes), mask=own.exists, other=0.0).to(m.dtype)
    if len(score.sink) > 0 or len(score.sinks) > 0:
        top = tl.maximum(m, sink)
        base = base_of(top, REDUCES)
        l = l * exponential(m - base, TYPE) + exponential(sink - base, TYPE)
        m = top
    if lse_ptr is not None:
        lse = base_of(m, True) + tl.log(l)
        tl.store(lse_ptr + offset(row, row_sizes, row_strides[3]), lse, mask=own.exists)
    if len(score.empty) > 0:
        nothing = (m == -float("inf")) & (l == 0.0)
        m = tl.where(nothing, 0.0, m)
        l = tl.where(nothing, 1.0, l)
    return m, l


@triton.jit
def scored_gradient(grad, y, m, sums, score, own, column, seen, read, sizes, TYPE: tl.constexpr, OUT: tl.constexpr):
    """The gradients of elements from the gradients of their scores, or the latter with ``of_scores``. 0 for masked-out
    elements.

    ``y``: the results of the forward, or the scores of logsumexp. ``m``: -inf in a row without a score above -inf.
    ``sums``: the sums of the rows. A masked-out softmax is 0 anyway, so its mask is read only in rows whose sum is not
    finite.
    """
    if len(score.mask) > 0:
        if len(score.whole) == 0:
            finite = tl.abs(sums) < float("inf")
            seen &= (y != 0.0) | ~finite
            read_mask = read & ~finite
            exists = own.exists & ~finite
        else:
            read_mask = read
            exists = own.exists
        seen &= load_beside(own.mask, score.mask, column, read_mask, sizes, exists, True)
    if len(score.empty) > 0:
        seen &= m != -float("inf")
    if len(score.softcap) > 0 and len(score.of_scores) == 0:
        x = load_beside(own.input, score.input, column, read, sizes, own.exists, 0.0)
        s = round_to(x, TYPE).to(grad.dtype) * own.factor
        t = tanh(s / number(score.softcap, grad.dtype), OUT)
        grad = grad * (1.0 - t * t)
    if len(score.of_scores) == 0:
        grad = grad * own.factor
    return tl.where(seen, grad, 0.0)
