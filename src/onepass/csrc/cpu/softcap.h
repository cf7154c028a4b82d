// softcap.h: tanh and its derivative, for softcaps and their gradients.
#pragma once

#include "exp_simd.h"

namespace onepass::ONEPASS_ISA {

ONEPASS_INLINE Vec magnitude(Vec v) { return Vec(IntVec(v) & 0x7fffffff); }
ONEPASS_INLINE V<double> magnitude(V<double> v) { return V<double>(V<int64_t>(v) & 0x7fffffffffffffff); }

// v, or `most` if v is larger. A NaN stays NaN.
ONEPASS_INLINE V<double> at_most(V<double> v, double most) { return v > most ? broadcast_as(most) : v; }

// For |v| < kNear, tanh is v + v z p(z), where z = v * v. This needs no exponential, and most vectors have only such
// lanes.
constexpr float kNear = 0.875f;
template <int K>
ONEPASS_INLINE bool are_near(const Vec (&v)[K]) {
  IntVec near = IntVec{} - 1;
  for (int k = 0; k < K; ++k) near &= v[k] * v[k] < kNear * kNear;
  return !any_lane<float>(Vec(~near));
}
ONEPASS_INLINE Vec tanh_near(Vec v) {
  const Vec z = v * v;
  Vec p = z * 1.37098983e-3f - 7.00325146e-3f;
  p = p * z + 2.10171044e-2f;
  p = p * z - 5.37616014e-2f;
  p = p * z + 1.33309752e-1f;
  p = p * z - 3.33332419e-1f;
  return v + v * (z * p);
}
// The derivative of tanh for |v| < kNear. `Half`: accurate to 2^-15, an eighth of the rounding error of a 16-bit
// result.
template <bool Half>
ONEPASS_INLINE Vec tanh_slope_near(Vec v) {
  const Vec z = v * v, t = tanh_near(v);
  if constexpr (!Half) return 1.0f - t * t;
  Vec p = z * 8.48635361e-2f - 3.16552281e-1f;
  p = p * z + 6.51973367e-1f;
  p = p * z - 9.98837888e-1f;
  return p * z + 1.0f;
}
// For other v, tanh is 1 - 2 y / (1 + y), where y = exp(-2 |v|), and its derivative is 4 y / (1 + y)^2.
template <int K>
__attribute__((noinline)) void apply_tanh_anywhere(Vec (&v)[K]) {
  Vec y[K];
  for (int k = 0; k < K; ++k) y[k] = magnitude(v[k]) * -2.0f;
  ExpFloat::apply(y);
  for (int k = 0; k < K; ++k) {
    const Vec size = magnitude(v[k]), far = 1.0f - inverse(y[k] * kExpUnscale + 1.0f) * (y[k] * (2 * kExpUnscale));
    const IntVec sign = IntVec(v[k]) ^ IntVec(size);
    v[k] = v[k] * v[k] < kNear * kNear ? tanh_near(v[k]) : Vec(IntVec(far) | sign);
  }
}
template <bool Half, int K>
__attribute__((noinline)) void apply_tanh_slope_anywhere(Vec (&v)[K]) {
  Vec y[K];
  for (int k = 0; k < K; ++k) y[k] = magnitude(v[k]) * -2.0f;
  std::conditional_t<Half, ExpHalf<4>, ExpFloat>::apply(y);
  for (int k = 0; k < K; ++k) {
    const Vec r = inverse(y[k] * kExpUnscale + 1.0f), far = (y[k] * (4 * kExpUnscale)) * r * r;
    v[k] = v[k] * v[k] < kNear * kNear ? tanh_slope_near<Half>(v[k]) : far;
  }
}

// tanh, accurate to 2 ulp.
template <int K>
ONEPASS_INLINE void apply_tanh(Vec (&v)[K]) {
  if (are_near(v)) {
    for (Vec& each : v) each = tanh_near(each);
  } else {
    Vec any[K];  // arguments of a function that is not inlined stay in memory
    for (int k = 0; k < K; ++k) any[k] = v[k];
    apply_tanh_anywhere(any);
    for (int k = 0; k < K; ++k) v[k] = any[k];
  }
}
// The derivative of tanh, accurate to 4 ulp or, with `Half`, as a 16-bit result needs.
template <bool Half = false, int K>
ONEPASS_INLINE void apply_tanh_slope(Vec (&v)[K]) {
  if (are_near(v)) {
    for (Vec& each : v) each = tanh_slope_near<Half>(each);
  } else {
    Vec any[K];
    for (int k = 0; k < K; ++k) any[k] = v[k];
    apply_tanh_slope_anywhere<Half>(any);
    for (int k = 0; k < K; ++k) v[k] = any[k];
  }
}
// tanh of doubles, accurate to 2 ulp, with the polynomials of Cephes' tanh near 0. From 20 on the result is 1.
template <int K>
ONEPASS_INLINE void apply_tanh(V<double> (&v)[K]) {
  V<double> y[K];
  for (int k = 0; k < K; ++k) y[k] = at_most(magnitude(v[k]), 20) * -2.0;
  ExpDouble::apply(y);
  for (int k = 0; k < K; ++k) {
    const V<double> size = magnitude(v[k]), z = size * size;
    const V<int64_t> sign = V<int64_t>(v[k]) ^ V<int64_t>(size);
    V<double> p = z * -9.64399179425052238628e-1 - 9.92877231001918586564e1;
    p = p * z - 1.61468768441708447952e3;
    V<double> q = z + 1.12811678491632931402e2;
    q = q * z + 2.23548839060100448583e3;
    q = q * z + 4.84406305325125486048e3;
    const auto is_near = size < 0.625;  // there |v| + |v| z p / q, elsewhere 1 - 2 y / (1 + y)
    const V<double> whole = is_near ? size : V<double>{} + 1.0, above = is_near ? z * p : y[k] * -2.0;
    v[k] = V<double>(V<int64_t>(whole + whole * (above / (is_near ? q : y[k] + 1.0))) | sign);
  }
}
// The derivative for doubles, accurate to 5 ulp. Below 4e-304 it is 0, before y is subnormal.
template <bool = false, int K>
ONEPASS_INLINE void apply_tanh_slope(V<double> (&v)[K]) {
  V<double> y[K];
  for (int k = 0; k < K; ++k) v[k] = magnitude(v[k]), y[k] = at_most(v[k], 350) * -2.0;
  ExpDouble::apply(y);
  for (int k = 0; k < K; ++k) {
    const V<double> sum = y[k] + 1.0;
    v[k] = v[k] > 350.0 ? V<double>{} : y[k] * 4.0 / (sum * sum);
  }
}

}  // namespace onepass::ONEPASS_ISA
