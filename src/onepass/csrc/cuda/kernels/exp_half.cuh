// exp_half.cuh: exponentials for columns with half results. float16 has 11 bits and bfloat16 has 8, so their products
// with a factor of 13, or 16, bits are exact in float, however large they are, and so is the difference of two of them.
// exp(x - m) then takes one fused multiply-add before the exponential, and the product of m is computed once.
#pragma once

#include "column_online.cuh"

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

// OnlineState (column_online.cuh) for elements that are half2. The maxima so far (for softmin, the minima), and the
// limits above which the sums are rescaled, are half2 too.
template <class C>
struct OnlineStateHalf2 {
  typedef typename C::In T;
  static constexpr int V = C::kVecSize;
  static constexpr float kSign = C::kFunction == Function::softmin ? -1 : 1;
  typedef uint32_t Maxima[V > 1 ? V / 2 : 1];
  Maxima m, limit;
  float scaled_base[V], l[V];

  template <int Vecs>
  static __device__ void max_of(const ColumnFragment<C, T, Vecs>& fragment, Maxima& max) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      max[w] = fragment.at[0].at[w];
#pragma unroll
      for (int i = 1; i < Vecs; ++i) max[w] = larger(max[w], fragment.at[i].at[w]);
    }
  }
  __device__ void init() {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) m[w] = neutral_element<C>().bits * 0x10001u;
#pragma unroll
    for (int v = 0; v < V; ++v) l[v] = 0;
    set_base();
  }
  __device__ void update_max(const Maxima& stage_max) {
    uint32_t is_higher = 0;
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      m[w] = larger(m[w], stage_max[w]);
      is_higher |= larger(limit[w], stage_max[w]) ^ limit[w];
    }
    if (!is_higher) return;
    float before[V];
#pragma unroll
    for (int v = 0; v < V; ++v) before[v] = scaled_base[v];
    set_base();
#pragma unroll
    for (int v = 0; v < V; ++v) l[v] = rescale(l[v], before[v] - scaled_base[v]);
  }
  template <int Vecs, class F>
  __device__ void add_elements(int v, const ColumnFragment<C, T, Vecs>&, F element) {
#pragma unroll
    for (int i = 0; i < Vecs; ++i) {
      const float root = sqrt_exp<T>(element(i), scaled_base[v]);
      l[v] = fmaf(root, root, l[v]);
    }
  }
  // A NaN is no maximum.
  __device__ float max(int v) const { return fmaxf(kSign * to_acc(get_half<T>(m[v / 2], v % 2)), -infinity()); }
  __device__ float sum_relative_to(int v, float max) const {
    return rescale(l[v], scaled_base[v] - finite_or_zero(max) * ShortLog2e<T>::kFactor);
  }

 private:
  static constexpr float kSlack = 8;
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    return C::kFunction == Function::softmin ? min_half2<T>(a, b) : max_half2<T>(a, b);
  }
  static __device__ float rescale(float sum, float difference) {
    const float root = exp2_(fminf(difference, 0.0f) * (ShortLog2e<T>::kRest / 2));
    return sum * root * root;
  }
  // Makes the maxima the base, which serves until they grow by more than kSlack.
  __device__ void set_base() {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float base = clamp_to_finite(max(v));
      scaled_base[v] = base * ShortLog2e<T>::kFactor;
      const uint32_t bits = round_down<T>(base + kSlack) ^ (C::kFunction == Function::softmin ? 0x8000u : 0u);
      limit[v / 2] = v % 2 ? limit[v / 2] & 0xffff | bits << 16 : bits;
    }
  }
};
