// state.h: the state of a row on the CPU, the pair (m, l) = (maximum, sum of exp(x - m)), and its merge; element types.
// Included once for each instruction set, in a namespace of its own, so that no code of one is linked into another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../core/problem.h"
#include "exp_scalar.h"

namespace onepass::ONEPASS_ISA {

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;

inline float to_wide(float v) { return v; }
inline double to_wide(double v) { return v; }
inline float to_wide(float16 v) { return float(v); }
inline float to_wide(bfloat16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class T>
struct Narrow {
  static T from(double v) { return T(v); }
};
template <>
struct Narrow<float16> {
  static float16 from(double v) { return float16(float(v)); }  // through float, as torch casts
  static float16 from(float v) { return float16(v); }
};
template <>
struct Narrow<float> {
  static float from(double v) { return float(v); }
  static float from(float v) { return v; }
};
template <>
struct Narrow<bfloat16> {
  static bfloat16 from(double v) { return from(float(v)); }
  static bfloat16 from(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    return {uint16_t(v != v ? 0x7fc0 : rounded)};
  }
};

// The type a row is computed in: float for the half types.
template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

// Is every value of X also one of Y? If not, torch's `dtype=` rounds the input to Y before the function.
template <class X, class Y>
constexpr bool kWidens = false;
template <class T>
constexpr bool kWidens<T, T> = true;
template <>
inline constexpr bool kWidens<float, double> = true;
template <>
inline constexpr bool kWidens<float16, double> = true;
template <>
inline constexpr bool kWidens<bfloat16, double> = true;
template <>
inline constexpr bool kWidens<float16, float> = true;
template <>
inline constexpr bool kWidens<bfloat16, float> = true;

template <class Y, class X>
inline typename Wide<Y>::type load(X raw) {
  using A = typename Wide<Y>::type;
  if constexpr (kWidens<X, Y>) {
    return A(to_wide(raw));
  } else {
    return A(to_wide(Narrow<Y>::from(to_wide(raw))));
  }
}

template <class A>
constexpr A kInf = std::numeric_limits<A>::infinity();

// What is subtracted before exp: the maximum, or 0 where that is infinite, so that -inf - -inf never happens: a part of
// a row that is all -inf adds 0 to l, and a +inf makes l +inf.
template <class A>
inline A shift(A m) {
  return m == kInf<A> || m == -kInf<A> ? A(0) : m;
}

// A sum of doubles that keeps what each addition rounds off beside it (Knuth's TwoSum).
struct Total {
  double sum = 0, rest = 0;
  void add(double e) {
    const double next = sum + e, part = next - sum;
    rest += (sum - (next - part)) + (e - part);
    sum = next;
  }
  double value() const { return std::isfinite(sum) ? sum + rest : sum; }
};

// The sum of a row's or a block's exponentials. Floats are added up in double, which adds no error worth the name;
// doubles need Total, which costs little beside a double's exp.
template <class A>
struct Sum {
  double sum = 0;
  void add(A e) { sum += double(e); }
  Total total() const { return {sum, 0}; }
};
template <>
struct Sum<double> : Total {
  Total total() const { return *this; }
};

template <class A>
struct State {
  A m = -kInf<A>;
  Total l;
};

template <class A>
inline State<A> merge(const State<A>& a, const State<A>& b) {
  const A m = a.m > b.m ? a.m : b.m, s = shift(m);
  const double scale_a = std::exp(double(a.m) - double(s)), scale_b = std::exp(double(b.m) - double(s));
  Total l = {a.l.sum * scale_a, a.l.rest * scale_a};
  l.add(b.l.sum * scale_b);
  l.rest += b.l.rest * scale_b;
  return {m, l};
}

// y = finish(x): what is left to do to an element once the state of its whole row is known. The last operation is done
// in double, so that it is rounded once.
template <Function F, class A>
struct Finish {
  A m;
  double last;  // log(l), or l for doubles and 1 / l for floats
  Finish() = default;
  explicit Finish(const State<A>& row) : m(row.m) {
    const bool undefined = row.m == kInf<A> || row.m == -kInf<A>;  // torch: NaN for the whole row
    const double l = row.l.value();
    last = F == Function::log_softmax ? std::log(l) : sizeof(A) == 8 ? l : 1 / l;
    if (undefined) last = std::numeric_limits<double>::quiet_NaN();
  }
  A from_exp(A e) const { return sizeof(A) == 8 ? A(double(e) / last) : A(double(e) * last); }
  A operator()(A x) const { return F == Function::log_softmax ? A(double(x - m) - last) : from_exp(exp_minus(x, m)); }
};

// Of a function that reduces: what it gives of a row, at `y`. The state is a plane of maxima and, `plane` elements on,
// one of sums.
template <Function F, class Y, class A>
inline void store_reduced(const State<A>& row, Y* y, int64_t plane) {
  if constexpr (F == Function::state) {
    *y = Narrow<Y>::from(row.m);
    y[plane] = Narrow<Y>::from(row.l.value());
  } else {
    *y = Narrow<Y>::from(A(double(shift(row.m)) + std::log(row.l.value())));
  }
}

}  // namespace onepass::ONEPASS_ISA
