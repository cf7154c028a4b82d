// types.cuh: element types, their conversion to and from the accumulator's type, and vector loads and stores. "Half
// types" are float16 and bfloat16. No CUDA header is included: NVRTC needs none, so a user needs no CUDA toolkit.
#pragma once

typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

template <bool Condition, class Then, class Else>
struct Conditional {
  typedef Then type;
};
template <class Then, class Else>
struct Conditional<false, Then, Else> {
  typedef Else type;
};

// Calls f(0), ..., f(Count - 1), without a loop.
template <int Count, class F>
__device__ inline void unroll(F f) {
#pragma unroll
  for (int i = 0; i < Count; ++i) f(i);
}

struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

// The type of the arithmetic on elements of type T (the accumulator's type).
template <class T>
using AccType = typename Conditional<is_same<T, double>, double, float>::type;

__device__ inline double to_acc(double v) { return v; }
__device__ inline float to_acc(float v) { return v; }
__device__ inline float to_acc(half_t v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}
__device__ inline float to_acc(bfloat16_t v) { return __uint_as_float((uint32_t)v.bits << 16); }

// Rounds to T. For a half type, a double is first rounded to float, as torch does.
template <class T, class A>
__device__ inline T from_acc(A v) {
  if constexpr (sizeof(T) > 2) {
    return T(v);
  } else {
    T half;
    if constexpr (is_same<T, half_t>)
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"((float)v));
    else
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half.bits) : "f"((float)v));
    return half;
  }
}

// Whether Out holds every value of In. If it does not, torch's `dtype=` rounds the input to Out before the function.
template <class In, class Out>
constexpr bool is_lossless = is_same<In, Out> || is_same<Out, double> || (sizeof(In) == 2 && is_same<Out, float>);

// The value of an input element in the accumulator's type of Out. It is rounded to Out first if Out loses bits of it.
template <class Out, class In>
__device__ inline AccType<Out> round_through(In raw) {
  if (is_lossless<In, Out>) return to_acc(raw);
  return to_acc(from_acc<Out>(to_acc(raw)));
}

// `Count` elements that one instruction loads or stores.
template <class T, int Count>
struct alignas(sizeof(T) * Count) Vector {
  T at[Count];
};

// Loads a vector. `EvictFirst` tells the L2 cache to evict it first, because it is not read again. That saves 1 to 2 us
// if a few rows are read and written in turn, and costs 3% if there are many rows.
template <class T, int Count, bool EvictFirst>
__device__ inline Vector<T, Count> load_vector(const void* at) {
  typedef Vector<T, Count> Result;
  if constexpr (EvictFirst && sizeof(Result) == 16) {
    uint32_t w[4];
    asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(at));
    Result result;
    memcpy(&result, w, sizeof(w));
    return result;
  } else {
    return *reinterpret_cast<const Result*>(at);
  }
}

// Prefetches the bytes at a global address into the L2 cache.
__device__ inline void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Stores a vector with one instruction. It is PTX because the compiler splits the vector store if another branch stores
// the same values one by one.
template <class T, int Count>
__device__ inline void store_vector(void* at, Vector<T, Count> vector) {
  constexpr int kBytes = sizeof(vector);
  if constexpr (kBytes == 16 || kBytes == 8) {
    uint32_t words[kBytes / 4];
    memcpy(words, &vector, kBytes);
    if constexpr (kBytes == 16) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                   "r"(words[3])
                   : "memory");
    } else {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(words[0]), "r"(words[1]) : "memory");
    }
  } else {
    *reinterpret_cast<Vector<T, Count>*>(at) = vector;
  }
}

// A half2 is a register that holds two elements of 2 bytes, the first one in the low bits.

template <class T>
__device__ inline T get_half(uint32_t half2, int which) {
  return T{(uint16_t)(half2 >> which * 16)};
}

// Element i of a vector, whose registers may be half2.
template <class T, int Count>
__device__ inline T get_element(const Vector<T, Count>& vector, int i) {
  return vector.at[i];
}
template <class T, int Count>
__device__ inline T get_element(const Vector<uint32_t, Count>& vector, int i) {
  return get_half<T>(vector.at[i / 2], i % 2);
}

// The type in which a vector is loaded: two elements per register for half types.
template <class T, int Count>
struct HalfWords {
  typedef
      typename Conditional<sizeof(T) == 2 && Count % 2 == 0, Vector<uint32_t, (Count + 1) / 2>, Vector<T, Count>>::type
          Type;
};

// Converts one element of a half2, with another instruction than to_acc. If both used the same instruction, ptxas would
// keep the converted elements of the first pass for the second one, in twice the registers.
template <class T>
__device__ inline float reconvert(uint32_t half2, int which) {
  if constexpr (is_same<T, half_t>) return to_acc(get_half<T>(half2, which));
  float wide;
  asm("prmt.b32 %0, %1, 0, %2;" : "=f"(wide) : "r"(half2), "r"(which ? 0x3244 : 0x1044));
  return wide;
}

template <class T>
__device__ inline uint32_t pack_half2(float low, float high) {
  uint32_t half2;
  if constexpr (is_same<T, half_t>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(half2) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(half2) : "f"(high), "f"(low));
  return half2;
}

// Adds two half2 element by element, and rounds the sums to T.
template <class T>
__device__ inline uint32_t add_half2(uint32_t a, uint32_t b) {
  if constexpr (is_same<T, half_t>)
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  else
    asm("fma.rn.bf16x2 %0, %0, %2, %1;" : "+r"(a) : "r"(b), "r"(0x3f803f80));  // a * 1 + b
  return a;
}

// The minima, or maxima, of two half2, element by element. If one element is a NaN, the result is the other.
template <class T>
__device__ inline uint32_t min_half2(uint32_t a, uint32_t b) {
  if constexpr (is_same<T, half_t>)
    asm("min.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  else
    asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <class T>
__device__ inline uint32_t max_half2(uint32_t a, uint32_t b) {
  if constexpr (is_same<T, half_t>)
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  else
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
