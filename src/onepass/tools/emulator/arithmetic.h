// arithmetic.h: what instructions of PTX compute. ex2, lg2 and rcp of floats are rounded once, where hardware is off by
// more.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "machine.h"

namespace emulator {

struct Pair {
  uint64_t low, high;
};

// Bits ---------------------------------------------------------------------------------------------------------------

// The low bytes of a value, or the value and zeros.
template <class To, class From>
To as(From value) {
  To to{};
  std::memcpy(&to, &value, std::min(sizeof to, sizeof value));
  return to;
}

// Into a register, which may be wider than the value: then the sign of a signed one goes on.
template <class Register, class T>
void put(Register& to, T value) {
  static_assert(!std::is_floating_point_v<T> || sizeof(Register) == sizeof(T));
  if constexpr (std::is_same_v<Register, bool>) {
    to = value;
  } else if constexpr (std::is_integral_v<T> && sizeof(Register) > sizeof(T)) {
    to = as<Register>(uint64_t(int64_t(value)));
  } else {
    to = as<Register>(value);
  }
}

template <class T>
T shifted_left(T v, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : T(v << by);
}
template <class T>
T shifted_right(T v, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(v < T(0) ? T(-1) : T(0)) : T(v >> by);
}
template <class T>
T inserted(T from, T into, uint32_t at, uint32_t count) {
  const T ones = shifted_left(T(count >= 8 * sizeof(T) ? ~T(0) : T((T(1) << count) - 1)), at);
  return T((into & T(~ones)) | (shifted_left(from, at) & ones));
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 15, byte = uint32_t(both >> 8 * (which & 7)) & 255;
    made |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return made;
}

// Numbers ------------------------------------------------------------------------------------------------------------

template <class T>
T divided(T a, T b) {
  if (std::is_integral_v<T> && b == 0) fail("a division by 0");
  return T(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) fail("a division by 0");
  return T(a % b);
}

inline float flushed(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
inline float ex2(float v) { return flushed(float(std::exp2(double(flushed(v))))); }
inline float lg2(float v) { return float(std::log2(double(flushed(v)))); }
inline float rcp(float v) { return flushed(1 / flushed(v)); }
inline double rcp(double v) { return as<double>(as<uint64_t>(1 / v) >> 32 << 32); }  // half of its bits
inline float saturated(float v) { return v > 0 ? std::min(v, 1.0f) : 0.0f; }

// Without a NaN where one of them is a number; +0 is above -0.
template <class T>
T largest(T a, T b) {
  if constexpr (std::is_integral_v<T>) return std::max(a, b);
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float largest_or_nan(float a, float b) { return a != a || b != b ? NAN : largest(a, b); }
template <class T>
T smallest(T a, T b) {
  return std::is_integral_v<T> ? std::min(a, b) : -largest(-a, -b);
}

// Rounded downwards: `near` is the nearest to an exact value, which is `value` and a little of the sign of `rest`.
inline float downwards(float near, double value, double rest) {
  return near > value || (near == value && rest < 0) ? std::nextafterf(near, -INFINITY) : near;
}
inline float fma_down(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c, other = sum - product;  // the product is exact
  if (!std::isfinite(sum)) return float(sum);
  return downwards(float(sum), sum, (product - (sum - other)) + (c - other));
}

// 16-bit floats by their bits ----------------------------------------------------------------------------------------

inline float of_bf16(uint16_t h) { return as<float>(uint32_t(h) << 16); }
inline uint16_t to_bf16(float v) {
  const uint32_t bits = as<uint32_t>(v);
  return v != v ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float of_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? std::ldexp(float(1024 + mantissa), exponent - 25)
                                    : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -size : size;
}
inline uint16_t to_f16(float v) {
  if (v != v) return 0x7fff;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const double size = std::fabs(double(v));
  if (size >= 65520) return sign | 0x7c00;
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -14, -14);
  const int steps = int(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024 and more, but for subnormal numbers
  return uint16_t(sign | ((exponent + 14) * 1024 + steps));
}
inline uint16_t to_f16_down(float v) {
  const uint16_t near = to_f16(v);
  if (!(of_f16(near) > v)) return near;
  return near == 0 ? 0x8001 : uint16_t(near & 0x8000 ? near + 1 : near - 1);
}

inline uint32_t leading_zeros(uint32_t v) { return v == 0 ? 32 : uint32_t(__builtin_clz(v)); }
inline uint32_t ones(uint32_t v) { return uint32_t(__builtin_popcount(v)); }
inline uint32_t reversed(uint32_t v) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (v >> i & 1) << (31 - i);
  return bits;
}
// By how much a number can be shifted to the left.
inline uint32_t largest_shift(uint32_t v) { return v == 0 ? ~0u : leading_zeros(v); }

// f(a, b, c) of the low 16 bits and of the high ones.
template <class F>
uint32_t by_halves(uint32_t a, uint32_t b, uint32_t c, F f) {
  return uint32_t(f(uint16_t(a), uint16_t(b), uint16_t(c))) |
         uint32_t(f(uint16_t(a >> 16), uint16_t(b >> 16), uint16_t(c >> 16))) << 16;
}

}  // namespace emulator
