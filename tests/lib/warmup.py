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
    tier, threads_x, threads_y, items, vec_size, blocks, smem_vecs, access = plan["plan"]
    threads = -(-threads_x * threads_y // 32) * 32
    most_threads = max(128, 1 << (threads - 1).bit_length())
    in_grid = plan["tier"] == "columns-grid" or (plan["tier"] == "columns-twopass" and blocks > 1)
    cluster = blocks if plan["tier"] == "columns" else 1
    return tier, in_grid, most_threads, items // vec_size, vec_size, cluster, min(smem_vecs, 2), access


def plan_of(kernel: str) -> dict:
    """The plan that is written in front of a kernel's digest, as `native` has it."""
    numbers = struct.unpack("8i", bytes.fromhex(kernel.split("-")[0]))
    return {"tier": native.TIERS[numbers[0]], "plan": numbers}


def compiled_in(plan: dict) -> tuple:
    """What a kernel has compiled into it of the plan of a gradient."""
    if plan["tier"].startswith("columns"):
        return column_kernel(plan)
    numbers = native.Plan(*plan["plan"])
    threads = numbers.threads_per_row if plan["tier"] == "warp" else 0
    blocks = numbers.blocks_per_row if plan["tier"] == "cluster" else 1
    return numbers._replace(threads_per_row=threads, blocks_per_row=blocks, smem_vecs=0)
