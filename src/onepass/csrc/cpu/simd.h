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

typedef int16_t Shorts __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Codes __attribute__((vector_size(4 * kWidth)));

ONEPASS_INLINE Floats all(float v) { return v - Floats{}; }

// The larger, and the smaller, of each two; of a NaN and something, `b`. One instruction, of which the compiler makes
// two.
#if defined(__AVX512F__)
ONEPASS_INLINE Floats larger(Floats a, Floats b) { return Floats(_mm512_max_ps(__m512(a), __m512(b))); }
ONEPASS_INLINE Floats smaller(Floats a, Floats b) { return Floats(_mm512_min_ps(__m512(a), __m512(b))); }
#elif defined(__AVX__)
ONEPASS_INLINE Floats larger(Floats a, Floats b) { return Floats(_mm256_max_ps(__m256(a), __m256(b))); }
ONEPASS_INLINE Floats smaller(Floats a, Floats b) { return Floats(_mm256_min_ps(__m256(a), __m256(b))); }
#elif defined(__SSE__)
ONEPASS_INLINE Floats larger(Floats a, Floats b) { return Floats(_mm_max_ps(__m128(a), __m128(b))); }
ONEPASS_INLINE Floats smaller(Floats a, Floats b) { return Floats(_mm_min_ps(__m128(a), __m128(b))); }
#else
ONEPASS_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
ONEPASS_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif

// a * b + c, rounded once where the machine can, whatever the compiler makes of products and sums that it sees.
#if defined(__AVX512F__) && defined(__FMA__)
ONEPASS_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
}
#elif defined(__AVX__) && defined(__FMA__)
ONEPASS_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
}
#else
ONEPASS_INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
#endif

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
template <bool Split, class T>
ONEPASS_INLINE void load_two(const T* from, Floats& a, Floats& b) {
  if constexpr (Split) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    a = Floats(pairs << 16), b = Floats(pairs & 0xffff0000u);
  } else {
    a = load_vector(from), b = load_vector(from + kWidth);
  }
}
ONEPASS_INLINE Words rounded_pairs(Floats a, Floats b) {
  const Words even = Words(a), odd = Words(b);
  return ((even + 0x7fff + ((even >> 16) & 1)) >> 16) | ((odd + 0x7fff + ((odd >> 16) & 1)) & 0xffff0000u);
}

// The same of numbers that are not negative, where it does not matter which way a tie goes: up, half the steps.
ONEPASS_INLINE Words rounded_up_pairs(Floats a, Floats b) {
  const Words even = (Words(a) + 0x8000) >> 16, odd = Words(b) + 0x8000;
#if defined(__AVX2__) && !defined(__AVX512F__)
  return Words(_mm256_blend_epi16(__m256i(even), __m256i(odd), 0xaa));
#else
  return even | (odd & 0xffff0000u);
#endif
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

template <bool Split, bool Up = false, class T>
ONEPASS_INLINE void store_two(T* to, Floats a, Floats b) {
  if constexpr (Split) {
    const Words made = Up ? rounded_up_pairs(a, b) : rounded_pairs(a, b);
    std::memcpy(to, &made, sizeof made);
  } else {
    store_vector(to, a), store_vector(to + kWidth, b);
  }
}
template <bool Split, bool Up = false, class T>
ONEPASS_INLINE void stream_two(T* to, Floats a, Floats b) {
  if constexpr (Split) {
    stream_vector(reinterpret_cast<float*>(to), Floats(Up ? rounded_up_pairs(a, b) : rounded_pairs(a, b)));
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
#if defined(__AVX512F__)
  const __mmask16 bits = __mmask16((1u << count) - 1);
  if constexpr (std::is_same_v<T, float>) {
    return Floats(_mm512_mask_loadu_ps(__m512(all(fill)), bits, from));
  } else {
    alignas(32) T whole[kWidth];
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole), _mm256_maskz_loadu_epi16(bits, from));
    return mask ? load_vector(whole) : all(fill);
  }
#elif defined(__AVX__)
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
#if defined(__AVX512F__)
  const __mmask16 bits = __mmask16((1u << count) - 1);
  const typename Packed<T, AnyNan>::type made = Packed<T, AnyNan>::of(v);
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, bits, __m512(made));
  } else {
    _mm256_mask_storeu_epi16(to, bits, __m256i(made));
  }
  return;
#elif defined(__AVX__)
  if constexpr (std::is_same_v<T, float>) return _mm256_maskstore_ps(to, __m256i(first_lanes(count)), __m256(v));
#endif
  T whole[kWidth];
  store_vector<AnyNan>(whole, v);
  copy_part(to, whole, count);
}

}  // namespace onepass::ONEPASS_ISA
