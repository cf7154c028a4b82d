"""Shared by the tests of `onepass.warmup`."""

import math
import random
from collections.abc import Iterator

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


def column_kernel(plan: dict) -> tuple:
    """The parts of a plan that are compiled into its kernel of columns."""
    tier, threads_x, threads_y, items, vec_size, blocks, smem_vecs, access = plan["plan"]
    threads = -(-threads_x * threads_y // 32) * 32
    most_threads = max(128, 1 << (threads - 1).bit_length())
    in_grid = plan["tier"] == "columns-grid" or (plan["tier"] == "columns-twopass" and blocks > 1)
    cluster = blocks if plan["tier"] in ("columns", "columns-smem") else 1
    in_smem = 0 if plan["tier"] == "columns-staged" else min(smem_vecs, 2)  # for that tier: slices of a group
    return tier, in_grid, most_threads, items // vec_size, vec_size, cluster, in_smem, access


def plan_of(numbers: native.Plan) -> dict:
    return {"tier": native.TIERS[numbers.tier], "plan": numbers}


def compiled_in(plan: dict) -> tuple:
    """The parts of a gradient's plan that are compiled into its kernel."""
    if plan["tier"].startswith("columns"):
        return column_kernel(plan)
    numbers = native.Plan(*plan["plan"])
    threads = numbers.threads_per_row if plan["tier"] == "warp" else 0
    blocks = numbers.blocks_per_row if plan["tier"] == "cluster" else 1
    return numbers._replace(threads_per_row=threads, blocks_per_row=blocks, smem_vecs=0)


def random_call(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Sizes of a contiguous tensor, and dims of a call with `n` elements per column."""
    outer, inner = (int(2 ** rng.uniform(0, bits)) for bits in (8, rng.choice([4, 10, 14])))
    more = rng.choice([2, 3, 8])
    if rng.random() < 0.4 and n % more == 0 and n > more:  # no elements of a column are adjacent
        sizes = [n // more, inner, more, outer]
        return (sizes, [0, 2]) if rng.random() < 0.5 else ([outer, n // more, inner, more], [1, 3])
    inner = inner // 8 * 8 if rng.random() < 0.4 and inner >= 8 else inner
    return [outer, n, inner], [1]


def plan_of_call(
    function: str,
    which: str,
    types: tuple,
    arch: int,
    sizes: list[int],
    dims: list[int],
    addresses: tuple[int, ...] = (),
    one_a_column: bool = False,
    gpu: str = "",
) -> dict:
    """The plan of a call on contiguous tensors at `addresses`, or of its gradient, which may have one value per row."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    results = [1 if i in dims else size for i, size in enumerate(sizes)]
    one_a_row = [0 if i in dims else math.prod(results[i + 1 :]) for i in range(len(sizes))]
    lse, chip = function == "logsumexp", {"arch": arch, "gpu": gpu}
    if which == native.PASSES[0]:
        y_strides = one_a_row if lse else strides
        plan = native.plan(function, True, sizes, strides, y_strides, dims, *types, *addresses, **chip)
    else:
        grad = [0] * len(sizes) if which == native.PASSES[2] else one_a_row if lse or one_a_column else strides
        each = strides, strides, grad, one_a_row if lse else [0] * len(sizes)
        plan = native.backward_plan(function, sizes, each, dims, *types, addresses or (0,) * 4, **chip)
    return {**plan, "sizes": sizes, "dims": dims, "addresses": addresses}


def addresses_of(function: str, which: str, types: tuple, first: int, in_place: bool = False) -> tuple[int, ...]:
    """The addresses of a call's tensors. The input, or the upstream gradient, begins at element `first` of its
    memory."""
    if which == native.PASSES[0]:
        return first * types[0].itemsize, first * types[1].itemsize if in_place else 0
    return (0, first * types[1].itemsize, 0, 0) if function == "logsumexp" else (0, 0, first * types[0].itemsize, 0)


def random_plans(count: int, n: int | None, function: str, which: str, types: tuple, arch: int) -> Iterator[dict]:
    """Plans of random calls over other dims than the last. Columns have `n` elements, or any number if that is None.
    Tensors begin at any element."""
    rng = random.Random(0)
    for _ in range(count):
        sizes, dims = random_call(rng, n or int(2 ** rng.uniform(1, rng.choice([8, 12, 16, 24]))))
        kind = rng.choice(["fresh", "fresh", "in place", "one a column"])
        addresses = addresses_of(function, which, types, rng.choice([0, 0, 1, 2, 3, 4, 6]), kind == "in place")
        plan = plan_of_call(function, which, types, arch, sizes, dims, addresses, kind == "one a column")
        if plan["tier"].startswith("columns"):
            yield plan
