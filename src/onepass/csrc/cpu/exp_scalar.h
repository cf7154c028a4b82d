// exp_scalar.h: the exponential, written so that a compiler makes vectors of it: no branch, no call, no table.
//
// exp(x) = 2^k * exp(r), k = round(x * log2(e)), r = x - k * ln(2) in two parts (Cody & Waite), exp(r) by a polynomial
// on |r| <= ln(2) / 2. The float polynomial is the minimax one of Cephes (expf.c): 2e-7 relative, under 2 ulp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace onepass::ONEPASS_ISA {

inline float power_of_two(int32_t k) {
  const uint32_t bits = uint32_t(k + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float exp_(float x) {
  // Beyond these the result is 0 or +inf anyway; a NaN passes through both comparisons unchanged.
  const float low = x < -104.0f ? -104.0f : x;
  const float clamped = low > 89.0f ? 89.0f : low;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  const float shifted = clamped * 1.44269504088896341f + magic;
  const float k = shifted - magic;
  float r = clamped - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^k in two factors, so that subnormal results come out right (k goes down to -150) and so does overflow (k to 128).
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const int32_t whole = int32_t(bits - 0x4b400000u), half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
}

// exp(x - s). For doubles also by what the subtraction rounds off (up to 4 ulp of the result at x - s = -8), which
// costs little beside std::exp; floats do as torch does.
inline float exp_minus(float x, float s) { return exp_(x - s); }
inline double exp_minus(double x, double s) {
  const double d = x - s, back = d - x;
  const double rest = (x - (d - back)) - (s + back);
  const double e = std::exp(d);
  // Where e is 0, `back` may have overflown: x - s - x of the largest double s is not s again but what d was rounded
  // to.
  return e != 0 && std::isfinite(d) && std::isfinite(e) ? e + e * rest : e;
}

}  // namespace onepass::ONEPASS_ISA
