// columns_scalar.h: rows that lie side by side (the reduced dim is not the unit-stride one). A tile of neighbouring
// rows goes together, one row a SIMD lane, so that every access is along the unit stride.
//
//   maximum over n -> exp and sum over n -> finish over n -> store
//
// The input is read three times, but from the second on a tile of moderate n comes from the cache.
#pragma once

#include "state.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kTile = 64;  // rows a tile: 64 floats are four cache lines

template <Function F, class X, class Y>
void columns(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t width, int64_t plane) {
  using A = typename Wide<Y>::type;
  A m[kTile], s[kTile];
  Sum<A> l[kTile];
  for (int64_t j = 0; j < width; ++j) m[j] = -kInf<A>;
  for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const A value = load<Y>(x[i * x_stride + j]);
      m[j] = value > m[j] ? value : m[j];
    }
  }
  for (int64_t j = 0; j < width; ++j) s[j] = shift(m[j]);
  for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) l[j].add(exp_minus(load<Y>(x[i * x_stride + j]), s[j]));
  }
  if constexpr (reduces(F)) {
    for (int64_t j = 0; j < width; ++j) store_reduced<F>(State<A>{m[j], l[j].total()}, y + j, plane);
    return;
  }
  Finish<F, A> finish[kTile];
  for (int64_t j = 0; j < width; ++j) finish[j] = Finish<F, A>(State<A>{m[j], l[j].total()});
  for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      y[i * y_stride + j] = Narrow<Y>::from(finish[j](load<Y>(x[i * x_stride + j])));
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
