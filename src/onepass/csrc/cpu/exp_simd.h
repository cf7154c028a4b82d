// exp_simd.h: exponentials of vectors, their sums, and the logarithms of those.
#pragma once

#include "simd_reduce.h"

namespace onepass::ONEPASS_ISA {

// Exponentials come times 2^64: 2^k is then never subnormal, and what they are multiplied by in the end brings them
// back, rounding once.
constexpr float kLift = 18446744073709551616.0f, kDrop = 1 / kLift;

// A sum of lifted exponentials, at most four at a time, and what it was rounded by. It begins with more than any of
// them: what is rounded off then takes fewer steps to know (Dekker's Fast2Sum).
struct LiftedSums {
  static constexpr float kStart = 8 * kLift;
  Floats sum = all(kStart), rest{};
  ONEPASS_INLINE void add(Floats e) {
    const Floats next = sum + e;
    rest += e - (next - sum);
    sum = next;
  }
  ONEPASS_INLINE Sums sums() const {
    Sums both;
    both.sum = sum - kStart;
    both.add(rest);
    return both;
  }
  double total() const { return total_of((widened(sum) - double(kStart)) + widened(rest)); }
};

// The same for half results, whose rounding is much coarser than that of a sum of a thousand floats.
struct PlainSums {
  Floats sum{};
  ONEPASS_INLINE void add(Floats e) { sum += e; }
  ONEPASS_INLINE Sums sums() const {
    Sums both;
    both.sum = sum;
    return both;
  }
  double total() const { return total_of(widened(sum)); }
};
template <class Y>
using SumsFor = std::conditional_t<sizeof(Y) == 2, PlainSums, LiftedSums>;

// exp(v) times 2^64 of several vectors at a time, step by step: one vector's steps all wait for each other. v is at
// most 0, -inf, or NaN. Adding kMagic rounds to an integer k, and leaves k + 127 + 64 in the low bits: the exponent.
constexpr float kLog2e = 1.44269502f, kMagic = 12582912.0f + 127 + 64;  // 1.5 * 2^23 + ...

// What is further below the maximum, -inf above all, is taken for this: there 2^k is 0 itself. Were it only tiny, its
// results would be subnormal before they are 0, and an Intel core takes 150 cycles for a vector that has one.
constexpr float kBottom = -(127 + 64), kLn2 = 0.693147181f;

// Where the exponentials of elements near a maximum m are counted from. They are relative to m itself, which is
// subtracted first, or, where products are not rounded (FMA), to a power of two near exp(m), so that nothing need be
// subtracted: `excess(m)` is what they are then too large by, m's own. |m| is at most kFarthest.
struct Origin {
  Floats top{}, low = all(kBottom * kLn2), magic = all(kMagic);

  static constexpr float kFarthest = 1048576.0f;
#if defined(__FMA__)
  static constexpr bool kSubtracts = false;
  static ONEPASS_INLINE Origin of(Floats m) {
    const Floats whole = (m * kLog2e + 12582912.0f) - 12582912.0f;
    return {all(0), (whole + kBottom) * kLn2, kMagic - whole};
  }
#else
  static constexpr bool kSubtracts = true;
  static ONEPASS_INLINE Origin of(Floats m) { return {m}; }
#endif
  static Origin of(float m) { return of(all(m)); }
};
// One for all vectors, or one for each.
ONEPASS_INLINE const Origin& of_each(const Origin& from, int) { return from; }
template <int K>
ONEPASS_INLINE const Origin& of_each(const Origin (&from)[K], int k) {
  return from[k];
}

#define ONEPASS_EACH for (int k = 0; k < K; ++k)
// 2^(v * log2(e)) = 2^f * power. Less than `low` becomes that, and a NaN stays one.
template <int K, class From>
ONEPASS_INLINE void reduce(Floats (&v)[K], Floats (&f)[K], Floats (&power)[K], const From& from) {
  ONEPASS_EACH v[k] = larger(of_each(from, k).low, v[k]);
  ONEPASS_EACH power[k] = fused(v[k], all(kLog2e), of_each(from, k).magic);
  ONEPASS_EACH f[k] = fused(v[k], all(kLog2e), of_each(from, k).magic - power[k]);
  ONEPASS_EACH power[k] = Floats(Ints(power[k]) << 23);
}

// Good to 1 ulp. With a multiply-add: log2(e) in two terms, and a polynomial of 2^f for |f| <= 1/2 whose own error is
// 2^-28. Without: as in exp_scalar.h, where no product is rounded that counts.
struct Precise {
  template <int K, class From = Origin>
  static ONEPASS_INLINE void of(Floats (&v)[K], const From& from = {}) {
    Floats f[K], power[K], p[K];
    reduce(v, f, power, from);
#if defined(__FMA__)
    ONEPASS_EACH f[k] = v[k] * 1.92596298909109e-8f + f[k];
    ONEPASS_EACH p[k] = f[k] * 0.000153532579f + 0.00133990035f;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.0096184386f;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.0555033216f;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.240226479f;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.693147203f;
    ONEPASS_EACH p[k] = p[k] * f[k] + 1.0f;
#else
    ONEPASS_EACH {
      const Floats whole = (v[k] * kLog2e + kMagic) - kMagic;
      Floats r = v[k] - whole * 0.693359375f;
      r = r - whole * -2.12194440e-4f;
      Floats q = r * 1.9875691500e-4f + 1.3981999507e-3f;
      q = q * r + 8.3334519073e-3f;
      q = q * r + 4.1665795894e-2f;
      q = q * r + 1.6666665459e-1f;
      q = q * r + 5.0000001201e-1f;
      p[k] = q * (r * r) + r + 1.0f;
    }
#endif
    ONEPASS_EACH v[k] = p[k] * power[k];
  }
};

// For half results: a polynomial of 2^f for |f| <= 1/2, exact for f = 0, good to 2^-18 (float16) or 2^-13 (bfloat16),
// a 64th and a 16th of what rounding the result does.
template <int Degree>
struct Coarse {
  static constexpr int kTerms = Degree + 1;
  Floats term[kTerms];  // times `scale`: exponentials that are scaled cost nothing more

  ONEPASS_INLINE explicit Coarse(float scale = 1) {
    constexpr float kThree[] = {1, 0.69328293f, 0.24221096f, 0.05500893f, 0};
    constexpr float kFour[] = {1, 0.693124105f, 0.240241045f, 0.0559072132f, 0.00958277683f};
    for (int i = 0; i < kTerms; ++i) term[i] = all(scale * (Degree == 3 ? kThree[i] : kFour[i]));
  }
  template <int K, class From>
  ONEPASS_INLINE void scaled(Floats (&v)[K], const From& from) const {
    Floats f[K], power[K], p[K];
    reduce(v, f, power, from);
    ONEPASS_EACH p[k] = f[k] * term[Degree] + term[Degree - 1];
    for (int i = Degree - 2; i >= 0; --i) ONEPASS_EACH p[k] = p[k] * f[k] + term[i];
    ONEPASS_EACH v[k] = p[k] * power[k];
  }
  template <int K, class From = Origin>
  static ONEPASS_INLINE void of(Floats (&v)[K], const From& from = {}) {
    Coarse().scaled(v, from);
  }
};
#undef ONEPASS_EACH

// The exponentials of elements, counted from an origin.
template <class E, int K>
ONEPASS_INLINE void exponentials(Floats (&v)[K], const Origin& from) {
  if constexpr (Origin::kSubtracts) {
    for (Floats& each : v) each -= from.top;
  }
  if constexpr (K == 4 && std::is_same_v<E, Coarse<4>>) {  // what four keep does not fit the registers: 7% faster
    Floats low[2] = {v[0], v[1]}, high[2] = {v[2], v[3]};
    E::of(low, from), E::of(high, from);
    v[0] = low[0], v[1] = low[1], v[2] = high[0], v[3] = high[1];
  } else {
    E::of(v, from);
  }
}

template <class E>
inline double excess(float m) {
  Floats one[1] = {all(m)};
  exponentials<E>(one, Origin::of(m));
  return double(one[0][0] * kDrop);
}

template <class Y>
struct Exponential {
  typedef Precise type;
};
template <>
struct Exponential<float16> {
  typedef Coarse<4> type;
};
template <>
struct Exponential<bfloat16> {
  typedef Coarse<3> type;
};

// The natural logarithm of a positive normal number, or NaN, in two floats, good to 2^-25 or half an ulp (the
// polynomial is that of Cephes' logf).
ONEPASS_INLINE Pair log_in_two(const Sums& l) {
  const Ints bits = Ints(l.sum), k = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const Floats f = Floats(bits - (k << 23)) - 1.0f, square = f * f, exponent = __builtin_convertvector(k, Floats);
  Floats p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Floats rest = (l.rest / l.sum + 0.0009765625f) - 0.0009765625f;  // what exp(-100) and the like leave is nothing
  const Floats curve = (p * square * f - 0.5f * square) + exponent * -2.12194440e-4f + rest;
  const Floats line = exponent * 0.693359375f + f;  // within [0, log(n)]; exact but for large n
  const Floats high = line + curve;
  return {(line - high) + curve + (l.sum - l.sum), high};
}

// m + log(l), in two floats.
ONEPASS_INLINE Pair log_beside(Floats m, const Sums& l) {
  const Pair log = log_in_two(l);
  Sums both;
  both.sum = m;
  both.add(log.high);
  return {both.rest + log.low, both.sum};
}

// 1 / l, in two floats.
ONEPASS_INLINE Pair inverse_in_two(const Sums& l) {
#if defined(__FMA__)
  const Floats high = 1.0f / l.sum;
  return {high * (fused(-high, l.sum, all(1)) - high * l.rest), high};
#else
  const Doubles inverse = 1.0 / (widened(l.sum) + widened(l.rest));
  const Floats high = narrowed(inverse);
  return {narrowed(inverse - widened(high)), high};
#endif
}

}  // namespace onepass::ONEPASS_ISA
