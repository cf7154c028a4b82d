// scaled_exp.h: numbers times exponentials, a * exp(v), which gradients are made of. v is at most 0, -inf, or NaN.
#pragma once

#include "exp_simd.h"

namespace onepass::ONEPASS_ISA {

#if defined(__AVX512F__)
// A factor of exponentials. Its exponent goes into theirs, so that a product takes one multiplication and is rounded
// once; it leaves 2^-64 in the factor, so that an exponential may be that much smaller than any number.
struct Factor {
  Floats number;
  Origin from;

  static ONEPASS_INLINE Factor of(Floats a) {
    const Ints field = (Ints(a) >> 23) & 255;
    Ints exponent = field < 127 + 63 ? field - (127 - 64) : Ints{} + 127;
    exponent = (field == 0) | (field == 255) ? Ints{} : exponent;
    const Floats e = __builtin_convertvector(exponent, Floats);
    return {Floats(Ints(a) - (exponent << 23)), {Floats{}, (e + 127.0f) * -kLn2, e * 16.0f + 12582912.0f}};
  }
};

// A whole table of 2^(j / 16) is one vector, and one step finds the numbers of all lanes in it: the polynomial of what
// is left has two or three terms for four to six. These are the bits, less j in the place of the exponent's sixteenths:
// what adds (16 k + j) there makes 2^k of it.
alignas(64) inline constexpr int32_t kPowers[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// Good to 2^-21 (Half) or 1 ulp. Steps as in exp_simd.h, `f` in sixteenths.
template <bool Half, int K>
ONEPASS_INLINE void powers(Floats (&v)[K], const Origin& from) {
  constexpr float scale = kLog2e * 16, part = 1.0f / 16;
  Ints table;
  std::memcpy(&table, kPowers, sizeof table);
  Floats f[K], t[K], p[K];
#define ONEPASS_EACH for (int k = 0; k < K; ++k)
  ONEPASS_EACH v[k] = larger(from.low, v[k]);
  ONEPASS_EACH t[k] = fused(v[k], all(scale), from.magic);
  ONEPASS_EACH f[k] = fused(v[k], all(scale), from.magic - t[k]);
  if constexpr (Half) {
    ONEPASS_EACH p[k] = f[k] * (0.24023555f * part * part) + 0.69318783f * part;
  } else {
    ONEPASS_EACH f[k] = v[k] * (1.92596298909109e-8f * 16) + f[k];
    ONEPASS_EACH p[k] = f[k] * (0.05550595f * part * part * part) + 0.24023429f * part * part;
    ONEPASS_EACH p[k] = p[k] * f[k] + 0.6931472f * part;
  }
  ONEPASS_EACH p[k] *= f[k];
  ONEPASS_EACH v[k] = Floats(Ints(_mm512_permutexvar_epi32(__m512i(t[k]), __m512i(table))) + (Ints(t[k]) << 19));
  ONEPASS_EACH v[k] = p[k] * v[k] + v[k];
#undef ONEPASS_EACH
}
#else
struct Factor {
  Floats number;
  Origin from;
  static ONEPASS_INLINE Factor of(Floats a) { return {a, {}}; }
};

// In differences of products terms cancel, so that the shortest polynomial would show.
template <bool Half, int K>
ONEPASS_INLINE void powers(Floats (&v)[K], const Origin&) {
  std::conditional_t<Half, Coarse<4>, Precise>::of(v);
  for (Floats& each : v) each *= kDrop;
}
#endif

}  // namespace onepass::ONEPASS_ISA
