"""Other dims, strides and layouts by an engine's own choice, on what is here: CUDA's columns where there is a GPU."""

import itertools

import pytest
import torch
from torch import Tensor

import onepass
from lib.plans import BF16, F32, F64, Engine, names
from lib.support import FUNCTIONS, assert_defined, ours
from lib.views import check_gradient, check_views

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * torch.cuda.is_available()

_ops = torch.ops.onepass
ENGINE = Engine(DEVICE)


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=F64).mul_(2).to(dtype)


def check(function: str, x: Tensor, dims: list[int], g: Tensor | None = None) -> None:
    """Forward and backward, into results of their own."""
    reduces = function == "logsumexp"
    y = ours(function)(x, dims, engine=DEVICE)
    assert_defined(function, y, x, tuple(dims))
    g = torch.randn_like(y) if g is None else g.to(y.dtype).expand_as(y)
    dx = torch.full_like(x, torch.nan)
    check_gradient(ENGINE, function, g, x if reduces else y, y if reduces else None, dims, dx)


# Every order of dims in memory, over every dim; sizes are odd and few kernels are needed


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_every_order_of_dims(rank, function):
    torch.manual_seed(rank)
    sizes = (3, 5, 2, 7, 4)[:rank]
    for order in itertools.permutations(range(rank)):
        x = randn(*(sizes[d] for d in order)).permute([order.index(d) for d in range(rank)])
        assert x.shape == sizes
        for dim in range(rank):
            check(function, x, [dim])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_set_of_dims(function):
    torch.manual_seed(0)
    x = randn(3, 9, 5, 4)
    for view in (x, x.permute(2, 0, 3, 1), x.contiguous(memory_format=torch.channels_last), x[:, 1:7, ::2, :3]):
        for count in (1, 2, 3, 4):
            for dims in itertools.combinations(range(4), count):
                check(function, view, [*dims])


@pytest.mark.parametrize("seed", range(96))
def test_any_views(seed):
    check_views(ENGINE, seed)


# Where the plans' tables change, and beyond all clusters

LENGTHS = [2, 17, 24, 25, 33, 64, 65, 197, 257, 512, 1025, 4096, 4097, 8193, 20_001, 131_072, 300_001]
INNER = (2, 7, 8, 49, 130, 513)
MOST = 10_000_000 if DEVICE == "cuda" else 100_000  # elements


@pytest.mark.parametrize("dtype", [F32, BF16], ids=names)
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n, dtype):
    torch.manual_seed(n)
    at = LENGTHS.index(n)
    for inner in {INNER[at % 6], INNER[(at + 2) % 6], INNER[(at + 3) % 6]}:
        if n * inner > MOST:
            continue
        for outer in (1, 3):
            x = randn(outer, n, inner, dtype=dtype)
            check("softmax" if dtype is F32 else "log_softmax", x, [1])
            check("softmax" if dtype is F32 else "log_softmax", x, [1], g=torch.randn((), device=DEVICE))
    check("logsumexp", randn(2, n, 6, dtype=dtype), [1])


LAYOUTS = {
    "maps": lambda: (randn(3, 21, 40, 33), [1]),
    "channels last": lambda: (randn(4, 64, 9, 7).contiguous(memory_format=torch.channels_last), [1]),
    "channels last, along": lambda: (randn(4, 64, 9, 27).contiguous(memory_format=torch.channels_last), [3]),
    "channels last, both": lambda: (randn(4, 64, 9, 7).contiguous(memory_format=torch.channels_last), [2, 3]),
    "transposed": lambda: (randn(300, 500).t(), [1]),
    "sliced": lambda: (randn(9, 100, 70)[1:, 3:90, 5:66], [1]),
    "stepped": lambda: (randn(9, 100, 70)[::2, :, ::3], [1]),
    "two dims": lambda: (randn(20, 30, 40), [0, 2]),
    "expanded": lambda: (randn(1, 30, 40).expand(7, 30, 40), [1]),
    "expanded along": lambda: (randn(7, 1, 40).expand(7, 30, 40), [1]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_gradients(layout, function):
    """Any, expanded over the last dim, and as the sum of everything has them."""
    torch.manual_seed(0)
    x, dims = LAYOUTS[layout]()
    y = ours(function)(x, dims, engine=DEVICE)
    for g in (torch.randn_like(y), torch.randn((*y.shape[:-1], 1), device=DEVICE), torch.ones((), device=DEVICE)):
        check(function, x, dims, g)


@pytest.mark.parametrize("shape", [(5, 20, 40), (40, 7, 49), (3, 5000, 24), (2, 60_000, 16)], ids=str)
def test_bits_are_the_same_from_run_to_run(shape):
    x, g = randn(*shape, dtype=BF16), randn(*shape, dtype=F32)
    y = onepass.softmax(x, 1, dtype=F32)
    dx = _ops._softmax_backward(g, y, 0, [1], BF16)
    for _ in range(4):
        assert torch.equal(y, onepass.softmax(x, 1, dtype=F32))
        assert torch.equal(dx, _ops._softmax_backward(g, y, 0, [1], BF16))
