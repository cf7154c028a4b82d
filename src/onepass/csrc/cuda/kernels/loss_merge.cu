// loss_merge.cu: the terms of rows whose classes were cut into parts, from the states of the parts. A warp merges one
// row.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads) onepass_kernel(const __grid_constant__ LossMap map) {
  wait_for_kernel_before(), let_next_start();
  const int lane = threadIdx.x % 32;
  const int64_t warps = (int64_t)gridDim.x * blockDim.x / 32;
  LossSums<C> sums = {};
  for (int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; row < map.rows; row += warps) {
    LossState<C> state = LossState<C>::empty();
    for (int part = lane; part < map.parts; part += 32) {
      LossState<C> other = LossState<C>::empty();
      other.load(map.states, row * map.parts + part, map.rows * map.parts);
      state.merge(other);
    }
    state.reduce_in_warp<32>();
    const LossPlace place(map, row, map.dims);
    const C::In* const x = (const C::In*)map.x + place.x;
    LossPick<C> pick;
    pick.load_class(map, row, lane == 0), pick.load_element(x, map.x_step);
    if (lane == 0) LossTerms<C>(map, row, x[0], pick, state, sums).store(map, row);
    LossTerms<C>::store_picks(map, row, x, map.x_step, state, lane, 32);
  }
  sums.finish(map);
}
