"""The launches that a thread caches: the same that it would make anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onepass
from lib.cpp import build, output
from lib.support import slow
from onepass import native, reference


@pytest.mark.parametrize("calls", [8_000, slow(60_000)])  # of each of five threads
def test_cached_launches_are_those_made_anew(tmp_path, calls):
    program = build(tmp_path, "launches", "cuda/host/launch.cpp", "plan/tables.cpp", options=("-O0", "-pthread"))
    found, made, tiers, forward_ns, backward_ns = map(float, output(program, calls).split())
    assert min(found, made) > calls
    assert tiers == len(native.TIERS)
    assert 0 < backward_ns < 3 * forward_ns + 200  # no gradient is planned anew: that takes microseconds


# On a GPU -------------------------------------------------------------------------------------------------------------


def right(y: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(y.double(), reference.softmax(x, -1).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_a_shape_at_every_address():
    """Each pair of places within 16 bytes has its own launch; none is taken for another's."""
    for n in (33, 128, 5000, 140_001):
        x, y = (torch.randn(3 * n + 8, device="cuda") for _ in range(2))
        for _ in range(2):
            for i in range(5):
                for j in range(5):
                    rows, out = x[i : i + 3 * n].view(3, n), y[j : j + 3 * n].view(3, n)
                    right(onepass.softmax(rows, -1), rows)
                    right(onepass.softmax(rows, -1, out=out), rows)


@pytest.mark.gpu
def test_other_tables_are_heeded_at_once():
    gpu = torch.cuda.get_device_name(0)
    x = torch.randn(64, 512, device="cuda")
    onepass.softmax(x, -1)
    known = native.tables(gpu)
    twopass = [[2**63 - 1, 5, 64, 56, 1, 0]]  # all rows read twice, with numbers that no built-in table has
    unaligned = [[2**63 - 1, -1, 0, 0, 1, 0]]
    made = native.counts()
    try:
        others = {name: unaligned if "unaligned" in name else twopass for name in native.TABLES[:8]}
        native.set_tables(gpu, "a test's", {**native.tables()["tables"], **others})
        right(onepass.softmax(x, -1), x)
        assert native.counts() != made  # a kernel that this process had not got yet
    finally:
        native.set_tables(gpu, known["origin"], known["tables"])
    right(onepass.softmax(x, -1), x)
