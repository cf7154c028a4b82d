"""Rows on the CPU engine: maxima near and far, found by bits, and rows that go past the cache."""

import pytest
import torch

import onepass
from lib.support import FUNCTIONS, SOFTMAXES, assert_defined, maker, ours

HALF_TYPES = (torch.float16, torch.bfloat16)
LENGTHS = (513, 4099, 70001)  # a row in one go, a longer one, one in pieces


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("top", [0.0, 60000.0, -60000.0, 1048575.0, -1048575.0, 1048577.0, -3e6, 1e20, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_the_maximum_may_be_anywhere(dtype, top, n):
    x = maker(torch.float64)(2, n).mul(3)
    x = (x - x.amax(1, keepdim=True) + top).clamp(-3e38, 3e38).to(dtype)
    x[:, n // 3] = min(top, torch.finfo(dtype).max) if top > 0 else max(top, torch.finfo(dtype).min)
    for function in FUNCTIONS:
        assert_defined(function, ours(function)(x, 1), x, 1)
        if function in SOFTMAXES and dtype in HALF_TYPES:
            wide = ours(function)(x, 1, dtype=torch.float32)
            assert_defined(function, wide, x.float(), 1)


@pytest.mark.parametrize("n", LENGTHS)
def test_pieces_with_maxima_near_and_far(n):
    x = maker(torch.float32)(2, n)
    x[0, : n // 2] -= 2e6
    x[1, n // 2 :] += 2e6
    for function in FUNCTIONS:
        assert_defined(function, ours(function)(x, 1), x, 1)


@pytest.mark.parametrize("shape", [(37, 5, 1), (37, 15, 1), (70, 33, 1), (45, 64, 1), (2, 40, 70), (2, 21, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_rows_and_rows_side_by_side_with_maxima_near_and_far(dtype, shape):
    x = maker(torch.float32)(*shape)
    far = torch.arange(shape[0] * shape[2]).view(shape[0], 1, shape[2]) % 7
    for far_ones in ((), (0,), (0, 3, 5)):
        y = x.clone()
        for at, shift in zip(far_ones, (2e6, -3e6, 1e20), strict=False):
            y = torch.where(far == at, y + shift, y)
        y = y.to(dtype)
        for function in FUNCTIONS:
            made = ours(function)(y, 1)
            assert_defined(function, made, y, 1)
            if function in SOFTMAXES:
                own = y.clone()
                ours(function)(own, 1, out=own)
                assert torch.equal(own, made)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("function", ["softmax", "softmin", "logsumexp"])
def test_the_maximum_of_half_types_is_found_at_every_place(function, dtype):
    n = 577
    for low, high in ((-9.0, 1.0), (-9.0, -1.0), (1.0, 9.0), (0.0, 9.0), (-9.0, -0.0)):
        x = torch.full((n, n), high if function == "softmin" else low, dtype=dtype)
        x.fill_diagonal_(low if function == "softmin" else high)
        y = ours(function)(x, 1)
        assert_defined(function, y, x, 1)
        assert torch.equal(y.diag() if y.dim() == 2 else y, (y.diag() if y.dim() == 2 else y)[:1].expand(n))


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("n", [2048, 2049, 3001, 40001])
def test_what_goes_past_the_cache_has_the_same_bits(n, dtype, function):
    rows = (9 << 20) // (n * dtype.itemsize)
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    near = torch.cat([ours(function)(part, 1) for part in x.split(rows // 8)])
    memory = torch.full((rows * n + 80,), 7.0, dtype=dtype)
    for start in (0, 1, 33):
        out = memory[start : start + rows * n].view(rows, n)
        assert ours(function)(x, 1, out=out) is out
        assert torch.equal(out, near)
        assert bool((memory[start + rows * n :] == 7).all())
        memory.fill_(7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("n", LENGTHS)
def test_one_nan_makes_its_row_nan_and_no_other(n, dtype):
    for sign in (1.0, -1.0):
        for at in (0, n // 2, n - 1):
            x = maker(dtype)(3, n) - 100
            x[1, at] = sign * float("nan")
            y = onepass.softmax(x, 1)
            assert y[1].isnan().all()
            assert not y[[0, 2]].isnan().any()
            assert onepass.logsumexp(x, 1).isnan().tolist() == [False, True, False]
            state = onepass.state(x, 1)
            assert state.m[1] == x[1].nan_to_num(nan=-torch.inf).max()
            assert state.l.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("shape", [(3, 2100, 256), (2, 2100, 70), (4500, 33)])
def test_long_rows_side_by_side(shape, dtype):
    x = maker(dtype)(*shape)
    x[..., :5] += 40
    dim = len(shape) - 2
    for function in FUNCTIONS:
        assert_defined(function, ours(function)(x, dim), x, dim)
    x[0, ..., 3] = float("-inf")
    if len(shape) == 3:
        assert onepass.softmax(x, dim)[0, :, 3].isnan().all()
