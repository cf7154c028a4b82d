// scored_scratch.h: the input and the softmax epilogue that the kernels of plain rows and tiles use if their input is
// scores in the scratch memory.
#pragma once

#include "rows_simd.h"
#include "scored_walk.h"

namespace onepass::ONEPASS_ISA {

// Reads scores from the scratch memory, and prefetches the elements and the bias of the next scores.
template <class A>
struct ScoreReader : Input<A, A> {
  const char *x = nullptr, *bias = nullptr;  // addresses for score 0
  int64_t x_size = 0, bias_size = 0;         // of an element; 0 if nothing is prefetched

  explicit ScoreReader(const A* scores = nullptr) : Input<A, A>{scores} {}
  // The `count` scores are followed by those of the row at the beginning of the run `next`.
  ScoreReader(const A* scores, const ScoredProblem& p, const ScoredRun& next, int64_t count) : ScoreReader(scores) {
    x_size = size_of(p.in), x = static_cast<const char*>(p.data[kInput]) + (next.at(kInput) - count) * x_size;
    if (!p.has(kBias)) return;
    bias_size = size_of(p.bias_type);
    bias = static_cast<const char*>(p.data[kBias]) + (next.at(kBias) - count) * bias_size;
  }
  ONEPASS_INLINE void fetch(int64_t i, int64_t count) const {
    for (int64_t j = i * x_size; j < (i + count) * x_size; j += kLine) __builtin_prefetch(x + j);
    for (int64_t j = i * bias_size; j < (i + count) * bias_size; j += kLine) __builtin_prefetch(bias + j);
  }
};

// The softmax of scores. Scores are rounded themselves, so 1 / l in two parts would not help. Slopes and biases put
// many scores far below the maximum. If products are subnormal, an Intel core takes 150 cycles for a vector that has
// one. So subnormal results are computed as integers, which are their bits.
struct ScoredSoftmaxEpilogue : SoftmaxEpilogue {
  static ScoredSoftmaxEpilogue of(float m, double l) { return {SoftmaxEpilogue::of(m, l)}; }

  template <class Y, int K>
  ONEPASS_INLINE void apply(Vec (&e)[K]) const {
    const Vec factor = sizeof(Y) == 2 ? high : high + low;
#if defined(__AVX512F__)
    // A power of two whose product with the factor is the least normal number, or less than twice as much.
    const UintVec least = (128u << 23) - (UintVec(factor) & 0x7f800000);
    __mmask16 far[K], any = 0;
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {  // 0 is not far
      far[k] = _mm512_cmplt_epu32_mask(__m512i(UintVec(e[k]) - 1), __m512i(least - 1));
      any |= far[k];
    }
    if (__builtin_expect(any != 0, 0)) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) {
        const __m512i bits = _mm512_cvtps_epi32(__m512(e[k] * (factor * 0x1p85f) * 0x1p64f));
        e[k] = Vec(_mm512_mask_mov_epi32(__m512i(_mm512_maskz_mul_ps(__mmask16(~far[k]), __m512(e[k]), __m512(factor))),
                                         far[k], bits));
      }
      return;
    }
#endif
    for (Vec& each : e) each *= factor;
  }
};

}  // namespace onepass::ONEPASS_ISA
