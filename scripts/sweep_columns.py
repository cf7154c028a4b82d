"""Times many plans of columns on random shapes, on a GPU: what `ColumnPlanner::expected` and the ways of
`plan_narrow` (src/onepass/csrc/plan/columns.h) are made of.

    python scripts/sweep_columns.py --seeds 2 3 --count 8 --out sweep.json

For each case that `onepass bench random` draws, the planner's own plan and the product of these parameters: the tier,
the elements of a vector, the bytes of a line, threads, vectors in registers and in shared memory, blocks. Plans that do
not fit are passed over. Prints of each case the planner's part of a copy's speed and the fastest plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import torch

from onepass import native
from onepass._kernel_compiler import Kernel, compile_all
from onepass.native import Plan
from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.random_cases import MB, draw
from onepass.tools.bench.timing import Cuda, summarise

COLUMNS, STAGED = native.TIERS.index("columns"), native.TIERS.index("columns-staged")
ALIGNED, SLAB, SLAB_ALIGNED, SHIFTED = 2, 3, 4, 6
LINE_BYTES, THREADS, GROUP_KB = (128, 256, 512), (128, 256, 512), (12, 24, 48)
REGISTER_VECS, SMEM_VECS = {2: 28, 4: 28, 8: 20, 16: 12}, (0, 12, 24)


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def compiled(vecs: int) -> int:
    """The number of vectors per thread, rounded up to a number for which there are kernels."""
    return vecs if vecs <= 16 else up(vecs, 2) * 2


def shared(vecs: int, smem_vecs: int, need: int) -> Iterator[tuple[int, int, int]]:
    """(vectors in registers, in shared memory, blocks): the fewest blocks that hold a column, and twice as many."""
    fitting = [blocks for blocks in (1, 2, 4, 8, 16) if up(need, blocks) <= vecs + smem_vecs]
    for blocks in fitting[:2]:
        each = up(need, blocks)
        in_registers = compiled(min(each, vecs))
        yield in_registers, up(max(each - in_registers, 0), 4) * 4, blocks


def tiles(n: int, b: int, size: int, operands: int) -> Iterator[Plan]:
    for vector, access in product((1, 2, 4, 8), (ALIGNED, SHIFTED)):
        shift = access == SHIFTED
        if vector * size > 16 or (shift == (b % vector == 0)) or (shift and vector == 1):
            continue
        vectors, period = up(b, vector), vector // gcd(b, vector) if shift else 1
        for line, threads, in_smem in product(LINE_BYTES, THREADS, SMEM_VECS):
            side = max(line // (vector * size) - shift, 1)
            across = max(up(vectors, up(vectors, side)) + shift, 3 if shift else 1)
            down = max(min(threads // across, up(n, 2)) // period * period, period)
            if across * down > 1024 or (in_smem and (vector == 1 or vector * size < 4)):
                continue
            for vecs in (REGISTER_VECS[vector * size] // operands, 8 // operands):
                for kept, smem_vecs, blocks in shared(vecs, in_smem // operands, up(n, down)):
                    yield Plan(COLUMNS, across, down, kept * vector, vector, blocks, smem_vecs, access)


def slabs(n: int, b: int, size: int, operands: int) -> Iterator[Plan]:
    vector = 16 // size
    whole, turn = n * b % vector == 0, b // gcd(b, vector)
    for threads, vecs in product(THREADS, (16 // operands, 8 // operands)):
        across = turn * max(threads // turn, 1)
        if across <= 512:
            need = up(n * b + (0 if whole else vector - 1), across * vector)
            for kept, _, blocks in shared(vecs, 0, need):
                yield Plan(COLUMNS, across, 1, kept * vector, vector, blocks, 0, SLAB_ALIGNED if whole else SLAB)


def groups(a: int, n: int, b: int, size: int, operands: int) -> Iterator[Plan]:
    slice_bytes = n * b * size * operands
    for vector, threads, kilobytes, most in product((1, 2), (256, 512), GROUP_KB, (16, 32)):
        down, slices = up(n, most), max(kilobytes * 1024 // slice_bytes, 1)
        if down <= threads // 2 and slices <= a and slices * slice_bytes < 100 * 1024 and slices * n * b * size >= 16:
            vecs = slices * up(b, vector)
            across, each = up(vecs, up(vecs, threads // down)), up(n, down)
            items = each if each <= 4 else up(each, 2) * 2 if each <= 16 else up(each, 4) * 4
            yield Plan(STAGED, across, down, items * vector, vector, 2, slices, ALIGNED)


def candidates(case: Case) -> list[Plan]:
    """The plans to time, the planner's first."""
    (a, n, b), dtype = case.shape, getattr(torch, case.dtypes[0])
    sizes, strides, about = (a, n, b), (n * b, b, 1), torch.cuda.get_device_name()
    if case.direction == "backward":
        own = native.backward_plan(case.function, sizes, [strides] * 3, [1], dtype, dtype, gpu=about)["plan"]
    else:
        own = native.plan(case.function, True, sizes, strides, strides, [1], dtype, dtype, gpu=about)["plan"]
    of = n, b, ITEMSIZE[case.dtypes[0]], 2 if case.direction == "backward" else 1
    return [*dict.fromkeys([Plan(*own), *tiles(*of), *slabs(*of), *groups(a, *of)])]


def measure(case: Case, plans: list[Plan], clock: Cuda) -> list[tuple[float, Plan]]:
    """Fractions of a copy's speed (for a gradient, of an addition's): the planner's first, then the fastest first."""
    dtype, number = getattr(torch, case.dtypes[0]), native.FUNCTIONS.index(case.function)
    x = torch.randn(case.shape, device="cuda", dtype=dtype)
    g, out, ops = torch.randn_like(x), torch.empty_like(x), torch.ops.onepass
    gradient = case.direction == "backward"
    if gradient:
        x = x.softmax(1) if case.function == "softmax" else x.log_softmax(1)

    def launch(plan: Plan) -> None:
        if gradient:
            ops._softmax_backward_with_plan(g, x, None, number, [1], list(plan), out)
        else:
            ops._softmax_with_plan(x, number, [1], False, list(plan), out)

    def time(call: Any) -> float:
        call()
        return summarise(clock.events(call, 7, 1)).median

    limit = time(lambda: torch.add(x, g, out=out) if gradient else out.copy_(x))
    parts = []
    for plan in plans:
        try:
            parts.append((limit / time(partial(launch, plan)), plan))
        except RuntimeError:  # the plan does not support the call
            torch.cuda.synchronize()
    return parts[:1] + sorted(parts[1:], reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--count", type=int, default=8, help="shapes per seed and class")
    parser.add_argument("--classes", nargs="+", default=["other-dim", "gradient-other-dim"])
    parser.add_argument("--out", help="a JSON file for all times")
    given = parser.parse_args()
    cases = [c for s in given.seeds for c in draw(s, given.count, given.classes, moves=(64 * MB, 300 * MB))]
    plans = [candidates(case) for case in cases]
    kernels = []
    for case, tried in zip(cases, plans, strict=True):
        dtype = getattr(torch, case.dtypes[0])
        kernels += [Kernel(case.function, dtype, dtype, case.direction, plan) for plan in tried]
    major, minor = torch.cuda.get_device_capability()
    print(f"{len(cases)} cases, {len(kernels)} plans")
    for _ in compile_all(kernels, 10 * major + minor, ignore_errors=True):
        pass
    clock, found = Cuda(torch.device("cuda", torch.cuda.current_device())), []
    for case, tried in zip(cases, plans, strict=True):
        parts = measure(case, tried, clock)
        found.append({"case": case.name, "dtype": case.dtypes[0], "direction": case.direction, "parts": parts})
        best = "; ".join(f"{part:.2f} {tuple(map(int, plan))}" for part, plan in parts[1:4])
        print(f"{case.name} {case.dtypes[0]} {case.direction}: the planner's {parts[0][0]:.2f}; {best}")
    if given.out:
        with open(given.out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
