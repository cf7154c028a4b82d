// exp_half.cuh: exponentials of columns of half results. Halves have 11 bits, bfloat16 8, so that their products with a
// factor of 13, or 16, are exact in float, however large they are, and so is what is left of two: exp(x - m) takes one
// fused multiply-add before the exponential, and the product of m is made once.
#pragma once

#include "column_online.cuh"

// log2(e) / 2 as a factor so short, and what it is to be multiplied by to be log2(e).
template <class T>
struct Short {
  static constexpr float kFactor = 0.7213134765625f, kRest = 2.00009446f;
};
template <>
struct Short<bfloat16_t> {
  static constexpr float kFactor = 0.721343994140625f, kRest = 2.00000982f;
};

// The square root of exp(x - m), `high` being the factor times m: to be squared as it is added up. Of bfloat16 without
// what the factor lacks, 5e-6 of x - m.
template <class T>
__device__ inline float root_of_exp(float x, float high) {
  const float v = fmaf(x, Short<T>::kFactor, -high);
  return exp2_(Short<T>::kRest - 2 > 1e-5f ? v * (Short<T>::kRest / 2) : v);
}
// exp(x - m) / l, `low` being log2(l).
template <class T>
__device__ inline float finished(float x, float high, float low) {
  return exp2_(fmaf(fmaf(x, Short<T>::kFactor, -high), Short<T>::kRest, -low));
}

// The largest number of the type that is no larger.
template <class T>
__device__ inline uint32_t rounded_down(float v);
template <>
__device__ inline uint32_t rounded_down<bfloat16_t>(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits >> 16) + (bits >> 31 && bits & 0xffff);
}
template <>
__device__ inline uint32_t rounded_down<half_t>(float v) {
  uint16_t bits;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}

// The states of a thread's columns of halves that lie two in a register, as Online has them (column_online.cuh). What
// decides whether sums are to be scaled are pairs too: the largest so far (of a softmin the smallest), and how large it
// may be.
template <class T>
struct OnlinePairs {
  static constexpr float kSign = FUNCTION == SOFTMIN ? -1 : 1;
  typedef uint32_t Tops[V > 1 ? V / 2 : 1];
  Tops top, limit;
  float high[V], l[V];

  template <int Slots>
  static __device__ void largest(const Held<T, Slots>& held, Tops& here) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      here[w] = held.at[0].at[w];
#pragma unroll
      for (int i = 1; i < Slots; ++i) here[w] = larger(here[w], held.at[i].at[w]);
    }
  }
  __device__ void begin() {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) top[w] = nothing<FUNCTION, T>().bits * 0x10001u;
#pragma unroll
    for (int v = 0; v < V; ++v) l[v] = 0;
    aim();
  }
  __device__ void raise(const Tops& here) {
    uint32_t higher = 0;
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      top[w] = larger(top[w], here[w]);
      higher |= larger(limit[w], here[w]) ^ limit[w];
    }
    if (!higher) return;
    float before[V];
#pragma unroll
    for (int v = 0; v < V; ++v) before[v] = high[v];
    aim();
#pragma unroll
    for (int v = 0; v < V; ++v) l[v] = scaled_by(l[v], before[v] - high[v]);
  }
  template <int Slots, class F>
  __device__ void add_up(int v, const Held<T, Slots>&, F element) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const float root = root_of_exp<T>(element(i), high[v]);
      l[v] = fmaf(root, root, l[v]);
    }
  }
  // A NaN is no maximum.
  __device__ float maximum(int v) const {
    return fmaxf(kSign * to_wide(T{(uint16_t)(top[v / 2] >> v % 2 * 16)}), -INFINITY_);
  }
  __device__ float below(int v, float top) const { return scaled_by(l[v], high[v] - shift(top) * Short<T>::kFactor); }

 private:
  static constexpr float kSlack = 8;
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    return FUNCTION == SOFTMIN ? min_of_pairs<T>(a, b) : max_of_pairs<T>(a, b);
  }
  static __device__ float scaled_by(float sum, float d) {
    const float root = exp2_(fminf(d, 0.0f) * (Short<T>::kRest / 2));
    return sum * root * root;
  }
  // Sums are to be relative to the maxima, as long as those do not grow by more than kSlack.
  __device__ void aim() {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float base = clamped(maximum(v));
      high[v] = base * Short<T>::kFactor;
      const uint32_t most = rounded_down<T>(base + kSlack) ^ (FUNCTION == SOFTMIN ? 0x8000u : 0u);
      limit[v / 2] = v % 2 ? limit[v / 2] & 0xffff | most << 16 : most;
    }
  }
};
