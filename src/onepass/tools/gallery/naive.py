"""naive: one torch call for each step of the definition.

Idea: subtract each row's maximum, so that no exponential overflows; exponentiate; divide by the sum. Five calls, each
a kernel that knows nothing of the next.

Traffic: reads 5MN + 2M, writes 3MN + 2M: each call reads the result of the one before.

Limit: memory. A softmax needs MN reads and MN writes. These are four times as many, so that it can reach a quarter of
a copy's speed. It holds two more matrices besides the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["softmax"]


def softmax(x: Tensor, out: Tensor | None = None) -> Tensor:
    """
    >>> softmax(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    # The maximum is exact in float16 and bfloat16. As float32, it makes every later step float32.
    maximum = torch.amax(x, 1).float()  # reads MN      writes M
    shifted = x - maximum[:, None]  # reads MN + M  writes MN
    numerator = torch.exp(shifted)  # reads MN      writes MN
    denominator = torch.sum(numerator, 1)  # reads MN      writes M
    if out is None:
        out = torch.empty_like(x)
    return torch.div(numerator, denominator[:, None], out=out)  # reads MN + M  writes MN
