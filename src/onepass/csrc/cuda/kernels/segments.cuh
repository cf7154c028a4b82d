// segments.cuh: what rows of unequal length are computed by, however threads take them.
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

// What a gradient sums over a row.
template <class C, class A>
__device__ inline A term_of(A y, A grad) {
  if constexpr (C::kSums) return C::Policy::Grad::template sum_term<false>(y, grad);
  return y;
}

// What becomes of an element of a row, whose state or numbers are known.
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
  // From exp(value - m), where results are made of that.
  __device__ A from_exp(A exp) const {
    if constexpr (C::ElementEpilogue::kTakesExp) return epilogue.from_exp(exp);
    return exp;
  }
};
