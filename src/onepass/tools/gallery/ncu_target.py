"""The process that ncu watches: `python -m onepass.tools.gallery.ncu_target NAMES... M N DTYPE INDEX`, on a GPU.

It makes the matrix and calls every contestant until it is compiled. Then it switches the profiler on, and calls each
contestant once more, after a kernel that marks the begin of its own: ncu.py separates them in ncu's report.

ncu sees kernels but no memcpy, so that the copy is a kernel here: y = x * 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_calls", "main", "prepare_calls"]

WARMUP_CALLS = 3  # before the call that is counted: TorchScript fuses after two
Call = Callable[[], Any]


def prepare_calls(names: Sequence[str], x: Tensor, out: Tensor) -> tuple[dict[str, Call], dict[str, str]]:
    """(compiled calls by name, the reasons why others are left out by name)."""
    calls: dict[str, Call] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            call = _call(name, x, out)
            if isinstance(call, str):
                left_out[name] = call
                continue
            for _ in range(WARMUP_CALLS):
                call()
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
            calls[name] = call
        except Exception as error:  # compilers and launches raise various types; the others are still counted
            left_out[name] = _describe(error)
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
    return calls, left_out


def _call(name: str, x: Tensor, out: Tensor) -> Call | str:
    """The call of one contestant, or why it is left out."""
    import onepass
    from onepass.tools.gallery.variants import variant

    if name == "copy":
        return lambda: torch.mul(x, 1, out=out)
    if name == "torch":
        return lambda: torch.softmax(x, 1, out=out)
    if name == "onepass":
        return lambda: onepass.softmax(x, 1, out=out)
    chosen = variant(name)
    reason = chosen.unavailable(x.device) or chosen.refuses(x.shape[0], x.shape[1], x.dtype)
    if reason is not None:
        return reason
    return (lambda: chosen(x, out=out)) if chosen.takes_out else (lambda: chosen(x))


def count_calls(
    calls: dict[str, Call], left_out: dict[str, str], start: Call, mark: Call, wait: Call, stop: Call
) -> dict[str, Any]:
    """Makes each call once, after a marker, between start and stop. Returns the data that the process prints."""
    failed = {}
    wait()
    start()
    for name, call in calls.items():
        mark()
        try:
            call()
            wait()
        except Exception as error:
            failed[name] = _describe(error)
    stop()
    return {"marked": list(calls), "left_out": {**left_out, **failed}}


def _describe(error: Exception) -> str:
    return f"raised: {(str(error).strip() or repr(error)).splitlines()[0]}"


def main(arguments: Sequence[str]) -> None:
    """Takes NAMES... M N DTYPE INDEX, the last the number of the GPU; prints one line of JSON."""
    *names, rows, n, dtype, index = arguments
    torch.cuda.set_device(int(index))
    device = torch.device("cuda", int(index))
    x = torch.empty(int(rows), int(n), dtype=getattr(torch, dtype), device=device).normal_()
    calls, left_out = prepare_calls(names, x, torch.empty_like(x))
    profiler = torch.cuda.profiler
    mark = lambda: torch.cuda._sleep(1)  # noqa: E731
    result = count_calls(calls, left_out, profiler.start, mark, torch.cuda.synchronize, profiler.stop)
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
