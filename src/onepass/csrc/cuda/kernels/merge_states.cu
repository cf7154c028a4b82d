// merge_states.cu: merges the states of parts of rows to the states of the rows, in the order of the parts, and
// computes the numbers that results need. A thread merges one row.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads) onepass_kernel(const StateMerge merge) {
  const int64_t rows = merge.rows;
  for (int64_t row = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; row < rows;
       row += (int64_t)gridDim.x * blockDim.x) {
    const A* const part = (const A*)merge.parts + row;
    A m = -infinity(), l = 0;
#pragma unroll 4
    for (int64_t i = 0; i < merge.count; ++i) m = max_(m, part[2 * i * rows]);
    const A base = finite_or_zero(m);
#pragma unroll 4
    for (int64_t i = 0; i < merge.count; ++i) l += part[(2 * i + 1) * rows] * exp_<A>(part[2 * i * rows] - base);
    const bool has_result = m != infinity() && m != -infinity();
    A* const to = (A*)merge.planes + row;
    to[0] = m, to[3 * rows] = l;
    to[rows] = has_result ? log_(l) : A(nan_()), to[2 * rows] = has_result ? 1 / l : A(nan_());
  }
}
