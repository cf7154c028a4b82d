// backward_small_rows.h: gradients of short rows of unit stride in vectors of floats: as many together as a vector has
// lanes, so that their sums, which are across the lanes of each, become one vector at once. Rows shorter than a vector
// are transposed.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

// kWidth rows of n elements, n >= kWidth, all of which may be read. `count` of them are stored. The elements behind a
// row's whole pairs of vectors are taken with some of those before them, in a pair (of short rows: a vector) that ends
// with the row.
template <GradOp Op, class Y, class D>
struct SmallGradRows {
  static constexpr bool kNan = kInputNan<Y, D>;
  static constexpr bool kPointwise = Op == GradOp::logsumexp;  // no sum
  using Epilogue = GradEpilogue<Op, D>;
  const Y *y, *g;
  D* dx;
  int64_t n, y_stride, g_stride, dx_stride;
  int count;
  float slope;
  alignas(64) float a[kWidth], b[kWidth];  // the numbers of the epilogues of logsumexp

  // All bits set in the lanes of K vectors from element `taken` on.
  template <int K>
  ONEPASS_INLINE void masks_from(int64_t taken, IntVec (&masks)[K]) const {
    alignas(64) int32_t bits[K * kWidth];
    for (int i = 0; i < K * kWidth; ++i) {
      const int element = kDeinterleaveSums<Y> && K == 2 ? 2 * (i % kWidth) + i / kWidth : i;
      bits[i] = element >= taken ? -1 : 0;
    }
    std::memcpy(&masks, bits, sizeof masks);
  }

  // Works on K vectors at a time. `kOneStep`: these are the whole row.
  template <int K, bool kStreaming, bool kOneStep = false>
  __attribute__((noinline)) void run() {
    constexpr int64_t step = K * kWidth;
    const int64_t n = kOneStep ? step : this->n, whole = n / step * step, end = n - step;
    Vec sums[kWidth];
    if constexpr (!kPointwise) {
      IntVec masks[K];
      masks_from<K>(whole - end, masks);
      for (int r = 0; r < kWidth; ++r) {
        const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
        Vec sum[K] = {}, t[K];
        for (int64_t i = 0; i < whole; i += step) {
          grad_terms<Op, kDeinterleaveSums<Y>>(y_r + i, g_r + i, t);
          for (int k = 0; k < K; ++k) sum[k] += t[k];
        }
        if (whole < n) {
          grad_terms<Op, kDeinterleaveSums<Y>>(y_r + end, g_r + end, t);
          for (int k = 0; k < K; ++k) sum[k] += masks[k] ? t[k] : Vec{};
        }
        sums[r] = K == 2 ? sum[0] + sum[K - 1] : sum[0];
      }
    }
    const GradEpilogues<Op, D> epilogues(kPointwise ? Epilogue::of(load_vector(a), load_vector(b), broadcast(slope))
                                                    : Epilogue::of_sum(transpose_reduce(sums, add), broadcast(slope)));
    for (int r = 0; r < count; ++r) {
      const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
      D* const to = dx + r * dx_stride;
      const Epilogue epilogue = epilogues[r];
      Vec tail[K] = {};
      if (whole < n) epilogue.compute(y_r + end, g_r + end, tail);  // first: in place, its operands change next
      for (int64_t i = 0; i < whole; i += step) {
        Vec v[K];
        epilogue.compute(y_r + i, g_r + i, v);
        store_vectors<kDeinterleave<Y, D>, false, kStreaming, kNan>(to + i, v);
      }
      if (whole < n) store_vectors<kDeinterleave<Y, D>, false, false, kNan>(to + end, tail);
    }
  }
};

// Copies whole lines by streaming stores.
inline void stream_bytes(char* to, const char* from, int64_t bytes) {
  constexpr int64_t vector = sizeof(Vec);
  for (int64_t i = 0; i < bytes; i += vector) {
    Vec v;
    std::memcpy(&v, from + i, sizeof v);
    stream_vector(reinterpret_cast<float*>(to + i), v);
  }
}

// Rows shorter than a vector ------------------------------------------------------------------------------------------

constexpr int64_t kTinyRows = 64;  // that go together

// Stores elements in another type.
template <bool InputNan, class T, class F>
void convert_elements(T* to, const F* from, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_vector<InputNan>(to + i, load_vector(from + i));
  if (i < n) store_tail<InputNan>(to + i, n - i, load_tail(from + i, n - i, 0));
}

// Between rows of Y and columns of floats, one row per lane. `row(j)` is where row j begins; `contiguous`: each row
// begins where the one before ends.
template <class Row>
void transpose_in(float (*columns)[kTinyRows], int64_t n, int64_t count, bool contiguous, Row row) {
  alignas(64) float flat[kTinyRows * kWidth];
  for (int64_t j = 0; j < (contiguous ? 1 : count); ++j) {
    convert_elements<false>(flat + j * n, row(j), contiguous ? n * count : n);
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) columns[i][j] = flat[j * n + i];
  }
}
template <bool InputNan, class Row>
void transpose_out(const float (*columns)[kTinyRows], int64_t n, int64_t count, bool contiguous, Row row) {
  alignas(64) float flat[kTinyRows * kWidth];
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) flat[j * n + i] = columns[i][j];
  }
  for (int64_t j = 0; j < (contiguous ? 1 : count); ++j) {
    convert_elements<InputNan>(row(j), flat + j * n, contiguous ? n * count : n);
  }
}

}  // namespace onepass::ONEPASS_ISA
