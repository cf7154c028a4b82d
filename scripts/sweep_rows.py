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

WARP, BLOCK, STREAM = range(3)
SHORT = [4, 8, 16, 32, 33, 64, 100, 128, 256, 512, 781, 1024, 2048, 4096, 8192, 16384, 32768]
LONG = [32001, 50257, 65536, 131072, 262144]


def vector_of(n: int, size: int) -> int:
    vector = 16 // size
    while vector > 1 and (n % vector or vector > n):
        vector //= 2
    return vector


def plans(n: int, size: int) -> list[tuple[int, int, int, int, int]]:
    vector, found = vector_of(n, size), []
    for log in range(11):
        lanes = 2**log
        values = max(vector, 1 << (-(-n // lanes) - 1).bit_length())
        if values <= 32 and lanes <= max(n, 32):
            for threads in {max(128, lanes), max(256, lanes)}:
                found.append((WARP if lanes <= 32 else BLOCK, lanes, threads // lanes, values, vector))
    if n >= 8192:
        found += [(STREAM, lanes, 1, values, vector) for lanes in (256, 512, 1024) for values in (8, 16, 32)]
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
    options = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date, "rows": rows}
    for dtype in (torch.float32, torch.bfloat16):
        for n in (*SHORT, *LONG):
            found = sweep(n, dtype, options.mib, options.repeats)
            rows += found
            best = "  ".join(
                f"{'WBS'[p[0]]}{p[1]}x{p[2]}v{p[3]}/{p[4]} {row['copy_fraction']:.3f}"
                for row in found[:4]
                for p in [row["plan"]]
            )
            print(f"{str(dtype)[6:]:9}{n:7}  {best}", flush=True)
            with open(options.file, "w") as file:
                json.dump(result, file, indent=0)


if __name__ == "__main__":
    main()
