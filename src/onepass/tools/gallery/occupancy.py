"""How many programs of a kernel a multiprocessor holds at once, from the registers and shared memory of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu", "occupancy"]

_CDNA = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")


@dataclass(frozen=True)
class Gpu:
    """Properties that decide occupancy. `registers` (of 32 bits), `shared_memory` (bytes) and `threads` count what a
    multiprocessor has; `arch` is Triton's name of the architecture: "90" (NVIDIA) or "gfx942" (AMD)."""

    multiprocessors: int
    registers: int
    shared_memory: int
    threads: int
    warp_size: int
    arch: str


def occupancy(gpu: Gpu, registers: int, shared_memory: int, num_warps: int) -> int:
    """Programs of `num_warps` warps that fit a multiprocessor together, at least 1.

    `registers` is the number per thread, `shared_memory` the bytes per program. AMD's CDNA has a second pool of
    registers, as large as the one that is reported (CDNA3 instruction set, section 3.6.4).

    >>> h200 = Gpu(132, 65536, 232448, 2048, 32, "90")
    >>> occupancy(h200, registers=32, shared_memory=0, num_warps=8)
    8
    >>> occupancy(h200, registers=32, shared_memory=98304, num_warps=8)
    2
    """
    waves = gpu.threads // gpu.warp_size
    if gpu.arch.startswith("gfx"):
        pool = gpu.registers * (2 if gpu.arch.startswith(_CDNA) else 1)
        fits = min(pool // gpu.warp_size // max(registers, 1), waves) // num_warps
    else:
        fits = min(gpu.registers // (max(registers, 1) * gpu.warp_size), waves) // num_warps
    if shared_memory:
        fits = min(fits, gpu.shared_memory // shared_memory)
    return max(fits, 1)
