"""Gradients on the CUDA engine against their definition in float64: every tier forced, and the plan's own choice."""

import itertools
import random

import pytest
import torch
from torch import Tensor

import onepass
from onepass import reference

pytestmark = pytest.mark.gpu

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS = range(6)
WINDOW, APART, WHOLE = range(3)
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
TOLERANCE = {F64: 1e-12, F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}
PAIRS = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (F32, BF16), (BF16, F32), (F64, F32)]
_ops = torch.ops.onepass


def operand(rows: int, n: int, dtype: torch.dtype, offset: int, padding: int, values: Tensor) -> Tensor:
    """A matrix that begins `offset` elements into its memory, which is NaN everywhere else."""
    memory = torch.full((rows * (n + padding) + offset + 8,), float("nan"), device="cuda", dtype=dtype)
    return memory.as_strided((rows, n), (n + padding, 1), offset).copy_(values)


def definition(function: str, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dx in float64, and the sum of the magnitudes of its terms."""
    g, y = g.double(), y.double()
    if function == "log_softmax":
        return g - y.exp() * g.sum(-1, keepdim=True), g.abs() + y.exp() * g.abs().sum(-1, keepdim=True)
    dx = y * (g - (g * y).sum(-1, keepdim=True))
    return dx if function == "softmax" else -dx, y * (g.abs() + (g * y).abs().sum(-1, keepdim=True))


def check(
    function: str,
    shape: tuple[int, int],
    types: tuple[torch.dtype, torch.dtype] = (F32, F32),
    offsets: tuple[int, int, int] = (0, 0, 0),
    paddings: tuple[int, int, int] = (0, 0, 0),
    even: bool = False,
    plan: tuple[int, ...] | None = None,
) -> Tensor:
    """Makes one gradient into a poisoned result amid untouched memory, compares it, and gives it."""
    rows, n = shape
    dtype, dx_dtype = types
    x = 2 * torch.randn(rows, n, device="cuda")
    y = operand(rows, n, dtype, offsets[0], paddings[0], getattr(reference, function)(x, -1))
    if even:
        g = torch.randn(rows, 1, device="cuda").to(dtype).expand(rows, n)
    else:
        g = operand(rows, n, dtype, offsets[1], paddings[1], torch.randn(rows, n, device="cuda"))
    memory = torch.full((rows * (n + paddings[2]) + offsets[2] + 8,), 7.0, device="cuda", dtype=dx_dtype)
    dx = memory.as_strided((rows, n), (n + paddings[2], 1), offsets[2]).fill_(float("nan"))
    number = FAMILY.index(function)
    if plan is None:
        _ops._softmax_backward.out(g, y, number, [1], dx)
    else:
        _ops._softmax_backward_with_plan(g, y, None, number, [1], plan, dx)
    want, scale = definition(function, g, y)
    error = ((dx.double() - want).abs() - 1e-7 * (dx_dtype in (F16, BF16))).clamp(min=0) / (scale + 1e-30)
    assert error.isfinite().all()
    assert error.max() <= max(TOLERANCE[dtype] if dtype is F64 else 0, TOLERANCE[dx_dtype])
    rest = memory.clone()
    rest.as_strided(dx.shape, dx.stride(), offsets[2]).fill_(7.0)
    assert (rest == 7.0).all(), "memory beside the result was written"
    return dx


def vector(types: tuple[torch.dtype, torch.dtype]) -> int:
    return 16 // max(t.itemsize for t in types)


# (tier, threads, rows a block, vectors a thread, blocks a row, vectors on the shelf)
PLANS = {
    "warp": (WARP, 32, 4, 7, 1, 0),
    "lanes": (WARP, 8, 16, 8, 1, 0),
    "block": (BLOCK, 256, 1, 4, 1, 0),
    "cluster": (CLUSTER, 64, 1, 4, 4, 0),
    "cluster16": (CLUSTER, 64, 1, 2, 16, 0),
    "grid": (GRID, 64, 1, 4, 3, 4),
    "grid, nothing kept": (GRID, 64, 1, 0, 2, 0),
    "stream": (TWOPASS, 64, 1, 2, 1, 0),
}


@pytest.mark.parametrize("even", [False, True], ids=["", "even"])
@pytest.mark.parametrize("types", PAIRS, ids=lambda p: f"{str(p[0])[6:]}-{str(p[1])[6:]}")
@pytest.mark.parametrize("tier", PLANS)
def test_every_tier(tier, types, even):
    threads, rows, slots, split, shelf = PLANS[tier][1:]
    wide = vector(types)
    if slots * wide > 64 or (tier.startswith("grid") and slots > (4 if wide == 2 else 8)):
        slots = 64 // wide
    room = threads * slots * split * wide if PLANS[tier][0] in (WARP, BLOCK, CLUSTER) else 5000
    for function, n in itertools.product(FAMILY, {1, wide, 37, room // 2 + 1, room - wide}):
        if not 1 <= n <= room - wide + 1:
            continue
        for edges in (WINDOW, APART, WHOLE):
            if edges == WHOLE and (n % wide or PLANS[tier][0] in (GRID, TWOPASS)):
                continue
            if edges == WINDOW and n < wide:  # no such vector lies in a row
                continue
            plan = (PLANS[tier][0], threads, rows, slots * wide, wide, split, shelf, edges)
            offset, padding = (1, 3) if edges != WHOLE else (0, wide)
            for one in (0, offset):
                check(function, (5, n), types, (one,) * 3, (padding if one else 0,) * 3, even, plan)


LENGTHS = [1, 2, 7, 16, 33, 64, 100, 129, 200, 513, 781, 1000, 1025, 2048, 4097, 8192, 12289, 32001, 50257]
LONG = [(1, 131072), (5, 131073), (1, 300001), (3, 1 << 20), (2, (1 << 22) + 3), (40, 128256)]


@pytest.mark.parametrize("n", LENGTHS)
def test_the_plans_own(n):
    rng = random.Random(n)
    places = [((0, 0, 0), (0, 0, 0)), ((1, 1, 1), (0, 0, 0)), ((1, 2, 3), (0, 8, 1)), ((0, 4, 0), (8, 0, 8))]
    for function, types in itertools.product(FAMILY, PAIRS):
        if n > 300 and types[0] is not types[1] and rng.random() < 0.5:
            continue
        for offsets, paddings in places:
            check(function, (rng.choice((1, 3, 37, 130)), n), types, offsets, paddings, rng.random() < 0.2)


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_long_rows(shape, dtype):
    for function in FAMILY[:2]:
        check(function, shape, (dtype, dtype))
        check(function, shape, (dtype, dtype), (1, 1, 1), (3, 3, 3), grad_is_broadcast=True)


OF_LOGSUMEXP = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (F16, F32)]  # of x, of the result
every_logsumexp = pytest.mark.parametrize("types", OF_LOGSUMEXP, ids=lambda p: f"{str(p[0])[6:]}-{str(p[1])[6:]}")


def check_logsumexp(
    shape: tuple[int, int],
    types: tuple[torch.dtype, torch.dtype],
    offsets: tuple[int, int] = (0, 0),
    paddings: tuple[int, int] = (0, 0),
    plan: tuple[int, ...] | None = None,
) -> None:
    """As `check`: x and dx begin and are padded as told, the result and its gradient lie with gaps."""
    (rows, n), (dtype, wide) = shape, types
    x = operand(rows, n, dtype, offsets[0], paddings[0], torch.randn(rows, n, device="cuda"))
    lse = operand(rows, 1, wide, 1, 2, torch.logsumexp(x.double(), -1, keepdim=True))[:, 0]
    g = operand(rows, 1, wide, 0, 1, torch.randn(rows, 1, device="cuda"))[:, 0]
    memory = torch.full((rows * (n + paddings[1]) + offsets[1] + 8,), 7.0, device="cuda", dtype=dtype)
    dx = memory.as_strided((rows, n), (n + paddings[1], 1), offsets[1]).fill_(float("nan"))
    if plan is None:
        _ops._logsumexp_backward.out(g, x, lse, [1], False, dx)
    else:
        _ops._softmax_backward_with_plan(g, x, lse, 3, [1], plan, dx)
    want = g.double()[:, None] * (x.double() - lse.double()[:, None]).exp()
    torch.testing.assert_close(dx.double(), want, rtol=TOLERANCE[dtype], atol=1e-12 if dtype is F64 else 1e-7)
    dx.fill_(7.0)
    assert (memory == 7.0).all(), "memory beside the result was written"


@every_logsumexp
@pytest.mark.parametrize("n", [1, 9, 33, 500, 513, 4096, 50257])
def test_logsumexp(n, types):
    for rows, offset, padding in ((1, 0, 0), (37, 0, 0), (130, 1, 1), (5, 3, 8)):
        check_logsumexp((rows, n), types, (offset, offset), (padding, padding))
        check_logsumexp((rows, n), types, (offset, 0), (padding, 0))


@every_logsumexp
@pytest.mark.parametrize(("tier", "lanes", "rows"), [(WARP, 32, 4), (WARP, 4, 32), (TWOPASS, 64, 1), (TWOPASS, 512, 1)])
def test_logsumexp_in_every_tier(tier, lanes, rows, types):
    wide = 16 // types[0].itemsize
    for width, edges in ((wide, WINDOW), (wide, APART), (wide, WHOLE), (1, WINDOW)):
        room = lanes * 4 * width
        for n in (1, wide, 37, room // 2 + 1, room - width, 5000):
            if (tier == WARP and n > room - width + 1) or n < 1:
                continue
            if (edges == WHOLE and n % width) or (edges == WINDOW and n < width):
                continue
            offset, padding = (0, width) if edges == WHOLE else (1, 3)
            plan = (tier, lanes, rows, 4 * width, width, 1, 0, edges)
            for one in (0, offset):
                check_logsumexp((5, n), types, (one, one), (padding if one else 0,) * 2, plan)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("dim", [0, 1, (0, 2), (0, 1, 2)], ids=str)
def test_logsumexp_of_halves_to_float32_in_other_layouts(dtype, dim):
    x = torch.randn(6, 5, 9, device="cuda").to(dtype).permute(1, 2, 0)[1:, ::2].requires_grad_()
    with torch.autocast("cuda", dtype):
        y = onepass.logsumexp(x, dim)
    assert y.dtype is F32
    w = x.detach().double().requires_grad_()
    want = reference.logsumexp(w, dim)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)
    for g in (torch.randn_like(y), torch.ones((), device="cuda").expand_as(y)):
        (got,) = torch.autograd.grad(y, x, g, retain_graph=True)
        (expected,) = torch.autograd.grad(want, w, g.double(), retain_graph=True)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 5, 6), 1), ((4, 5, 6), (0, 2)), ((7, 3, 2, 5), 2), ((), 0), ((3, 1), 1)]
)
@pytest.mark.parametrize("function", [*FAMILY, "logsumexp"])
def test_other_layouts(function, shape, dim):
    x = torch.randn(shape, device="cuda", dtype=F64)
    x = (x.mT.contiguous().mT if x.dim() > 1 else x).requires_grad_()
    y, want = getattr(onepass, function)(x, dim), getattr(reference, function)(x, dim)
    for g in (torch.randn_like(want), torch.randn((), device="cuda", dtype=F64).expand_as(want)):
        got = torch.autograd.grad(y, x, g, retain_graph=True)[0]
        torch.testing.assert_close(got, torch.autograd.grad(want, x, g, retain_graph=True)[0])


@pytest.mark.parametrize("n", [5, 33, 200, 1000, 4099, 30001, 131073])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(n, dtype):
    for function in FAMILY[:2]:
        y = getattr(onepass, function)(torch.randn(50, n, device="cuda"), -1).to(dtype)
        g = torch.randn(50, n, device="cuda").to(dtype)
        number = FAMILY.index(function)
        with onepass.batch_invariant():
            together = _ops._softmax_backward(g, y, number, [1], dtype)
            for first, count in ((0, 1), (7, 1), (13, 20), (49, 1)):
                part = slice(first, first + count)
                alone = _ops._softmax_backward(g[part].clone(), y[part].clone(), number, [1], dtype)
                assert torch.equal(alone, together[part])


@pytest.mark.parametrize("shape", [(64, 1000), (1, 1 << 20)], ids=str)
def test_in_a_graph_and_on_streams(shape):
    y, g = (torch.randn(shape, device="cuda").softmax(-1) for _ in range(2))
    want = definition("softmax", g, y)[0].float()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            results.append(_ops._softmax_backward(g, y, 0, [1], F32))
    torch.cuda.synchronize()
    graph, dx = torch.cuda.CUDAGraph(), torch.empty_like(y)
    with torch.cuda.graph(graph):
        _ops._softmax_backward.out(g, y, 0, [1], dx)
    for _ in range(3):
        dx.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        results.append(dx.clone())
    for result in results:
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-9)
        assert torch.equal(result, results[0])


def test_more_than_2_to_the_31_elements():
    rows, n = 2**21 + 3, 1025
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    y, g = (torch.empty(rows, n, device="cuda", dtype=BF16) for _ in range(2))
    y.fill_(1 / n), g.normal_()
    dx = _ops._softmax_backward(g, y, 0, [1], BF16)
    for at in (0, 1, 2**21 // 2, 2**21 - 1, 2**21, rows - 1):
        want, scale = definition("softmax", g[at : at + 1], y[at : at + 1])
        assert ((dx[at].double() - want[0]).abs() / scale[0]).max() <= TOLERANCE[BF16]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ((STAGED, 4, 32, 8, 1, 1, 2, WINDOW), "tiers warp, block"),
        ((BLOCK, 64, 1, 8, 8, 1, 0, WINDOW), "allow 4"),
        ((BLOCK, 32, 1, 4, 4, 1, 0, WINDOW), "rows of up to 128"),
        ((TWOPASS, 1024, 1, 8, 4, 1, 0, WINDOW), "up to 512 threads"),
        ((GRID, 64, 1, 48, 4, 2, 0, WINDOW), "keep up to 8 vectors"),
    ],
)
def test_a_plan_that_cannot_serve_is_refused(plan, words):
    y = torch.full((4, 1000), 1e-3, device="cuda")
    with pytest.raises(RuntimeError, match=words):
        _ops._softmax_backward_with_plan(y, y, None, 0, [1], plan, torch.empty_like(y))
