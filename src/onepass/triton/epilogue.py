"""Epilogues: how a kernel computes results from the state of a row. Also the table of the policies of each function.

``ROW`` computes the numbers of a row from its state, once per row. ``EPILOGUE`` computes the result of an element from
these numbers. A reduction has no ``EPILOGUE``: its results are the numbers.

In a gradient ``y`` is the tensor that the forward saved, ``g`` is the upstream gradient, and ``TERM`` computes the term
of an element in the sum of its row. The result of an element is the gradient of its score:

    softmax      y * (g - s)        s = sum(g * y)
    log_softmax  g - exp(y) * s     s = sum(g)
    logsumexp    g * exp(y - s)     y is the score, s the saved result

Special values need no branches in these expressions.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .score import INTERPRETED, base_of, exponential, identity


@triton.jit
def softmax_row(m, l, TYPE: tl.constexpr):
    """The base and 1 / l, so that a row costs one division. Doubles are divided by l instead, which saves a rounding.

    l >= 1 because the row's maximum adds exp(0) = 1 exactly, so no probability exceeds 1. A plain 1 / l is
    div.full.f32, with an error of 2 ulp in every element of the row. So the division is correctly rounded. Its error of
    up to half an ulp is removed by a second term (for float32 results only).
    """
    base = base_of(m, False)
    if TYPE.is_fp64():
        return base, l, l
    else:
        one = tl.full(l.shape, 1.0, tl.float32)
        scale = tl.div_rn(one, l)
        if TYPE.is_fp32() and not INTERPRETED:
            return base, scale, tl.fma(-l, scale, one) * scale
        else:
            return base, scale, tl.zeros(l.shape, tl.float32)


@triton.jit
def softmax(x, g, row, TYPE: tl.constexpr):
    base, scale, scale_low = row
    e = exponential(x - base, TYPE)
    if TYPE.is_fp32():
        return tl.fma(e, scale, e * scale_low)
    elif TYPE.is_fp64():
        return e / scale
    else:
        return e * scale


@triton.jit
def log_softmax_row(m, l, TYPE: tl.constexpr):
    return base_of(m, False), tl.log(l)


@triton.jit
def log_softmax(x, g, row, TYPE: tl.constexpr):
    return x - row[0] - row[1]


@triton.jit
def logsumexp_row(m, l, TYPE: tl.constexpr):
    return (base_of(m, True) + tl.log(l),)


@triton.jit
def state_row(m, l, TYPE: tl.constexpr):
    return m, l


# Gradients ------------------------------------------------------------------------------------------------------------


@triton.jit
def product(y, g):
    return g * y


@triton.jit
def result_gradient(y, g):
    return g


@triton.jit
def sum_row(m, l, TYPE: tl.constexpr):
    return (l,)


@triton.jit
def softmax_gradient(y, g, row, TYPE: tl.constexpr):
    return y * (g - row[0])


@triton.jit
def log_softmax_gradient(y, g, row, TYPE: tl.constexpr):
    return g - exponential(y, y.dtype) * row[0]


@triton.jit
def logsumexp_gradient(y, g, row, TYPE: tl.constexpr):
    return g * exponential(y - row[0], y.dtype)


# The policies of the functions, forward and backward. softmin is softmax with another SCORE.
SOFTMAX = (
    {"TERM": None, "ROW": softmax_row, "EPILOGUE": softmax},
    {"TERM": product, "ROW": sum_row, "EPILOGUE": softmax_gradient, "SCORE": identity},
)
POLICIES = {
    "softmax": SOFTMAX,
    "softmin": SOFTMAX,
    "log_softmax": (
        {"TERM": None, "ROW": log_softmax_row, "EPILOGUE": log_softmax},
        {"TERM": result_gradient, "ROW": sum_row, "EPILOGUE": log_softmax_gradient, "SCORE": identity},
    ),
    "logsumexp": (
        {"TERM": None, "ROW": logsumexp_row, "EPILOGUE": None},
        {"TERM": None, "ROW": sum_row, "EPILOGUE": logsumexp_gradient},
    ),
    "state": ({"TERM": None, "ROW": state_row, "EPILOGUE": None},),
}
