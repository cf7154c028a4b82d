"""The portable engine: Triton kernels for NVIDIA, AMD and Intel GPUs, and for the CPU under Triton's interpreter.

    scored.py     the entry points of calls with scores: scale, bias, mask, window, ...
    loss.py       the entry points of losses, whose kernels are in loss_kernels.py
    divergence.py the entry points of divergences, whose kernels are in divergence_kernels.py
    segments.py   the entry points of segments, whose kernels are in segment_kernels.py
    launch.py     all other entry points: whether the engine can run, any dims and strides viewed as rows by n, launches
    plan.py       the tier of a call and its launch numbers, as data
    kernels.py    a row tier, which keeps whole rows on the chip, and an online tier, which streams longer rows; both
                  for the forward and the backward
    score.py      the prologue: how a kernel transforms an element that it reads (function, scores); arithmetic
    epilogue.py   the epilogue: what a kernel computes from a row's state and its elements, by function and direction

Importing this package does not import Triton. The first kernel does.
"""

from .divergence import (
    launch_divergence_backward,
    launch_divergence_forward,
    launch_product,
    launch_product_gradient,
)
from .launch import launch_backward, launch_forward, unavailable
from .loss import launch_loss_backward, launch_loss_forward
from .plan import Plan, plan_backward, plan_forward, plan_scored
from .scored import launch_scored_backward, launch_scored_forward, launch_scored_logsumexp_backward
from .segments import launch_segment_backward, launch_segment_forward

__all__ = [
    "Plan",
    "launch_backward",
    "launch_divergence_backward",
    "launch_divergence_forward",
    "launch_forward",
    "launch_loss_backward",
    "launch_loss_forward",
    "launch_product",
    "launch_product_gradient",
    "launch_scored_backward",
    "launch_scored_forward",
    "launch_scored_logsumexp_backward",
    "launch_segment_backward",
    "launch_segment_forward",
    "plan_backward",
    "plan_forward",
    "plan_scored",
    "unavailable",
]
