// block.cuh: merge over the threads that share a row, one level above the warp. Each warp leaves its part in shared
// memory and then reads all the parts of its row: one barrier a merge, and none where a warp (or less) owns the row.
#pragma once

#include "warp.cuh"

// Room for the parts of one merge. Two merges that follow one another need one each: there is no barrier after the
// reads.
template <int Lanes, int Rows, class T>
struct Parts {
  T at[Lanes > 32 ? Rows : 1][Lanes > 32 ? Lanes / 32 : 1];
};

template <int Lanes, int Rows, class T, class Merge>
__device__ inline T row_merge(T value, Merge merge_two, Parts<Lanes, Rows, T>& parts) {
  value = warp_merge<(Lanes < 32 ? Lanes : 32)>(value, merge_two);
  if constexpr (Lanes > 32) {
    constexpr int kWarps = Lanes / 32;
    const int row = threadIdx.x / Lanes, lane = threadIdx.x % 32;
    if (lane == 0) parts.at[row][threadIdx.x % Lanes / 32] = value;
    __syncthreads();
    value = warp_merge<kWarps>(parts.at[row][lane % kWarps], merge_two);
  }
  return value;
}

struct Max {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return max_(a, b);
  }
};
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return add(a, b);
  }
};
