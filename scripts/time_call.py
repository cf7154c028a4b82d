"""What a call costs the host: onepass.softmax, its raw operator, torch.softmax and torch.empty_like on a small tensor.

    python scripts/time_call.py [--json FILE] [--calls 20000] [--size 128]

The functions take turns in batches of 100 calls, so that all of them see the same machine. On a GPU a batch begins and
ends with a synchronisation, and the rows are short enough for the host to be what the time is spent on.

"backward" is the forward and the backward, by torch.autograd.grad.

Where the time of the plain call goes is told by calls that leave something out: with no elements, nothing is computed
or launched; with an `out`, nothing is allocated; without the functional layer, Python checks nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch

import onepass
from onepass import native, ops

BATCH = 100
BASE = "torch.softmax"
NOTHING = "int_out of no elements"
# Parts of the plain call: what is timed with it, and what without it.
PARTS = {
    "checks in Python": ("onepass.softmax", "onepass._softmax.int"),
    "allocation of the result": ("onepass._softmax.int", "onepass._softmax.int_out"),
    "plan and launch (CPU: the work)": ("onepass._softmax.int_out", NOTHING),
    "the call of an operator": (NOTHING, None),
}


def functions(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    y = torch.empty_like(x)
    nothing = x[:0].clone()
    raw, handle, out_handle = torch.ops.onepass.softmax.default, ops.HANDLES["softmax"], ops.OUT_HANDLES["softmax"]
    leaf, g = x.clone().requires_grad_(), torch.randn_like(x)

    def there_and_back(f: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(f(leaf, -1), leaf, g)

    return {
        "onepass.softmax": lambda: onepass.softmax(x, -1),
        BASE: lambda: torch.softmax(x, -1),
        "onepass._softmax.int": lambda: ops.call_boxed(handle, x, -1, None),
        "onepass._softmax.int_out": lambda: ops.call_boxed(out_handle, x, -1, None, y),
        NOTHING: lambda: ops.call_boxed(out_handle, nothing, -1, None, nothing),
        "the registered operator": lambda: raw(x, [-1]),
        "onepass.softmax, dtype": lambda: onepass.softmax(x, -1, dtype=torch.float32),
        "torch.softmax, dtype": lambda: torch.softmax(x, -1, dtype=torch.float32),
        "onepass.softmax, out": lambda: onepass.softmax(x, -1, out=y),
        "torch.softmax, out": lambda: torch.softmax(x, -1, out=y),
        "onepass.log_softmax": lambda: onepass.log_softmax(x, -1),
        "torch.log_softmax": lambda: torch.log_softmax(x, -1),
        "onepass.logsumexp": lambda: onepass.logsumexp(x, -1),
        "torch.logsumexp": lambda: torch.logsumexp(x, -1),
        "torch.empty_like": lambda: torch.empty_like(x),
        "onepass.softmax, backward": there_and_back(onepass.softmax),
        "torch.softmax, backward": there_and_back(torch.softmax),
    }


def batch_us(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Microseconds per call, over one batch."""
    wait()
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    wait()
    return (time.perf_counter() - start) / BATCH * 1e6


def measure(x: torch.Tensor, calls: int) -> dict[str, dict[str, float]]:
    """The median and the 20th percentile of each function's batches, in us a call, and the ratios to torch.softmax."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    called = functions(x)
    for call in called.values():
        batch_us(call, wait)
    times: dict[str, list[float]] = {name: [] for name in called}
    for _ in range(max(calls // BATCH, 5)):
        for name, call in called.items():
            times[name].append(batch_us(call, wait))
    answer = {}
    for name, found in times.items():
        p20 = statistics.quantiles(found, n=5)[0]
        answer[name] = {"median_us": statistics.median(found), "p20_us": p20, "min_us": min(found)}
    for found in answer.values():
        found["ratio"] = found["median_us"] / answer[BASE]["median_us"]
    return answer


def parts(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """Where the time of `onepass.softmax(x, -1)` goes: the parts of it in us, by medians; they add up to it."""

    def median(name: str | None) -> float:
        return times[name]["median_us"] if name else 0.0

    return {part: median(whole) - median(rest) for part, (whole, rest) in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers into FILE")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of each function (default 20000)")
    parser.add_argument("--size", type=int, default=128, help="rows, and elements a row (default 128)")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({native.status('isa')}, 1 thread)"
    times = measure(torch.randn(given.size, given.size, device=device), given.calls)
    print(f"{given.size}x{given.size} float32 on {machine}, torch {torch.__version__}")
    print(f"{'':28}{'median us':>11}{'p20 us':>9}{'min us':>9}  of {BASE}")
    for name, found in times.items():
        numbers = f"{found['median_us']:>11.2f}{found['p20_us']:>9.2f}{found['min_us']:>9.2f}"
        print(f"{name:28}{numbers}{found['ratio']:>9.2f}")
    where = parts(times)
    print(f"\nonepass.softmax: {times['onepass.softmax']['median_us']:.2f} us, of which")
    for name, part in where.items():
        print(f"  {name:34}{part:>6.2f}")
    if given.json:
        record = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine,
            "torch": torch.__version__,
            "size": given.size,
            "calls": given.calls,
            "batch": BATCH,
            "functions": times,
            "parts_us": where,
        }
        with open(given.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
