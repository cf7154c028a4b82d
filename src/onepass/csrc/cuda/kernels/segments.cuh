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

// A row, or a part of one.
struct RowItems {
  int64_t segment, begin;  // the first item
  int count;               // items
};

// A row by its offsets; of offsets that are none, one of nothing.
__device__ inline RowItems row_of(const SegmentMap& map, int64_t segment, int64_t begin, int64_t end) {
  const bool is_valid = begin >= 0 && begin <= end && end <= map.items;
  return {segment, is_valid ? begin : 0, is_valid ? (int)min(end - begin, (int64_t)0x7fffffff) : 0};
}

__device__ inline RowItems row_of(const SegmentMap& map, int64_t segment) {
  return row_of(map, segment, offset_of(map, segment), offset_of(map, segment + 1));
}

// The first segments that begin at some items or after them. All lanes of a warp look for all of them at the same time;
// offsets that fall give some segment.
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

// What a block of the kernel of tiles says of the rows that it passed over.
constexpr int kHasMiddling = 1, kHasLong = 2;
