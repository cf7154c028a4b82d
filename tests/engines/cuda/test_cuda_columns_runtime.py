"""What columns take on the CUDA engine by its own plans: no memory, more than 2^31 elements, graphs and streams."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass
from lib.columns import BF16, TOLERANCE, assert_gradient, gradient
from onepass import reference

pytestmark = pytest.mark.gpu

_ops = torch.ops.onepass


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def peak(call: Callable[[], object]) -> int:
    """Bytes that are held at once of what a call allocates."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


IN_PLACE = {
    "maps": lambda: (randn(4, 21, 256, 256), [1]),
    "maps of 49": lambda: (randn(32, 1000, 7, 7), [1]),
    "channels last": lambda: (randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last), [1]),
    "channels last, along": lambda: (randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last), [3]),
    "transposed": lambda: (randn(2048, 2048).t(), [1]),
    "sliced": lambda: (randn(64, 300, 300)[:, 5:290, 3:291], [1]),
    "stepped": lambda: (randn(64, 300, 300)[:, :, ::2], [1]),
    "two dims": lambda: (randn(64, 80, 196), [0, 2]),
    "long": lambda: (randn(300_000, 16), [0]),
}


@pytest.mark.parametrize("layout", IN_PLACE)
def test_nothing_as_large_as_the_input_is_made(layout):
    x, dims = IN_PLACE[layout]()
    size = x.numel() * x.element_size()
    y, g = onepass.softmax(x, dims), torch.randn_like(x)
    dx = torch.empty_like(y)
    assert peak(lambda: onepass.softmax(x, dims, out=y)) < size / 8
    assert peak(lambda: onepass.logsumexp(x, dims)) < size / 8
    assert peak(lambda: _ops._softmax_backward.out(g, y, 0, dims, dx)) < size / 8
    even = torch.ones((), device="cuda").expand_as(x)
    assert peak(lambda: _ops._softmax_backward.out(even, y, 0, dims, dx)) < size / 8
    lse = onepass.logsumexp(x, dims)
    ones = torch.ones_like(lse)
    assert peak(lambda: _ops._logsumexp_backward.out(ones, x, lse, dims, False, dx)) < size / 8


HUGE = {  # more than 2^31 elements
    "long columns": ((2**24 + 3, 129), 0),
    "many tiles": ((2**20 + 1, 21, 98), 1),
    "many slabs": ((2**21 + 1, 21, 49), 1),
    "long lines": ((3, 2**23 + 1, 86), 1),
}


@pytest.mark.parametrize("shape", HUGE)
def test_more_than_2_to_the_31_elements(shape):
    """Of halves; some columns are compared, the first and the last among them."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    sizes, dim = HUGE[shape]
    x = torch.empty(sizes, device="cuda", dtype=BF16).normal_()
    assert x.numel() > 2**31
    y = torch.full_like(x, torch.nan)
    onepass.softmax(x, dim, out=y)
    if dim == 0:
        some = [(slice(None), column) for column in (0, 1, 64, 128)]
    else:
        inner = sizes[2] - 1
        places = (0, 1, sizes[0] // 2, sizes[0] - 2, sizes[0] - 1)
        some = [(outer, slice(None), column) for outer in places for column in (0, inner // 2, inner)]
    for at in some:
        want = reference.softmax(x[at], 0)
        torch.testing.assert_close(y[at].double(), want, rtol=TOLERANCE[BF16], atol=torch.finfo(BF16).tiny)
    lse = onepass.logsumexp(x, dim)
    for at in some:
        rest = tuple(i for i in at if not isinstance(i, slice))
        torch.testing.assert_close(lse[rest].double(), reference.logsumexp(x[at], 0), rtol=1e-2, atol=1e-2)
    assert not any(bool(part.isnan().any()) for part in y.view(-1).split(2**28))
    g = x  # its values are as good as any
    dx = torch.full_like(x, torch.nan)
    _ops._softmax_backward.out(g, y, 0, [dim], dx)
    for at in some:
        assert_gradient(dx[at], *gradient("softmax", g[at], y[at], [0]))
    assert not any(bool(part.isnan().any()) for part in dx.view(-1).split(2**28))


def test_over_the_chip_in_a_graph_and_on_streams():
    x = randn(2, 131_072, 16)
    want = onepass.softmax(x, 1)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in streams * 20:
        with torch.cuda.stream(stream):
            results.append(onepass.softmax(x, 1))
    torch.cuda.synchronize()
    graph, y = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        onepass.softmax(x, 1, out=y)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        results.append(y.clone())
    assert all(torch.equal(result, want) for result in results)
