"""The CPU engine's segments of heads that fill vectors: gradients go from memory to memory, where tensors are alike."""

import pytest
import torch
from torch import Tensor

import onepass
from lib.losses import assert_close
from lib.support import DTYPES, maker, slow

F32, F64, F16, BF16 = DTYPES
LENGTHS = [k % 13 for k in range(60)] + [300]


def computed(x: Tensor, g: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = onepass.segment_softmax(leaf, torch.tensor([0, *lengths]).cumsum(0))
    return y.detach(), torch.autograd.grad(y, leaf, g)[0]


def gradient(y: Tensor, g: Tensor, lengths: list[int]) -> Tensor:
    """Of softmax over segments of dim 0, in float64, from its rounded result."""
    parts = zip(y.double().split(lengths), g.double().split(lengths), strict=True)
    return torch.cat([of_y * (of_g - (of_y * of_g).sum(0)) for of_y, of_g in parts])


def assert_right(x: Tensor, g: Tensor, lengths: list[int]) -> None:
    y, dx = computed(x, g, lengths)
    assert_close(y, torch.cat([part.softmax(0) for part in x.double().split(lengths)]), x.dtype)
    assert_close(dx, gradient(y, g, lengths), x.dtype)


def behind(t: Tensor, elements: int) -> Tensor:
    """A copy that lies `elements` behind the beginning of its memory."""
    return torch.cat((t.new_zeros(elements), t.flatten()))[elements:].view(t.shape)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [8, 16, 24, 32, 48, 64, 96, 128, 144, 256, slow(272), slow(512)])
def test_heads_that_fill_vectors(width, dtype):
    make = maker(dtype)
    for shift in (0, 3):
        x, g = (behind(make(sum(LENGTHS), width), shift) for _ in range(2))
        assert_right(x, g, LENGTHS)


@pytest.mark.parametrize(("items", "dtype"), [(40_000, F32), (70_000, BF16)])
def test_results_that_are_streamed(items, dtype):
    lengths = [items // 4 - 1, *[7] * (items // 14), 1]
    lengths.append(items - sum(lengths))
    x, g = (maker(dtype)(items, 64) for _ in range(2))
    assert_right(x, g, lengths)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_not_finite_stays_in_its_row(dtype):
    x, g = (maker(dtype)(sum(LENGTHS), 64) for _ in range(2))
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    spoilt = torch.zeros(x.shape, dtype=torch.bool)
    for segment, head, value in ((5, 0, torch.inf), (8, 17, torch.nan), (60, 63, -torch.inf)):
        rows = slice(ends[segment] - LENGTHS[segment], ends[segment])
        g[rows.start, head] = value
        spoilt[rows, head] = True
    y, got = computed(x, g, LENGTHS)
    right = gradient(y, torch.where(spoilt, 0, g), LENGTHS)
    assert not got[spoilt].isfinite().any()
    assert_close(got[~spoilt], right[~spoilt], dtype)
