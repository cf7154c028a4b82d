"""Scores, what a kernel applies to every element that it reads; and the arithmetic that all kernels share."""

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
def round_to(x, OUT: tl.constexpr):
    """x rounded to the dtype OUT; a double becomes a half type by way of float32, as in torch."""
    if x.dtype != OUT and OUT.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    if INTERPRETED and x.dtype == tl.float32 and OUT.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(OUT)


@triton.jit
def exponential(d, OUT: tl.constexpr):
    """exp(d), as exact as the dtype of the result needs; exp(-inf) = 0 and exp(inf) = inf exactly.

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
def two_sum(a, a_low, b, b_low):
    """a + b in two terms: the rounded sum, and what the additions rounded off (Knuth's TwoSum)."""
    high = a + b
    part = high - a
    return high, a_low + b_low + ((a - (high - part)) + (b - part))


@triton.jit
def total(high, low):
    """A sum of two terms as one number. An infinite sum has no second term."""
    return tl.where(tl.abs(high) == float("inf"), high, high + low)


@triton.jit
def add_up(e, AXIS: tl.constexpr, OUT: tl.constexpr):
    """The sum over an axis. Its error is in every element of a row, so results of full precision keep what is rounded
    off: a plain sum over 2047 doubles was off by 3 ulp. Half types take a plain sum.
    """
    if OUT.primitive_bitwidth == 16:
        return tl.sum(e, AXIS, keep_dims=True)
    else:
        high, low = tl.reduce((e, tl.zeros_like(e)), AXIS, two_sum, keep_dims=True)
        return total(high, low)


@triton.jit
def base_of(m, REDUCES: tl.constexpr):
    """The point that exponentials are measured from: the maximum, or 0 where that would give inf - inf."""
    if REDUCES:
        return tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        return tl.where(m == -float("inf"), 0.0, m)


# Scores ---------------------------------------------------------------------------------------------------------------
# The score of an element, and likewise the gradient of the element from that of its score. `SCORE(-inf)` is the element
# whose score is -inf.


@triton.jit
def identity(x):
    return x


@triton.jit
def negate(x):
    return -x


SCORES = {"softmin": negate}  # of the other functions: identity
