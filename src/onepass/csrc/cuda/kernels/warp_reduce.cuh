// warp_reduce.cuh: merge the values of 2 to 32 neighbouring lanes by butterfly shuffles; every lane ends with the
// whole.
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

// The largest of a warp, of which none is a NaN.
__device__ inline double warp_max(double value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = max_(value, shuffle(value, mask));
  return value;
}
// By one instruction, which knows integers only: those that are in the same order.
__device__ inline float warp_max(float value) {
  const auto turned = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(turned(__reduce_max_sync(0xffffffffu, turned(__float_as_int(value)))));
}
