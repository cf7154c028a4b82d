"""CUDA kernels without a GPU: NVRTC's PTX of a kernel, translated to C++ (ptx.py), runs on the processor (machine.h).

Slow, and exact where hardware is not (ex2, lg2 and rcp of floats are rounded once): it shows that a kernel computes
the right thing from the right places, waits for what it needs, and leaves all other memory alone; not how fast, nor the
last bit.

    build.py                                 what is compiled, and where it is kept
    ptx.py, instructions.py, operands.py     from PTX to C++
    machine.h, scheduler.h, barriers.h       threads, memory and how they wait
    arithmetic.h, host.cpp                   instructions on numbers; launches
    run.py                                   a launch on tensors of the CPU
"""

from .build import missing
from .run import run

__all__ = ["missing", "run"]
