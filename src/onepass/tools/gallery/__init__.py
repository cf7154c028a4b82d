"""The gallery: each published way to compute a softmax, one short file per variant, from the plainest to the fastest.

    naive.py, naive_jit.py, naive_compile.py                    torch calls, and compilers of them
    triton_row.py, triton_persistent.py, triton_online.py       Triton
    cpu_threepass.cpp, cpu_online.cpp                           C++ loops
    cuda_warp.cu, cuda_block.cu, cuda_online.cu, cuda_auto.py   CUDA C++

The header of each says its idea, its traffic and its limit. `variant(name)(x)` runs one; `onepass gallery` on the
command line lists, shows and runs them; `onepass bench --gallery` races them.

    variants.py, launch_params.py        what a variant is, the list of them, their launch parameters
    native_calls.py, occupancy.py        how the C++, CUDA and persistent Triton variants are launched
    traffic.py, ncu.py                   `onepass traffic`: predicted bytes, and those that ncu counted
"""

from onepass.tools.gallery.variants import VARIANTS, Traffic, Variant, variant

__all__ = ["VARIANTS", "Traffic", "Variant", "variant"]
