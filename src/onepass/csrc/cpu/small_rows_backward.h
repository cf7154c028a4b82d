// small_rows_backward.h: gradients of short rows of unit stride in floats: as many together as a vector has lanes, so
// that their sums, which are across the lanes of each, become one vector at once.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kShortMost = 128;  // elements of such a row

// kWidth rows of n elements, kWidth or more, all of which may be read; `count` of them are stored. What is left of a
// row after whole pairs of vectors is taken with some of the elements before it, in a pair (of short rows: a vector)
// that ends with the row.
template <Kind K, class Y, class D>
struct ShortRows {
  static constexpr bool kAny = kAnyNan<Y, D>, kSums = std::is_same_v<Y, bfloat16>;
  typedef BackwardLast<K, D> Last;
  const Y *y, *g;
  D* dx;
  int64_t n, y_stride, g_stride, dx_stride;
  int count;
  float sign;
  alignas(64) float a[kWidth], b[kWidth];  // of K::lse given

  // Of M vectors what they add to a sum, and what becomes of them.
  template <int M>
  static ONEPASS_INLINE void terms(const Y* y, const Y* g, Floats (&t)[M]) {
    Floats of_y[M] = {};
    load_some<kSums>(g, t);
    if constexpr (K == Kind::soft) load_some<kSums>(y, of_y);
    for (int k = 0; k < M; ++k) t[k] = backward_term<K>(of_y[k], t[k]);
  }
  template <int M>
  static ONEPASS_INLINE void make(const Y* y, const Y* g, const Last& last, Floats (&made)[M]) {
    Floats of_g[M] = {};
    load_some<kSplit<Y, D>>(y, made);
    if constexpr (K != Kind::lse) load_some<kSplit<Y, D>>(g, of_g);
    last(made, of_g);
  }

  // Ones where lane i of vector k has no element that was taken before.
  template <int M>
  ONEPASS_INLINE void fresh(Ints (&masks)[M], int64_t taken) const {
    alignas(64) int32_t at[M * kWidth];
    for (int i = 0; i < M * kWidth; ++i) {
      const int element = kSums && M == 2 ? 2 * (i % kWidth) + i / kWidth : i;
      at[i] = element >= taken ? -1 : 0;
    }
    std::memcpy(&masks, at, sizeof masks);
  }

  // M vectors at a time; `One`: which are the row.
  template <int M, bool Past, bool One = false>
  __attribute__((noinline)) void run() {
    constexpr int64_t step = M * kWidth;
    const int64_t n = One ? step : this->n, whole = n / step * step, end = n - step;
    if constexpr (K != Kind::lse) {
      Floats sums[kWidth];
      Ints masks[M];
      fresh<M>(masks, whole - end);
      for (int r = 0; r < kWidth; ++r) {
        const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
        Floats sum[M] = {}, t[M];
        for (int64_t i = 0; i < whole; i += step) {
          terms<M>(y_r + i, g_r + i, t);
          for (int k = 0; k < M; ++k) sum[k] += t[k];
        }
        if (whole < n) {
          terms<M>(y_r + end, g_r + end, t);
          for (int k = 0; k < M; ++k) sum[k] += masks[k] ? t[k] : Floats{};
        }
        sums[r] = M == 2 ? sum[0] + sum[M - 1] : sum[0];
      }
      const Floats total = each_across(sums, [](Floats one, Floats other) { return one + other; });
      store_vector(a, K == Kind::soft ? total * -sign : total);
    }
    alignas(64) float low[kWidth], magic[kWidth];
    if constexpr (K != Kind::soft) {
      const Last lasts = Last::of(load_vector(a), Floats{});
      store_vector(a, lasts.a), store_vector(low, lasts.from.low), store_vector(magic, lasts.from.magic);
    }
    for (int r = 0; r < count; ++r) {
      const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
      D* const to = dx + r * dx_stride;
      Last last = {all(a[r]), K == Kind::lse ? all(b[r]) : all(sign), {}};
      if constexpr (K != Kind::soft) last.from.low = all(low[r]), last.from.magic = all(magic[r]);
      Floats tail[M] = {};
      if (whole < n) make<M>(y_r + end, g_r + end, last, tail);  // first: in place what it reads is overwritten next
      for (int64_t i = 0; i < whole; i += step) {
        Floats made[M];
        make<M>(y_r + i, g_r + i, last, made);
        store_some<kSplit<Y, D>, kAny, Past>(to + i, made);
      }
      if (whole < n) store_some<kSplit<Y, D>, kAny, false>(to + end, tail);
    }
  }
};

// Bytes past the cache, whole lines of them.
inline void stream_bytes(char* to, const char* from, int64_t bytes) {
  constexpr int64_t vector = sizeof(Floats);
  for (int64_t i = 0; i < bytes; i += vector) {
    Floats v;
    std::memcpy(&v, from + i, sizeof v);
    stream_vector(reinterpret_cast<float*>(to + i), v);
  }
}

// Rows shorter than a vector: 64 of them, turned so that they lie side by side.
constexpr int64_t kTiny = 64;

// Converted, one row a lane; `at(j)` is where row j begins.
template <class Y, class At>
void turn_in(float (*turned)[kTiny], int64_t n, int64_t count, bool packed, At at) {
  alignas(64) float flat[kTiny * kWidth];
  for (int64_t j = 0; j < (packed ? 1 : count); ++j) {
    const Y* const from = at(j);
    const int64_t length = packed ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector(flat + j * n + i, load_vector(from + i));
    if (i < length) store_part(flat + j * n + i, length - i, load_part(from + i, length - i, 0));
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) turned[i][j] = flat[j * n + i];
  }
}

template <class D, bool Any, class At>
void turn_out(const float (*turned)[kTiny], int64_t n, int64_t count, bool packed, At at) {
  alignas(64) float flat[kTiny * kWidth];
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) flat[j * n + i] = turned[i][j];
  }
  for (int64_t j = 0; j < (packed ? 1 : count); ++j) {
    D* const to = at(j);
    const int64_t length = packed ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector<Any>(to + i, load_vector(flat + j * n + i));
    if (i < length) store_part<Any>(to + i, length - i, load_part(flat + j * n + i, length - i, 0));
  }
}

}  // namespace onepass::ONEPASS_ISA
