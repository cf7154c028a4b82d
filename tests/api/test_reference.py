"""Every function on every dtype, layout, dim and engine gives the definition's values, in torch's shape and dtype."""

import itertools
import math

import numpy as np
import pytest
import torch

import onepass
from lib import support
from onepass import reference

SOME_LAYOUTS = ["0-d", "odd rows", "sliced", "transposed", "channels_last", "middle", "empty dim", "gaps"]
SOME_LAYOUTS += ["expanded columns", "size 1 dims, odd strides", "as_strided, interleaved", "empty and permuted"]


@pytest.mark.parametrize("layout", ["rows", "columns", "two dims"])
def test_the_reference_sums_equal_elements_pairwise(layout):
    """Whose rounding errors all have one sign: one after another, 600 of them are 16 eps off."""
    row = torch.full((600,), -1.9990, dtype=torch.float64)
    row[0] = 0
    x = {"rows": row[None], "columns": row[:, None].expand(600, 3), "two dims": row.view(200, 1, 3)}[layout]
    _, total = reference.state(x, {"rows": 1, "columns": 0, "two dims": (0, 2)}[layout])
    want = math.fsum(row.exp().tolist())
    assert ((total - want).abs() <= 3 * torch.finfo(torch.float64).eps * want).all(), total


@support.thin_product(3, layout=support.LAYOUTS, function=support.OPERATORS)
def test_every_layout(function, layout, engine, device):
    for dtype in support.DTYPES:
        check_layout(function, support.LAYOUTS[layout](support.maker(dtype, device)), engine)


def check_layout(function: str, x: torch.Tensor, engine: str) -> None:
    before = x.clone()
    for dim, named in itertools.product((*support.ints(x), *support.tuples(x)), support.keepdims(function)):
        y = support.ours(function)(x, dim, engine=engine, **named)
        like = torch.logsumexp(x, dim, **named) if named else torch.empty_like(x)
        if function == "state":
            assert y.m.stride() == y.l.stride() == like.stride()
            assert y.l.shape == like.shape
        else:
            assert (y.shape, y.dtype, y.device, y.stride()) == (like.shape, x.dtype, x.device, like.stride())
        support.assert_defined(function, y, x, dim)
    assert support.same(x, before)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
@support.every_softmax
def test_dtype_rounds_the_input_first(function, layout, engine, device):
    values = support.LAYOUTS[layout](support.maker(torch.float64, device, scale=3.0))
    for given in (*support.DTYPES, *support.INTEGERS):
        x = torch.empty_like(values, dtype=given).copy_(values.abs() if given is torch.uint8 else values)
        for dtype, dim in itertools.product(support.DTYPES, (0, -1)):
            y = support.ours(function)(x, dim, dtype=dtype, engine=engine)
            assert y.dtype is dtype
            assert y.stride() == torch.empty_like(x).stride()
            support.assert_defined(function, y, x.to(dtype), dim, f" (dtype= of {given})")


@pytest.mark.parametrize("function", ["logsumexp", "state"])
@pytest.mark.parametrize("given", support.INTEGERS, ids=lambda d: str(d).removeprefix("torch."))
def test_integers_are_taken_as_the_default_dtype(function, given, engine, device):
    x = torch.arange(-7, 8, device=device).reshape(3, 5).to(given)
    y = support.ours(function)(x, (0, -1), keepdim=True, engine=engine)
    support.assert_defined(function, y, x.float(), (0, 1))
    torch.set_default_dtype(torch.float64)
    try:
        z = support.ours(function)(x, 1, engine=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    support.assert_defined(function, z, x.double(), 1)
    if function == "logsumexp":
        assert (y.dtype, z.dtype) == (torch.float32, torch.float64)


def test_integers_above_2_to_the_24_are_rounded_first(engine, device):
    x = torch.tensor([2**24 + 1, 2**24, 2**24 + 3], device=device)
    y = onepass.softmax(x, dtype=torch.float32, engine=engine)
    torch.testing.assert_close(y, torch.softmax(x, -1, dtype=torch.float32))


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        (np.int64(1), 1),
        (torch.tensor(-1), -1),
        ([0], 0),
        ([0, -1], (0, 2)),
        ((np.int64(0), torch.tensor(2)), (0, 2)),
        (torch.Size([1]), 1),
    ],
    ids=str,
)
def test_dims_may_be_anything_that_is_an_index(function, spelled, plain):
    x = support.maker(torch.float32)(3, 4, 5)
    torch.logsumexp(x, spelled)  # torch takes it
    assert torch.equal(support.ours(function)(x, spelled), support.ours(function)(x, plain))


@support.every_operator
def test_no_dims_are_all_dims(function):
    x = support.maker(torch.float32)(3, 4)
    want = torch.logsumexp(x, (), True)  # torch takes the empty tuple with keepdim=True
    torch.testing.assert_close(onepass.logsumexp(x, (), True), want)
    support.assert_defined(function, support.ours(function)(x, ()), x, (0, 1))


def test_auto_is_the_engine_of_the_device(function, engine, device):
    x = support.maker(torch.float32, device)(33, 70)
    at_hand = [param.values[0] for param in support.engines_at_hand() if param.values[1] == device]
    assert engine in at_hand
    y = support.ours(function)(x, -1)
    assert any(torch.equal(y, support.ours(function)(x, -1, engine=name)) for name in at_hand)


# The published unit test of the fused softmax tutorial, 1823 x 781 float32 against torch, and its relatives.
# The shape has no power of two in it: rows are misaligned and lanes are masked.


@support.thin_product(
    5, shape=[(1823, 781), (256, 256), (256, 384), (256, 12672)], function=support.FUNCTIONS, dtype=support.DTYPES
)
def test_published_shapes(function, dtype, shape, engine, device):
    """And the ends of its sweep: M = 4096, N = 128 * i for i = 2 .. 99; fewer rows here."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    for dim in (1, 0):
        torch.testing.assert_close(support.ours(function)(x, dim, engine=engine), support.TORCH[function](x, dim))


class TestReference:
    """The oracle itself, against values worked out by hand and against torch in float64."""

    ROWS = torch.tensor([0.0, 1.0, 2.0]).log()  # weights 0, 1, 2

    def test_by_hand(self):
        third = torch.tensor([0, 1, 2], dtype=torch.float64) / 3
        torch.testing.assert_close(reference.softmax(self.ROWS), third, rtol=1e-7, atol=0)
        torch.testing.assert_close(reference.log_softmax(self.ROWS).exp(), third, rtol=1e-7, atol=0)
        torch.testing.assert_close(reference.softmin(-self.ROWS), third, rtol=1e-7, atol=0)
        assert reference.logsumexp(self.ROWS, 0).item() == pytest.approx(np.log(3), rel=1e-7)

    @pytest.mark.parametrize("layout", support.LAYOUTS)
    def test_is_torchs(self, function, layout):
        x = support.LAYOUTS[layout](support.maker(torch.float64))
        for dim, named in itertools.product((*support.ints(x), *support.tuples(x)), support.keepdims(function)):
            if named or isinstance(dim, int):
                want = support.TORCH[function](x, dim, **named)
                torch.testing.assert_close(getattr(reference, function)(x, dim, **named), want)

    @pytest.mark.parametrize("function", support.SOFTMAXES)
    def test_several_dims_are_one_flattened_dim(self, function):
        x = support.maker(torch.float64)(3, 4, 5)
        flat = x.permute(1, 0, 2).reshape(4, 15)
        want = support.TORCH[function](flat, 1).reshape(4, 3, 5).permute(1, 0, 2)
        torch.testing.assert_close(getattr(reference, function)(x, (-1, 0)), want)
