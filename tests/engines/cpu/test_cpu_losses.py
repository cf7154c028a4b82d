"""Losses on a CPU: rows whose scores are far from that of class 0, among rows whose scores are near."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onepass
from lib.losses import assert_close, classes
from lib.support import DTYPES, maker

INF = torch.inf
SHAPES = {
    "lanes": (70, 13),
    "rows": (37, 64),
    "longer rows": (9, 1000),
    "parts": (5, 5001),
    "columns": (2, 21, 40),
    "long columns": (2, 150, 40),
}


def far_rows(x: Tensor) -> Tensor:
    """Every other row has a class 0 that is far from the others, in one of several ways."""
    x = x.movedim(1, -1).clone(memory_format=torch.contiguous_format)
    rows = x.view(-1, x.shape[-1])
    for k, low in enumerate((-40.0, -100.0, 50.0, 200.0, -INF, -30000.0, 30000.0, -5000.0)):
        rows[2 * k + 1 :: 16, 0] = low
    rows[3::32] -= 1000
    return x.movedim(-1, 1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_class_0_is_far_from_the_others(shape, dtype):
    x = far_rows(maker(dtype, "cpu")(*SHAPES[shape]))
    target = classes(x[:, 1:]) + 1
    for smoothing in (0.0, 0.1) if shape == "rows" else (0.0,):
        named = {"reduction": "none", "label_smoothing": smoothing}
        got = onepass.cross_entropy(x, target, **named)
        want = F.cross_entropy(x.double(), target, **named)
        assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_beside_do_not_matter(shape, dtype):
    near = maker(dtype, "cpu")(*SHAPES[shape])
    far = far_rows(near)
    target = classes(near)
    (a, lse_a), (b, lse_b) = (onepass.cross_entropy(x, target, reduction="none", return_lse=True) for x in (near, far))
    is_same = (near == far).all(1)
    assert is_same.any()
    assert not is_same.all()
    assert torch.equal(a[is_same], b[is_same])
    assert torch.equal(lse_a[is_same], lse_b[is_same])


def test_sums_of_many_weights_and_rows_have_the_same_bits_with_any_number_of_threads() -> None:
    weight = torch.rand(150_000)
    x, target = torch.randn(2, 150_000), torch.tensor([3, 77])
    wide, shares = torch.randn(140_000, 2, dtype=torch.float64), torch.rand(140_000, 2, dtype=torch.float64)
    before, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            smoothed = onepass.cross_entropy(x, target, weight, label_smoothing=0.5, reduction="none")
            made.append((smoothed, onepass.cross_entropy(wide, shares)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for each in made[1:] for a, b in zip(made[0], each, strict=True))
