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
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return Floats(__builtin_convertvector(h, Words) << 16);
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

// What is streamed is seen by other threads.
ONEPASS_INLINE void end_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Fewer bytes than a vector has, in pieces whose sizes are powers of two.
ONEPASS_INLINE void copy_bytes(void* to, const void* from, int64_t bytes) {
  char* t = static_cast<char*>(to);
  const char* f = static_cast<const char*>(from);
  const auto piece = [&](auto size) {
    if (bytes & size) std::memcpy(t, f, size), t += size, f += size;
  };
  piece(std::integral_constant<int, 32>()), piece(std::integral_constant<int, 16>());
  piece(std::integral_constant<int, 8>()), piece(std::integral_constant<int, 4>());
  piece(std::integral_constant<int, 2>());
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
  copy_bytes(whole, from, count * int64_t(sizeof(T)));
  return mask ? load_vector(whole) : all(fill);
}
template <bool AnyNan = false, class T>
ONEPASS_INLINE void store_part(T* to, int64_t count, Floats v) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm256_maskstore_ps(to, __m256i(first_lanes(count)), __m256(v));
#endif
  T whole[kWidth];
  store_vector<AnyNan>(whole, v);
  copy_bytes(to, whole, count * int64_t(sizeof(T)));
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

// A sum, and what its additions rounded off (Knuth's TwoSum).
struct Sums {
  Floats sum{}, rest{};
  ONEPASS_INLINE void add(Floats e) {
    const Floats next = sum + e, part = next - sum;
    rest += (sum - (next - part)) + (e - part);
    sum = next;
  }
  double total() const {
    typedef double Doubles __attribute__((vector_size(8 * kWidth)));
    const Doubles wide = __builtin_convertvector(sum, Doubles) + __builtin_convertvector(rest, Doubles);
    double all = 0;
    for (int i = 0; i < kWidth; i += 4) all += (wide[i] + wide[i + 1]) + (wide[i + 2] + wide[i + 3]);
    return all;
  }
};

// Exponentials come times 2^64: 2^k is then never subnormal, and what they are multiplied by in the end brings them
// back, rounding once. For x <= 0, -inf, or NaN.
constexpr float kLift = 18446744073709551616.0f, kDrop = 1 / kLift;

ONEPASS_INLINE Floats lifted_power(Floats p, Floats shifted) {
  return p * Floats((Ints(shifted) + (127 + 64)) << 23);  // the low bits of `shifted` are k
}

constexpr float kLog2e = 1.44269502f;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits

// Good to 1 ulp. With a multiply-add: x * log2(e) in two terms, and a polynomial of 2^f for |f| <= 1/2 whose own error
// is 2^-28. Without: as in exp.h, where no product is rounded that counts.
struct Precise {
  Floats minus;
  Precise() = default;
  explicit Precise(float m) : minus(all(m)) {}
  explicit Precise(Floats m) : minus(m) {}
  ONEPASS_INLINE Floats operator()(Floats x) const {
    const Floats v = larger(all(-104.0f), x - minus);  // and a NaN stays one
    const Floats shifted = v * kLog2e + kMagic, k = shifted - kMagic;
#if defined(__FMA__)
    const Floats f = v * 1.92596298909109e-8f + (v * kLog2e - k);
    Floats p = f * 0.000153532579f + 0.00133990035f;
    p = p * f + 0.0096184386f;
    p = p * f + 0.0555033216f;
    p = p * f + 0.240226479f;
    p = p * f + 0.693147203f;
    return lifted_power(p * f + 1.0f, shifted);
#else
    Floats r = v - k * 0.693359375f;
    r = r - k * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return lifted_power(p * (r * r) + r + 1.0f, shifted);
#endif
  }
};

// Good to 2^-18, for half results: a polynomial of 2^f for |f| <= 1/2, exact for f = 0.
struct Coarse {
  Floats minus;
  Coarse() = default;
  explicit Coarse(float m) : minus(all(m)) {}
  explicit Coarse(Floats m) : minus(m) {}
  ONEPASS_INLINE Floats operator()(Floats x) const {
    const Floats t = larger(all(-150.0f), (x - minus) * kLog2e);
    const Floats shifted = t + kMagic, f = t - (shifted - kMagic);
    Floats p = f * 0.00958277683f + 0.0559072132f;
    p = p * f + 0.240241045f;
    p = p * f + 0.693124105f;
    return lifted_power(p * f + 1.0f, shifted);
  }
};

template <class Y>
struct Exponential {
  typedef Coarse type;
};
template <>
struct Exponential<float> {
  typedef Precise type;
};

}  // namespace onepass::ONEPASS_ISA
