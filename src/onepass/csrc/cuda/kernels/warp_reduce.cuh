// warp_reduce.cuh: reductions over 2 to 32 neighbouring lanes by butterfly shuffles. Every lane gets the result.
#pragma once

#include "state.cuh"

template <class T>
__device__ inline T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class A>
__device__ inline Compensated<A> shuffle_xor(Compensated<A> sum, int mask) {
  return {shuffle_xor(sum.hi, mask), shuffle_xor(sum.lo, mask)};
}

template <int Lanes, class T, class Op>
__device__ inline T warp_reduce(T value, Op op) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}

// Over the lanes of a warp whose numbers are equal modulo `stride`. `stride` is a power of two.
template <class T, class Op>
__device__ inline T warp_reduce_strided(T value, int stride, Op op) {
  for (int mask = 16; mask >= stride; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}

// The maximum over a warp. None of the values may be a NaN.
__device__ inline double warp_max(double value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = max_(value, shuffle_xor(value, mask));
  return value;
}
// For floats it is one integer instruction: they are mapped to integers of the same order.
__device__ inline float warp_max(float value) {
  const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(flip(__reduce_max_sync(0xffffffffu, flip(__float_as_int(value)))));
}

// The operators of reductions, with their identity elements.
struct Max {
  template <class A>
  static __device__ A identity() {
    return -infinity();
  }
  template <class A>
  __device__ A operator()(A a, A b) const {
    return max_(a, b);
  }
};
struct Sum {
  template <class T>
  static __device__ T identity() {
    return T{};
  }
  template <class T>
  __device__ T operator()(T a, T b) const {
    return add(a, b);
  }
};
