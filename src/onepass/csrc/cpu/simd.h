// simd.h: vectors of floats, as wide as the instruction set allows. They are the compiler's own vector types. The file
// has loads and stores of all element types, streaming stores, and the scratch memory of a thread. Intrinsics are used
// only where the compiler would emit several instructions for one, and for streaming stores, which the language lacks.
#pragma once

#include <cstdlib>
#include <new>
#include <utility>
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

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kWidth)));
typedef double DoubleVec __attribute__((vector_size(8 * kWidth)));
typedef uint16_t Uint16Vec __attribute__((vector_size(2 * kWidth)));
// These two have the size of a vector of floats, and twice as many lanes.
typedef int16_t WideInt16Vec __attribute__((vector_size(4 * kWidth)));
typedef uint16_t WideUint16Vec __attribute__((vector_size(4 * kWidth)));
using Lanes = std::make_index_sequence<kWidth>;

// Whether frequent cases have a faster path beside the general one. If there are several instruction sets, the
// baseline, which only serves x86 processors without AVX2, has none: less to compile and to ship.
constexpr bool kHasFastPaths =
#if defined(ONEPASS_AVX2) && !defined(__AVX2__)
    false;
#else
    true;
#endif

// Vectors of A, with the size of a vector of floats.
template <class A>
struct VecOf {
  typedef A type __attribute__((vector_size(4 * kWidth)));
};
template <>
struct VecOf<float> {
  using type = Vec;
};
template <class A>
using V = typename VecOf<A>::type;
template <class A>
constexpr int kLanes = int(sizeof(Vec) / sizeof(A));
template <class A>
ONEPASS_INLINE V<A> broadcast_as(A v) {
  return v - V<A>{};
}
template <class A>
ONEPASS_INLINE V<A> load_as(const A* from) {
  V<A> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class Value, class To>
ONEPASS_INLINE void store_as(To* to, Value v) {
  std::memcpy(static_cast<void*>(to), &v, sizeof v);
}

ONEPASS_INLINE Vec broadcast(float v) { return v - Vec{}; }

// The larger of each pair of lanes. If either is a NaN, the result is `b`. This is one instruction; the compiler would
// emit two.
#if defined(__AVX512F__)
ONEPASS_INLINE Vec max(Vec a, Vec b) { return Vec(_mm512_max_ps(__m512(a), __m512(b))); }
#elif defined(__AVX__)
ONEPASS_INLINE Vec max(Vec a, Vec b) { return Vec(_mm256_max_ps(__m256(a), __m256(b))); }
#elif defined(__SSE__)
ONEPASS_INLINE Vec max(Vec a, Vec b) { return Vec(_mm_max_ps(__m128(a), __m128(b))); }
#else
ONEPASS_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
#endif

// max for floats or doubles; for doubles the compiler emits one instruction by itself.
ONEPASS_INLINE Vec max_as(Vec a, Vec b) { return max(a, b); }
ONEPASS_INLINE V<double> max_as(V<double> a, V<double> b) { return a > b ? a : b; }

// a * b + c, rounded once if the machine can, whatever the compiler does with products and sums that it sees.
#if defined(__AVX512F__) && defined(__FMA__)
ONEPASS_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
#elif defined(__AVX__) && defined(__FMA__)
ONEPASS_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
#else
ONEPASS_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return a * b + c; }
#endif

// Loads and stores ----------------------------------------------------------------------------------------------------

#if defined(__AVX2__)
// As many 16-bit elements as a vector of floats has lanes.
#if defined(__AVX512F__)
using Packed = __m256i;
ONEPASS_INLINE UintVec widen_bits(Packed v) { return UintVec(_mm512_cvtepu16_epi32(v)); }
ONEPASS_INLINE Vec widen_float16(Packed v) { return Vec(_mm512_cvtph_ps(v)); }
#else
using Packed = __m128i;
ONEPASS_INLINE UintVec widen_bits(Packed v) { return UintVec(_mm256_cvtepu16_epi32(v)); }
ONEPASS_INLINE Vec widen_float16(Packed v) { return Vec(_mm256_cvtph_ps(v)); }
#endif
template <class T>
ONEPASS_INLINE Vec widen(Packed v) {
  return std::is_same_v<T, bfloat16> ? Vec(widen_bits(v) << 16) : widen_float16(v);
}
#endif
template <class T>
ONEPASS_INLINE Vec load_vector(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
  } else {
#if defined(__AVX2__)
    Packed packed;
    std::memcpy(&packed, from, sizeof packed);
    return widen<T>(packed);
#else
    if constexpr (std::is_same_v<T, bfloat16>) {
      Uint16Vec packed;
      std::memcpy(&packed, from, sizeof packed);
      return Vec(__builtin_convertvector(packed, UintVec) << 16);
    } else {
      Vec v;
      for (int i = 0; i < kWidth; ++i) v[i] = float(from[i]);
      return v;
    }
#endif
  }
}

// Converts a vector to elements of T. `InputNan`: NaNs may come from the input, with any bits. Otherwise NaNs come from
// arithmetic, and their low bits are 0.
template <class T, bool InputNan = false>
ONEPASS_INLINE auto convert(Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    const UintVec bits = UintVec(v), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
    if constexpr (!InputNan) return __builtin_convertvector(rounded, Uint16Vec);
    return __builtin_convertvector(v != v ? UintVec{} + 0x7fc0 : rounded, Uint16Vec);
  } else {
#if defined(__AVX512F__)
    return Uint16Vec(_mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return Uint16Vec(_mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT));
#else
    Uint16Vec packed;
    for (int i = 0; i < kWidth; ++i) {
      const float16 rounded = float16(v[i]);
      uint16_t bits;
      std::memcpy(&bits, &rounded, sizeof bits);
      packed[i] = bits;
    }
    return packed;
#endif
  }
}

template <bool InputNan = false, class T>
ONEPASS_INLINE void store_vector(T* to, Vec v) {
  const auto converted = convert<T, InputNan>(v);
  std::memcpy(to, &converted, sizeof converted);
}

// Streaming stores bypass the caches.
constexpr bool kHasStreamingStores =
#if defined(__AVX__)
    true;
#else
    false;
#endif

// `to` must be aligned to the size of the converted vector.
template <bool InputNan = false, class T>
ONEPASS_INLINE void stream_vector(T* to, Vec v) {
#if defined(__AVX__)
  const auto converted = convert<T, InputNan>(v);
  if constexpr (sizeof converted == 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), __m512i(converted));
#endif
  } else if constexpr (sizeof converted == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __m256i(converted));
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), __m128i(converted));
  }
#else
  store_vector<InputNan>(to, v);
#endif
}

// Makes streaming stores visible to other threads.
ONEPASS_INLINE void fence_streaming_stores() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Copies bytes to memory that is not read again soon: whole lines are streamed.
inline void stream_bytes(void* to, const void* from, int64_t bytes) {
  constexpr int64_t step = sizeof(Vec);
  char* const y = static_cast<char*>(to);
  const char* const x = static_cast<const char*>(from);
  int64_t i = int64_t(-uintptr_t(to) % 64);
  i = i < bytes ? i : bytes;
  std::memcpy(y, x, size_t(i));
  for (; i + 64 <= bytes; i += 64) {
    for (int64_t k = 0; k < 64; k += step) {
      Vec v;
      std::memcpy(&v, x + i + k, sizeof v);
      stream_vector(reinterpret_cast<float*>(y + i + k), v);
    }
  }
  std::memcpy(y + i, x + i, size_t(bytes - i));
}

// Rounds two vectors to bfloat16 and interleaves them. `TiesUp`: no number is negative, and ties may be rounded up;
// this takes half of the steps.
template <bool TiesUp>
ONEPASS_INLINE UintVec interleave_bfloat16(Vec a, Vec b) {
  if constexpr (TiesUp) {
    const UintVec even = (UintVec(a) + 0x8000) >> 16, odd = UintVec(b) + 0x8000;
#if defined(__AVX2__) && !defined(__AVX512F__)
    return UintVec(_mm256_blend_epi16(__m256i(even), __m256i(odd), 0xaa));
#else
    return even | (odd & 0xffff0000u);
#endif
  }
  const UintVec even = UintVec(a), odd = UintVec(b);
  return ((even + 0x7fff + ((even >> 16) & 1)) >> 16) | ((odd + 0x7fff + ((odd >> 16) & 1)) & 0xffff0000u);
}

#if defined(__AVX2__)
// Rounds two vectors to bfloat16, in order. `TiesUp` as in interleave_bfloat16.
template <bool TiesUp, bool InputNan, size_t... Lane>
ONEPASS_INLINE Vec pack_bfloat16(Vec a, Vec b, std::index_sequence<Lane...>) {
  const auto round = [](Vec v) __attribute__((always_inline)) {
    const UintVec bits = UintVec(v), rounded = bits + (TiesUp ? UintVec{} + 0x8000 : 0x7fff + ((bits >> 16) & 1));
    if constexpr (!InputNan) return rounded;
    return v != v ? UintVec{} + 0x7fc00000 : rounded;
  };
  const WideUint16Vec low = WideUint16Vec(round(a)), high = WideUint16Vec(round(b));
  return Vec(__builtin_shufflevector(low, high, int(2 * Lane + 1)...));
}
#endif

// Tails: fewer elements than a vector has -----------------------------------------------------------------------------

// Copies fewer bytes than twice `Chunk`, in chunks whose sizes are powers of two.
template <int Chunk>
ONEPASS_INLINE void copy_bytes(char* to, const char* from, int64_t bytes) {
  if constexpr (Chunk >= 2) {
    const int64_t now = bytes & Chunk;
    if (now) std::memcpy(to, from, Chunk);
    copy_bytes<Chunk / 2>(to + now, from + now, bytes);
  }
}
// Copies up to a vector's elements.
template <class T>
ONEPASS_INLINE void copy_tail(T* to, const T* from, int64_t count) {
  constexpr int most = std::min(kWidth * int(sizeof(T)), int(sizeof(Vec)));
  copy_bytes<most>(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), count * int64_t(sizeof(T)));
}

alignas(64) inline constexpr int32_t kLaneMasks[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

// All bits set in the first `count` lanes.
ONEPASS_INLINE IntVec lane_mask(int64_t count) {
  IntVec mask;
  std::memcpy(&mask, kLaneMasks + 16 - count, sizeof mask);
  return mask;
}

// Reads some bytes as a number.
template <class Bits>
ONEPASS_INLINE uint64_t load_bits(const void* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}
#if defined(__AVX2__)
// The first `count` 16-bit elements, fewer than eight, and zeros. (To load a vector from smaller stores that were just
// made would wait for them.)
ONEPASS_INLINE __m128i load_few(const void* from, int64_t count) {
  const char* const begin = static_cast<const char*>(from);
  const int64_t bytes = 2 * count;
  uint64_t low = 0, high = 0;
  if (bytes >= 8) {
    low = load_bits<uint64_t>(begin);
    if (bytes > 8) high = load_bits<uint64_t>(begin + bytes - 8) >> (8 * (16 - bytes));
  } else if (bytes >= 4) {
    low = load_bits<uint32_t>(begin) | load_bits<uint32_t>(begin + bytes - 4) << (8 * (bytes - 4));
  } else if (bytes) {
    low = load_bits<uint16_t>(begin);
  }
  return _mm_set_epi64x(int64_t(high), int64_t(low));
}
#endif

// Loads the first `count` elements, fewer than a vector has. The other lanes are `fill`.
template <class T>
ONEPASS_INLINE Vec load_tail(const T* from, int64_t count, float fill) {
  const IntVec mask = lane_mask(count);
#if defined(__AVX512F__)
  const __mmask16 bits = __mmask16((1u << count) - 1);
  if constexpr (std::is_same_v<T, float>) {
    return Vec(_mm512_mask_loadu_ps(__m512(broadcast(fill)), bits, from));
  } else {
    return mask ? widen<T>(_mm256_maskz_loadu_epi16(bits, from)) : broadcast(fill);
  }
#elif defined(__AVX__)
  if constexpr (std::is_same_v<T, float>) {
    const Vec v = Vec(_mm256_maskload_ps(from, __m256i(mask)));
    return mask ? v : broadcast(fill);
  }
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) return mask ? widen<T>(load_few(from, count)) : broadcast(fill);
#endif
  T whole[kWidth] = {};
  copy_tail(whole, from, count);
  return mask ? load_vector(whole) : broadcast(fill);
}
// Loads the first `count` doubles. The other lanes are 0.
ONEPASS_INLINE V<double> load_tail(const double* from, int64_t count) {
#if defined(__AVX512F__)
  return V<double>(_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from));
#elif defined(__AVX__)
  return V<double>(_mm256_maskload_pd(from, __m256i(lane_mask(2 * count))));
#else
  V<double> v{};
  copy_tail(reinterpret_cast<double*>(&v), from, count);
  return v;
#endif
}
template <bool InputNan = false, class T>
ONEPASS_INLINE void store_tail(T* to, int64_t count, Vec v) {
#if defined(__AVX512F__)
  const __mmask16 bits = __mmask16((1u << count) - 1);
  const auto converted = convert<T, InputNan>(v);
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, bits, __m512(converted));
  } else {
    _mm256_mask_storeu_epi16(to, bits, __m256i(converted));
  }
  return;
#elif defined(__AVX__)
  // Masked stores are much slower than stores of parts of a vector.
  if constexpr (std::is_same_v<T, float>) {
    __m128 rest = _mm256_castps256_ps128(__m256(v));
    if (count & 4) _mm_storeu_ps(to, rest), to += 4, rest = _mm256_extractf128_ps(__m256(v), 1);
    if (count & 2) _mm_storel_pi(reinterpret_cast<__m64*>(to), rest), to += 2, rest = _mm_movehl_ps(rest, rest);
    if (count & 1) _mm_store_ss(to, rest);
    return;
  }
#endif
  T whole[kWidth];
  store_vector<InputNan>(whole, v);
  copy_tail(to, whole, count);
}

// Several vectors -----------------------------------------------------------------------------------------------------

// Loads 1, 2 or 4 adjacent vectors, or, with a count, the first elements of one vector, whose other lanes become
// `fill`. Pairs of vectors of bfloat16 may be deinterleaved into elements of even and of odd index. This takes fewer
// steps, and the order does not matter if results are stored the same way or summed. (-O2, with which the baseline is
// compiled, keeps vectors in memory unless a pragma unrolls their loops.)
template <bool Deinterleave, class T, int K>
ONEPASS_INLINE void load_vectors(const T* from, Vec (&v)[K]) {
  if constexpr (Deinterleave && K > 1) {
    for (int k = 0; k < K; k += 2) {
      UintVec pairs;
      std::memcpy(&pairs, from + k * kWidth, sizeof pairs);
      v[k] = Vec(pairs << 16), v[k + 1] = Vec(pairs & 0xffff0000u);
    }
  } else {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) v[k] = load_vector(from + k * kWidth);
  }
}
template <bool Deinterleave, class T>
ONEPASS_INLINE void load_vectors(const T* from, Vec (&v)[1], int64_t count, float fill = 0) {
  v[0] = load_tail(from, count, fill);
}

// Stores vectors in the same way. `TiesUp` as in interleave_bfloat16.
template <bool Deinterleave, bool TiesUp, bool Streaming = false, bool InputNan = false, class T, int K>
ONEPASS_INLINE void store_vectors(T* to, const Vec (&v)[K]) {
  if constexpr (Deinterleave && K > 1) {
    for (int k = 0; k < K; k += 2) {
      const Vec packed = Vec(interleave_bfloat16<TiesUp>(v[k], v[k + 1]));
      float* const pair = reinterpret_cast<float*>(to + k * kWidth);
      if constexpr (Streaming) {
        stream_vector(pair, packed);
      } else {
        std::memcpy(static_cast<void*>(pair), &packed, sizeof packed);
      }
    }
#if defined(__AVX2__)
  } else if constexpr (std::is_same_v<T, bfloat16> && K % 2 == 0) {
#pragma GCC unroll 2
    for (int k = 0; k < K; k += 2) {
      const Vec packed = pack_bfloat16<TiesUp, InputNan>(v[k], v[k + 1], std::make_index_sequence<2 * kWidth>());
      float* const pair = reinterpret_cast<float*>(to + k * kWidth);
      if constexpr (Streaming) {
        stream_vector(pair, packed);
      } else {
        std::memcpy(static_cast<void*>(pair), &packed, sizeof packed);
      }
    }
#endif
  } else {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      if constexpr (Streaming) {
        stream_vector<InputNan>(to + k * kWidth, v[k]);
      } else {
        store_vector<InputNan>(to + k * kWidth, v[k]);
      }
    }
  }
}
template <bool Deinterleave, bool TiesUp, bool Streaming = false, bool InputNan = false, class T>
ONEPASS_INLINE void store_vectors(T* to, const Vec (&v)[1], int64_t count) {
  store_tail<InputNan>(to, count, v[0]);
}

// Calls work(std::true_type()) if stores are to be streamed, and else work(std::false_type()).
template <class Work>
ONEPASS_INLINE void with_streaming(bool streaming, Work work) {
  if (kHasStreamingStores && streaming) return work(std::true_type());
  work(std::false_type());
}

// Scratch memory ------------------------------------------------------------------------------------------------------

constexpr int64_t kScratch = 131072;  // floats: 512 KB fit into the L2 cache of a core

// Memory of the calling thread. It is freed when the thread ends.
inline float* scratch() {
  struct Buffer {
    float* floats = static_cast<float*>(std::aligned_alloc(64, kScratch * sizeof(float)));
    Buffer() {
      if (!floats) throw std::bad_alloc();
    }
    ~Buffer() { std::free(floats); }
  };
  thread_local Buffer buffer;
  return buffer.floats;
}

}  // namespace onepass::ONEPASS_ISA
