// exp_simd.h: exponentials of vectors, sums of exponentials and their logarithms, and products of numbers and
// exponentials.
//
//   exp(v) = 2^k * 2^f, k = round(v * log2(e)), f = the rest, 2^f by a polynomial or a table
//
// k and f take one fused multiply-add each: adding kMagic rounds v * log2(e) to an integer, and leaves the exponent of
// the result in the low bits of the sum.
#pragma once

#include "reduce_simd.h"

namespace onepass::ONEPASS_ISA {

// Exponentials are scaled by 2^64, so that 2^k is never subnormal. The final factor of a result removes the scale, with
// one rounding.
constexpr float kExpScale = 18446744073709551616.0f, kExpUnscale = 1 / kExpScale;

// A sum of scaled exponentials with its rounding error. At most four exponentials are added at a time. The sum starts
// with a number that is larger than any of them: then the rounding error of an addition takes fewer steps (Dekker's
// Fast2Sum).
struct CompensatedExpSum {
  static constexpr float kStart = 8 * kExpScale;
  Vec sum = broadcast(kStart), error{};
  ONEPASS_INLINE void add(Vec e) {
    const Vec next = sum + e;
    error += e - (next - sum);
    sum = next;
  }
  ONEPASS_INLINE CompensatedVec compensated() const {
    CompensatedVec both = {sum - kStart, Vec{}};
    both.add(error);
    return both;
  }
  double total() const { return reduce_sum((to_double(sum) - double(kStart)) + to_double(error)); }
};

// A plain sum, for 16-bit results: these are rounded far more coarsely than a sum of a thousand floats.
struct PlainExpSum {
  Vec sum{};
  ONEPASS_INLINE void add(Vec e) { sum += e; }
  ONEPASS_INLINE CompensatedVec compensated() const { return {sum, Vec{}}; }
  double total() const { return reduce_sum(to_double(sum)); }
};
template <class Y>
using ExpSum = std::conditional_t<sizeof(Y) == 2, PlainExpSum, CompensatedExpSum>;

constexpr float kLog2e = 1.44269502f, kLn2 = 0.693147181f;
constexpr float kRound = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer
constexpr float kMagic = kRound + 127 + 64;  // and makes that integer the exponent field of a scaled exponential
// Numbers further below the maximum, such as -inf, are replaced by this number, for which 2^k is exactly 0. If 2^k were
// only tiny, results would be subnormal before they are 0, and an Intel core takes 150 cycles for a vector with a
// subnormal.
constexpr float kMinExponent = -(127 + 64);

// The base that the exponentials of a row are relative to. Without FMA it is the maximum m itself, which is subtracted
// first. With FMA, where products are not rounded, it is a power of two near exp(m), so that nothing need be
// subtracted. `relative_to_base(m)` then is the exponential of m. |m| is at most kMaxMagnitude.
struct ExpBase {
  Vec max{}, lowest = broadcast(kMinExponent * kLn2), magic = broadcast(kMagic);

  static constexpr float kMaxMagnitude = 1048576.0f;
#if defined(__FMA__)
  static constexpr bool kSubtractsMax = false;
  static ONEPASS_INLINE ExpBase of(Vec m) {
    const Vec exponent = (m * kLog2e + kRound) - kRound;
    return {broadcast(0), (exponent + kMinExponent) * kLn2, kMagic - exponent};
  }
#else
  static constexpr bool kSubtractsMax = true;
  static ONEPASS_INLINE ExpBase of(Vec m) { return {m}; }
#endif
  static ExpBase of(float m) { return of(broadcast(m)); }
};
// All vectors have one base, or each has its own.
ONEPASS_INLINE const ExpBase& base_of(const ExpBase& base, int) { return base; }
template <int K>
ONEPASS_INLINE const ExpBase& base_of(const ExpBase (&bases)[K], int k) {
  return bases[k];
}

// Exponentials are computed for several vectors at a time, step by step, because the steps of one vector all depend on
// each other. v is at most 0, -inf, or NaN (relative to its base).
#define ONEPASS_EACH for (int k = 0; k < K; ++k)
// 2^(v * log2(e)) = 2^f * power. A v below `lowest` is replaced by `lowest`; a NaN stays NaN.
template <int K, class Base>
ONEPASS_INLINE void reduce_range(Vec (&v)[K], Vec (&f)[K], Vec (&power)[K], const Base& base) {
  ONEPASS_EACH v[k] = max(base_of(base, k).lowest, v[k]);
  ONEPASS_EACH power[k] = fmadd(v[k], broadcast(kLog2e), base_of(base, k).magic);
  ONEPASS_EACH f[k] = fmadd(v[k], broadcast(kLog2e), base_of(base, k).magic - power[k]);
  ONEPASS_EACH power[k] = Vec(IntVec(power[k]) << 23);
}

// Accurate to 1 ulp. With FMA: log2(e) in two terms, and a polynomial of 2^f for |f| <= 1/2 with an error of 2^-28.
// Without FMA: log(2) in two terms (Cody & Waite), so that no product that matters is rounded, and the polynomial of
// exp(r) for
// r| <= log(2) / 2 of Cephes' expf.
struct ExpFloat {
  template <int K, class Base = ExpBase>
  static ONEPASS_INLINE void apply(Vec (&v)[K], const Base& base = {}) {
    Vec f[K], power[K], p[K];
    reduce_range(v, f, power, base);
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
      const Vec whole = (v[k] * kLog2e + kMagic) - kMagic;
      Vec r = v[k] - whole * 0.693359375f;
      r = r - whole * -2.12194440e-4f;
      Vec q = r * 1.9875691500e-4f + 1.3981999507e-3f;
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

// For 16-bit results: a polynomial of 2^f for |f| <= 1/2, exact for f = 0. The error is 2^-18 (degree 4, float16) or
// 2^-13 (degree 3, bfloat16), a 64th or a 16th of the rounding error of a result.
template <int Degree>
struct ExpHalf {
  Vec coefficient[Degree + 1];  // times `factor`: then exponentials are multiplied by a number at no extra cost

  ONEPASS_INLINE explicit ExpHalf(float factor = 1) {
    constexpr float kThree[] = {1, 0.69328293f, 0.24221096f, 0.05500893f, 0};
    constexpr float kFour[] = {1, 0.693124105f, 0.240241045f, 0.0559072132f, 0.00958277683f};
    for (int i = 0; i <= Degree; ++i) coefficient[i] = broadcast(factor * (Degree == 3 ? kThree[i] : kFour[i]));
  }
  template <int K, class Base>
  ONEPASS_INLINE void multiply(Vec (&v)[K], const Base& base) const {
    Vec f[K], power[K], p[K];
    reduce_range(v, f, power, base);
    ONEPASS_EACH p[k] = f[k] * coefficient[Degree] + coefficient[Degree - 1];
    for (int i = Degree - 2; i >= 0; --i) ONEPASS_EACH p[k] = p[k] * f[k] + coefficient[i];
    ONEPASS_EACH v[k] = p[k] * power[k];
  }
  template <int K, class Base = ExpBase>
  static ONEPASS_INLINE void apply(Vec (&v)[K], const Base& base = {}) {
    ExpHalf().multiply(v, base);
  }
};

// For doubles, accurate to 1 ulp: 2^k in two factors, and the series of exp(r) for |r| <= ln(2) / 2. v may be any
// number.
struct ExpDouble {
  template <int K>
  static ONEPASS_INLINE void apply(V<double> (&v)[K]) {
    typedef uint64_t Bits __attribute__((vector_size(sizeof(Vec))));
    V<double> r[K], p[K], shifted[K];
    ONEPASS_EACH v[k] = max_as(broadcast_as(-746.0), v[k]);
    ONEPASS_EACH v[k] = v[k] > 710.0 ? broadcast_as(710.0) : v[k];
    ONEPASS_EACH shifted[k] = v[k] * 1.4426950408889634 + 6755399441055744.0;
    ONEPASS_EACH {
      const V<double> whole = shifted[k] - 6755399441055744.0;
      r[k] = (v[k] - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
      p[k] = broadcast_as(1.0 / 6227020800);
    }
    constexpr double series[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                 1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
#pragma GCC unroll 16
    for (const double term : series) ONEPASS_EACH p[k] = p[k] * r[k] + term;
    ONEPASS_EACH {
      const Bits whole = Bits(shifted[k]) - 0x4338000000000000, half = ((whole + 4096) >> 1) - 2048;
      const Bits one = (half + 1023) << 52, two = (whole - half + 1023) << 52;
      v[k] = (p[k] * (r[k] * r[k]) + r[k] + 1.0) * V<double>(one) * V<double>(two);
    }
  }
};

// The exponential for results of type Y.
template <class Y>
using ExpFor =
    std::conditional_t<std::is_same_v<Y, float16>, ExpHalf<4>,
                       std::conditional_t<std::is_same_v<Y, bfloat16>, ExpHalf<3>,
                                          std::conditional_t<std::is_same_v<Y, double>, ExpDouble, ExpFloat>>>;

// The exponentials of elements, relative to a base.
template <class Exp, int K>
ONEPASS_INLINE void exp_relative_to(const ExpBase& base, Vec (&v)[K]) {
  if constexpr (ExpBase::kSubtractsMax) {
    for (Vec& each : v) each -= base.max;
  }
  if constexpr (K == 4 && std::is_same_v<Exp, ExpHalf<4>>) {  // four at a time do not fit the registers: 7% slower
    Vec first[2] = {v[0], v[1]}, second[2] = {v[2], v[3]};
    Exp::apply(first, base), Exp::apply(second, base);
    v[0] = first[0], v[1] = first[1], v[2] = second[0], v[3] = second[1];
  } else {
    Exp::apply(v, base);
  }
}

// The exponential of m relative to the base of m. Sums that are relative to the base are too large by this factor.
template <class Exp>
inline double relative_to_base(float m) {
  Vec one[1] = {broadcast(m)};
  exp_relative_to<Exp>(ExpBase::of(m), one);
  return double(one[0][0] * kExpUnscale);
}

// Logarithms and reciprocals ------------------------------------------------------------------------------------------

// The natural logarithm of a positive normal number or NaN, as two floats, accurate to 2^-25 or half an ulp (the
// polynomial is that of Cephes' logf).
ONEPASS_INLINE HighLow log_high_low(const CompensatedVec& l) {
  const IntVec bits = IntVec(l.sum), k = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const Vec f = Vec(bits - (k << 23)) - 1.0f, square = f * f, exponent = __builtin_convertvector(k, Vec);
  Vec p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec error = (l.error / l.sum + 0.0009765625f) - 0.0009765625f;  // rounds what exp(-100) and the like leave to 0
  const Vec curve = (p * square * f - 0.5f * square) + exponent * -2.12194440e-4f + error;
  const Vec line = exponent * 0.693359375f + f;  // within [0, log(n)]; exact except for large n
  const Vec high = line + curve;
  return {high, (line - high) + curve + (l.sum - l.sum)};
}

// m + log(l) as two floats.
ONEPASS_INLINE HighLow log_sum_exp(Vec m, const CompensatedVec& l) {
  const HighLow log = log_high_low(l);
  CompensatedVec both = {m, Vec{}};
  both.add(log.high);
  return {both.sum, both.error + log.low};
}

// 1 / v, accurate to 1 ulp. v is positive and finite.
ONEPASS_INLINE Vec inverse(Vec v) {
#if defined(__AVX512F__)
  const Vec near = Vec(_mm512_rcp14_ps(__m512(v)));  // a step of Newton's is faster than a division
  return fmadd(near, fmadd(-near, v, broadcast(1)), near);
#else
  return 1.0f / v;
#endif
}

// 1 / l as two floats. l is positive and finite; for any other l, callers replace the result.
ONEPASS_INLINE HighLow reciprocal(const CompensatedVec& l) {
#if defined(__FMA__)
  const Vec high = inverse(l.sum);
  return {high, high * (fmadd(-high, l.sum, broadcast(1)) - high * l.error)};
#else
  const DoubleVec exact = 1.0 / (to_double(l.sum) + to_double(l.error));
  const Vec high = to_float(exact);
  return {high, to_float(exact - to_double(high))};
#endif
}

// Numbers times exponentials: a * exp(v), v at most 0, -inf, or NaN ---------------------------------------------------

#if defined(__AVX512F__)
// A factor of exponentials. Its exponent is moved into the exponentials, so that a product takes one multiplication and
// is rounded once. The factor keeps 2^-64, so that an exponential may be smaller than any number by that much.
struct ExpFactor {
  Vec factor;
  ExpBase base;

  static ONEPASS_INLINE ExpFactor of(Vec a) {
    const IntVec field = (IntVec(a) >> 23) & 255;
    IntVec exponent = field < 127 + 63 ? field - (127 - 64) : IntVec{} + 127;
    exponent = (field == 0) | (field == 255) ? IntVec{} : exponent;
    const Vec e = __builtin_convertvector(exponent, Vec);
    return {Vec(IntVec(a) - (exponent << 23)), {Vec{}, (e + 127.0f) * -kLn2, e * 16.0f + kRound}};
  }
};

// The whole table of 2^(j / 16) fits into one vector, and one instruction looks up all lanes. The polynomial of the
// rest then has two or three terms instead of four to six. Entries are the bits of a float, minus j at the place of
// sixteenths of the exponent: adding 16 k + j there gives 2^k times the entry.
alignas(64) inline constexpr int32_t kExp2Table[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// Accurate to 2^-21 (`Half`) or 1 ulp. The steps are those of reduce_range, with `f` in sixteenths.
template <bool Half, int K>
ONEPASS_INLINE void exp_with_factor(Vec (&v)[K], const ExpBase& base) {
  constexpr float scale = kLog2e * 16, part = 1.0f / 16;
  IntVec table;
  std::memcpy(&table, kExp2Table, sizeof table);
  Vec f[K], t[K], p[K];
  ONEPASS_EACH v[k] = max(base.lowest, v[k]);
  ONEPASS_EACH t[k] = fmadd(v[k], broadcast(scale), base.magic);
  ONEPASS_EACH f[k] = fmadd(v[k], broadcast(scale), base.magic - t[k]);
  if constexpr (Half) {
    ONEPASS_EACH p[k] = f[k] * (0.24023555f * part * part) + 0.69318783f * part;
  } else {
    ONEPASS_EACH f[k] = v[k] * (1.92596298909109e-8f * 16) + f[k];
    ONEPASS_EACH p[k] = f[k] * (0.05550595f * part * part * part) + 0.24023429f * part * part;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.6931472f * part;
  }
  ONEPASS_EACH p[k] *= f[k];
  ONEPASS_EACH v[k] = Vec(IntVec(_mm512_permutexvar_epi32(__m512i(t[k]), __m512i(table))) + (IntVec(t[k]) << 19));
  ONEPASS_EACH v[k] = p[k] * v[k] + v[k];
}
#else
struct ExpFactor {
  Vec factor;
  ExpBase base;
  static ONEPASS_INLINE ExpFactor of(Vec a) { return {a, {}}; }
};

// The degree is 4 for both 16-bit types: in differences of products terms cancel, so a shorter polynomial would be
// visible.
template <bool Half, int K>
ONEPASS_INLINE void exp_with_factor(Vec (&v)[K], const ExpBase&) {
  std::conditional_t<Half, ExpHalf<4>, ExpFloat>::apply(v);
  ONEPASS_EACH v[k] *= kExpUnscale;
}
#endif
#undef ONEPASS_EACH

}  // namespace onepass::ONEPASS_ISA
