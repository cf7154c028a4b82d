// vectors.cuh: what the kernels from cuda-vector on have in common: vectors of 16 bytes, and a fast exponential.
#pragma once

#include "cuda_block.cu"

// A vector stays four words until its elements are asked for: to take it apart would mean to wait for it.
#define V int(16 / sizeof(TYPE))  // its elements
typedef Vector<uint32_t, 4> Vec;

template <class T = TYPE>
__device__ float get(const Vec& v, int k) {
  if constexpr (sizeof(T) == 4)
    return __uint_as_float(v.at[k]);
  else
    return to_acc(get_half<T>(v.at[k / 2], k % 2));
}

// The vector of the elements value(0) to value(V - 1).
template <class F>
__device__ Vec pack(F value) {
  Vec v;
  unroll<4>([&](int w) {
    if constexpr (V == 4)
      v.at[w] = __float_as_uint(value(w));
    else
      v.at[w] = pack_half2<TYPE>(value(2 * w), value(2 * w + 1));
  });
  return v;
}

// Where the first vector of a row begins, which is at a multiple of 16 bytes: 0, or so many elements before the row.
__device__ int64_t start_of(const TYPE* row) { return -int64_t(uint64_t(row) % 16 / sizeof(TYPE)); }

// Whether one instruction can move the elements i to i + V - 1 of a row.
__device__ bool is_whole(const TYPE* row, int64_t i, int64_t n) {
  return i >= 0 && i + V <= n && uint64_t(row + i) % 16 == 0;
}

// The elements i to i + V - 1 of a row, with `outside` for those that the row does not have.
__device__ Vec load(const TYPE* row, int64_t i, int64_t n, float outside) {
  if (is_whole(row, i, n)) return load_vector<uint32_t, 4, false>(row + i);
  return pack([&](int k) { return i + k >= 0 && i + k < n ? to_acc(row[i + k]) : outside; });
}

// Stores those of the elements i to i + V - 1 that the row has.
__device__ void store(TYPE* row, int64_t i, int64_t n, const Vec& v) {
  if (is_whole(row, i, n)) return store_vector(row + i, v);
  unroll<V>([&](int k) {
    if (i + k >= 0 && i + k < n) row[i + k] = from_acc<TYPE>(get(v, k));
  });
}

// A vector of shared memory, by one instruction.
__device__ Vec load_shared(const Vec* at) {
  Vec v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.at[0]), "=r"(v.at[1]), "=r"(v.at[2]), "=r"(v.at[3])
               : "r"(uint32_t(__cvta_generic_to_shared(at)))
               : "memory");
  return v;
}

// exp(x) = 2^(x * log2(e)), by one multiplication and one instruction. What would be subnormal is 0.
__device__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// Merges another pair into (maximum, sum). As long as all is -inf the sum is relative to 0: -inf - -inf would be NaN.
__device__ void merge(float& maximum, float& sum, float other, float others_sum) {
  const float most = fmaxf(maximum, other), base = most == NOTHING ? 0 : most;
  sum = sum * fast_exp(maximum - base) + others_sum * fast_exp(other - base);
  maximum = most;
}
