"""Sweep the launch numbers of the CUDA row kernels on the GPU at hand: each plan is checked, then timed against a copy.

python scripts/sweep_rows.py FILE.json [--mib 256] [--few]
"""

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import product
from typing import Any

import torch

from onepass import native, reference

WARP, FLAT, BLOCK, CLUSTER, GRID, STREAM = range(6)
LENGTHS = [4, 8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216]
LENGTHS += [12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144]
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
SHELVES = (0, 4, 8, 12, 16)
FEW_SHELVES = (0, 4, 8, 12, 16, 20)
DTYPES = (torch.float32, torch.bfloat16)
SMS = 132

Plan = tuple[int, ...]


def up(a: int, b: int) -> int:
    return -(-a // b)


def grid_plans(rows: int, n: int, size: int) -> list[Plan]:
    """What the chip holds in registers and shared memory, for each number of blocks a row that may pay."""
    widest, found = 16 // size, []
    vectors = up(n if n % widest == 0 else n + widest - 1, widest)
    for threads, slots in ((480, 16), (480, 8), (480, 4), (224, 4), (992, 0), (736, 0), (480, 0), (352, 0)):
        most = SHARED // (threads * 16) // 4 * 4
        fit = up(vectors, threads * (slots + most))  # blocks that hold a row
        for split in {min(SMS, fit), SMS // min(rows, SMS), up(SMS // min(rows, SMS), 2)}:
            each = up(vectors, split * threads)
            shelf = min(most, max(0, up(each - slots, 4) * 4))
            if split >= 1 and 2 * slots * threads * split < 5 * vectors + 4 * threads * split and slots + shelf and rows * n > 250000:
                found.append((GRID, threads, 1, slots * widest, widest, split, shelf, 0))
    return sorted(set(found))


def plans(n: int, size: int, rows: int) -> list[Plan]:
    """(tier, lanes, rows a block, values, vector, split, shelf, apart): all that might be the fastest for contiguous
    rows of n."""
    widest, most, found = 16 // size, 128 // size, []
    whole = widest
    while n % whole:
        whole //= 2
    for vector in {widest, whole} if n >= widest else {whole}:
        window = n if n % vector == 0 else n + vector - 1
        vectors = up(window, vector)
        for lanes in (1, 2, 4, 8, 16, 32):
            values = up(vectors, lanes) * vector
            if n <= 2048 and values <= min(64, most * 5 // 4) and lanes <= max(1, 2 * vectors):
                found += [(WARP, lanes, threads // lanes, values, vector, 1, 0, 0) for threads in (128, 256)]
    for lanes in (1, 2, 4, 8, 16, 32):
        values = up(up(n, lanes), 2) * 2
        if (whole < widest or n < 64) and values <= 48 and (values > 8 or lanes == 1):
            for threads, kib in ((128, 8), (128, 16), (128, 24), (256, 16), (256, 32)):
                turns = max(1, kib * 1024 // (n * size * (threads // lanes)))
                found.append((FLAT, lanes, threads // lanes, values, 1, 1, turns, 0))
    vectors = up(n if n % widest == 0 else n + widest - 1, widest)
    for split, values, shelf in product((1, 2, 4, 8, 16), (most // 4, *range(most // 2, most + 1, most // 8)), SHELVES):
        threads = up(vectors, (values // widest + shelf) * split * 32) * 32
        least = 64 if n < 8192 else 128
        small = n < 512 or (split > 1 and n < 8192) or (shelf and n < 14000)
        fits = least <= threads <= (1024 if split == 1 else 512)
        if not small and fits and (shelf == 0 or (values >= most // 2 and threads <= 512)):
            found.append((BLOCK if split == 1 else CLUSTER, threads, 1, values, widest, split, shelf, 0))
    if n >= 12288:
        found += [(STREAM, threads, 1, 16, widest, 1, 0, 0) for threads in (512, 1024)]
    if n >= 131072 and rows > 1:
        found += grid_plans(rows, n, size)[:12]
    return sorted(set(found))


def few_plans(rows: int, n: int, size: int) -> list[Plan]:
    widest, most, found = 16 // size, 128 // size, grid_plans(rows, n, size)
    vectors = up(n, widest)
    for split, values, shelf in product((1, 2, 4, 8, 16), (most // 4, most // 2, most * 5 // 8, most), FEW_SHELVES):
        threads = up(vectors, (values // widest + shelf) * split * 32) * 32
        fits = 128 <= threads <= 1024 and rows * split <= 4 * SMS and shelf * threads * 16 < SHARED
        if fits and n < 2**19 and (rows * split >= 16 or split == 16):
            found.append((BLOCK if split == 1 else CLUSTER, threads, 1, values, widest, split, shelf, 0))
    return sorted(set(found))


def time_us(call: Any, repeats: int, flush: torch.Tensor | None) -> float:
    call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        if flush is not None:
            flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def sweep(rows: int, n: int, dtype: torch.dtype, tried: list[Plan], repeats: int, flush: Any) -> list[dict[str, Any]]:
    x = torch.randn(rows, n, device="cuda").to(dtype)
    y = torch.empty_like(x)
    sample = sorted({*torch.randint(rows, (16 if n < 2**20 else 2,)).tolist(), 0, rows - 1})
    expected = reference.softmax(x[sample], 1)
    copy = time_us(lambda: y.copy_(x), repeats, flush)
    auto = time_us(lambda: torch.ops.onepass.softmax.out(x, [1], out=y), repeats, flush)
    found = []
    for plan in tried:
        y.fill_(torch.nan)
        call = lambda plan=plan: torch.ops.onepass._forced(x, 0, [1], False, list(plan), y)  # noqa: E731
        row = {"n": n, "rows": rows, "dtype": str(dtype), "plan": plan, "copy_us": copy, "auto_us": auto}
        try:
            call()
            error = ((y[sample].double() - expected).abs() / (expected + 1e-30)).max().item()
            if not error < (1e-5 if dtype == torch.float32 else 8e-3) or y.isnan().any():
                raise SystemExit(f"wrong: {rows}x{n} {dtype} plan {plan}: relative error {error}")
            us = time_us(call, repeats, flush)
            found.append(row | {"us": us, "copy_fraction": copy / us})
        except RuntimeError as error:
            found.append(row | {"us": 1e9, "copy_fraction": 0.0, "error": str(error)})
    return sorted(found, key=lambda row: row["us"])


def compile_all(todo: list[tuple[torch.dtype, Plan]]) -> None:
    """Into the disk cache, with all cores."""
    compute = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    # What a kernel is compiled for: not its number of threads, where those are free, nor of blocks.
    kernels = {(d, p[0], p[1] if p[0] < 2 else 0, p[2:5], p[5] if p[0] == 3 else 0, p[6] > 0): (d, p) for d, p in todo}

    def compile_one(item: tuple[torch.dtype, Plan]) -> None:
        native.compile_kernel("softmax", item[0], item[0], item[1], compute, "/dev/null")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, kernels.values()))
    print(f"{len(kernels)} kernels for {len(todo)} plans", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--mib", type=int, default=256, help="size of the input (default 256)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="*", help="in place of all")
    parser.add_argument("--few", action="store_true", help="few long rows in place of 256 MiB of rows")
    options = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    points: list[dict[str, Any]] = []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date, "rows": points}
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda") if options.few else None
    todo = []
    for dtype in DTYPES:
        if options.few:
            todo += [(dtype, m, n, few_plans(m, n, dtype.itemsize)) for m, n in FEW]
        else:
            counts = {n: max(1, options.mib * 2**20 // (n * dtype.itemsize)) for n in options.lengths or LENGTHS}
            todo += [(dtype, m, n, plans(n, dtype.itemsize, m)) for n, m in counts.items()]
    compile_all([(dtype, plan) for dtype, _, _, tried in todo for plan in tried])
    for dtype, m, n, tried in todo:
        if not tried:
            continue
        found = sweep(m, n, dtype, tried, options.repeats, flush)
        points += found
        best = "  ".join(
            f"{'WFBCGS'[p[0]]}{p[1]}x{p[2]}v{p[3]}/{p[4]}s{p[5]}+{p[6]} "
            + (f"{row['us']:.1f}" if options.few else f"{row['copy_fraction']:.3f}")
            for row in found[:5]
            for p in [row["plan"]]
        )
        errors = [row["error"][:100] for row in found if "error" in row]
        copy = f" copy {found[0]['copy_us']:.1f}" if options.few else ""
        mine = f"{found[0]['auto_us']:.1f}" if options.few else f"{found[0]['copy_us'] / found[0]['auto_us']:.3f}"
        gap = found[0]["auto_us"] / found[0]["us"]
        print(
            f"{str(dtype)[6:]:9}{m}x{n}{copy} auto {mine}{'!' if gap > 1.03 else ' '} {best}"
            + (f"  {len(errors)}! {errors[0]}" if errors else ""),
            flush=True,
        )
    with open(options.file, "w") as file:
        json.dump(result, file, indent=0)


if __name__ == "__main__":
    main()
