// score.h: what happens to an element before its row is reduced: x -> score(x), of a vector or of a number. A score is
// made of the call that it belongs to, here and nowhere else, and goes with the input to whatever loads elements.
#pragma once

#include "simd.h"

namespace onepass::ONEPASS_ISA {

// Scores are monotone. `kDescends`: the largest score is that of the smallest element.
struct Identity {
  static constexpr bool kDescends = false;
  template <class V>
  ONEPASS_INLINE V operator()(V x) const {
    return x;
  }
};
struct Negate {
  static constexpr bool kDescends = true;
  template <class V>
  ONEPASS_INLINE V operator()(V x) const {
    return -x;
  }
};

// Calls use(score) with the score of a call. Each is its element times a constant, the slope, which is its derivative.
template <Function F, class Use>
void with_score(const Problem&, const Use& use) {
  use(std::conditional_t<F == Function::softmin, Negate, Identity>());
}
inline double score_slope(const Problem& call) {
  return call.function == Function::softmin ? -call.factor : call.factor;
}

// The input of a call as kernels read it: each load gives scores. Y is the type of the result: where it is narrower
// than X, torch rounds the input to it first.
template <class Score, class From, class Y>
struct Input {
  using X = From;
  static constexpr bool kDescends = Score::kDescends;
  static constexpr bool kIsPlain = std::is_same_v<Score, Identity> && kIsLossless<X, Y>;  // scores are the elements
  static constexpr bool kDeinterleave = std::is_same_v<X, bfloat16> && std::is_same_v<Y, bfloat16>;
  const X* x;
  Score score;

  ONEPASS_INLINE Input operator+(int64_t offset) const { return {x + offset, score}; }
  ONEPASS_INLINE Acc<Y> operator[](int64_t i) const { return score(round_through<Y>(x[i])); }
  // load_vectors from element i on. Lanes behind `count` have the score -inf.
  template <int K, class... Count>
  ONEPASS_INLINE void load(int64_t i, Vec (&v)[K], Count... count) const {
    if constexpr (sizeof...(count)) {
      load_vectors<kDeinterleave>(x + i, v, count..., kDescends ? kInf<float> : -kInf<float>);
    } else {
      load_vectors<kDeinterleave>(x + i, v);
    }
    for (Vec& each : v) {
      if constexpr (!kIsLossless<X, Y>) {
        Y rounded[kWidth];
        store_vector<true>(rounded, each);
        each = load_vector(rounded);
      }
      each = score(each);
    }
  }
  ONEPASS_INLINE Vec load1(int64_t i) const {
    Vec v[1];
    load(i, v);
    return v[0];
  }
  // Fetches the elements from element i on.
  ONEPASS_INLINE void fetch(int64_t i, int64_t count) const {
    constexpr int64_t line = 64 / int64_t(sizeof(X));
    for (int64_t j = 0; j < count; j += line) __builtin_prefetch(x + i + j);
  }
};

}  // namespace onepass::ONEPASS_ISA
