"""Runs CUDA kernels without a GPU: NVRTC compiles a kernel to PTX, which is translated to C++ (ptx.py) and run on the
CPU (machine.h).

It is slow, and exact where hardware is not (ex2, lg2 and rcp of floats are rounded once). It shows whether a kernel
computes the right values from the right addresses, synchronises correctly, and does not access other memory. It does
not show a kernel's speed or the last bit of its results.

    build.py                                 compiles kernels and the machine, and caches them
    ptx.py, instructions.py, operands.py     translate PTX to C++
    machine.h, scheduler.h, barriers.h       threads, memory and synchronisation
    arithmetic.h, host.cpp                   arithmetic instructions; launches
    run.py                                   a launch on CPU tensors
"""

from .build import missing
from .run import run

__all__ = ["missing", "run"]
