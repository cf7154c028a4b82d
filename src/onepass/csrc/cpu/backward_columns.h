// backward_columns.h: gradients of rows that lie side by side, in vectors of floats: a tile of them goes together, one
// row per lane.
//
//   sums over n -> dx, the operands read again -> store
//
// A tile is as wide as a page, however long: what is read again comes from a cache, and most of the cost of its rows is
// pages, each of which has to be looked up.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

template <class Y>
constexpr int64_t kTileCols = kTileBytes / int64_t(sizeof(Y));

// The operands: element i of column j is at [i * stride + j]. With a g_mask of 0 `g` is kUnroll copies of one number.
template <class Y, class D>
struct GradTile {
  const Y *y, *g;
  D* dx;
  int64_t n, y_stride, g_stride, dx_stride, g_mask;

  ONEPASS_INLINE const Y* y_at(int64_t i, int64_t j) const { return y + i * y_stride + j; }
  ONEPASS_INLINE const Y* g_at(int64_t i, int64_t j) const { return g + i * g_stride + (j & g_mask); }
};

// Columns [j, j + count) of a tile, less than a vector.
template <GradOp Op, class Y, class D>
__attribute__((noinline)) void grad_columns_tail(const GradTile<Y, D>& t, int64_t j, int64_t count, Vec slope) {
  count &= kWidth - 1;  // no change, but the compiler does not know
  CompensatedVec sums;
  for (int64_t i = 0; i < t.n; ++i) {
    sums.add(grad_term<Op>(load_tail(t.y_at(i, j), count, 0), load_tail(t.g_at(i, j), count, 0)));
  }
  const Vec total = finite_lanes(sums);
  const auto epilogue = GradEpilogue<Op, D>::of_sum(total, slope);
  for (int64_t i = 0; i < t.n; ++i) {
    const Vec dx = epilogue.apply1(load_tail(t.y_at(i, j), count, 0), load_tail(t.g_at(i, j), count, 0));
    store_tail<kInputNan<Y, D>>(t.dx + i * t.dx_stride + j, count, dx);
  }
}

// y becomes dx. `a`: for softmax minus the sums, times the slope; for log_softmax the sums.
template <GradOp Op, class D, int K>
ONEPASS_INLINE void grad_of_columns(Vec (&y)[K], const Vec (&g)[K], const Vec (&a)[K], Vec slope) {
  if constexpr (Op == GradOp::softmax) {
    for (int k = 0; k < K; ++k) y[k] *= g[k] * slope + a[k];
  } else {
    const ExpFactor one = ExpFactor::of(broadcast(1));
    exp_with_factor<sizeof(D) == 2>(y, one.base);
    for (int k = 0; k < K; ++k) y[k] = g[k] - y[k] * one.factor * a[k];
    if (slope[0] != 1) {
      for (int k = 0; k < K; ++k) y[k] *= slope;
    }
  }
}

// Calls store(to, i, is_streaming) for the elements i of a tile: `to` is where those of its columns are stored.
template <class D, class Store>
ONEPASS_INLINE void store_tile(D* dx, int64_t n, int64_t stride, bool streaming, Store store) {
  for (int64_t i = 0; i < n; ++i) {
    D* const to = dx + i * stride;
    with_streaming(streaming && uintptr_t(to) % kLine == 0,
                   [&](auto is_streaming) __attribute__((always_inline)) { store(to, i, is_streaming); });
  }
}

// A tile of `width` columns of softmax, softmin or log_softmax.
template <GradOp Op, class Y, class D>
void grad_columns(const GradTile<Y, D>& t, int64_t width, Vec slope, bool streaming) {
  constexpr bool input_nan = kInputNan<Y, D>;
  constexpr bool deinterleave = kDeinterleave<Y, D>;
  constexpr int64_t pair = kPair;
  const int64_t whole = width / pair * pair;
  for (int64_t j = whole; j < width; j += kWidth - 1) {
    grad_columns_tail<Op>(t, j, width - j < kWidth - 1 ? width - j : kWidth - 1, slope);
  }
  if (!whole) return;
  struct Column {
    Vec sum, error, part, total;
  };
  alignas(64) Column columns[kTileCols<Y> / kWidth];  // not a CompensatedVec, all of which would be set to 0
  for (int64_t v = 0; v < whole / kWidth; ++v) columns[v].sum = columns[v].error = Vec{};
  // Adds element i of all columns, or elements i and i + 1. Their terms begin a plain sum, are added to it, or go with
  // it into the compensated sum.
  enum class Into { new_part, part, sum };
  const auto add_row = [&, t](int64_t i, auto two_rows, auto into) __attribute__((always_inline)) {
    constexpr bool two = two_rows.value, uses_y = Op == GradOp::softmax;
    constexpr int64_t line = kLine / int64_t(sizeof(Y)), ahead = 4;
    const Y *const y = t.y_at(i, 0), *const y_second = y + t.y_stride;
    const Y *const g = t.g + i * t.g_stride, *const g_second = g + t.g_stride;
    for (int64_t v = 0; v < whole; v += pair) {
      const int64_t at_g = v & t.g_mask;
      if (v % line == 0) {
        if (uses_y) __builtin_prefetch(y + ahead * t.y_stride + v);
        if (uses_y && two) __builtin_prefetch(y_second + ahead * t.y_stride + v);
        __builtin_prefetch(g + ahead * t.g_stride + at_g);
        if (two) __builtin_prefetch(g_second + ahead * t.g_stride + at_g);
      }
      Vec terms[2], second[2];
      grad_terms<Op, deinterleave>(y + v, g + at_g, terms);
      if constexpr (two) {
        grad_terms<Op, deinterleave>(y_second + v, g_second + at_g, second);
        for (int k = 0; k < 2; ++k) terms[k] += second[k];
      }
      for (int k = 0; k < 2; ++k) {
        Column& column = columns[v / kWidth + k];
        if constexpr (into.value == Into::new_part) column.part = terms[k];
        if constexpr (into.value == Into::part) column.part += terms[k];
        if constexpr (into.value == Into::sum) {
          CompensatedVec sums = {column.sum, column.error};
          sums.add(column.part + terms[k]);
          column.sum = sums.sum, column.error = sums.error;
        }
      }
    }
  };
  // Eight rows are added in plain floats.
  using Two = std::true_type;
  using One = std::false_type;
  const std::integral_constant<Into, Into::new_part> into_new_part{};
  const std::integral_constant<Into, Into::part> into_part{};
  const std::integral_constant<Into, Into::sum> into_sum{};
  int64_t i = 0;
  for (; i + 8 <= t.n; i += 8) {
    add_row(i, Two(), into_new_part);
    for (int k = 2; k < 6; k += 2) add_row(i + k, Two(), into_part);
    add_row(i + 6, Two(), into_sum);
  }
  for (int64_t v = 0; v < whole / kWidth; ++v) columns[v].part = Vec{};
  for (; i + 1 < t.n; ++i) add_row(i, One(), into_part);
  if (i < t.n) add_row(i, One(), into_sum);
  for (int64_t v = 0; v < whole / kWidth; ++v) {
    const Vec total = finite_lanes({columns[v].sum, columns[v].error});
    columns[v].total = Op == GradOp::softmax ? total * -slope : total;
  }
  store_tile(t.dx, t.n, t.dx_stride, streaming,
             [=, &columns](D* to, int64_t i, auto is_streaming) __attribute__((always_inline)) {
               for (int64_t v = 0; v < whole; v += pair) {
                 Vec y[2], g[2];
                 load_vectors<deinterleave>(t.y_at(i, v), y), load_vectors<deinterleave>(t.g_at(i, v), g);
                 grad_of_columns<Op, D>(y, g, {columns[v / kWidth].total, columns[v / kWidth + 1].total}, slope);
                 store_vectors<deinterleave, false, is_streaming.value, input_nan>(to + v, y);
               }
             });
}

// A tile of logsumexp. `g`, which is multiplied by the slope, and `lse` have one number per column.
template <class Y>
void grad_columns_logsumexp(const Y* x, const float* g, const float* lse, Y* dx, int64_t n, const int64_t* n_strides,
                            int64_t width, Vec slope, bool streaming) {
  const ExpFactor one = ExpFactor::of(broadcast(1));
  const int64_t whole = width / kPair * kPair;
  store_tile(dx, n, n_strides[kDx], streaming, [=](Y* to, int64_t i, auto is_streaming) __attribute__((always_inline)) {
    const Y* const from = x + i * n_strides[kSaved];
    for (int64_t v = 0; v < whole; v += kPair) {
      Vec e[2], of_g[2];
      load_vectors<false>(from + v, e);
      for (int k = 0; k < 2; ++k) e[k] = e[k] * slope - load_vector(lse + v + k * kWidth);
      exp_with_factor<sizeof(Y) == 2>(e, one.base);
      load_vectors<false>(g + v, of_g);
      for (int k = 0; k < 2; ++k) e[k] = of_g[k] * (e[k] * one.factor);
      store_vectors<false, false, is_streaming.value>(to + v, e);
    }
    for (int64_t v = whole; v < width; v += kWidth - 1) {
      const int64_t rest = width - v < kWidth - 1 ? width - v : kWidth - 1;
      const auto epilogue =
          GradEpilogue<GradOp::logsumexp, Y>::of(load_tail(g + v, rest, 0), load_tail(lse + v, rest, 0), slope);
      store_tail(to + v, rest, epilogue.apply1(load_tail(from + v, rest, 0), Vec{}));
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
