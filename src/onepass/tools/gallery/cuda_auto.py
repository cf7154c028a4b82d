"""cuda-auto: one warp per row for short rows, one block per row for long rows.

Idea: the dispatch of the published CUDA code, which looks only at the length of a row: cuda-warp up to 1024 columns,
cuda-block above.

Traffic: reads 3MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L1 or the L2.

Limit: the same as of the kernel that it chooses. The number of rows plays no part: 8 rows of 1000 have 8 warps.
"""

from __future__ import annotations

from onepass.tools.gallery.native_calls import CudaVariant

__all__ = ["softmax"]

softmax = CudaVariant("cuda-auto")
