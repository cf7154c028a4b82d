// state.h: element types, the scalar exponential, and the state of a row on the CPU: the pair (m, l) = (maximum, sum of
// exp(x - m)) and its merge. This file is included once per instruction set, in a namespace of its own, so that the
// linker never takes code that was compiled for one instruction set into another.
//
// exp(x) = 2^k * exp(r), k = round(x * log2(e)), r = x - k * ln(2) in two parts (Cody & Waite), exp(r) by a polynomial
// on |r| <= ln(2) / 2. The float polynomial is the minimax one of Cephes (expf.c): 2e-7 relative, under 2 ulp. It has
// no branch, no call and no table, so that a compiler vectorises it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/problem.h"

namespace onepass::ONEPASS_ISA {

// Innermost loops call these functions: without the attribute the compiler stops inlining where there are many calls.
#define ONEPASS_INLINE inline __attribute__((always_inline))

// Element types -------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;

// The type in which a row of T is computed: float for the 16-bit types.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float to_acc(float v) { return v; }
inline double to_acc(double v) { return v; }
inline float to_acc(float16 v) { return float(v); }
inline float to_acc(bfloat16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to T. A double becomes a 16-bit type through float, as torch casts it.
template <class T, class A>
inline T from_acc(A v) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const float value = float(v);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    return {uint16_t(value != value ? 0x7fc0 : rounded)};
  } else if constexpr (std::is_same_v<T, float16>) {
    return float16(float(v));
  } else {
    return T(v);
  }
}

// Is every value of X also a value of Y? If not, torch's `dtype=` rounds the input to Y before the function.
template <class X, class Y>
constexpr bool kIsLossless = std::is_same_v<X, Y> || sizeof(X) < sizeof(Y);

// Converts an element to the type of the computation, through Y where X holds values that Y does not.
template <class Y, class X>
inline Acc<Y> round_through(X x) {
  if constexpr (kIsLossless<X, Y>) {
    return Acc<Y>(to_acc(x));
  } else {
    return Acc<Y>(to_acc(from_acc<Y>(to_acc(x))));
  }
}

// The exponential -----------------------------------------------------------------------------------------------------

inline float power_of_two(int32_t k) {
  const uint32_t bits = uint32_t(k + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float exp_float(float x) {
  // Beyond these limits the result is 0 or +inf anyway. A NaN passes through both comparisons unchanged.
  const float low = x < -104.0f ? -104.0f : x;
  const float clamped = low > 89.0f ? 89.0f : low;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
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
  // 2^k has two factors, so that subnormal results come out right (k goes down to -150) and so does overflow (k = 128).
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const int32_t whole = int32_t(bits - 0x4b400000u), half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
}

// exp(x - s). For doubles the result is corrected by the rounding error of the subtraction (up to 4 ulp of the result
// at x - s = -8), which costs little beside std::exp. Floats are not corrected, as in torch.
inline float exp_difference(float x, float s) { return exp_float(x - s); }
inline double exp_difference(double x, double s) {
  const double d = x - s, back = d - x;
  const double error = (x - (d - back)) - (s + back);
  const double e = std::exp(d);
  // Where e is 0, `back` may have overflowed: x - s - x of the largest double s is not s again but what d was rounded
  // to.
  return e != 0 && std::isfinite(d) && std::isfinite(e) ? e + e * error : e;
}

// The state of a row --------------------------------------------------------------------------------------------------

template <class A>
constexpr A kInf = std::numeric_limits<A>::infinity();

// The number that is subtracted before exp: the maximum, or 0 where that is infinite, so that -inf - -inf never
// happens. A part of a row that is all -inf then adds 0 to l, and a +inf makes l +inf.
template <class A>
inline A finite_or_zero(A m) {
  return m == kInf<A> || m == -kInf<A> ? A(0) : m;
}

// Adds a number, or a vector, to a sum that has the rounding errors of its additions beside it (Knuth's TwoSum).
template <class T>
ONEPASS_INLINE void add_compensated(T& sum, T& error, T e) {
  const T next = sum + e, part = next - sum;
  error += (sum - (next - part)) + (e - part);
  sum = next;
}
struct Compensated {
  double sum = 0, error = 0;
  void add(double e) { add_compensated(sum, error, e); }
  double value() const { return std::isfinite(sum) ? sum + error : sum; }
};

// The sum of the exponentials of a row or a block. Floats are summed in double, whose rounding error does not count.
// Doubles need a compensated sum, which costs little beside the exponential of a double.
template <class A>
struct ExpTotal {
  double sum = 0;
  void add(A e) { sum += double(e); }
  Compensated compensated() const { return {sum, 0}; }
};
template <>
struct ExpTotal<double> : Compensated {
  Compensated compensated() const { return *this; }
};

template <class A>
struct State {
  A m = -kInf<A>;
  Compensated l;
};

template <class A>
inline State<A> merge(const State<A>& a, const State<A>& b) {
  const A m = a.m > b.m ? a.m : b.m, s = finite_or_zero(m);
  const double scale_a = std::exp(double(a.m) - double(s)), scale_b = std::exp(double(b.m) - double(s));
  Compensated l = {a.l.sum * scale_a, a.l.error * scale_a};
  l.add(b.l.sum * scale_b);
  l.error += b.l.error * scale_b;
  return {m, l};
}

}  // namespace onepass::ONEPASS_ISA
