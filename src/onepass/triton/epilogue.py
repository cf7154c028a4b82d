"""Epilogues, what a kernel does with the state of a row once it has it. A kernel takes them as compile-time arguments.

A function that writes whole rows has two: its scale, once per row, from the sum ``l``; and the result of an element at
the distance ``d`` from the row's base, with ``e = exponential(d)``. The scale is in two terms. A reduction has one,
which stores the result of a row. A gradient has the term that an element adds to the number of its row (logsumexp reads
that number instead), and the result of an element.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .score import INTERPRETED, exponential, round_to


@triton.jit
def softmax_scale(l, OUT: tl.constexpr):  # noqa: E741
    """1 / l, so that a row costs one division. Doubles are divided by l instead, which is one rounding less.

    l >= 1 because the row's maximum adds exp(0) = 1 exactly, so no probability exceeds 1. A plain 1 / l is
    div.full.f32, 2 ulp, and every element of the row would carry that error; the correctly rounded one still adds up
    to half an ulp to all of them, which the second term takes away again (float32 results only).
    """
    if l.dtype == tl.float32:
        one = tl.full(l.shape, 1.0, tl.float32)
        scale = tl.div_rn(one, l)
        if OUT.is_fp32() and not INTERPRETED:
            return scale, tl.fma(-l, scale, one) * scale
        else:
            return scale, tl.zeros(l.shape, tl.float32)
    else:
        return l, l


@triton.jit
def softmax(d, e, scale, scale_low, OUT: tl.constexpr):
    if OUT.is_fp32():
        return tl.fma(e, scale, e * scale_low)
    elif OUT.is_fp64():
        return e / scale
    else:
        return e * scale


@triton.jit
def log_softmax_scale(l, OUT: tl.constexpr):  # noqa: E741
    scale = tl.log(l)
    return scale, scale


@triton.jit
def log_softmax(d, e, scale, scale_low, OUT: tl.constexpr):
    return d - scale


@triton.jit
def store_logsumexp(out, plane, m, base, l, mask, OUT: tl.constexpr):  # noqa: E741
    tl.store(out, round_to(base + tl.log(l), OUT), mask=mask)


@triton.jit
def store_state(out, plane, m, base, l, mask, OUT: tl.constexpr):  # noqa: E741
    """The maxima and, ``plane`` elements on, the sums. The maximum of a row of NaN, which is what the hardware makes of
    it, is -inf."""
    tl.store(out, round_to(tl.where(m == m, m, -float("inf")), OUT), mask=mask)
    tl.store(out + plane, round_to(l, OUT), mask=mask)


# Gradients ------------------------------------------------------------------------------------------------------------


@triton.jit
def product(y, g):
    return g * y


@triton.jit
def result_gradient(y, g):
    return g


@triton.jit
def softmax_gradient(y, g, s):
    return y * (g - s)


@triton.jit
def softmin_gradient(y, g, s):
    return y * (s - g)


@triton.jit
def log_softmax_gradient(y, g, s):
    return g - exponential(y, y.dtype) * s


@triton.jit
def logsumexp_gradient(y, g, s):
    return g * exponential(y - s, y.dtype)
