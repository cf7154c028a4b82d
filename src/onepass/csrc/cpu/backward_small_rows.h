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
  static constexpr bool kNan = kInputNan<Y, D>, kDeinterleaveSums = std::is_same_v<Y, bfloat16>;
  static constexpr bool kPointwise = Op == GradOp::logsumexp;  // no sum
  using Epilogue = GradEpilogue<Op, D>;
  const Y *y, *g;
  D* dx;
  int64_t n, y_stride, g_stride, dx_stride;
  int count;
  float sign;
  alignas(64) float a[kWidth], b[kWidth];  // the epilogue's numbers per row; those of logsumexp are given

  // The terms of K vectors, and their dx.
  template <int K>
  static ONEPASS_INLINE void terms(const Y* y, const Y* g, Vec (&t)[K]) {
    Vec of_y[K] = {};
    load_vectors<kDeinterleaveSums>(g, t);
    if constexpr (Op == GradOp::softmax) load_vectors<kDeinterleaveSums>(y, of_y);
    for (int k = 0; k < K; ++k) t[k] = grad_term<Op>(of_y[k], t[k]);
  }
  template <int K>
  static ONEPASS_INLINE void compute_dx(const Y* y, const Y* g, const Epilogue& epilogue, Vec (&dx)[K]) {
    Vec of_g[K] = {};
    load_vectors<kDeinterleave<Y, D>>(y, dx);
    if constexpr (!kPointwise) load_vectors<kDeinterleave<Y, D>>(g, of_g);
    epilogue.apply(dx, of_g);
  }

  // All bits set in the lanes of K vectors from element `taken` on.
  template <int K>
  ONEPASS_INLINE void masks_from(int64_t taken, IntVec (&masks)[K]) const {
    alignas(64) int32_t bits[K * kWidth];
    for (int i = 0; i < K * kWidth; ++i) {
      const int element = kDeinterleaveSums && K == 2 ? 2 * (i % kWidth) + i / kWidth : i;
      bits[i] = element >= taken ? -1 : 0;
    }
    std::memcpy(&masks, bits, sizeof masks);
  }

  // Works on K vectors at a time. `kOneStep`: these are the whole row.
  template <int K, bool kStreaming, bool kOneStep = false>
  __attribute__((noinline)) void run() {
    constexpr int64_t step = K * kWidth;
    const int64_t n = kOneStep ? step : this->n, whole = n / step * step, end = n - step;
    if constexpr (!kPointwise) {
      Vec sums[kWidth];
      IntVec masks[K];
      masks_from<K>(whole - end, masks);
      for (int r = 0; r < kWidth; ++r) {
        const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
        Vec sum[K] = {}, t[K];
        for (int64_t i = 0; i < whole; i += step) {
          terms<K>(y_r + i, g_r + i, t);
          for (int k = 0; k < K; ++k) sum[k] += t[k];
        }
        if (whole < n) {
          terms<K>(y_r + end, g_r + end, t);
          for (int k = 0; k < K; ++k) sum[k] += masks[k] ? t[k] : Vec{};
        }
        sums[r] = K == 2 ? sum[0] + sum[K - 1] : sum[0];
      }
      const Vec total = transpose_reduce(sums, add);
      store_vector(a, Op == GradOp::softmax ? total * -sign : total);
    }
    alignas(64) float lowest[kWidth], magic[kWidth];
    if constexpr (Op != GradOp::softmax) {
      const Epilogue lanes = Epilogue::of(load_vector(a), Vec{});
      store_vector(a, lanes.a), store_vector(lowest, lanes.base.lowest), store_vector(magic, lanes.base.magic);
    }
    for (int r = 0; r < count; ++r) {
      const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
      D* const to = dx + r * dx_stride;
      Epilogue epilogue = {broadcast(a[r]), kPointwise ? broadcast(b[r]) : broadcast(sign), {}};
      if constexpr (Op != GradOp::softmax) {
        epilogue.base.lowest = broadcast(lowest[r]), epilogue.base.magic = broadcast(magic[r]);
      }
      Vec tail[K] = {};
      if (whole < n) compute_dx<K>(y_r + end, g_r + end, epilogue, tail);  // first: in place, its operands change next
      for (int64_t i = 0; i < whole; i += step) {
        Vec v[K];
        compute_dx<K>(y_r + i, g_r + i, epilogue, v);
        store_vectors<kDeinterleave<Y, D>, kNan, kStreaming>(to + i, v);
      }
      if (whole < n) store_vectors<kDeinterleave<Y, D>, kNan, false>(to + end, tail);
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

// Between rows of Y and columns of floats, one row per lane. `row(j)` is where row j begins; `contiguous`: each row
// begins where the one before ends.
template <class Y, class Row>
void transpose_in(float (*columns)[kTinyRows], int64_t n, int64_t count, bool contiguous, Row row) {
  alignas(64) float flat[kTinyRows * kWidth];
  for (int64_t j = 0; j < (contiguous ? 1 : count); ++j) {
    const Y* const from = row(j);
    const int64_t length = contiguous ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector(flat + j * n + i, load_vector(from + i));
    if (i < length) store_tail(flat + j * n + i, length - i, load_tail(from + i, length - i, 0));
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) columns[i][j] = flat[j * n + i];
  }
}

template <class D, bool InputNan, class Row>
void transpose_out(const float (*columns)[kTinyRows], int64_t n, int64_t count, bool contiguous, Row row) {
  alignas(64) float flat[kTinyRows * kWidth];
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) flat[j * n + i] = columns[i][j];
  }
  for (int64_t j = 0; j < (contiguous ? 1 : count); ++j) {
    D* const to = row(j);
    const int64_t length = contiguous ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector<InputNan>(to + i, load_vector(flat + j * n + i));
    if (i < length) store_tail<InputNan>(to + i, length - i, load_tail(flat + j * n + i, length - i, 0));
  }
}

}  // namespace onepass::ONEPASS_ISA
