// types.cuh: element types, their conversion to and from the accumulator, and vector accesses. No CUDA headers: NVRTC
// needs none of them, so a user needs no toolkit.
#pragma once

typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

template <class T>
struct Accumulator {
  typedef float type;
};
template <>
struct Accumulator<double> {
  typedef double type;
};

__device__ inline double to_wide(double v) { return v; }
__device__ inline float to_wide(float v) { return v; }
__device__ inline float to_wide(half_t v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}
__device__ inline float to_wide(bfloat16_t v) { return __uint_as_float((uint32_t)v.bits << 16); }

template <class T>
__device__ inline T narrow(float v);
template <>
__device__ inline float narrow<float>(float v) {
  return v;
}
template <>
__device__ inline double narrow<double>(float v) {
  return v;
}
template <>
__device__ inline half_t narrow<half_t>(float v) {
  half_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
  return h;
}
template <>
__device__ inline bfloat16_t narrow<bfloat16_t>(float v) {
  bfloat16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
  return h;
}
template <class T>
__device__ inline T narrow(double v) {
  return narrow<T>((float)v);
}  // through float, as torch casts
template <>
__device__ inline double narrow<double>(double v) {
  return v;
}

// Is every value of In also one of Out? If not, torch's `dtype=` rounds the input to Out before the function.
template <class In, class Out>
struct Widens {
  static const bool value = false;
};
template <class T>
struct Widens<T, T> {
  static const bool value = true;
};
template <class T>
struct Widens<T, double> {
  static const bool value = true;
};
template <>
struct Widens<double, double> {
  static const bool value = true;
};
template <>
struct Widens<half_t, float> {
  static const bool value = true;
};
template <>
struct Widens<bfloat16_t, float> {
  static const bool value = true;
};

// The value of an input element in the accumulator of the call, rounded through Out on the way where Out is narrower.
template <class In, class Out>
__device__ inline typename Accumulator<Out>::type load_value(In raw) {
  if (Widens<In, Out>::value) return to_wide(raw);
  return to_wide(narrow<Out>(to_wide(raw)));
}

// `Count` elements moved by one access.
template <class T, int Count>
struct alignas(sizeof(T) * Count) Vector {
  T at[Count];
};

// Loads a vector. `Once`: it will not be read again, so the L2 cache may give its place away first. That is worth 1 to
// 2 us where a few rows are read and written in turn, and costs 3% where many are.
template <class T, int Count, bool Once>
__device__ inline Vector<T, Count> load(const void* at) {
  typedef Vector<T, Count> Result;
  if constexpr (Once && sizeof(Result) == 16) {
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

// Stores a vector by one access. By hand: beside a branch that stores the same values one by one, the compiler takes
// the vector apart.
template <class T, int Count>
__device__ inline void store(void* at, Vector<T, Count> vector) {
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

// One of two half values in a register, by another instruction than to_wide takes: ptxas would else keep what it has
// widened for one pass until the next, in twice the registers.
template <class T>
__device__ inline float widen_again(uint32_t pair, int which) {
  return to_wide(T{(uint16_t)(pair >> which * 16)});
}
template <>
__device__ inline float widen_again<bfloat16_t>(uint32_t pair, int which) {
  float wide;
  asm("prmt.b32 %0, %1, 0, %2;" : "=f"(wide) : "r"(pair), "r"(which ? 0x3244 : 0x1044));
  return wide;
}

// Two half values in a register: the first in the low bits.
template <class T>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<half_t>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ inline uint32_t pack<bfloat16_t>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Of each half of two pairs: the sum, rounded to the half type.
template <class T>
__device__ inline uint32_t add_pairs(uint32_t a, uint32_t b);
template <>
__device__ inline uint32_t add_pairs<half_t>(uint32_t a, uint32_t b) {
  asm("add.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <>
__device__ inline uint32_t add_pairs<bfloat16_t>(uint32_t a, uint32_t b) {
  asm("fma.rn.bf16x2 %0, %0, %2, %1;" : "+r"(a) : "r"(b), "r"(0x3f803f80));  // a * 1 + b
  return a;
}

// The larger, or smaller, of each half of two pairs. A NaN is dropped where the other is none.
template <class T>
__device__ inline uint32_t max_of_pairs(uint32_t a, uint32_t b);
template <class T>
__device__ inline uint32_t min_of_pairs(uint32_t a, uint32_t b);
template <>
__device__ inline uint32_t max_of_pairs<half_t>(uint32_t a, uint32_t b) {
  asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <>
__device__ inline uint32_t min_of_pairs<half_t>(uint32_t a, uint32_t b) {
  asm("min.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <>
__device__ inline uint32_t max_of_pairs<bfloat16_t>(uint32_t a, uint32_t b) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
template <>
__device__ inline uint32_t min_of_pairs<bfloat16_t>(uint32_t a, uint32_t b) {
  asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
