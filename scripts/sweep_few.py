"""Sweep the plans of few long rows on the GPU at hand. csrc/plan/rows.h plans such rows by rules, not by tables.

Each plan is checked, then timed with a cold L2 cache beside a copy. `onepass tune` measures many rows.

python scripts/sweep_few.py FILE.json [--repeats 15]
"""

import argparse
import json
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import product
from typing import Any

import torch

from onepass import reference
from onepass._kernel_compiler import compile_all
from onepass.tools.bench.timing import Cuda, summarise
from onepass.tools.tune.candidates import BLOCK, CLUSTER, GRID, Plan, kernels
from onepass.tools.tune.sizes import up

FEW = [
    (1, 16384),
    (8, 16384),
    (64, 16384),
    (1, 32768),
    (8, 32768),
    (64, 32768),
    (1, 65536),
    (32, 65536),
    (1, 262144),
    (8, 262144),
    (1, 131072),
    (1, 2**20),
    (1, 2**22),
    (4, 2**20),
    (8, 128256),
    (32, 128256),
    (64, 151936),
    (1, 2**24),
    (4, 2**22),
]
SHARED = 210 * 1024
SMEM_VECS = (0, 4, 8, 12, 16, 20)
DTYPES = (torch.float32, torch.bfloat16)
SMS = 132
ALIGNED = 2  # `access` of rows of whole vectors


def grid_plans(rows: int, n: int, size: int) -> list[Plan]:
    """Plans that hold the row in registers and shared memory, for each number of blocks per row that may pay."""
    widest, found = 16 // size, []
    vectors = up(n if n % widest == 0 else n + widest - 1, widest)
    for threads, vecs in ((480, 16), (480, 8), (480, 4), (224, 4), (992, 0), (736, 0), (480, 0), (352, 0)):
        room = SHARED // (threads * 16) // 4 * 4
        fit = up(vectors, threads * (vecs + room))  # blocks that hold a row together
        for blocks in {min(SMS, fit), SMS // min(rows, SMS), up(SMS // min(rows, SMS), 2)}:
            each = up(vectors, blocks * threads)
            smem_vecs = min(room, max(0, up(each - vecs, 4) * 4))
            pays = 2 * vecs * threads * blocks < 5 * vectors + 4 * threads * blocks and rows * n > 250000
            if blocks >= 1 and vecs + smem_vecs and pays:
                found.append(Plan(GRID, threads, 1, vecs * widest, widest, blocks, smem_vecs))
    return sorted(set(found))


def plans(rows: int, n: int, size: int) -> list[Plan]:
    widest, most, found = 16 // size, 128 // size, grid_plans(rows, n, size)
    vectors = up(n, widest)
    for blocks, values, smem_vecs in product((1, 2, 4, 8, 16), (most // 4, most // 2, most * 5 // 8, most), SMEM_VECS):
        threads = up(vectors, (values // widest + smem_vecs) * blocks * 32) * 32
        fits = 128 <= threads <= 1024 and rows * blocks <= 4 * SMS and smem_vecs * threads * 16 < SHARED
        if fits and n < 2**19 and (rows * blocks >= 16 or blocks == 16):
            access = ALIGNED if n % widest == 0 and not smem_vecs else 0
            found.append(Plan(BLOCK if blocks == 1 else CLUSTER, threads, 1, values, widest, blocks, smem_vecs, access))
    return sorted(set(found))


def sweep(rows: int, n: int, dtype: torch.dtype, tried: list[Plan], repeats: int, clock: Cuda) -> list[dict[str, Any]]:
    def time(call: Callable[[], object]) -> float:
        call()
        return summarise(clock.events(call, repeats, 1)).median

    x = torch.randn(rows, n, device="cuda").to(dtype)
    y = torch.empty_like(x)
    sample = sorted({*torch.randint(rows, (16 if n < 2**20 else 2,)).tolist(), 0, rows - 1})
    expected = reference.softmax(x[sample], 1)
    copy = time(lambda: y.copy_(x))
    auto = time(lambda: torch.ops.onepass.softmax.out(x, [1], out=y))
    found = []
    for plan in tried:
        y.fill_(torch.nan)
        call = lambda plan=plan: torch.ops.onepass._softmax_with_plan(x, 0, [1], False, list(plan), y)  # noqa: E731
        row = {"n": n, "rows": rows, "dtype": str(dtype), "plan": plan, "copy_us": copy, "auto_us": auto}
        try:
            call()
            error = ((y[sample].double() - expected).abs() / (expected + 1e-30)).max().item()
            if not error < (1e-5 if dtype == torch.float32 else 8e-3) or y.isnan().any():
                raise SystemExit(f"wrong: {rows}x{n} {dtype} plan {plan}: relative error {error}")
            us = time(call)
            found.append(row | {"us": us, "copy_fraction": copy / us})
        except RuntimeError as error:
            found.append(row | {"us": 1e9, "copy_fraction": 0.0, "error": str(error)})
    return sorted(found, key=lambda row: row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    points: list[dict[str, Any]] = []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date, "rows": points}
    clock = Cuda(torch.device("cuda", torch.cuda.current_device()))
    todo = [(dtype, m, n, plans(m, n, dtype.itemsize)) for dtype in DTYPES for m, n in FEW]
    compute = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    needed = kernels([("softmax", str(dtype)[6:], plan) for dtype, _, _, tried in todo for plan in tried])
    list(compile_all(needed, compute, ignore_errors=True))
    print(f"{len(needed)} kernels for {sum(len(tried) for *_, tried in todo)} plans", flush=True)
    for dtype, m, n, tried in todo:
        if not tried:
            continue
        found = sweep(m, n, dtype, tried, options.repeats, clock)
        points += found
        best = "  ".join(
            f"{'WFBCGS'[p[0]]}{p[1]}x{p[2]}v{p[3]}/{p[4]}s{p[5]}+{p[6]} {row['us']:.1f}"
            for row in found[:5]
            for p in [row["plan"]]
        )
        errors = [row["error"][:100] for row in found if "error" in row]
        gap = found[0]["auto_us"] / found[0]["us"]
        print(
            f"{str(dtype)[6:]:9}{m}x{n} copy {found[0]['copy_us']:.1f} auto {found[0]['auto_us']:.1f}"
            f"{'!' if gap > 1.03 else ' '} {best}" + (f"  {len(errors)}! {errors[0]}" if errors else ""),
            flush=True,
        )
    with open(options.file, "w") as file:
        json.dump(result, file, indent=0)


if __name__ == "__main__":
    main()
