// segments_invariant.cu: rows of unequal length in the batch-invariant mode. A warp computes a row. Each lane has the
// same items of the row whatever precedes the row, so that the bits of a row depend on that row alone. Elements are
// read again for each step.
#include "segment_types.cuh"
#include "segments.cuh"

struct Row {
  const SegmentMap& map;
  int64_t begin, end;  // items
  int64_t places[kSegmentTensors];

  __device__ Row(const SegmentMap& map, int64_t segment, int64_t column) : map(map), places{} {
    begin = min(max(offset_of(map, segment), (int64_t)0), (int64_t)map.items);
    end = min(max(offset_of(map, segment + 1), begin), (int64_t)map.items);
    for (int d = map.dims - 1; d >= 0; --d) {
      const int64_t whole = divide(column, map.sizes[d]), rest = column - whole * map.sizes[d];
      for (int t = 0; t < kSegmentTensors; ++t) places[t] += rest * map.strides[t][d];
      column = whole;
    }
    places[kRowFirst] += segment * map.steps[kRowFirst];
  }
  __device__ int64_t at(int tensor, int64_t item) const {
    const int64_t place = map.order ? index_at(map, map.order, item) : item;
    return place * map.steps[tensor] + places[tensor];
  }
  // The score of an item, or for a gradient the forward's result; second() is the gradient of that result.
  __device__ A first(int64_t item) const {
    const In raw = ((const In*)map.data[kItemFirst])[at(kItemFirst, item)];
    if constexpr (C::kSums) return to_acc(raw);
    Second bias = {};
    if constexpr (C::has(kSegmentBias)) bias = ((const Second*)map.data[kItemSecond])[at(kItemSecond, item)];
    return score_of<C>(map, raw, bias);
  }
  __device__ A second(int64_t item) const {
    return C::kSums ? A(to_acc(((const Second*)map.data[kItemSecond])[at(kItemSecond, item)])) : A(0);
  }
};

template <class Epilogue = C::Epilogue>
__device__ inline void store_row(const Row& row, RowState state) {
  if constexpr (C::kReduces)
    Epilogue::store(state, (Out*)row.map.data[kRowFirst] + row.places[kRowFirst], row.map.plane);
}

extern "C" __global__ void __launch_bounds__(C::kBlockThreads) onepass_kernel(const __grid_constant__ SegmentMap map) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = (int64_t)gridDim.x * (C::kBlockThreads / 32), rows = map.segments * map.columns;
  for (int64_t index = (int64_t)blockIdx.x * (C::kBlockThreads / 32) + threadIdx.x / 32; index < rows; index += warps) {
    const int64_t segment = divide(index, map.columns);
    const Row row(map, segment, index - segment * map.columns);
    RowState state = {A(0), A(0)};
    if constexpr (!C::kSums) {
      A m = -infinity();
      for (int64_t k = row.begin + lane; k < row.end; k += 32) m = max_(m, row.first(k));
      state.m = warp_reduce<32>(m, Max());
    }
    const A base = finite_for_sum(state.m);
    for (int64_t k = row.begin + lane; k < row.end; k += 32)
      state.l += C::kSums ? term_of<C>(row.first(k), row.second(k)) : exp_for_sum<Out>(row.first(k) - base);
    state.l = warp_reduce<32>(state.l, Sum());
    if constexpr (C::kReduces) {
      if (lane == 0) store_row(row, state);
    } else {
      const Finish<C> finish(map, state);
      for (int64_t k = row.begin + lane; k < row.end; k += 32)
        ((Out*)map.data[kItemResult])[row.at(kItemResult, k)] = from_acc<Out>(finish(row.first(k), row.second(k)));
    }
  }
}
