"""Rows without a GPU, by the emulator of their kernels: a part of what test_cuda.py does (`--emulate`: all of it)."""

import pytest
import torch

from emulator import missing
from lib.rows import FORCED, TYPES, check_forced, is_served
from onepass import native

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("turn", range(len(FORCED) // 2))
def test_every_tier(emulator, turn):
    """Functions and types take turns."""
    torch.manual_seed(0)
    function = native.FUNCTIONS[turn % 5]
    types = [pair for pair in TYPES if is_served(function, *pair)]
    check_forced(emulator, function, *types[turn // 2 % len(types)], *FORCED[2 * turn])
