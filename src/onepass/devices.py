"""Known devices by name: what a copy reaches on them, measured, with the date; and a measurement for others."""

import functools
import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Known:
    title: str
    compute: int  # 90 for sm_90
    multiprocessors: int
    copy_gbs: float  # read + written, of a copy that fills the device
    date: str


# Copies of several GB through torch's copy_, in 1e9 bytes a second.
KNOWN = {"h200": Known("NVIDIA H200", compute=90, multiprocessors=132, copy_gbs=4270.0, date="2026-11")}


def known(name: str) -> Known | None:
    """The entry of a short name ("h200") or of a device's full name ("NVIDIA H200")."""
    return next((entry for key, entry in KNOWN.items() if name.lower() in (key, entry.title.lower())), None)


@functools.cache
def measured_copy_gbs(device: torch.device) -> float:
    """The bandwidth of a copy on a device that is here, in 1e9 bytes read and written a second: the median of seven."""
    x = torch.empty(2**24 if device.type == "cpu" else 2**28, device=device).normal_()
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        y.copy_(x)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(times[1:]) / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
