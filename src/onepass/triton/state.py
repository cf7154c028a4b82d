"""The state of a row in Triton: the pair ``(m, l)``, how a tile is absorbed, how pairs merge, how a row is finished.

A row is summed up by its maximum ``m`` and its total ``l = sum(exp(x - m))``; the identity is ``(-inf, 0)``. Both
kernels (rows.py, online.py) are ``load -> absorb -> fold -> finish -> store`` in the words of this file.

Special values need no branch of their own:

- ``guard`` measures an all ``-inf`` part of a row from 0 instead of from ``-inf``, so that it stays ``(-inf, 0)`` and
  poisons nothing. A whole row of it ends as ``0 * (1 / 0) = NaN``, ``-inf - log(0) = NaN`` and ``log(0) = -inf``:
  what torch gives for softmax, log_softmax and logsumexp.
- A NaN is dropped by the maximum (``tl.max`` is IEEE maxNum) and kept by the sum, so it poisons its row through ``l``.
- ``+inf`` gives ``inf - inf = NaN`` in the softmax family; logsumexp and state measure it from 0 and get
  ``exp(inf) = inf``.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two terms (Cephes): the first has 9 significant bits, so j * LN2_HIGH is exact for every |j| <= 2^15.
LN2_HIGH = tl.constexpr(0.693359375)
# The second, times log2e.
LOG2_LOW = tl.constexpr(-2.12194440054690583e-4 * 1.4426950408889634)
# Adding 1.5 * 2^23 rounds a float32 to an integer and leaves it in the low bits; 127 more is the exponent's bias.
ROUND = tl.constexpr(12582912.0 + 127.0)
# The interpreter differs from every GPU in two roundings (3.6 to 3.9): it cuts float32 off to bfloat16 instead of
# rounding to nearest, ties to even; and it rounds a fused multiply-add twice, which leaves no residual of a division.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def narrow(x, OUT: tl.constexpr):
    """x rounded to the type of the result; whatever goes to a half type goes through float32, as in torch."""
    if x.dtype != OUT and OUT.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    if INTERPRETED and x.dtype == tl.float32 and OUT.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(OUT)


@triton.jit
def load(pointers, mask, OUT: tl.constexpr, NEGATE: tl.constexpr):
    """Values rounded to the type of the result, as torch's ``dtype=`` does, then widened to the accumulator's type.

    Lanes outside the mask read nothing and hold -inf.
    """
    outside = float("inf") if NEGATE else -float("inf")
    x = tl.load(pointers, mask=mask, other=outside)
    x = narrow(x, OUT).to(tl.float64 if OUT.is_fp64() else tl.float32)
    return -x if NEGATE else x


@triton.jit
def exponential(d, OUT: tl.constexpr):
    """exp(d), as exact as the type of the result needs; exp(-inf) = 0 and exp(inf) = inf exactly.

    ``tl.exp`` of a float32 is ``ex2.approx(d * log2e)``: the rounding of the product alone is |d| / 2 ulp (40 ulp at
    d = -80). That is nothing to a half type; a float32 result gets exp2(f) * 2^j with f = (d - j * ln 2) * log2e, ln 2
    in two terms, |f| <= 1/2, and one rounding of f where the hardware fuses the multiply-add. Below 2^-126.5 it is 0,
    because 2^-127 is built as 0.
    """
    if OUT.is_fp32():
        shifted = tl.minimum(tl.maximum(d * LOG2_E, -127.0), 128.0) + ROUND
        j = shifted - ROUND
        f = (d - j * LN2_HIGH) * LOG2_E - j * LOG2_LOW
        scale = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        return tl.exp2(f) * scale
    else:
        return tl.exp(d)


@triton.jit
def guard(m, FUNCTION: tl.constexpr):
    """The point that exponentials are measured from: the maximum, or 0 where that would give -inf - -inf."""
    if FUNCTION == "logsumexp" or FUNCTION == "state":
        return tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def two_sum(a, a_rest, b, b_rest):
    """a + b, with what the addition rounds off kept beside it (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, a_rest + b_rest + ((a - (total - part)) + (b - part))


@triton.jit
def add_up(e, AXIS: tl.constexpr, OUT: tl.constexpr):
    """The sum of a row. Its error is in every element of the row, so full-precision results keep what is rounded off: a
    plain sum over 2047 doubles was off by 3 ulp. Half types take a plain one. An infinite sum has no rest.
    """
    if OUT.primitive_bitwidth == 16:
        return tl.sum(e, AXIS)
    else:
        total, rest = tl.reduce((e, tl.zeros_like(e)), AXIS, two_sum)
        return tl.where(tl.abs(total) == float("inf"), total, total + rest)


@triton.jit
def absorb(m, total, rest, x, AXIS: tl.constexpr, FUNCTION: tl.constexpr, OUT: tl.constexpr):
    """Merge the tile x, reduced over AXIS, into the pairs (m, l): one exp an element, one rescale a pair.

    l is total + rest, rest what the additions have rounded off.
    """
    top = tl.maximum(m, tl.max(x, AXIS))
    base = guard(top, FUNCTION)
    tile = add_up(exponential(x - tl.expand_dims(base, AXIS), OUT), AXIS, OUT)
    scale = exponential(m - base, OUT)
    total, rest = two_sum(total * scale, rest * scale, tile, tl.zeros_like(tile))
    return top, total, rest


@triton.jit
def fold(m, total, rest, FUNCTION: tl.constexpr, OUT: tl.constexpr):
    """Merge a vector of pairs into one."""
    total = tl.where(total == float("inf"), total, total + rest)
    top = tl.max(m, 0)
    return top, add_up(total * exponential(m - guard(top, FUNCTION), OUT), 0, OUT)


@triton.jit
def store_reduced(out, plane, m, base, total, mask, FUNCTION: tl.constexpr, OUT: tl.constexpr):
    """What a function that reduces gives of rows. The state is a plane of maxima and, ``plane`` elements on, one of
    sums; the maximum of a row of NaN, which is what the hardware makes of it, is -inf.
    """
    if FUNCTION == "state":
        tl.store(out, narrow(tl.where(m == m, m, -float("inf")), OUT), mask=mask)
        tl.store(out + plane, narrow(total, OUT), mask=mask)
    else:
        tl.store(out, narrow(base + tl.log(total), OUT), mask=mask)


@triton.jit
def scale_of(total, FUNCTION: tl.constexpr, OUT: tl.constexpr):
    """What a row is finished with, in two terms: log l for log_softmax, else 1 / l, so that a row costs one division.

    l >= 1 because the row's maximum adds exp(0) = 1 exactly, so no probability exceeds 1. A plain 1 / l is
    div.full.f32, 2 ulp, and every element of the row would carry that error; the correctly rounded one still adds up
    to half an ulp to all of them, which the second term takes away again (float32 results only).
    """
    if FUNCTION == "log_softmax":
        scale = tl.log(total)
        return scale, scale
    elif total.dtype == tl.float32:
        one = tl.full(total.shape, 1.0, tl.float32)
        scale = tl.div_rn(one, total)
        if OUT.is_fp32() and not INTERPRETED:
            return scale, tl.fma(-total, scale, one) * scale
        else:
            return scale, tl.zeros(total.shape, tl.float32)
    else:
        return total, total  # doubles are divided: one rounding less


@triton.jit
def finish(d, e, scale, rest, FUNCTION: tl.constexpr, OUT: tl.constexpr):
    """The results of elements at distance d from the base, with e = exponential(d)."""
    if FUNCTION == "log_softmax":
        return d - scale
    elif OUT.is_fp32():
        return tl.fma(e, scale, e * rest)
    elif OUT.is_fp64():
        return e / scale
    else:
        return e * scale
