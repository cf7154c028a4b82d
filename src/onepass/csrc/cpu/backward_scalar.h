// backward_scalar.h: gradients of rows of any strides, and of doubles: plain loops, written so that a compiler makes
// vectors of those of unit stride.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

// exp(x) to 1 ulp, for any x: 2^k in two factors, and the series of exp(r) for |r| <= ln(2) / 2.
inline double exp_any(double x) {
  const double low = x < -746.0 ? -746.0 : x, v = low > 710.0 ? 710.0 : low;
  const double shifted = v * 1.4426950408889634 + 6755399441055744.0, k = shifted - 6755399441055744.0;
  const double r = (v - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const uint64_t whole = bits - 0x4338000000000000, half = ((whole + 4096) >> 1) - 2048;
  const uint64_t one = (half + 1023) << 52, two = (whole - half + 1023) << 52;
  double first, second;
  std::memcpy(&first, &one, sizeof first);
  std::memcpy(&second, &two, sizeof second);
  return p * first * second;
}
inline float exp_any(float x) { return exp_(x); }

// What a row is computed in.
template <class Y, class D>
using Common = std::conditional_t<sizeof(Y) == 8 || sizeof(D) == 8, double, float>;

template <Kind K, class A>
inline A scalar_term(A y, A g) {
  return K == Kind::soft ? y * g : g;
}
template <Kind K, class A>
inline A scalar_last(A y, A g, A a, A b) {
  if (K == Kind::soft) return y * (g - a) * b;
  if (K == Kind::log) return g - exp_any(y) * a;
  return a * exp_any(y - b);
}

constexpr int kLanes = 16;

// Steps through a bag in order without a division an element.
struct BackwardOdometer {
  const BackwardBag& bag;
  int64_t at[kMaxDims];
  int64_t offset[kBackwardTensors] = {};

  BackwardOdometer(const BackwardBag& over, int64_t index) : bag(over) {
    for (int i = bag.count - 1; i >= 0; --i) {
      at[i] = index % bag.dims[i].size;
      index /= bag.dims[i].size;
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] += at[i] * bag.dims[i].strides[t];
    }
  }

  ONEPASS_INLINE void next() {
    for (int i = bag.count - 1; i >= 0; --i) {
      const BackwardDim& dim = bag.dims[i];
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] += dim.strides[t];
      if (++at[i] < dim.size) return;
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] -= at[i] * dim.strides[t];
      at[i] = 0;
    }
  }
};

// A row of unit stride. `g_stride` is 0 or 1.
template <Kind K, class Y, class D, class A = Common<Y, D>>
void unit_row(const Y* y, const Y* g, int64_t g_stride, D* dx, int64_t n, A a, A b) {
  if constexpr (K != Kind::lse) {
    double sum[kLanes] = {}, rest[kLanes] = {};
    const auto add = [&](int64_t i, int lane) {
      const double e = scalar_term<K, double>(A(to_wide(y[i])), A(to_wide(g[i * g_stride])));
      const double next = sum[lane] + e, part = next - sum[lane];
      rest[lane] += (sum[lane] - (next - part)) + (e - part);
      sum[lane] = next;
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (int lane = 0; i < n; ++i, ++lane) add(i, lane);
    Total total;
    for (int lane = 0; lane < kLanes; ++lane) total.add(sum[lane]), total.rest += rest[lane];
    a = A(total.value());
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] =
        Narrow<D>::from(scalar_last<K, A>(A(to_wide(y[i])), K == Kind::lse ? A(0) : A(to_wide(g[i * g_stride])), a, b));
  }
}

// A row of any strides.
template <Kind K, class Y, class D, class A = Common<Y, D>>
void any_row(const Y* y, const Y* g, D* dx, const BackwardBag& reduced, int64_t n, A a, A b) {
  if constexpr (K != Kind::lse) {
    Total total;
    BackwardOdometer at(reduced, 0);
    for (int64_t i = 0; i < n; ++i, at.next()) {
      total.add(scalar_term<K, double>(A(to_wide(y[at.offset[kSaved]])), A(to_wide(g[at.offset[kGrad]]))));
    }
    a = A(total.value());
  }
  BackwardOdometer at(reduced, 0);
  for (int64_t i = 0; i < n; ++i, at.next()) {
    const A of_g = K == Kind::lse ? A(0) : A(to_wide(g[at.offset[kGrad]]));
    dx[at.offset[kDx]] = Narrow<D>::from(scalar_last<K, A>(A(to_wide(y[at.offset[kSaved]])), of_g, a, b));
  }
}

// Rows side by side, a tile of `width` of them: softmax, softmin and log_softmax.
constexpr int64_t kScalarTile = 64;

template <Kind K, class Y, class D, class A = Common<Y, D>>
void unit_columns(const Y* y, const Y* g, D* dx, const BackwardDim& n, int64_t g_stride, int64_t width, A b) {
  double sum[kScalarTile] = {}, rest[kScalarTile] = {};
  A total[kScalarTile];
  for (int64_t i = 0; i < n.size; ++i) {
    const Y *const y_row = y + i * n.strides[kSaved], *const g_row = g + i * n.strides[kGrad];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const double e = scalar_term<K, double>(A(to_wide(y_row[j])), A(to_wide(g_row[j * g_stride])));
      const double next = sum[j] + e, part = next - sum[j];
      rest[j] += (sum[j] - (next - part)) + (e - part);
      sum[j] = next;
    }
  }
  for (int64_t j = 0; j < width; ++j) total[j] = A(Total{sum[j], rest[j]}.value());
  for (int64_t i = 0; i < n.size; ++i) {
    const Y *const y_row = y + i * n.strides[kSaved], *const g_row = g + i * n.strides[kGrad];
    D* const to = dx + i * n.strides[kDx];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      to[j] = Narrow<D>::from(scalar_last<K, A>(A(to_wide(y_row[j])), A(to_wide(g_row[j * g_stride])), total[j], b));
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
