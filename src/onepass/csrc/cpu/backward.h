// backward.h: gradients of rows of unit stride as vectors of floats. (grad_tile.h handles all other rows, and doubles.)
//
//   softmax, softmin   dx = slope * y (dy - sum(dy y))
//   log_softmax        dx = slope * (dy - exp(y) sum(dy))
//   logsumexp          dx = slope * dy exp(slope * x - lse)
//
// where slope * x is the score of x (score.h). Rows are processed in one of three ways:
//
//   a row that fits into a core's cache:          sum, with operands read from memory -> dx, with operands read from
//                                                 the cache
//   a longer row, in chunks of a fixed length:    one sum per chunk, added in order; then dx
//   rows at one stride:                           one loop for all of them, with everything in registers
//
// y of log_softmax, and slope * x - lse, are at most 0.
#pragma once

#include "dispatch.h"
#include "rows_simd.h"

namespace onepass::ONEPASS_ISA {

enum class GradOp { softmax, log_softmax, logsumexp };  // softmin is softmax with another slope

template <class Y, class D>
constexpr bool kDeinterleave = std::is_same_v<Y, bfloat16> && std::is_same_v<D, bfloat16>;
// If all elements go into one sum, their order does not matter.
template <class Y>
constexpr bool kDeinterleaveSums = std::is_same_v<Y, bfloat16>;
// Floats that are converted to a 16-bit type may be NaNs of the input.
template <class Y, class D>
constexpr bool kInputNan = sizeof(Y) == 4 && sizeof(D) == 2;

// The term that an element adds to its row's sum.
template <GradOp Op>
ONEPASS_INLINE Vec grad_term(Vec y, Vec g) {
  return Op == GradOp::softmax ? y * g : g;
}
// The terms of the elements of K vectors, or of the first `count` elements of one.
template <GradOp Op, bool Deinterleave, class Y, int K, class... Count>
ONEPASS_INLINE void grad_terms(const Y* y, const Y* g, Vec (&terms)[K], Count... count) {
  load_vectors<Deinterleave>(g, terms, count...);
  if constexpr (Op == GradOp::softmax) {
    Vec of_y[K];
    load_vectors<Deinterleave>(y, of_y, count...);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) terms[k] = grad_term<Op>(of_y[k], terms[k]);
  }
}

// Computes dx of elements. a and b are, for softmax, minus the sum times the slope; for log_softmax the sum; for
// logsumexp the gradient of the result times the slope, and the result. Either each lane is a row of its own, or all
// lanes belong to one row.
template <GradOp Op, class D>
struct GradEpilogue {
  static constexpr bool kHalf = sizeof(D) == 2;
  Vec a, b, slope;
  ExpBase base;

  static ONEPASS_INLINE GradEpilogue of(Vec a, Vec b, Vec slope) {
    if constexpr (Op == GradOp::softmax) return {a, b, slope, {}};
    const ExpFactor factor = ExpFactor::of(a);
    return {factor.factor, b, slope, factor.base};
  }
  static ONEPASS_INLINE GradEpilogue of_sum(Vec sum, Vec slope) {
    return of(Op == GradOp::softmax ? sum * -slope : sum, Vec{}, slope);
  }
  // Replaces y by dx.
  template <int K>
  ONEPASS_INLINE void apply(Vec (&y)[K], const Vec (&g)[K]) const {
    if constexpr (Op == GradOp::softmax) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) y[k] *= g[k] * slope + a;
    } else {
      if constexpr (Op == GradOp::logsumexp) {
        for (int k = 0; k < K; ++k) y[k] = y[k] * slope - b;
      }
      exp_with_factor<kHalf>(y, base);
      for (int k = 0; k < K; ++k) y[k] = Op == GradOp::log_softmax ? g[k] - y[k] * a : a * y[k];
      if (Op == GradOp::log_softmax && slope[0] != 1) {  // the product costs 5% if a row is in the cache
        for (int k = 0; k < K; ++k) y[k] *= slope;
      }
    }
  }
  // dx of the elements of K vectors, or of the first `count` elements of one vector.
  template <class Y, int K, class... Count>
  ONEPASS_INLINE void compute(const Y* y, const Y* g, Vec (&dx)[K], Count... count) const {
    Vec of_g[K];
    load_vectors<kDeinterleave<Y, D>>(y, dx, count...);
    if constexpr (Op != GradOp::logsumexp) load_vectors<kDeinterleave<Y, D>>(g, of_g, count...);
    apply(dx, of_g);
  }
};

// The epilogues of a few rows: computed as vectors with one row per lane, and then used one by one.
template <GradOp Op, class D>
struct GradEpilogues {
  alignas(64) float a[kWidth], b[kWidth], lowest[kWidth], magic[kWidth];
  Vec slope;

  explicit GradEpilogues(const GradEpilogue<Op, D>& lanes) : slope(lanes.slope) {
    store_vector(a, lanes.a), store_vector(b, lanes.b);
    if constexpr (Op != GradOp::softmax) store_vector(lowest, lanes.base.lowest), store_vector(magic, lanes.base.magic);
  }
  ONEPASS_INLINE GradEpilogue<Op, D> operator[](int64_t r) const {
    GradEpilogue<Op, D> row = {broadcast(a[r]), broadcast(b[r]), slope, {}};
    if constexpr (Op != GradOp::softmax) row.base.lowest = broadcast(lowest[r]), row.base.magic = broadcast(magic[r]);
    return row;
  }
};

// If a sum is not finite, its rounding error is meaningless.
inline double finite_total(const CompensatedVec& sums) {
  const double total = sums.total();
  if (std::isfinite(total)) return total;
  double plain = 0;
  for (int i = 0; i < kWidth; ++i) plain += double(sums.sum[i]);
  return plain;
}

// One row, or one chunk -----------------------------------------------------------------------------------------------

// The operands of a row. If the gradient is the same along the row, `mask` is 0, and `g` is kUnroll copies of it.
template <class Y>
struct GradRow {
  const Y *y, *g;
  int64_t mask, n;
  ONEPASS_INLINE const Y* g_at(int64_t i) const { return g + (i & mask); }
};

template <GradOp Op, class Y>
ONEPASS_INLINE double grad_sum(const GradRow<Y> row) {
  CompensatedVec total;
  int64_t i = 0;
  const auto step = [&](int64_t at) __attribute__((always_inline)) {
    Vec t[4];
    grad_terms<Op, kDeinterleaveSums<Y>>(row.y + at, row.g_at(at), t);
    return (t[0] + t[1]) + (t[2] + t[3]);
  };
  // Eight vectors are added as plain floats: compensating each addition would be visible when operands come from
  // memory.
  for (; i + 2 * kUnroll <= row.n; i += 2 * kUnroll) total.add(step(i) + step(i + kUnroll));
  for (; i + kUnroll <= row.n; i += kUnroll) total.add(step(i));
  Vec t[1];
  for (; i + kWidth <= row.n; i += kWidth) {
    grad_terms<Op, kDeinterleaveSums<Y>>(row.y + i, row.g_at(i), t);
    total.add(t[0]);
  }
  if (i < row.n) {
    grad_terms<Op, kDeinterleaveSums<Y>>(row.y + i, row.g_at(i), t, row.n - i);
    total.add(t[0]);
  }
  return finite_total(total);
}

// Stores dx. `streaming`: whole lines are streamed; then the call is not in place.
template <GradOp Op, class Y, class D>
ONEPASS_INLINE void grad_store(const GradRow<Y> row, D* dx, const GradEpilogue<Op, D> epilogue, bool streaming) {
  store_row<kDeinterleave<Y, D>, false, false, kInputNan<Y, D>>(
      dx, row.n, streaming, [=](int64_t i, auto& v, auto... count) __attribute__((always_inline)) {
        epilogue.compute(row.y + i, row.g_at(i), v, count...);
      });
}

// Runs of rows --------------------------------------------------------------------------------------------------------
//
// The overhead per row is visible when operands come from a cache. For rows of 256 it was half of the time, mostly
// arguments that were written to memory in parts and read back as a whole. So one loop processes many rows.
//
//   a row: a sum, four vectors at a time, in blocks -> dx, with operands read from the cache
//   short rows, whose exponentials would each wait for the row's sum: the sums of a few rows -> dx of these rows
//
// Nothing is prefetched: the hardware prefetcher is faster (4096x1024 float32 by a fifth to a third).

constexpr int64_t kSumBlock = 8 * kUnroll;    // elements summed separately: a lane adds a few numbers, then a few sums
constexpr int64_t kRowsTogetherBytes = 4096;  // of an operand, for the rows whose sums are computed first

// The sum of a block of whole steps, in each lane.
template <GradOp Op, class Y>
ONEPASS_INLINE Vec block_sum(const Y* y, const Y* g, int64_t n) {
  Vec sums[4] = {};
  for (int64_t i = 0; i < n; i += kUnroll) {
    Vec t[4];
    grad_terms<Op, kDeinterleaveSums<Y>>(y + i, g + i, t);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sums[k] += t[k];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The slopes of rows (derivatives of their scores): one number, times the scale of each row if rows have scales.
struct RowSlopes {
  float slope;
  const float* scales;  // of row 0, or null
  int64_t stride;
  ONEPASS_INLINE Vec operator[](int64_t r) const { return broadcast(scales ? slope * scales[r * stride] : slope); }
};

// Rows of at least one vector, n elements each. The elements behind a row's whole vectors are computed in a vector that
// ends with the row, and so also has elements before them. For logsumexp, `load_numbers(r, count, a, b)` loads the
// numbers of the rows from r on.
template <GradOp Op, bool kStreaming, class Y, class D, class LoadNumbers>
__attribute__((noinline)) void grad_row_run(const Y* y, const Y* g, D* dx, const int64_t* strides, int64_t rows,
                                            int64_t n, const RowSlopes slopes, LoadNumbers load_numbers) {
  constexpr bool input_nan = kInputNan<Y, D>, deinterleave = kDeinterleave<Y, D>;
  const int64_t y_stride = strides[kSaved], g_stride = strides[kGrad], dx_stride = strides[kDx];
  const int64_t whole = n & -int64_t(kWidth), steps = n & -kUnroll, pairs = n & -kPair, end = n - kWidth;
  alignas(64) int32_t of_end[kWidth];
  for (int i = 0; i < kWidth; ++i) of_end[i] = i >= whole - end ? -1 : 0;
  IntVec tail_mask;  // the lanes of the last vector with elements that are in no whole vector
  std::memcpy(&tail_mask, of_end, sizeof tail_mask);
  const auto term = [](const Y* at_y, const Y* at_g) __attribute__((always_inline)) {
    Vec t[1];
    grad_terms<Op, false>(at_y, at_g, t);
    return t[0];
  };
  const auto sum_of = [&](int64_t r) __attribute__((always_inline)) {
    const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
    Vec sum{};
    for (int64_t i = 0; i < steps; i += kSumBlock)
      sum += block_sum<Op>(y_r + i, g_r + i, steps - i < kSumBlock ? steps - i : kSumBlock);
    if (steps < pairs) {
      Vec t[2];
      grad_terms<Op, kDeinterleaveSums<Y>>(y_r + steps, g_r + steps, t);
      sum += t[0] + t[1];
    }
    if (pairs < whole) sum += term(y_r + pairs, g_r + pairs);
    if (whole < n) sum += tail_mask ? term(y_r + end, g_r + end) : Vec{};
    return sum;
  };
  const auto store = [&](int64_t r, const GradEpilogue<Op, D>& epilogue) __attribute__((always_inline)) {
    const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
    D* const to = dx + r * dx_stride;
    if constexpr (kStreaming) return grad_store<Op, Y, D>({y_r, g_r, -1, n}, to, epilogue, true);
    Vec tail[1] = {};  // computed first: in place, the stores below overwrite what it reads
    if (whole < n) epilogue.compute(y_r + end, g_r + end, tail);
    for (int64_t i = 0; i < steps; i += kUnroll) {
      Vec v[4];
      epilogue.compute(y_r + i, g_r + i, v);
      store_vectors<deinterleave, false, false, input_nan>(to + i, v);
    }
    if (steps < pairs) {
      Vec v[2];
      epilogue.compute(y_r + steps, g_r + steps, v);
      store_vectors<deinterleave, false, false, input_nan>(to + steps, v);
    }
    if (pairs < whole) {
      Vec v[1];
      epilogue.compute(y_r + pairs, g_r + pairs, v);
      store_vector<input_nan>(to + pairs, v[0]);
    }
    if (whole < n) store_vector<input_nan>(to + end, tail[0]);
  };
  if constexpr (Op == GradOp::logsumexp) {
    alignas(64) float a[kWidth] = {}, b[kWidth] = {};
    for (int64_t first = 0; first < rows; first += kWidth) {
      const int64_t count = rows - first < kWidth ? rows - first : kWidth;
      load_numbers(first, count, a, b);
      const GradEpilogues<Op, D> epilogues(GradEpilogue<Op, D>::of(load_vector(a), load_vector(b), slopes[0]));
      for (int64_t r = 0; r < count; ++r) store(first + r, epilogues[r]);
    }
    return;
  }
  const int64_t fit = kRowsTogetherBytes / (n * int64_t(sizeof(Y))), some = fit < kWidth ? fit : kWidth;
  // For products, waiting for a sum is cheaper than storing it, and also for narrow vectors. For 16-bit types it is
  // not.
  const bool transposed = Op == GradOp::softmax && sizeof(Y) == 2 && n >= kUnroll && n < 384;
  const bool alone = (Op == GradOp::softmax || kWidth < 16) && (n >= kUnroll || n % kWidth == 0);
  if (some <= 1 || (alone && !transposed)) {
    for (int64_t r = 0; r < rows; ++r) {
      store(r, GradEpilogue<Op, D>::of_sum(broadcast(reduce_lanes(sum_of(r), add)), slopes[r]));
    }
    return;
  }
  alignas(64) float sums[kWidth] = {};
  for (int64_t first = 0; first < rows; first += some) {
    const int64_t count = rows - first < some ? rows - first : some;
    if (transposed) {
      Vec lanes[kWidth] = {};
      for (int64_t r = 0; r < count; ++r) lanes[r] = sum_of(first + r);
      store_vector(sums, transpose_reduce(lanes, add));
    } else {
      for (int64_t r = 0; r < count; ++r) sums[r] = reduce_lanes(sum_of(first + r), add);
    }
    if constexpr (Op == GradOp::softmax) {  // a vector of sums would wait for all of them
      for (int64_t r = 0; r < count; ++r) {
        store(first + r, GradEpilogue<Op, D>::of_sum(broadcast(sums[r]), slopes[first + r]));
      }
    } else {
      const GradEpilogues<Op, D> epilogues(GradEpilogue<Op, D>::of_sum(load_vector(sums), slopes[first]));
      for (int64_t r = 0; r < count; ++r) {
        GradEpilogue<Op, D> epilogue = epilogues[r];
        epilogue.slope = slopes[first + r];
        store(first + r, epilogue);
      }
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
