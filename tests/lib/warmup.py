"""What the tests of warming up share."""

import struct

import pytest
import torch
from click.testing import CliRunner, Result

from onepass import native
from onepass.tools.cli import cli

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
TYPES = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (BF16, F32), (F32, F16)]

TIERS = ("warp", "flat", "block", "cluster", "grid", "stream", "columns", "columns-grid", "columns-stream")
EDGES = ("window", "apart", "whole", "slab", "whole slab", "strided")
FIELDS = ("tier", "lanes", "rows_per_block", "values", "vector", "split", "shelf", "edges")  # of a plan, in order


def has_nvrtc() -> bool:
    try:
        return bool(native.status("nvrtc"))
    except RuntimeError:
        return False


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["warmup", *arguments])


def names(kernels: list[str]) -> set[str]:
    """What tells kernels apart: several plans may ask for one."""
    return {kernel.split("-")[1] for kernel in kernels}


def column_kernel(plan: dict) -> tuple:
    """What a kernel of columns has compiled into it of a plan."""
    tier, slots = plan["tier"], plan["values"] // plan["vector"]
    threads = -(-plan["lanes"] * plan["rows_per_block"] // 32) * 32
    block = max(128, 1 << (threads - 1).bit_length())
    in_grid = tier == "columns-grid" or (tier == "columns-stream" and plan["split"] > 1)
    cluster, shelf = plan["split"] if tier == "columns" else 1, min(plan["shelf"], 2)
    return tier == "columns-stream", in_grid, block, slots, plan["vector"], cluster, shelf, plan["edges"]


def plan_of(kernel: str) -> dict:
    """The plan that is written in front of a kernel's digest."""
    plan = dict(zip(FIELDS, struct.unpack("8i", bytes.fromhex(kernel.split("-")[0])), strict=True))
    return {**plan, "tier": TIERS[plan["tier"]], "edges": EDGES[plan["edges"]]}


def compiled_in(plan: dict) -> tuple:
    """What a kernel has compiled into it of the plan of a gradient."""
    if plan["tier"].startswith("columns"):
        return column_kernel(plan)
    lanes = plan["lanes"] if plan["tier"] == "warp" else 0
    split = plan["split"] if plan["tier"] == "cluster" else 1
    return plan["tier"], lanes, plan["rows_per_block"], plan["values"], plan["vector"], split, plan["edges"]
