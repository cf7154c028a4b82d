"""Sweep the plans of few long rows on the GPU at hand. csrc/plan/rows.h plans such rows by rules, not by tables.

Each plan is checked, then timed with a cold L2 cache beside a copy, as `onepass tune` does with many rows.

python scripts/sweep_few.py FILE.json [--repeats 15]
"""

import argparse
import json
from datetime import datetime, timezone
from itertools import product

import torch

from onepass.tables import gpu_model
from onepass.tools.tune.candidates import BLOCK, CLUSTER, GRID, Candidate, Gpu, Plan, kernels
from onepass.tools.tune.sizes import up
from onepass.tools.tune.timing import CudaTimer

FEW = [(rows, n) for n in (16384, 32768) for rows in (1, 8, 64)]
FEW += [(1, 65536), (32, 65536), (1, 262144), (8, 262144), (1, 131072), (1, 2**20), (1, 2**22), (4, 2**20)]
FEW += [(8, 128256), (32, 128256), (64, 151936), (1, 2**24), (4, 2**22)]
SHARED = 210 * 1024
SMEM_VECS = (0, 4, 8, 12, 16, 20)
SMS = 132
ALIGNED = 2  # the `access` for rows of whole vectors


def grid_plans(rows: int, n: int, size: int) -> list[Plan]:
    """Plans that hold the row in registers and shared memory, for each number of blocks per row that may be fast."""
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
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    properties = torch.cuda.get_device_properties()
    gpu = Gpu(*gpu_model(None), properties.shared_memory_per_block_optin)
    timer = CudaTimer(gpu, options.repeats)
    todo = [
        (dtype, m, n, plans(m, n, getattr(torch, dtype).itemsize)) for dtype in ("float32", "bfloat16") for m, n in FEW
    ]
    needed = kernels([("softmax", dtype, plan) for dtype, _, _, tried in todo for plan in tried])
    print(f"{len(needed)} kernels for {sum(len(tried) for *_, tried in todo)} plans", flush=True)
    timer.prepare(needed, lambda done, total: None)
    points = []
    for dtype, m, n, tried in todo:
        if not tried:
            continue
        point = timer.measure("softmax", dtype, n, (m, 1), [Candidate(plan, plan) for plan in tried])
        points.append(point.as_dict())  # each plan, then its microseconds
        words = [f"{dtype:9}{m}x{n} copy {point.copy_us:.1f} auto {point.auto_us:.1f}"]
        words += ["!" if point.auto_us > 1.03 * point.best else ""]
        words += [f"{tuple(plan)} {us:.1f} " for *plan, us in points[-1]["times"][:5]]
        words += [f"refused {point.refused}" if point.refused else ""]
        print(*filter(None, words), flush=True)
    result = {"device": gpu.name, "torch": torch.__version__, "date": date, "rows": points}
    with open(options.file, "w") as file:
        json.dump(result, file, indent=0)


if __name__ == "__main__":
    main()
