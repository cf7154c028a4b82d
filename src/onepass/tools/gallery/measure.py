"""What ncu watches: `python -m onepass.tools.gallery.measure NAMES... M N DTYPE INDEX` calls each once on a GPU.

The matrix is made once, and every contestant is called until it is compiled. Then the profiler is switched on, and each
is called once more, after a kernel that marks where its own begin: ncu.py reads them apart in ncu's report.

ncu sees kernels and no memcpy, so that the copy is a kernel here: y = x * 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["count", "main", "prepare"]

WARM = 3  # calls before the one that is counted: TorchScript fuses after two


def prepare(names: Sequence[str], x: Tensor, out: Tensor) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """(calls that are compiled and warm, by name; who was left out, with the reason)."""
    calls: dict[str, Callable[[], Any]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            call = _call(name, x, out)
            if isinstance(call, str):
                left_out[name] = call
                continue
            for _ in range(WARM):
                call()
            _synchronize(x.device)
        except Exception as error:  # whatever a compiler or a launch raises: the others are still counted
            left_out[name] = _raised(error)
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        calls[name] = call
    return calls, left_out


def _call(name: str, x: Tensor, out: Tensor) -> Callable[[], Any] | str:
    """The call of one contestant, or why it is left out."""
    import onepass
    from onepass.tools.gallery.rungs import rung

    if name == "copy":
        return lambda: torch.mul(x, 1, out=out)
    if name == "torch":
        return lambda: torch.softmax(x, 1, out=out)
    if name == "onepass":
        return lambda: onepass.softmax(x, 1, out=out)
    chosen = rung(name)
    reason = chosen.unavailable(x.device) or chosen.refuses(x.shape[0], x.shape[1], x.dtype)
    if reason is not None:
        return reason
    return (lambda: chosen(x, out=out)) if chosen.takes_out else (lambda: chosen(x))


def count(
    calls: dict[str, Callable[[], Any]],
    left_out: dict[str, str],
    start: Callable[[], Any],
    mark: Callable[[], Any],
    wait: Callable[[], Any],
    stop: Callable[[], Any],
) -> dict[str, Any]:
    """Makes each call once, after a mark, between start and stop. Returns what the process prints."""
    failed = {}
    wait()
    start()
    for name, call in calls.items():
        mark()
        try:
            call()
            wait()
        except Exception as error:
            failed[name] = _raised(error)
    stop()
    return {"marked": list(calls), "left_out": {**left_out, **failed}}


def _raised(error: Exception) -> str:
    said = str(error).strip() or repr(error)
    return f"raised: {said.splitlines()[0]}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str]) -> None:
    """Takes NAMES... M N DTYPE INDEX, the last the number of the GPU.

    Prints one line of JSON: who was marked, who was left out and why.
    """
    *names, rows, n, dtype, index = arguments
    torch.cuda.set_device(int(index))
    device = torch.device("cuda", int(index))
    x = torch.empty(int(rows), int(n), dtype=getattr(torch, dtype), device=device).normal_()
    calls, left_out = prepare(names, x, torch.empty_like(x))
    tools = torch.cuda.profiler
    said = count(calls, left_out, tools.start, lambda: torch.cuda._sleep(1), torch.cuda.synchronize, tools.stop)
    print("\n" + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
