// warp.cuh: merge the values of 2 to 32 neighbouring lanes by butterfly shuffles; every lane ends with the whole.
#pragma once

#include "state.cuh"

template <class T>
__device__ inline T shuffle(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

template <class A>
__device__ inline Total<A> shuffle(Total<A> total, int mask) {
  return {shuffle(total.sum, mask), shuffle(total.rest, mask)};
}

template <int Lanes, class T, class Merge>
__device__ inline T warp_merge(T value, Merge merge_two) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) value = merge_two(value, shuffle(value, mask));
  return value;
}
