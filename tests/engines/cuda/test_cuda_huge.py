"""The CUDA engine on tensors of more than 2**31 elements."""

import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lib.cuda import BF16, F16, FUNCTIONS, TOLERANCE, call, close
from onepass import reference

pytestmark = pytest.mark.gpu

SPIKES = 64
CHUNK = 2**26


def spiked(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Normal values, and in each row high ones that have half of its sum, so that results are no zeros in a half type
    and are wrong if a part of the row is left out; and where these are."""
    x = torch.empty(rows, n, device="cuda", dtype=dtype)
    for row in x:
        for part in row.split(2**28):
            part.normal_()
    whole = n * 1.6487  # the mean of exp(a normal value)
    at = {0, 1, n // 2, n - 2, n - 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, *range(5, n, n // (SPIKES - 8))}
    spikes = sorted(i for i in at if i < n)
    for i in spikes:
        x[:, i] = math.log(whole / len(spikes))
    return x, spikes


def state(row: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of a row in float64, a part at a time."""
    m = row.max().double()
    return m, torch.stack([(part.double() - m).exp().sum() for part in row.split(CHUNK)]).sum()


def slices(n: int, spikes: list[int]) -> Iterator[slice]:
    rng = random.Random(n)
    for at in (*spikes, *(rng.randrange(n) for _ in range(20))):
        yield slice(max(0, at - 500), min(n, at + 500))


def expected(function: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if function == "softmax":
        return lambda x, m, total: (x.double() - m).exp() / total
    return lambda x, m, total: x.double() - m - total.log()


@pytest.fixture
def room() -> Iterator[None]:
    """24 GiB of the GPU's memory, given back after the test."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("shape", [(3, 2**30 + 7), (1, 2**31 + 9)], ids=["3 rows", "1 row"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_rows_beyond_31_bits(room, dtype, shape):
    x, spikes = spiked(*shape, dtype)
    states = [state(row) for row in x]
    lse = call("logsumexp", x)
    close("logsumexp", lse, torch.stack([m + total.log() for m, total in states]))
    out = torch.empty_like(x)
    for function in ("softmax", "log_softmax"):
        out.fill_(torch.nan)
        call(function, x, out)
        for row, given, (m, total) in zip(out, x, states, strict=True):
            assert not any(bool(part.isnan().any()) for part in row.split(2**30))
            for piece in slices(shape[1], spikes):
                want = expected(function)(given[piece], m, total)
                least = TOLERANCE[dtype] if function == "log_softmax" else torch.finfo(dtype).tiny
                torch.testing.assert_close(row[piece].double(), want, rtol=TOLERANCE[dtype], atol=least)
    if shape[0] == 1:  # as a vector, in place
        call("softmax", x[0], x[0])
        assert abs(sum(float(x[0, at]) for at in spikes) - 0.5) < 0.03


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_beyond_31_bits_of_elements(room, function):
    rows, n = 2**25 + 1, 65
    x = torch.empty(rows, n, device="cuda", dtype=BF16)
    for part in x.split(2**22):
        part.normal_(0, 3)
    out = torch.full((rows,) if function == "logsumexp" else (rows, n), torch.nan, device="cuda", dtype=BF16)
    call(function, x, out)
    rng = random.Random(0)
    sample = [0, 1, rows - 2, rows - 1, *(2**31 // n + i for i in range(-40, 40)), *(2**30 // n + i for i in (0, 1))]
    sample = torch.tensor([*sample, *(rng.randrange(rows) for _ in range(2000))], device="cuda")
    close(function, out[sample], getattr(reference, function)(x[sample], -1))
    assert not any(bool(part.isnan().any()) for part in out.split(2**22))
