// exp_half.cuh: exponentials for columns with half results. float16 has 11 bits and bfloat16 has 8, so their products
// with a factor of 13, or 16, bits are exact in float, however large they are, and so is the difference of two of them.
// exp(x - m) then takes one fused multiply-add before the exponential, and the product of m is computed once.
#pragma once

#include "state.cuh"

// log2(e) / 2 as so short a factor, and the number that makes log2(e) of it.
template <class T>
struct ShortLog2e {
  static constexpr float kFactor = 0.7213134765625f, kRest = 2.00009446f;
};
template <>
struct ShortLog2e<bfloat16_t> {
  static constexpr float kFactor = 0.721343994140625f, kRest = 2.00000982f;
};

// The square root of exp(x - m), where scaled_m is the factor times m. It is squared as it is added. For bfloat16 it
// leaves out what the factor lacks, 5e-6 of x - m.
template <class T>
__device__ inline float sqrt_exp(float x, float scaled_m) {
  const float v = fmaf(x, ShortLog2e<T>::kFactor, -scaled_m);
  return exp2_(ShortLog2e<T>::kRest - 2 > 1e-5f ? v * (ShortLog2e<T>::kRest / 2) : v);
}
// exp(x - m) / l.
template <class T>
__device__ inline float softmax_half(float x, float scaled_m, float log2_l) {
  return exp2_(fmaf(fmaf(x, ShortLog2e<T>::kFactor, -scaled_m), ShortLog2e<T>::kRest, -log2_l));
}

// The bits of the largest number of the type that is not above v.
template <class T>
__device__ inline uint32_t round_down(float v);
template <>
__device__ inline uint32_t round_down<bfloat16_t>(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits >> 16) + (bits >> 31 && bits & 0xffff);
}
template <>
__device__ inline uint32_t round_down<half_t>(float v) {
  uint16_t bits;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
