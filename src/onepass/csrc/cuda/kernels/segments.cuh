// segments.cuh: the arithmetic of rows of unequal length, which all kernels of segments share: scores, results,
// gradients, and the search for the segment of an item.
#pragma once

#include "division.cuh"
#include "epilogue.cuh"
#include "segment_map.cuh"
#include "warp_reduce.cuh"

__device__ inline int64_t index_at(const SegmentMap& map, const void* indices, int64_t at) {
  return map.has_wide_indices ? ((const int64_t*)indices)[at] : (int64_t)((const int*)indices)[at];
}
__device__ inline int64_t offset_of(const SegmentMap& map, int64_t segment) {
  return index_at(map, map.offsets, segment);
}

template <class C>
__device__ inline typename C::A factor_of(const SegmentMap& map) {
  return C::of_type(typename C::A(), map.factor, map.factor_f32);
}
template <class C>
__device__ inline typename C::A score_of(const SegmentMap& map, typename C::In x, typename C::Second bias) {
  typedef typename C::A A;
  const A s = to_acc(x) * factor_of<C>(map);
  if constexpr (C::has(kSegmentBias)) return s + A(to_acc(bias));
  return s;
}

// The term that an element adds to the sum of a gradient.
template <class C, class A>
__device__ inline A term_of(A y, A grad) {
  if constexpr (C::kSums) return C::Policy::Grad::template sum_term<false>(y, grad);
  return y;
}

// Computes the result of an element of a row from the row's state or, for logsumexp's gradient, from its numbers.
template <class C>
struct Finish {
  typedef typename C::A A;
  typedef typename C::Out Out;
  A factor, sum, lse, grad;
  typename C::ElementEpilogue epilogue;

  Finish() = default;
  __device__ Finish(const SegmentMap& map, State<A> state) : factor(factor_of<C>(map)), sum(state.l) {
    if constexpr (!C::kIsBackward && !C::kReduces) epilogue = typename C::ElementEpilogue(state);
  }
  __device__ A operator()(A value, A other) const {
    if constexpr (C::kPointwise)
      return factor * C::Policy::Grad::template result<Out>(value, grad, lse);
    else if constexpr (C::kSums)
      return factor * C::Policy::Grad::template result<Out>(value, other, sum);
    else if constexpr (!C::kReduces)
      return epilogue(value);
    return value;
  }
  // From exp(value - m), if results are computed from that.
  __device__ A from_exp(A exp) const {
    if constexpr (C::ElementEpilogue::kTakesExp) return epilogue.from_exp(exp);
    return exp;
  }
};

// Whether a row whose scores are all small can be reduced without its maximum. No exponential of such a row overflows
// or vanishes, and quotients and sums of exponentials are as accurate as with a maximum. Differences of logarithms are
// not.
template <class C>
constexpr bool kMayHaveNoMaxima =
    !C::kIsBackward && sizeof(typename C::A) == 4 && !is_same<typename C::Epilogue, StateEpilogue<typename C::Out>> &&
    C::ElementEpilogue::kTakesExp;
constexpr float kSmall = 60;  // 1e-26 < exp(-60), and the sum of 2^32 exp(60) is below 1e36

__device__ inline float larger_or_nan(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
// exp(v) for small v of either sign, if results have the type Out.
template <class Out>
__device__ inline float exp_of_small(float v) {
  const float t = v * kLog2e, e = exp2_(t);
  return sizeof(Out) == 2 ? e : fmaf(e, fmaf(t, -0.693147181f, v), e);  // corrected by the product's rounding error
}

// For each of the items `items`, finds the first segment that begins at or after it. All lanes of a warp search for all
// items together. If offsets are not sorted, it finds some segment.
template <int Count>
__device__ inline void find_segments(const SegmentMap& map, const int64_t (&items)[Count], int64_t (&found)[Count]) {
  const int lane = threadIdx.x % 32;
  int64_t high[Count];
  unroll<Count>([&](int i) { found[i] = 0, high[i] = map.segments; });
  for (bool is_done = false; !is_done;) {
    int64_t step[Count];
    bool is_less[Count];
    is_done = true;
    unroll<Count>([&](int i) {
      step[i] = max((high[i] - found[i] + 31) / 32, (int64_t)1);
      const int64_t at = found[i] + (lane + 1) * step[i] - 1;
      is_less[i] = at < high[i] && offset_of(map, at) < items[i];
    });
    unroll<Count>([&](int i) {
      const int passed = __popc(__ballot_sync(0xffffffffu, is_less[i]));
      high[i] = min(high[i], found[i] + (passed + 1) * step[i] - 1);
      found[i] = min(found[i] + passed * step[i], high[i]);
      is_done &= found[i] == high[i];
    });
  }
}
