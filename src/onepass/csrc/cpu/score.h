// score.h: the input of a call as kernels read it, and the score of an element, which is computed before its row is
// reduced. For softmin the score is minus the element: the sign is changed in a copy, of a tile or of a row.
#pragma once

#include "simd.h"

namespace onepass::ONEPASS_ISA {

inline bool negates(const Problem& call) { return call.function == Function::softmin; }
// A score is its element times a constant, the slope, which is also its derivative.
inline double score_slope(const Problem& call) { return negates(call) ? -call.factor : call.factor; }

// Copies elements with the other sign.
template <class X>
void copy_negated(const X* from, X* to, int64_t count) {
  using Bits = std::conditional_t<sizeof(X) == 8, uint64_t, std::conditional_t<sizeof(X) == 4, uint32_t, uint16_t>>;
  constexpr int64_t lanes = int64_t(sizeof(Vec) / sizeof(X));
  constexpr Bits sign = Bits(Bits(1) << (8 * sizeof(X) - 1));
  const auto copy = [=](int64_t i, auto bits) {
    std::memcpy(&bits, from + i, sizeof bits);
    bits ^= sign;
    store_as(to + i, bits);
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    __builtin_prefetch(from + i + 8 * lanes);
    copy(i, V<Bits>());
  }
  for (; i < count; ++i) copy(i, Bits());
}

// Y is the type of the result. If it does not hold all values of X, the input is rounded to Y first, as in torch.
template <class From, class Y>
struct Input {
  using X = From;
  static constexpr bool kIsPlain = kIsLossless<X, Y>;
  static constexpr bool kDeinterleave = std::is_same_v<X, bfloat16> && std::is_same_v<Y, bfloat16>;
  const X* x;

  ONEPASS_INLINE Input operator+(int64_t offset) const { return {x + offset}; }
  ONEPASS_INLINE Acc<Y> operator[](int64_t i) const { return round_through<Y>(x[i]); }
  // Loads vectors from element i on (see load_vectors). Lanes from `count` on are -inf.
  template <int K, class... Count>
  ONEPASS_INLINE void load(int64_t i, Vec (&v)[K], Count... count) const {
    if constexpr (sizeof...(count)) {
      load_vectors<kDeinterleave>(x + i, v, count..., -kInf<float>);
    } else {
      load_vectors<kDeinterleave>(x + i, v);
    }
    for (Vec& each : v) {
      if constexpr (!kIsLossless<X, Y>) {
        Y rounded[kWidth];
        store_vector<true>(rounded, each);
        each = load_vector(rounded);
      }
    }
  }
  ONEPASS_INLINE Vec load1(int64_t i) const {
    Vec v[1];
    load(i, v);
    return v[0];
  }
  // Prefetches `count` elements, from element i on.
  ONEPASS_INLINE void fetch(int64_t i, int64_t count) const {
    constexpr int64_t line = 64 / int64_t(sizeof(X));
    for (int64_t j = 0; j < count; j += line) __builtin_prefetch(x + i + j);
  }
};

}  // namespace onepass::ONEPASS_ISA
