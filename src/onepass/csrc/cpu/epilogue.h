// epilogue.h: how results are computed from the state of a row: one result for each element (softmax, log_softmax), or
// the row's one result (logsumexp, state).
//
//   kOnePerRow   the function is a reduction: a row has one result, or two
//   kFromExp     results are computed from exponentials, not from elements
#pragma once

#include "exp_simd.h"

namespace onepass::ONEPASS_ISA {

struct SoftmaxEpilogue {
  static constexpr bool kOnePerRow = false, kFromExp = true;
  Vec high, low;  // 1 / l, where l is a sum of scaled exponentials

  // For a whole row. l is not scaled.
  static SoftmaxEpilogue of(float, double l) {
    const double value = double(kExpUnscale) / l;
    return {broadcast(float(value)), broadcast(float(value - double(float(value))))};
  }
  // For 16-bit results the product is rounded once before it is rounded to the result.
  template <class Y, int K>
  ONEPASS_INLINE void apply(Vec (&e)[K]) const {
    for (Vec& each : e) each = sizeof(Y) == 2 ? each * high : each * high + each * low;
  }
};

struct LogSoftmaxEpilogue {
  static constexpr bool kOnePerRow = false, kFromExp = false;
  Vec high, low;  // m + log(l)

  static LogSoftmaxEpilogue of(float m, double l) {
    const double value = double(m) + std::log(l);
    return {broadcast(float(value)), broadcast(float(value - double(float(value))))};
  }
  // x - high is exact if the difference is small compared with x, and otherwise rounded as the result is.
  template <class Y, int K>
  ONEPASS_INLINE void apply(Vec (&x)[K]) const {
    for (Vec& each : x) each = (each - high) - low;
  }
};

// For logsumexp and for states. A state has its maxima in one plane and its sums in another: `sum_offset` is the
// distance from a row's maximum to its sum, and 0 for logsumexp. Both functions share all code before the result.
struct ReduceEpilogue {
  static constexpr bool kOnePerRow = true, kFromExp = false;

  template <class Y, class A>
  static void store(const State<A>& row, Y* y, int64_t sum_offset) {
    if (sum_offset) {
      y[0] = from_acc<Y>(row.m), y[sum_offset] = from_acc<Y>(row.l.value());
    } else {
      y[0] = from_acc<Y>(A(double(finite_or_zero(row.m)) + std::log(row.l.value())));
    }
  }
};

// A state uses the code of logsumexp, with another result.
template <Function F>
using EpilogueOf =
    std::conditional_t<is_reduction(F), ReduceEpilogue,
                       std::conditional_t<F == Function::log_softmax, LogSoftmaxEpilogue, SoftmaxEpilogue>>;

template <class A>
constexpr A kNan = std::numeric_limits<A>::quiet_NaN();

template <class Y>
inline void fill(Y* y, int64_t n, Acc<Y> value) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<Y>(value);
}
template <class Y>
inline void fill_nan(Y* y, int64_t n) {
  fill(y, n, kNan<Acc<Y>>);
}

}  // namespace onepass::ONEPASS_ISA
