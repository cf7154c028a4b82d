"""The CUDA kernels of segments in the emulator, by the plans that an H200 has for them, against torch in float64."""

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import Emulator, missing
from lib.plan_tables import BF16, F16, F32, F64
from lib.support import maker, slow

# Devices: the second has one block at a time, so that none waits for another, and the third little shared memory.
LARGE, SMALL, LITTLE = 0, 3, 4
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOLERANCE = {F32: 1e-5, BF16: 1.6e-2, F16: 2e-3, F64: 1e-12}
# The function, dtype, trailing dims, and the lengths of segments. A tile has neighbouring ones of up to some thousand
# elements together. Longer segments are cut into pieces, of which each block takes some.
CASES: dict[str, tuple[str, Any, tuple[int, ...], list[int]]] = {
    "short": ("softmax", F32, (), [k % 40 for k in range(450)]),
    "long": ("softmax", F32, (), [3, 700, 0, 9000, 40, 0, 5]),
    "middling": ("softmax", F64, (), [3, 600, 300, 1024, 0, 900, 40]),
    "middling, long": ("log_softmax", F32, (64,), [3, 40, 0, 60, 20, 64, 70, 33] + 9 * [100]),
    "heads": ("softmax", BF16, (8,), [k % 30 for k in range(90)]),
    "rows": ("logsumexp", F32, (), [5, 0, 4100, 30, 0]),
    "odd heads": ("log_softmax", F16, (3,), [700, 1, 0, 900]),
    "many heads": ("log_softmax", F64, (70,), [40, 3, 60]),
    "wide": ("logsumexp", F64, (64,), [20, 1, 0, 90]),
    "as long as a tile": ("logsumexp", BF16, (), [2043, 0, 5]),
    "large tiles": ("logsumexp", BF16, (), [4093, 0, 5] + [k % 40 for k in range(250)]),
    "no items": ("logsumexp", F16, (2,), [0, 0]),
    "many long": ("logsumexp", F32, (), 40 * [2050] + [7, 0] + 2 * [2100] + [1]),
    "pieces": ("softmax", F32, (), [2050 + 61 * k for k in range(20)] + [9, 20000, 0] + 3 * [2300]),
    "pieces of heads": ("softmax", BF16, (8,), [700, 90, 9000, 0, 2100]),
}
QUICK = ("short", "long")


def expected(function: str, scores: Tensor, lengths: list[int], order: Tensor | None) -> Tensor:
    parts = (scores if order is None else scores[order]).split(lengths)
    if function == "logsumexp":
        return torch.stack([part.logsumexp(0) for part in parts])
    y = torch.cat([getattr(part, function)(0) for part in parts])
    return y if order is None else torch.zeros_like(y).index_copy(0, order, y)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want, rtol=4 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


def solve(emulator: Any, case: str, has_more: bool, device: int) -> None:
    """A function and its gradient; with `has_more` with an order, a bias and a factor."""
    function, dtype, inner, lengths = CASES[case]
    n, make = sum(lengths), maker(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x, bias, factor = make(n, *inner), make(n, *inner) if has_more else None, 0.5 if has_more else 1.0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)) if has_more else None
    wide = x.double().requires_grad_()
    want = expected(function, wide * factor + (0 if bias is None else bias.double()), lengths, order)
    y = torch.empty(want.shape, dtype=dtype)
    given = {"x": x} if bias is None else {"x": x, "bias": bias}
    emulator.segments(function, {**given, "y": y}, offsets, 0, order, factor, device)
    assert_close(y, want.detach(), dtype)
    grad, dx = make(*want.shape), torch.empty_like(x)
    (of_x,) = torch.autograd.grad(want, wide, grad.double())
    if function == "logsumexp":
        accumulator = F64 if dtype is F64 else F32
        given.update(y=want.detach().to(accumulator), grad=grad.to(accumulator))
    else:
        given = {"y": want.detach().to(dtype), "grad": grad}
    emulator.segments(function, {**given, "dx": dx}, offsets, 0, order, factor, device)
    assert_close(dx, of_x, dtype)


@pytest.mark.parametrize("case", [name if name in QUICK else slow(name) for name in CASES])
def test_segments(emulator, case):
    solve(emulator, case, has_more=False, device=LARGE)


@pytest.mark.parametrize("case", [name if name == "long" else slow(name) for name in CASES])
def test_blocks_that_do_not_wait(emulator, case):
    """Rows of several tiles are finished by a second launch, and a block takes all chunks of the heads of a tile."""
    solve(emulator, case, has_more=False, device=SMALL)


def test_tiles_of_many_items_are_larger():
    emulator = Emulator()  # which has loaded no kernel yet
    solve(emulator, "large tiles", has_more=False, device=SMALL)
    source, defines = emulator.kernels_run[0]
    assert source == "segments_tiled.cu"
    assert "-DVECS_PER_THREAD=32" in defines


@pytest.mark.parametrize("case", ["pieces", slow("pieces of heads")])
def test_segments_of_more_pieces_than_blocks(emulator, case):
    """They are finished when all states are there, among others that need not wait."""
    solve(emulator, case, has_more=False, device=LITTLE)


LONG_ROWS = ("large", "-inf", "inf", "nan", "one piece is large")


@pytest.mark.parametrize("function", ["softmax", slow("logsumexp")])
@pytest.mark.parametrize("dtype", [F32, slow(BF16)])
@pytest.mark.parametrize("scores", [name if name == LONG_ROWS[-1] else slow(name) for name in LONG_ROWS])
def test_scores_of_long_segments_that_are_not_small(emulator, scores, dtype, function):
    """Exponentials in the place of elements give way to the elements."""
    lengths = [5, 3001, 17000, 40]
    x = torch.empty(sum(lengths) + 3, dtype=dtype)[3:].copy_(maker(F32)(sum(lengths)))
    if scores == "large":
        x *= 50
    else:
        x[9000] = {"one piece is large": 90.0}.get(scores) or float(scores)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    want = expected(function, x.double(), lengths, None)
    y = torch.empty(want.shape, dtype=dtype)
    emulator.segments(function, {"x": x, "y": y}, offsets)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("device", "threads"), [(LARGE, 256), slow(LITTLE, 128)])
def test_tiles_have_as_many_heads_as_shared_memory_takes(device, threads):
    emulator = Emulator()  # which has loaded no kernel yet
    solve(emulator, "wide", has_more=False, device=device)
    source, defines = emulator.kernels_run[0]
    assert source == "segments_tiled.cu"
    assert f"-DROWS_PER_BLOCK={threads}" in defines


@pytest.mark.parametrize("case", ["rows", *(slow(name) for name in CASES if name != "rows")])
def test_an_order_a_bias_and_a_factor(emulator, case):
    solve(emulator, case, has_more=True, device=LARGE)


@pytest.mark.parametrize("case", ["odd heads", *(slow(name) for name in CASES if name != "odd heads")])
def test_bits_of_a_segment_do_not_depend_on_its_neighbours(emulator, case):
    """In the batch-invariant mode, whose kernel computes the right values too."""
    function, dtype, inner, lengths = CASES[case]
    reduces = function == "logsumexp"

    def compute(x: Tensor, lengths: list[int]) -> Tensor:
        y = torch.empty((len(lengths), *inner) if reduces else x.shape, dtype=dtype)
        emulator.segments(function, {"x": x, "y": y}, torch.tensor([0, *lengths]).cumsum(0))
        return y

    longest = lengths.index(max(lengths))
    begin, end = sum(lengths[:longest]), sum(lengths[: longest + 1])
    with emulator.batch_invariant():
        solve(emulator, case, has_more=False, device=LARGE)
        assert any(run[0] == "segments_invariant.cu" for run in emulator.kernels_run)
        x = maker(dtype)(sum(lengths), *inner)
        together, alone = compute(x, lengths), compute(x[begin:end].clone(), [end - begin])
    assert torch.equal(alone, together[longest : longest + 1] if reduces else together[begin:end])


def drawn(rng: Random, dtype: torch.dtype, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Normal values, maybe with gaps, behind some elements of the same memory."""
    gap, before = rng.choice((1, 1, 2)), rng.choice((0, 0, 1, 3, 4))
    memory = torch.empty(before + math.prod(shape) * gap, dtype=dtype)[before:]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)), dtype=F64)
    return memory.view(*shape, gap)[..., 0].copy_(values * scale)


@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, 20))])
def test_drawn_segments(emulator, seed):
    """Layouts, scores that need maxima and scores that do not, and one that is not finite, which stays in its row."""
    rng = Random(seed)
    function, dtype = rng.choice(("softmax", "log_softmax", "logsumexp")), rng.choice(tuple(TOLERANCE))
    inner = rng.choice(((), (), (2,), (3,), (5,), (8,), (2, 3), (33,)))
    mean = rng.choice((1, 5, 20, 70))
    lengths = [int(rng.expovariate(1 / mean)) for _ in range(rng.randint(1, 40))]
    lengths[0], n = 1, sum(lengths[1:]) + 1
    scale, factor = rng.choice((1.0, 5.0, 40.0)), rng.choice((1.0, 0.5, -2.0))
    x = drawn(rng, dtype, (n, *inner), scale)
    x[tuple(rng.randrange(size) for size in x.shape)] = rng.choice((1.0, math.inf, -math.inf, math.nan))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if rng.random() < 0.3 else None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    wide = x.double().requires_grad_()
    want = expected(function, wide * factor, lengths, order)
    y = drawn(rng, dtype, want.shape)
    emulator.segments(function, {"x": x, "y": y}, offsets, 0, order, factor)
    tolerance = TOLERANCE[dtype] * max(1.0, scale / 4)
    torch.testing.assert_close(y.double(), want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    dx = drawn(rng, dtype, x.shape)
    if function == "logsumexp":
        accumulator = F64 if dtype is F64 else F32
        grad = drawn(rng, accumulator, want.shape)
        (of_x,) = torch.autograd.grad(want, wide, grad.double())
        given = {"x": x, "y": want.detach().to(accumulator), "grad": grad}
    else:
        grad, of_y = drawn(rng, dtype, want.shape), y.double()
        row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        row = row if order is None else torch.empty_like(row).index_copy(0, order, row)
        terms = grad.double() * (of_y if function == "softmax" else 1)
        sums = torch.zeros(len(lengths), *inner, dtype=F64).index_add(0, row, terms)[row]
        of_x = of_y * (grad.double() - sums) if function == "softmax" else grad.double() - of_y.exp() * sums
        of_x, given = factor * of_x, {"y": y, "grad": grad}
    emulator.segments(function, {**given, "dx": dx}, offsets, 0, order, factor)
    largest = max(1.0, of_x[of_x.isfinite()].abs().max().item() if of_x.isfinite().any() else 1.0)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(dx.double(), of_x, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("inner", [(), slow((8,)), slow((3,))])
def test_bits_do_not_depend_on_what_shared_memory_held(emulator, inner, dtype):
    """What it holds is drawn for each call."""
    lengths = [k % 40 for k in range(700)]
    offsets, n = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    x, grad = (maker(dtype)(n, *inner) for _ in range(2))
    results = []
    for _ in range(6):
        y, dx = torch.empty_like(x), torch.empty_like(x)
        emulator.segments("softmax", {"x": x, "y": y}, offsets)
        emulator.segments("softmax", {"y": y, "grad": grad, "dx": dx}, offsets)
        results.append(torch.stack((y, dx)))
    assert all(torch.equal(each, results[0]) for each in results)
    assert results[0].isfinite().all()


def test_a_sum_that_overflows_stays_in_its_row(emulator):
    lengths = [k % 11 for k in range(300)]
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    offsets, n, is_large = torch.tensor([0, *lengths]).cumsum(0), sum(lengths), row % 3 == 0
    make = maker(F32)
    y, grad = make(n), torch.where(is_large, 3e38 * make(n).sign(), make(n))
    y[is_large] = 1
    dx = torch.empty_like(y)
    emulator.segments("softmax", {"y": y, "grad": grad, "dx": dx}, offsets)
    sums = torch.zeros(len(lengths), dtype=F64).index_add(0, row, (y * grad).double())
    assert_close(dx[~is_large], (y * (grad.double() - sums[row]))[~is_large], F32)


# Numbers of items and of segments. The first one is of many items in few segments, of which some begin alone.
INDICES = [(70000, 3), (5000, 900), (33, 4000), (1024, 1), (1, 1), (0, 5), (0, 0)]


@pytest.mark.parametrize(("items", "segments"), INDICES)
@pytest.mark.parametrize("types", [(torch.int64, torch.int32), (torch.int32, torch.int64)])
def test_offsets_of_a_sorted_index(emulator, items, segments, types):
    of_index, of_offsets = types
    generator = torch.Generator().manual_seed(items)
    index = torch.randint(0, max(segments, 1), (items,), generator=generator, dtype=of_index).sort().values
    offsets = torch.empty(segments + 1, dtype=of_offsets)
    for given in (index, torch.cat((index[:1], index))[1:]):  # one that begins within a vector
        emulator.offsets(given, offsets.fill_(-7))
        assert torch.equal(offsets, torch.searchsorted(index, torch.arange(segments + 1)).to(of_offsets))


@pytest.mark.parametrize("values", [(-(10**12), 10**12), (0, 900)])
def test_an_index_that_is_not_sorted_writes_nothing_else(emulator, values):
    """The emulator fails where a kernel reads or writes outside of its tensors."""
    index = torch.randint(*values, (3000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.zeros(500, dtype=torch.int32)
    emulator.offsets(index, offsets)
    assert 0 <= int(offsets.min()) <= int(offsets.max()) <= 3000


@pytest.mark.parametrize("offsets", [[0, -5, 10**12, 20, 9000], [9000, 4500, 0], [7, 8]])
def test_wrong_offsets_read_nothing_else(emulator, offsets):
    """The emulator refuses what is outside of the tensors."""
    x = maker(F32)(9000)
    emulator.segments("softmax", {"x": x, "y": torch.empty_like(x)}, torch.tensor(offsets))
