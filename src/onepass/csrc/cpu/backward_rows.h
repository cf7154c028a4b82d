// backward_rows.h: gradients of rows of unit stride that need not be cut into pieces, in floats. What a row costs
// beside its elements shows where operands come from a cache: of rows of 256 it was half of the time, most of it
// arguments that were written to memory in parts and read back whole. So a run of rows is one loop, and all of it in
// registers.
//
//   a row: a sum, four vectors side by side, in blocks -> dx, its operands read from the cache
//   short rows, whose exponentials would each wait for the row's sum: the sums of some rows -> dx of these rows
//
// Nothing is fetched beforehand: what the core does by itself is faster (4096x1024 floats by a fifth to a third).
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

// Elements whose sum is taken on its own, so that a lane adds up a few numbers and then a few sums.
constexpr int64_t kBlock = 8 * kBackwardStep;
constexpr int64_t kTogether = 4096;  // bytes of an operand of rows whose sums are taken first

// Lane by lane, the sum of a block of whole steps.
template <Kind K, class Y>
ONEPASS_INLINE Floats block_sum(const Y* y, const Y* g, int64_t n) {
  constexpr bool split = std::is_same_v<Y, bfloat16>;
  Floats sums[4] = {};
  for (int64_t i = 0; i < n; i += kBackwardStep) {
    Floats of_y[4] = {}, of_g[4];
    load_some<split>(g + i, of_g);
    if constexpr (K == Kind::soft) load_some<split>(y + i, of_y);
    for (int k = 0; k < 4; ++k) sums[k] += backward_term<K>(of_y[k], of_g[k]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Rows of n elements, a vector or more. What is left of one after whole vectors is taken with some of the elements
// before it, in a vector that ends with the row.
template <Kind K, class Y, class D>
__attribute__((noinline)) void backward_rows(const Y* y, const Y* g, D* dx, const int64_t* strides, int64_t rows,
                                             int64_t n, float sign, bool past) {
  constexpr bool any = kAnyNan<Y, D>, split = kSplit<Y, D>;
  const int64_t y_stride = strides[kSaved], g_stride = strides[kGrad], dx_stride = strides[kDx];
  const int64_t whole = n & -int64_t(kWidth), steps = n & -kBackwardStep, end = n - kWidth;
  alignas(64) int32_t of_end[kWidth];
  for (int i = 0; i < kWidth; ++i) of_end[i] = i >= whole - end ? -1 : 0;
  Ints fresh;  // ones where a lane of the last vector has no element that was taken before
  std::memcpy(&fresh, of_end, sizeof fresh);
  const auto term = [](const Y* at_y, const Y* at_g) __attribute__((always_inline)) {
    return backward_term<K>(K == Kind::soft ? load_vector(at_y) : Floats{}, load_vector(at_g));
  };
  const auto sum_of = [&](int64_t r) __attribute__((always_inline)) {
    const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
    Floats sum{};
    for (int64_t i = 0; i < steps; i += kBlock)
      sum += block_sum<K>(y_r + i, g_r + i, steps - i < kBlock ? steps - i : kBlock);
#pragma GCC unroll 1
    for (int64_t i = steps; i < whole; i += kWidth) sum += term(y_r + i, g_r + i);
    if (whole < n) sum += fresh ? term(y_r + end, g_r + end) : Floats{};
    return across(sum, [](Floats a, Floats b) __attribute__((always_inline)) { return a + b; });
  };
  const auto finish = [&](int64_t r, const BackwardLast<K, D>& last) __attribute__((always_inline)) {
    const Y *const y_r = y + r * y_stride, *const g_r = g + r * g_stride;
    D* const to = dx + r * dx_stride;
    if (past) return backward_store<K, Y, D>({y_r, g_r, -1, n}, to, last, true);
    Floats tail{};  // first: in place what it reads is overwritten next
    if (whole < n) tail = last.one(load_vector(y_r + end), load_vector(g_r + end));
    for (int64_t i = 0; i < steps; i += kBackwardStep) {
      Floats made[4], of_g[4];
      load_some<split>(y_r + i, made), load_some<split>(g_r + i, of_g);
      last(made, of_g);
      store_some<split, any, false>(to + i, made);
    }
#pragma GCC unroll 1
    for (int64_t i = steps; i < whole; i += kWidth) {
      store_vector<any>(to + i, last.one(load_vector(y_r + i), load_vector(g_r + i)));
    }
    if (whole < n) store_vector<any>(to + end, tail);
  };
  const int64_t fit = kTogether / (n * int64_t(sizeof(Y))), some = fit < kWidth ? fit : kWidth;
  // Products wait less for a sum than it takes to keep it, and so do narrow vectors.
  if (some <= 1 || ((K == Kind::soft || kWidth < 16) && (n >= kBackwardStep || n % kWidth == 0))) {
    for (int64_t r = 0; r < rows; ++r) finish(r, BackwardLast<K, D>::of_sum(all(sum_of(r)), all(sign)));
    return;
  }
  alignas(64) float as[kWidth] = {}, lows[kWidth], magics[kWidth];
  for (int64_t first = 0; first < rows; first += some) {
    const int64_t count = rows - first < some ? rows - first : some;
    for (int64_t r = 0; r < count; ++r) as[r] = sum_of(first + r);
    if constexpr (K == Kind::log) {
      const auto lasts = BackwardLast<K, D>::of_sum(load_vector(as), all(sign));
      store_vector(as, lasts.a), store_vector(lows, lasts.from.low), store_vector(magics, lasts.from.magic);
    }
    for (int64_t r = 0; r < count; ++r) {
      BackwardLast<K, D> last = {all(K == Kind::soft ? -sign * as[r] : as[r]), all(sign), {}};
      if constexpr (K == Kind::log) last.from.low = all(lows[r]), last.from.magic = all(magics[r]);
      finish(first + r, last);
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
