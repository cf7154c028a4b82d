"""The gallery: each published way to compute a softmax, one short file a rung, in rising order.

    naive.py, naive_jit.py, naive_compile.py                    torch calls, and compilers of them
    triton_row.py, triton_persistent.py, triton_online.py       Triton
    cpu_threepass.cpp, cpu_online.cpp                           C++ loops
    cuda_warp.cu, cuda_block.cu, cuda_online.cu, cuda_auto.py   CUDA C++

The header of each says its idea, its traffic and its limit. `rung(name)(x)` runs one; `onepass gallery` on the
command line lists, shows and runs them; `onepass bench --gallery` races them.
"""

from onepass.tools.gallery.rung import Rung, Traffic
from onepass.tools.gallery.rungs import RUNGS, rung

__all__ = ["RUNGS", "Rung", "Traffic", "rung"]
