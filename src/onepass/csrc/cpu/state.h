// state.h: element types, and the state of a row on the CPU, the pair (m, l) = (maximum, sum of exp(x - m)), with its
// merge. This file is compiled once per instruction set, in a namespace of its own, so that the linker never puts code
// for one instruction set into another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/problem.h"

namespace onepass::ONEPASS_ISA {

// For functions that innermost loops call: without the attribute, the compiler stops inlining when there are many
// calls.
#define ONEPASS_INLINE inline __attribute__((always_inline))

// Element types -------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;

// The type in which rows of T are computed: float for the 16-bit types.
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

// Rounds to T. For a 16-bit type, a double is first rounded to float, as torch does.
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

// Whether Y holds every value of X. If not, torch's `dtype=` rounds the input to Y before the function.
template <class X, class Y>
constexpr bool kIsLossless = std::is_same_v<X, Y> || sizeof(X) < sizeof(Y);

// Converts an element to the type of the computation. It is rounded to Y first if Y does not hold all values of X.
template <class Y, class X>
inline Acc<Y> round_through(X x) {
  if constexpr (kIsLossless<X, Y>) {
    return Acc<Y>(to_acc(x));
  } else {
    return Acc<Y>(to_acc(from_acc<Y>(to_acc(x))));
  }
}

// The state of a row --------------------------------------------------------------------------------------------------

template <class A>
constexpr A kInf = std::numeric_limits<A>::infinity();

// The number to subtract before exp: the maximum, or 0 if the maximum is infinite. Then -inf - -inf never happens: a
// part of a row that is all -inf adds 0 to l, and a +inf makes l +inf.
template <class A>
inline A finite_or_zero(A m) {
  return m == kInf<A> || m == -kInf<A> ? A(0) : m;
}

// Adds a number, or a vector, to a sum, and the rounding error of this addition to `error` (Knuth's TwoSum).
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
