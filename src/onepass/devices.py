"""Known GPUs by name, with the bandwidth of a copy if it was measured; and a measurement for other GPUs."""

import functools
import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KnownDevice:
    """A GPU of the table `KNOWN`. It need not be in this machine.

    compute: 90 for compute capability 9.0; None for AMD's GPUs, which the Triton engine serves. multiprocessors: AMD
    calls them compute units. peak_gbs: the memory bandwidth in the data sheet, in 1e9 bytes per second, which no copy
    reaches. copy_gbs: read + written by a copy that fills the device, if it was measured, in the month `date`.
    """

    title: str
    compute: int | None
    multiprocessors: int
    peak_gbs: float
    copy_gbs: float | None = None
    date: str | None = None
    warp_size: int = 32

    @property
    def bandwidth(self) -> tuple[float, str]:
        """(bandwidth in 1e9 bytes a second, the source of that number)."""
        if self.copy_gbs is not None:
            return self.copy_gbs, f"that of a copy on {self.title}, measured {self.date}"
        slower = "a copy is slower: it reaches 0.89 of the peak on an H200"
        return self.peak_gbs, f"the peak of the data sheet of {self.title}, not measured ({slower})"


# From the data sheets of the SXM modules of NVIDIA's A100 80GB, H100, H200 and B200, of its L4 and GeForce RTX 4090,
# and of AMD's MI300X. Names are those of torch.cuda.get_device_name. H200: copies of several GB with torch's copy_.
KNOWN = {
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", compute=80, multiprocessors=108, peak_gbs=2039.0),
    "h100": KnownDevice("NVIDIA H100 80GB HBM3", compute=90, multiprocessors=132, peak_gbs=3350.0),
    "h200": KnownDevice(
        "NVIDIA H200", compute=90, multiprocessors=132, peak_gbs=4800.0, copy_gbs=4270.0, date="2026-11"
    ),
    "b200": KnownDevice("NVIDIA B200", compute=100, multiprocessors=148, peak_gbs=8000.0),
    "l4": KnownDevice("NVIDIA L4", compute=89, multiprocessors=58, peak_gbs=300.0),
    "rtx4090": KnownDevice("NVIDIA GeForce RTX 4090", compute=89, multiprocessors=128, peak_gbs=1008.0),
    "mi300x": KnownDevice("AMD Instinct MI300X", compute=None, multiprocessors=304, peak_gbs=5300.0, warp_size=64),
}
UNKNOWN = (
    f"known GPUs, which need not be here, are {', '.join(KNOWN)}; of another give --arch, --sm-count and "
    "--bandwidth (arch=, sm_count=, bandwidth=)"
)


def known(name: str) -> KnownDevice | None:
    """The entry of a short name ("h200", "RTX 4090") or of a device's full name ("NVIDIA H200")."""
    key_of_name = _normalize(name)
    return next((entry for key, entry in KNOWN.items() if key_of_name in (key, _normalize(entry.title))), None)


def _normalize(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


@functools.cache
def measured_copy_gbs(device: torch.device) -> float:
    """The bandwidth of a copy on a device of this machine, in 1e9 bytes read and written a second: the median of 7."""
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
