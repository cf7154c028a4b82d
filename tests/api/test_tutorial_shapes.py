"""The published unit test of the fused softmax tutorial: 1823 x 781 float32 against torch, and its relatives."""

from __future__ import annotations

import pytest
import torch

from lib.support import TORCH, ours


def test_1823_by_781(engine, device):
    """The shape has no power of two in it: rows are misaligned and lanes are masked."""
    torch.manual_seed(0)
    x = torch.randn(1823, 781, device=device)
    y = ours("softmax")(x, engine=engine)
    torch.testing.assert_close(y, torch.softmax(x, dim=1))


def test_1823_by_781_of_every_kind(function, dtype, engine, device):
    torch.manual_seed(0)
    x = torch.randn(1823, 781, device=device).to(dtype)
    for dim in (1, 0):
        torch.testing.assert_close(ours(function)(x, dim, engine=engine), TORCH[function](x, dim))


@pytest.mark.parametrize("columns", [256, 384, 12672])
def test_ends_of_the_published_sweep(columns, engine, device):
    """M = 4096, N = 128 * i for i = 2 .. 99; fewer rows here."""
    torch.manual_seed(0)
    x = torch.randn(256, columns, device=device)
    torch.testing.assert_close(ours("softmax")(x, engine=engine), torch.softmax(x, dim=-1))
