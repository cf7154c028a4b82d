"""Public calls with scores by engine="triton": values and gradients are the definition's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib.support import maker
from lib.triton import needs_triton
from onepass import reference

pytestmark = needs_triton


def _values_and_gradient(function: str, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    y = getattr(onepass, function)(x, -1, engine="triton", **options)
    return y.detach(), torch.autograd.grad(y.masked_fill(y.isinf(), 0).square().sum(), x)[0]


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "softmin", "logsumexp"])
def test_values_and_gradients(runs, function):
    make = maker(torch.float32, runs.device)
    x, options = make(2, 3, 7), {"scale": 0.5, "causal": True, "bias": make(7), "softcap": 4.0, "sink": 0.0}
    got, gradient = runs.run(_values_and_gradient, function, x, options)
    exact = x.double().requires_grad_()
    want = getattr(reference, function)(exact, -1, **options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    finite = want.masked_fill(want.isinf(), 0)
    torch.testing.assert_close(
        gradient.double(), torch.autograd.grad(finite.square().sum(), exact)[0], rtol=1e-4, atol=1e-5
    )
