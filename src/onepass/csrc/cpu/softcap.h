// softcap.h: tanh and its derivative, of which a softcap and its gradient are made.
#pragma once

#include "exp_simd.h"

namespace onepass::ONEPASS_ISA {

ONEPASS_INLINE Vec magnitude(Vec v) { return Vec(IntVec(v) & 0x7fffffff); }
ONEPASS_INLINE V<double> magnitude(V<double> v) { return V<double>(V<int64_t>(v) & 0x7fffffffffffffff); }

// v, or `most` where that is less. A NaN stays one.
ONEPASS_INLINE V<double> at_most(V<double> v, double most) { return v > most ? broadcast_as(most) : v; }

// tanh to 2 ulp: a polynomial near 0 (that of Cephes' tanhf), elsewhere 1 - 2 y / (1 + y), where y = exp(-2 |v|).
template <int K>
ONEPASS_INLINE void apply_tanh(Vec (&v)[K]) {
  Vec y[K];
  for (int k = 0; k < K; ++k) y[k] = magnitude(v[k]) * -2.0f;
  ExpFloat::apply(y);
  for (int k = 0; k < K; ++k) {
    const Vec size = magnitude(v[k]), far = 1.0f - inverse(y[k] * kExpUnscale + 1.0f) * (y[k] * (2 * kExpUnscale));
    const IntVec sign = IntVec(v[k]) ^ IntVec(size);
    const Vec z = v[k] * v[k];
    Vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    v[k] = size < 0.625f ? v[k] + v[k] * (z * p) : Vec(IntVec(far) | sign);
  }
}
// The derivative of tanh: 4 y / (1 + y)^2.
template <int K>
ONEPASS_INLINE void apply_tanh_slope(Vec (&v)[K]) {
  for (int k = 0; k < K; ++k) v[k] = magnitude(v[k]) * -2.0f;
  ExpFloat::apply(v);
  for (int k = 0; k < K; ++k) {
    const Vec r = inverse(v[k] * kExpUnscale + 1.0f);
    v[k] = (v[k] * (4 * kExpUnscale)) * r * r;
  }
}
// Doubles also to 2 ulp, with the polynomials of Cephes' tanh near 0. From 20 on the result is 1.
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
// Its derivative to 5 ulp. It is 0 below 4e-304, before y is subnormal.
template <int K>
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
