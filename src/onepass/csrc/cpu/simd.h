// simd.h: vectors of floats, as wide as the instruction set has them, by the compiler's own vector types; elements of
// every type come and go through them. Intrinsics only where the compiler takes apart what is one instruction, and for
// stores past the cache, which the language has none of.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#include "state.h"

namespace onepass::ONEPASS_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// What the innermost loops call: left to itself the compiler stops inlining where there are many of them.
#define ONEPASS_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

ONEPASS_INLINE Floats all(float v) { return v - Floats{}; }

// The larger of each two; of a NaN and something, `b`. One instruction, of which the compiler makes two.
ONEPASS_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return Floats(_mm512_max_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
  return Floats(_mm256_max_ps(__m256(a), __m256(b)));
#elif defined(__SSE__)
  return Floats(_mm_max_ps(__m128(a), __m128(b)));
#else
  return a > b ? a : b;
#endif
}

template <class T>
ONEPASS_INLINE Floats load_vector(const T* from);
template <>
ONEPASS_INLINE Floats load_vector(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <>
ONEPASS_INLINE Floats load_vector(const bfloat16* from) {
#if defined(__AVX512F__)
  const Words wide = Words(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  const Words wide = Words(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Halves h;
  std::memcpy(&h, from, sizeof h);
  const Words wide = __builtin_convertvector(h, Words);
#endif
  return Floats(wide << 16);
}
template <>
ONEPASS_INLINE Floats load_vector(const float16* from) {
#if defined(__AVX512F__)
  return Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = float(from[i]);
  return v;
#endif
}

// Converted, but not yet where they go. A NaN is one that arithmetic makes, not any 32 bits, unless `AnyNan`.
template <class T, bool AnyNan = false>
struct Packed;
template <bool AnyNan>
struct Packed<float, AnyNan> {
  typedef Floats type;
  static ONEPASS_INLINE type of(Floats v) { return v; }
};
template <bool AnyNan>
struct Packed<bfloat16, AnyNan> {
  typedef Halves type;
  static ONEPASS_INLINE type of(Floats v) {
    const Words bits = Words(v), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    if (!AnyNan) return __builtin_convertvector(rounded, Halves);
    return __builtin_convertvector(v != v ? Words{} + 0x7fc0 : rounded, Halves);
  }
};
template <bool AnyNan>
struct Packed<float16, AnyNan> {
  typedef Halves type;
  static ONEPASS_INLINE type of(Floats v) {
#if defined(__AVX512F__)
    return Halves(_mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return Halves(_mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT));
#else
    Halves h;
    for (int i = 0; i < kWidth; ++i) {
      const float16 half = float16(v[i]);
      uint16_t bits;
      std::memcpy(&bits, &half, sizeof bits);
      h[i] = bits;
    }
    return h;
#endif
  }
};

template <bool AnyNan = false, class T>
ONEPASS_INLINE void store_vector(T* to, Floats v) {
  const typename Packed<T>::type made = Packed<T, AnyNan>::of(v);
  std::memcpy(to, &made, sizeof made);
}

// Two vectors of elements that are neighbours. Those of bfloat16 may be split as they lie in 32-bit words, the even
// ones and the odd ones: fewer steps, and no matter where they go back the same way.
typedef uint32_t Pairs __attribute__((vector_size(4 * kWidth)));
template <bool Split, class T>
ONEPASS_INLINE void load_two(const T* from, Floats& a, Floats& b) {
  if constexpr (Split) {
    Pairs pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    a = Floats(pairs << 16), b = Floats(pairs & 0xffff0000u);
  } else {
    a = load_vector(from), b = load_vector(from + kWidth);
  }
}
ONEPASS_INLINE Pairs rounded_pairs(Floats a, Floats b) {
  const Pairs even = Pairs(a), odd = Pairs(b);
  return ((even + 0x7fff + ((even >> 16) & 1)) >> 16) | ((odd + 0x7fff + ((odd >> 16) & 1)) & 0xffff0000u);
}

constexpr bool kStreams =
#if defined(__AVX__)
    true;
#else
    false;
#endif

// Past the cache; `to` is aligned to the vector.
template <bool AnyNan = false, class T>
ONEPASS_INLINE void stream_vector(T* to, Floats v) {
#if defined(__AVX__)
  const typename Packed<T>::type made = Packed<T, AnyNan>::of(v);
  if constexpr (sizeof made == 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), __m512i(made));
#endif
  } else if constexpr (sizeof made == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __m256i(made));
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), __m128i(made));
  }
#else
  store_vector<AnyNan>(to, v);
#endif
}

template <bool Split, class T>
ONEPASS_INLINE void store_two(T* to, Floats a, Floats b) {
  if constexpr (Split) {
    const Pairs made = rounded_pairs(a, b);
    std::memcpy(to, &made, sizeof made);
  } else {
    store_vector(to, a), store_vector(to + kWidth, b);
  }
}
template <bool Split, class T>
ONEPASS_INLINE void stream_two(T* to, Floats a, Floats b) {
  if constexpr (Split) {
    stream_vector(reinterpret_cast<float*>(to), Floats(rounded_pairs(a, b)));
  } else {
    stream_vector(to, a), stream_vector(to + kWidth, b);
  }
}

// What is streamed is seen by other threads.
ONEPASS_INLINE void end_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Fewer bytes than twice `Piece`, in pieces whose sizes are powers of two.
template <int Piece>
ONEPASS_INLINE void copy_bytes(char* to, const char* from, int64_t bytes) {
  if constexpr (Piece >= 2) {
    const int64_t now = bytes & Piece;
    if (now) std::memcpy(to, from, Piece);
    copy_bytes<Piece / 2>(to + now, from + now, bytes);
  }
}
// Fewer elements than a vector has.
template <class T>
ONEPASS_INLINE void copy_part(T* to, const T* from, int64_t count) {
  copy_bytes<kWidth* int(sizeof(T)) / 2>(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
                                         count * int64_t(sizeof(T)));
}

alignas(64) inline constexpr int32_t kMask[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

// Ones in the first `count` lanes.
ONEPASS_INLINE Ints first_lanes(int64_t count) {
  Ints mask;
  std::memcpy(&mask, kMask + 16 - count, sizeof mask);
  return mask;
}

// The first `count` elements; `fill` stands for those beyond.
template <class T>
ONEPASS_INLINE Floats load_part(const T* from, int64_t count, float fill) {
  const Ints mask = first_lanes(count);
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    const Floats v = Floats(_mm256_maskload_ps(from, __m256i(mask)));
    return mask ? v : all(fill);
  }
#endif
  T whole[kWidth] = {};
  copy_part(whole, from, count);
  return mask ? load_vector(whole) : all(fill);
}
template <bool AnyNan = false, class T>
ONEPASS_INLINE void store_part(T* to, int64_t count, Floats v) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm256_maskstore_ps(to, __m256i(first_lanes(count)), __m256(v));
#endif
  T whole[kWidth];
  store_vector<AnyNan>(whole, v);
  copy_part(to, whole, count);
}

// Each lane with another: half a vector, a quarter, ... away.
template <class Merge>
ONEPASS_INLINE float across(Floats v, Merge merge) {
#if defined(__AVX512F__)
  v = merge(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX__)
  v = merge(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
#endif
  return v[0];
}
ONEPASS_INLINE float maximum_of(Floats v) { return across(v, larger); }

// Of two rows' vectors, at each of the levels on which as many rows as a vector has lanes become one vector: the parts
// that are merged next.
struct Pair {
  Floats low, high;
};
template <int Level>
ONEPASS_INLINE Pair crossed(Floats a, Floats b) {
#define ONEPASS_MIX(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if defined(__AVX512F__)
  if constexpr (Level == 0)
    return {ONEPASS_MIX(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
            ONEPASS_MIX(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)};
  if constexpr (Level == 1)
    return {ONEPASS_MIX(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
            ONEPASS_MIX(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)};
  if constexpr (Level == 2)
    return {ONEPASS_MIX(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
            ONEPASS_MIX(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)};
  return {ONEPASS_MIX(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          ONEPASS_MIX(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)};
#elif defined(__AVX__)
  if constexpr (Level == 0) return {ONEPASS_MIX(0, 8, 1, 9, 4, 12, 5, 13), ONEPASS_MIX(2, 10, 3, 11, 6, 14, 7, 15)};
  if constexpr (Level == 1) return {ONEPASS_MIX(0, 1, 8, 9, 4, 5, 12, 13), ONEPASS_MIX(2, 3, 10, 11, 6, 7, 14, 15)};
  return {ONEPASS_MIX(0, 1, 2, 3, 8, 9, 10, 11), ONEPASS_MIX(4, 5, 6, 7, 12, 13, 14, 15)};
#else
  if constexpr (Level == 0) return {ONEPASS_MIX(0, 4, 1, 5), ONEPASS_MIX(2, 6, 3, 7)};
  return {ONEPASS_MIX(0, 1, 4, 5), ONEPASS_MIX(2, 3, 6, 7)};
#endif
#undef ONEPASS_MIX
}

// Exponentials come times 2^64: 2^k is then never subnormal, and what they are multiplied by in the end brings them
// back, rounding once.
constexpr float kLift = 18446744073709551616.0f, kDrop = 1 / kLift;

// The values of the lanes together.
typedef double Doubles __attribute__((vector_size(8 * kWidth)));
ONEPASS_INLINE double total_of(Doubles wide) {
  double all = 0;
  for (int i = 0; i < kWidth; i += 4) all += (wide[i] + wide[i + 1]) + (wide[i + 2] + wide[i + 3]);
  return all;
}
ONEPASS_INLINE Doubles widened(Floats v) { return __builtin_convertvector(v, Doubles); }

// A sum, and what its additions rounded off (Knuth's TwoSum).
struct Sums {
  Floats sum{}, rest{};
  ONEPASS_INLINE void add(Floats e) {
    const Floats next = sum + e, part = next - sum;
    rest += (sum - (next - part)) + (e - part);
    sum = next;
  }
  double total() const { return total_of(widened(sum) + widened(rest)); }
};

ONEPASS_INLINE Floats narrowed(Doubles v) { return __builtin_convertvector(v, Floats); }

// What each lane of kWidth vectors has together: of vector r in lane r.
template <int Level = 0, int Rows>
ONEPASS_INLINE Floats maxima_of(Floats (&rows)[Rows]) {
  if constexpr (Rows == 1) {
    return rows[0];
  } else {
    Floats next[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const Pair pair = crossed<Level>(rows[2 * r], rows[2 * r + 1]);
      next[r] = larger(pair.low, pair.high);
    }
    return maxima_of<Level + 1>(next);
  }
}
// The same of sums, and of what they were rounded by.
template <int Level = 0, int Rows>
ONEPASS_INLINE Sums totals_of(Floats (&sums)[Rows], Floats (&rests)[Rows]) {
  if constexpr (Rows == 1) {
    Sums all;
    all.sum = sums[0], all.rest = rests[0];
    return all;
  } else {
    Floats next[Rows / 2], next_rests[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const Pair pair = crossed<Level>(sums[2 * r], sums[2 * r + 1]);
      Sums sum;
      sum.sum = pair.low;
      sum.add(pair.high);
      const Pair more = crossed<Level>(rests[2 * r], rests[2 * r + 1]);
      sum.rest += more.low + more.high;
      next[r] = sum.sum, next_rests[r] = sum.rest;
    }
    return totals_of<Level + 1>(next, next_rests);
  }
}
// The same in plain floats.
template <int Level = 0, int Rows>
ONEPASS_INLINE Floats plain_totals_of(Floats (&sums)[Rows]) {
  if constexpr (Rows == 1) {
    return sums[0];
  } else {
    Floats next[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const Pair pair = crossed<Level>(sums[2 * r], sums[2 * r + 1]);
      next[r] = pair.low + pair.high;
    }
    return plain_totals_of<Level + 1>(next);
  }
}

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
  const Floats rest = (l.rest / l.sum + 0.0009765625f) - 0.0009765625f;  // what exp(-104) and the like leave is nothing
  const Floats curve = (p * square * f - 0.5f * square) + exponent * -2.12194440e-4f + rest;
  const Floats line = exponent * 0.693359375f + f;  // within [0, log(n)]; exact but for large n
  const Floats high = line + curve;
  return {(line - high) + curve + (l.sum - l.sum), high};
}

// The same of lifted exponentials, at most four at a time. It begins with more than any of them: what is rounded off
// then takes fewer steps to know (Dekker's Fast2Sum).
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

// exp(v) times 2^64 of several vectors at a time, step by step: one vector's steps all wait for each other. v is at
// most 0, -inf, or NaN. Adding kMagic rounds to an integer k, and leaves k + 127 + 64 in the low bits: the exponent.
constexpr float kLog2e = 1.44269502f, kMagic = 12582912.0f + 127 + 64;  // 1.5 * 2^23 + ...

#define ONEPASS_EACH for (int k = 0; k < K; ++k)
// 2^(v * log2(e)) = 2^f * power. Less than -104 becomes -104, and a NaN stays one.
template <int K>
ONEPASS_INLINE void reduce(Floats (&v)[K], Floats (&f)[K], Floats (&power)[K]) {
  ONEPASS_EACH v[k] = larger(all(-104.0f), v[k]);
  ONEPASS_EACH power[k] = v[k] * kLog2e + kMagic;
  ONEPASS_EACH f[k] = v[k] * kLog2e - (power[k] - kMagic);
  ONEPASS_EACH power[k] = Floats(Ints(power[k]) << 23);
}

// Good to 1 ulp. With a multiply-add: log2(e) in two terms, and a polynomial of 2^f for |f| <= 1/2 whose own error is
// 2^-28. Without: as in exp.h, where no product is rounded that counts.
struct Precise {
  template <int K>
  static ONEPASS_INLINE void of(Floats (&v)[K]) {
    Floats f[K], power[K], p[K];
    reduce(v, f, power);
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
  template <int K>
  static ONEPASS_INLINE void of(Floats (&v)[K]) {
    Floats f[K], power[K], p[K];
    reduce(v, f, power);
    if constexpr (Degree == 3) {
      ONEPASS_EACH p[k] = f[k] * 0.05500893f + 0.24221096f;
      ONEPASS_EACH p[k] = p[k] * f[k] + 0.69328293f;
    } else {
      ONEPASS_EACH p[k] = f[k] * 0.00958277683f + 0.0559072132f;
      ONEPASS_EACH p[k] = p[k] * f[k] + 0.240241045f;
      ONEPASS_EACH p[k] = p[k] * f[k] + 0.693124105f;
    }
    ONEPASS_EACH p[k] = p[k] * f[k] + 1.0f;
    ONEPASS_EACH v[k] = p[k] * power[k];
  }
};
#undef ONEPASS_EACH

template <class E>
ONEPASS_INLINE Floats exponential(Floats v) {
  Floats one[1] = {v};
  E::of(one);
  return one[0];
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

}  // namespace onepass::ONEPASS_ISA
