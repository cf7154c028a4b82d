"""The gallery: each way to compute a softmax, one short file per variant, from the plainest to the fastest.

    naive.py, naive_jit.py, naive_compile.py                    torch calls, and compilers of them
    triton_row.py, triton_persistent.py, triton_online.py       Triton
    cpu_threepass.cpp, cpu_online.cpp                           C++ loops
    cuda_warp.cu, cuda_block.cu, cuda_online.cu, cuda_auto.py   CUDA C++
    cuda_vector.cu, cuda_registers.cu, cuda_rows.cu,            from there to the speed of a copy
    cuda_async.cu, cuda_cluster.cu, cuda_grid.cu
    cuda_columns.cu, cuda_backward.cu                           softmax of columns, gradient of the softmax of rows
    vectors.cuh                                                 code that several CUDA variants share

The header of each says its idea, its traffic and its limit. `variant(name)(x)` runs one; `onepass gallery` on the
command line lists, shows and runs them; `onepass bench --gallery` races them.

    variants.py, launch_params.py        the class and the list of variants, and their launch parameters
    cuda_launches.py, native_calls.py    how the CUDA and C++ variants are launched
    occupancy.py                         the number of programs of the persistent Triton variant
    traffic.py, ncu.py                   `onepass traffic`: predicted bytes, and bytes counted by ncu
"""

from onepass.tools.gallery.variants import VARIANTS, Traffic, Variant, variant

__all__ = ["VARIANTS", "Traffic", "Variant", "variant"]
