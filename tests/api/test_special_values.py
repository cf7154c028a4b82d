"""NaN, infinities, empty and extreme rows: torch's values, on every engine, at every place of a row."""

import itertools
import math

import pytest
import torch

import onepass
from lib import support
from lib.samples import special
from onepass import reference

INF, NAN = math.inf, math.nan


@support.thin_product(
    3, length=[1, 2, 3, 16, 33, 1000, 1025, 4100, 20011], function=support.OPERATORS, dtype=support.DTYPES
)
def test_rows(function, dtype, length, engine, device):
    x = special(length, dtype, device)
    x = -x if function == "softmin" else x
    y = support.ours(function)(x, 1, engine=engine)
    if function != "state":
        assert torch.equal(y.isnan(), support.TORCH[function](x.double(), 1).isnan())
    support.assert_defined(function, y, x, 1)
    support.assert_defined(function, support.ours(function)(x.t(), 0, engine=engine), x.t(), 0)


@pytest.mark.parametrize("shape", [(5, 40, 9), (2, 700, 33)], ids=str)
@support.every_operator
def test_columns(function, dtype, shape, engine, device):
    """The same rows along a dim that is not the last."""
    x = special(shape[1], dtype, device)
    x = torch.stack([x.roll(k, 0)[: shape[2]].t() for k in range(shape[0])]).contiguous()
    assert x.shape[:2] == shape[:2]
    for dim in (1, (0, 1)):
        support.assert_defined(function, support.ours(function)(x, dim, engine=engine), x, dim)


def check_all() -> None:  # by another instruction set
    for function, dtype in itertools.product(support.OPERATORS, support.DTYPES):
        for length in (2, 3, 16, 33, 1000):
            test_rows(function, dtype, length, "cpu", "cpu")
        test_columns(function, dtype, (5, 40, 9), "cpu", "cpu")


@pytest.mark.parametrize("value", [0.0, -3.5, INF, -INF, NAN])
def test_0_d(function, value, dtype, engine, device):
    x = torch.tensor(value, dtype=dtype, device=device)
    y = support.ours(function)(x, 0, engine=engine)
    assert y.shape == ()
    assert support.same(y, support.TORCH[function](x, 0))
    assert function != "logsumexp" or support.same(y, x)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100, 1001, 5000, 33333])
def test_constant_and_one_hot_rows(length, dtype, engine, device):
    x = torch.full((2, length), -7.3, dtype=dtype, device=device)
    x[1, length // 2] = 7.0
    for function in support.FUNCTIONS:
        support.assert_defined(function, support.ours(function)(x, 1, engine=engine), x, 1)
    y = onepass.softmax(x, 1, engine=engine)
    assert bool((y[0] == y[0, 0]).all())  # equal inputs, equal results, wherever in the row they stand


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_probability_exceeds_one(dtype, engine, device):
    """Both passes over a row must round the exponent alike, or the largest gets more than 1 (1.0013 has been seen)."""
    x = support.maker(torch.float64, device, scale=30.0)(2000, 97).mul(1.37).to(dtype)
    for wide in (dtype, torch.float32):
        assert onepass.softmax(x, dtype=wide, engine=engine).max() <= 1
        assert (onepass.log_softmax(x, dtype=wide, engine=engine) <= 0).all()


def test_underflow_is_gradual_or_flushed_and_never_negative(engine, device):
    x = torch.tensor([[0.0, -80.0, -87.0, -88.0, -95.0, -103.0, -104.0, -110.0, -1e4]], device=device)
    y = onepass.softmax(x, engine=engine).double()
    want = reference.softmax(x)
    assert bool((y >= 0).all())
    assert bool(((y - want).abs() <= 1e-5 * want + torch.finfo(torch.float32).tiny).all())
