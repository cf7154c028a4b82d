"""The factors by which columns of half results take exponentials: products with them are exact."""

import math
import re
from pathlib import Path

import pytest
import torch

import onepass

SOURCE = Path(onepass.__file__).with_name("csrc") / "cuda" / "kernels" / "exp_half.cuh"
NUMBERS = re.findall(r"kFactor = ([\d.]+)f, kRest = ([\d.]+)f", SOURCE.read_text())


@pytest.mark.parametrize(("dtype", "which"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_products_are_exact_and_their_factors_make_up_log2_e(dtype, which):
    factor, rest = (float(torch.tensor(float(number))) for number in NUMBERS[which])
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).float()
    every = every[every.isfinite() & ((every == 0) | (every.abs() >= 2.0**-126))]
    assert (every * factor).isfinite().all()
    assert ((every * factor).double() == every.double() * factor).all()
    assert factor * rest == pytest.approx(math.log2(math.e), rel=3e-8)
    if dtype == torch.bfloat16:  # sums leave out what the factor lacks
        assert 0 < rest - 2 < 1e-5
