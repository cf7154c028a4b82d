"""CUDA kernels without a GPU: NVRTC's PTX of a kernel, translated to C++ (ptx.py), runs on the processor (machine.h).

Slow, and exact where hardware is not (ex2, lg2 and rcp of floats are rounded once): it shows that a kernel computes
the right thing from the right places, waits for what it needs, and leaves all other memory alone; not how fast, nor the
last bit.
"""

from .build import missing
from .calls import Emulator

__all__ = ["Emulator", "missing"]
