// divergence_merge.cu: the terms of rows of two tensors whose classes were cut into parts, from the states of the
// parts. A warp merges one row.
#include "config.cuh"
#include "divergence.cuh"

typedef LossConfig C;
typedef DivergenceRowState<C> RowState;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads)
    onepass_kernel(const __grid_constant__ DivergenceMap map) {
  wait_for_kernel_before(), let_next_start();
  const int lane = threadIdx.x % 32;
  const int64_t warps = (int64_t)gridDim.x * blockDim.x / 32;
  for (int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; row < map.rows; row += warps) {
    RowState state = RowState::empty();
    for (int part = lane; part < map.parts; part += 32) {
      state.merge(RowState::load(map.states, row * map.parts + part, map.rows * map.parts));
    }
    state.reduce_in_warp(32);
    if (lane == 0) state.store_terms(map, row);
  }
}
