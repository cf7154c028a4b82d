"""The CUDA kernel of segments in the emulator, by the plans that an H200 has for it, against torch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import missing
from lib.plan_tables import BF16, F16, F32, F64
from lib.support import maker, slow

LARGE, SMALL = 0, 3  # devices: the second has one block at a time, so that none waits for another
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOLERANCE = {F32: 1e-5, BF16: 1.6e-2, F16: 2e-3, F64: 1e-12}
# The function, dtype, trailing dims, and the lengths of segments. A lane takes up to 32 items of a segment; the blocks
# share one that is longer than all lanes of a warp take. A block takes one of middling length, and keeps some of them.
CASES: dict[str, tuple[str, Any, tuple[int, ...], list[int]]] = {
    "short": ("softmax", F32, (), [k % 40 for k in range(450)]),
    "long": ("softmax", F32, (), [3, 700, 0, 9000, 40, 0, 5]),
    "middling": ("softmax", F64, (), [3, 600, 300, 1024, 0, 900, 40]),
    "middling, long": ("log_softmax", F32, (64,), [3, 40, 0, 60, 20, 64, 70, 33] + 9 * [100]),
    "heads": ("softmax", BF16, (8,), [k % 30 for k in range(90)]),
    "rows": ("logsumexp", F32, (), [5, 0, 4100, 30, 0]),
    "odd heads": ("log_softmax", F16, (3,), [700, 1, 0, 900]),
    "many heads": ("log_softmax", F64, (70,), [40, 3, 60]),
    "no items": ("logsumexp", F16, (2,), [0, 0]),
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


@pytest.mark.parametrize("case", ["long", *(slow(name) for name in CASES if name != "long")])
def test_blocks_that_do_not_wait(emulator, case):
    """Rows of several tiles are finished by a second launch."""
    solve(emulator, case, has_more=False, device=SMALL)


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


@pytest.mark.parametrize("offsets", [[0, -5, 10**12, 20, 9000], [9000, 4500, 0], [7, 8]])
def test_wrong_offsets_read_nothing_else(emulator, offsets):
    """The emulator refuses what is outside of the tensors."""
    x = maker(F32)(9000)
    emulator.segments("softmax", {"x": x, "y": torch.empty_like(x)}, torch.tensor(offsets))
