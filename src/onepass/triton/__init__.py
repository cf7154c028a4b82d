"""The portable engine: Triton kernels for NVIDIA, AMD and Intel GPUs, and for the CPU under Triton's interpreter.

    state.py    the pair (m, l) in Triton: load, exponential, absorb, fold, finish
    rows.py     the row tier: whole rows on the chip, one read and one write
    online.py   the online tier: longer rows, streamed in chunks
    plans.py    which tier and which launch numbers, as data
    layout.py   any dims and strides -> rows by n, or a copy where that cannot be
    launch.py   the entry point

    gradients.py   the gradients of rows, in both tiers
    backward.py    their entry point

Triton itself is imported when the first kernel is needed, never by importing this package.
"""

from .available import unavailable
from .backward import backward
from .launch import forward
from .plans import Plan, backward_plan, plan

__all__ = ["Plan", "backward", "backward_plan", "forward", "plan", "unavailable"]
