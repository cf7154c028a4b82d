// parts.cuh: what threads and blocks that share columns have of each, how it is merged, and how blocks tell it by
// messages.
#pragma once

#include "grid.cuh"
#include "place.cuh"
#include "warp.cuh"

// A value from the lanes of a warp that have the same number below `from`: `merge` is told the distance of two.
template <class T, class Merge>
__device__ inline T over_lanes(T value, int from, Merge merge) {
  for (int mask = 16; mask >= from; mask /= 2) value = merge(value, shuffle(value, mask));
  return value;
}

template <class A>
struct alignas(2 * sizeof(A)) PairOf {
  A m, l;
};

template <class A, class L>
__device__ inline L begin_sum(A value) {
  if constexpr (sizeof(L) == sizeof(A))
    return value;
  else
    return {value, 0};
}

// What parts of columns are, and how they are merged: `over` has the parts number 0, 1, ... of one column, of which the
// lanes of a group take some each.
template <class A, class L>
struct States {
  typedef PairOf<A> Part;
  typedef A Scalar;
  typedef L Sum;
  static constexpr bool kTops = true;
  static __device__ Part of(A top, A sum) { return {top, sum}; }
  static __device__ Part nothing() { return {-INFINITY_, 0}; }
  template <int Count>
  static __device__ Part two(Part before, const Part (&parts)[Count]) {
    A top = before.m;
#pragma unroll
    for (int i = 0; i < Count; ++i) top = max_(top, parts[i].m);
    L sum = lowered(before, top);
#pragma unroll
    for (int i = 0; i < Count; ++i) sum = add(sum, lowered(parts[i], top));
    return {top, value_of(sum)};
  }
  static __device__ Part of_lanes(Part part, int from) {
    const A top = over_lanes(part.m, from, [](A a, A b) { return max_(a, b); });
    return {top, value_of(over_lanes(lowered(part, top), from, [](L a, L b) { return add(a, b); }))};
  }

 private:
  // The smaller of the two: where both are infinite their difference is no number.
  static __device__ L lowered(Part part, A top) {
    return scaled(begin_sum<A, L>(part.l), exp_to_add(min_(part.m - shift(top))));
  }
  static __device__ float min_(float v) { return fminf(v, 0.0f); }
  static __device__ double min_(double v) { return fmin(v, 0.0); }
};
template <class A, class L>
struct Sums {
  typedef A Part;
  typedef A Scalar;
  typedef L Sum;
  static constexpr bool kTops = false;
  static __device__ Part of(A, A sum) { return sum; }
  static __device__ Part nothing() { return 0; }
  template <int Count>
  static __device__ Part two(Part before, const Part (&parts)[Count]) {
    return value_of(
        add(begin_sum<A, L>(before), begin_sum<A, L>(plain_sum<Count, 0>([&](int i) { return parts[i]; }))));
  }
  static __device__ Part of_lanes(Part part, int from) {
    return value_of(over_lanes(begin_sum<A, L>(part), from, [](L a, L b) { return add(a, b); }));
  }
};

// What the blocks of a group tell each other of a column.
template <class A>
struct Told {
  Message message;
  __device__ void write(PairOf<A> part, uint32_t turn) {
    if constexpr (sizeof(A) == 8)
      message.write(part.m, Total<double>{part.l, 0}, turn);
    else
      message.write(part.m, (double)part.l, turn);
  }
  __device__ void write(A part, uint32_t turn) { write(PairOf<A>{A(0), part}, turn); }
  __device__ bool read(PairOf<A>* part, uint32_t turn) const {
    if constexpr (sizeof(A) == 8) {
      Total<double> l;
      const bool there = message.read(&part->m, &l, turn);
      return part->l = l.sum, there;
    } else {
      return message.read(&part->m, &part->l, turn);
    }
  }
  __device__ bool read(A* part, uint32_t turn) const {
    PairOf<A> pair;
    const bool there = read(&pair, turn);
    return *part = pair.l, there;
  }
};
