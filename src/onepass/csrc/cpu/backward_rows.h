// backward_rows.h: gradients of rows of unit stride that stay in the cache, in floats. What a row costs beside its
// elements shows there: of rows of 256 it was half of the time, most of it arguments that were written to memory in
// parts and read back whole. So a run of rows is one loop, and all of it in registers; no row is fetched beforehand.
//
//   a row: a sum, four vectors side by side, in blocks -> dx, the last block first, since that is in the nearest cache
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

// Elements whose sum is taken on its own, so that a lane adds up a few numbers and then a few sums; and elements of a
// block of dx, of which the operands fit the nearest cache.
constexpr int64_t kBlock = 8 * kBackwardStep, kStored = 2048;

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
                                             int64_t n, float sign) {
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
  for (; rows > 0; --rows, y += y_stride, g += g_stride, dx += dx_stride) {
    Floats sum{};
    for (int64_t i = 0; i < steps; i += kBlock)
      sum += block_sum<K>(y + i, g + i, steps - i < kBlock ? steps - i : kBlock);
#pragma GCC unroll 1
    for (int64_t i = steps; i < whole; i += kWidth) sum += term(y + i, g + i);
    if (whole < n) sum += fresh ? term(y + end, g + end) : Floats{};
    const float total = across(sum, [](Floats a, Floats b) __attribute__((always_inline)) { return a + b; });
    const auto last = BackwardLast<K, D>::of(total, sign);
    Floats tail{};  // first: in place what it reads is overwritten next
    if (whole < n) tail = last.one(load_vector(y + end), load_vector(g + end));
    for (int64_t first = (steps - 1) & -kStored; first >= 0; first -= kStored) {
      const int64_t stop = steps - first < kStored ? steps : first + kStored;
      for (int64_t i = first; i < stop; i += kBackwardStep) {
        Floats made[4], of_g[4];
        load_some<split>(y + i, made), load_some<split>(g + i, of_g);
        last(made, of_g);
        store_some<split, any, false>(dx + i, made);
      }
    }
#pragma GCC unroll 1
    for (int64_t i = steps; i < whole; i += kWidth) {
      store_vector<any>(dx + i, last.one(load_vector(y + i), load_vector(g + i)));
    }
    if (whole < n) store_vector<any>(dx + end, tail);
  }
}

}  // namespace onepass::ONEPASS_ISA
