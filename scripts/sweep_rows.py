"""Sweep the launch numbers of the CUDA row kernels on the GPU at hand: each plan is checked, then timed against a copy.

    python scripts/sweep_rows.py FILE.json [--mib 256]

The winners go into the tables of src/onepass/csrc/plan.h by hand, with the date.
"""

import argparse
import json
import statistics
from datetime import datetime, timezone
from typing import Any

import torch

from onepass import reference

WARP, BLOCK, CLUSTER, STREAM = range(4)
LENGTHS = [4, 8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216]
LENGTHS += [12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144]


def plans(n: int, size: int) -> list[tuple[int, ...]]:
    """(tier, lanes, rows a block, values, vector, cluster): all that might be the fastest for contiguous rows of n."""
    widest, most, found = 16 // size, 128 // size, []
    whole = widest
    while n % whole:
        whole //= 2
    for vector in {widest, whole} if n >= widest else {whole}:
        window = n if n % vector == 0 else n + vector - 1
        vectors = -(-window // vector)
        for lanes in (1, 2, 4, 8, 16, 32):
            values = -(-vectors // lanes) * vector
            if n <= 2048 and values <= min(64, most * 5 // 4) and lanes <= max(1, 2 * vectors):
                found += [(WARP, lanes, threads // lanes, values, vector, 1) for threads in (128, 256)]
    vectors = -(-(n if n % widest == 0 else n + widest - 1) // widest)
    for cluster in (1, 2, 4, 8, 16):
        for values in (most // 4, most // 2, most * 3 // 4, most):
            threads = -(-vectors // (values // widest * cluster * 32)) * 32
            if n >= 512 and (64 if n < 8192 else 128) <= threads <= 768 and (cluster == 1 or n >= 8192):
                found.append((BLOCK if cluster == 1 else CLUSTER, threads, 1, values, widest, cluster))
    if n >= 12288:
        found += [(STREAM, threads, 1, 16, widest, 1) for threads in (512, 1024)]
    return found


def time_us(call: Any, repeats: int) -> float:
    call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def sweep(n: int, dtype: torch.dtype, mib: int, repeats: int) -> list[dict[str, Any]]:
    rows = max(1, mib * 2**20 // (n * dtype.itemsize))
    x = torch.randn(rows, n, device="cuda").to(dtype)
    y = torch.empty_like(x)
    sample = [*torch.randint(rows, (16,)).tolist(), 0, rows - 1]
    expected = reference.softmax(x[sample], 1)
    copy = time_us(lambda: y.copy_(x), repeats)
    found = []
    for plan in plans(n, dtype.itemsize):
        y.fill_(torch.nan)
        call = lambda plan=plan: torch.ops.onepass._forced(x, 0, [1], False, list(plan), y)  # noqa: E731
        call()
        error = ((y[sample].double() - expected).abs() / (expected + 1e-30)).max().item()
        if not error < (1e-5 if dtype == torch.float32 else 8e-3) or y.isnan().any():
            raise SystemExit(f"wrong: n {n} {dtype} plan {plan}: relative error {error}")
        us = time_us(call, repeats)
        found.append({"n": n, "rows": rows, "dtype": str(dtype), "plan": plan, "us": us, "copy_fraction": copy / us})
    return sorted(found, key=lambda row: row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--mib", type=int, default=256, help="size of the input (default 256)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="*", help="in place of all")
    options = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date, "rows": rows}
    for dtype in (torch.float32, torch.bfloat16):
        for n in options.lengths or LENGTHS:
            found = sweep(n, dtype, options.mib, options.repeats)
            rows += found
            best = "  ".join(
                f"{'WBCS'[p[0]]}{p[1]}x{p[2]}v{p[3]}/{p[4]}c{p[5]} {row['copy_fraction']:.3f}"
                for row in found[:4]
                for p in [row["plan"]]
            )
            print(f"{str(dtype)[6:]:9}{n:7}  {best}", flush=True)
            with open(options.file, "w") as file:
                json.dump(result, file, indent=0)


if __name__ == "__main__":
    main()
