// exp_half.cuh: exponentials for columns with half results. float16 has 11 bits and bfloat16 has 8. The product with a
// constant of 13, or 16, bits is therefore exact in float, however large the element is, and so is the difference of
// two such products. exp(x - m) then takes one fused multiply-add before the exponential; the product with m is
// computed once.
#pragma once

#include "state.cuh"

// kFactor is log2(e) / 2 with that few bits. kFactor * kRest is log2(e).
template <class T>
struct ShortLog2e {
  static constexpr float kFactor = 0.7213134765625f, kRest = 2.00009446f;
};
template <>
struct ShortLog2e<bfloat16_t> {
  static constexpr float kFactor = 0.721343994140625f, kRest = 2.00000982f;
};

// The square root of exp(x - m), where scaled_m is kFactor * m. The caller squares it in its sum. For bfloat16 the
// correction by kRest is left out, which changes the exponent by 5e-6 of x - m.
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
__device__ inline uint32_t round_down(float v) {
  if constexpr (is_same<T, half_t>) {
    uint16_t bits;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
  } else {
    const uint32_t bits = __float_as_uint(v);
    return (bits >> 16) + (bits >> 31 && bits & 0xffff);
  }
}
