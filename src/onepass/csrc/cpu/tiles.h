// tiles.h: a tile is some hundred rows, one row per lane, `depth` steps deep, as floats or doubles in the scratch
// memory of a thread. How a tile is loaded and stored depends only on strides:
//
//   columns  the rows lie side by side: the vectors of a step are copied as they are
//   parts    a few long rows: a lane has some steps of a row at a fixed distance, so that the elements of a slice keep
//            their order in memory; the states of the lanes of a row are merged
//   slices   short rows: a lane has a slice, and blocks of elements are transposed in registers
//
// A slice is `columns` rows that lie side by side in memory (or one row), step after step; a step is one element of
// each.
#pragma once

#include "dispatch.h"
#include "exp_simd.h"
#include "plan.h"
#include "score.h"

namespace onepass::ONEPASS_ISA {

// A tile has groups of `depth` steps of `across` vectors: vector w of step i of group g is at [(g * depth + i) * across
// + w]. Slices have one group for each kLanes slices. Columns and parts have one group.
struct TileShape {
  int64_t groups, depth, across;
  int64_t vectors() const { return groups * depth * across; }
  int64_t sequences() const { return groups * across; }
};

// Runs of adjacent elements, from and to floats or doubles ------------------------------------------------------------

// Loads the scores of a run of adjacent elements. They are stored as whole vectors, the last of which is filled up with
// zeros. The elements `ahead` of these are prefetched.
template <class In, class A>
ONEPASS_INLINE void load_run(const In& x, int64_t count, A* to, int64_t ahead = 0) {
  int64_t i = 0;
  constexpr int64_t line = kLine / int64_t(sizeof(typename In::X));
  if constexpr (std::is_same_v<A, float>) {
    for (; i + kUnroll <= count; i += kUnroll) {
      if (ahead) {
        for (int64_t k = 0; k < kUnroll; k += line) __builtin_prefetch(x.x + i + k + ahead);
      }
      for (int64_t k = 0; k < kUnroll; k += kWidth) store_vector(to + i + k, x.load1(i + k));
    }
    for (; i + kWidth <= count; i += kWidth) store_vector(to + i, x.load1(i));
    if (i < count) {
      Vec v[1];
      x.load(i, v, count - i);
      store_vector(to + i, lane_mask(count - i) ? v[0] : Vec{});
    }
  } else {
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) to[k] = x[k];
    for (i = count; i % kLanes<A>; ++i) to[i] = 0;
  }
}

// Stores results as a run. What is streamed are whole lines.
template <bool InputNan, class Y, class A>
ONEPASS_INLINE void store_run(Y* y, int64_t count, const A* from, bool streaming) {
  if constexpr (std::is_same_v<A, float> && !std::is_same_v<Y, double>) {
    int64_t i = 0;
    const auto store_up_to = [&](int64_t end) __attribute__((always_inline)) {
      for (; i + kWidth <= end; i += kWidth) store_vector<InputNan>(y + i, load_vector(from + i));
      if (i < end) store_tail<InputNan>(y + i, end - i, load_tail(from + i, end - i, 0));
      i = end;
    };
    constexpr int64_t line = kLine / int64_t(sizeof(Y));
    const int64_t head = int64_t(-uintptr_t(y) % kLine / sizeof(Y));
    if (kHasStreamingStores && streaming && count >= head + line) {
      store_up_to(head);
      for (; i + line <= count; i += line) {
        for (int64_t k = 0; k < line; k += kWidth) stream_vector<InputNan>(y + i + k, load_vector(from + i + k));
      }
    } else {
      for (; i + kUnroll <= count; i += kUnroll) {
        Vec v[4];
        load_vectors<false>(from + i, v);
        store_vectors<false, false, false, InputNan>(y + i, v);
      }
    }
    store_up_to(count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = from_acc<Y>(from[i]);
  }
}

// Calls work(offset, run, index) for the runs of adjacent elements in the steps [first, first + count) of a slice.
// `offset` is counted from the beginning of the slice, and `index` from the first element of these steps. If the stride
// of steps is not `columns`, runs have `columns` elements. If that is one element, work_strided(offset, stride, steps,
// index) is called instead.
template <class Work, class Strided>
ONEPASS_INLINE void for_each_run(const DimGroup& reduced, int tensor, int64_t columns, int64_t first, int64_t count,
                                 Work work, Strided work_strided) {
  const Dim inner = reduced.innermost();
  const int64_t stride = inner.strides[tensor];
  OffsetCalculator at(reduced, first / inner.size, 1);
  int64_t step = first % inner.size, index = 0;
  while (index < count) {
    const int64_t rest = inner.size - step, steps = count - index < rest ? count - index : rest;
    const int64_t offset = at.offset[tensor] + step * stride;
    if (stride == columns) {
      work(offset, steps * columns, index * columns);
    } else if (columns == 1) {
      work_strided(offset, stride, steps, index);
    } else {
      for (int64_t i = 0; i < steps; ++i) work(offset + i * stride, columns, (index + i) * columns);
    }
    index += steps, step = 0;
    if (index < count) at.next();
  }
}

// Transposes ----------------------------------------------------------------------------------------------------------

template <int Count, class A>
struct PieceOf {
  typedef A type __attribute__((vector_size(Count * sizeof(A))));
};
template <int Count, class A>
using Piece = typename PieceOf<Count, A>::type;

template <class P, size_t... Lane>
ONEPASS_INLINE auto concatenate(P a, P b, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(a, b, int(Lane)...);
}
// Loads pieces of C elements at from, from + stride, ... into one vector of `Total` elements.
template <int C, int Total, class A>
ONEPASS_INLINE auto load_pieces(const A* from, int64_t stride) {
  if constexpr (C == Total) {
    Piece<C, A> v;
    std::memcpy(&v, from, sizeof v);
    return v;
  } else {
    return concatenate(load_pieces<C, Total / 2>(from, stride),
                       load_pieces<C, Total / 2>(from + Total / 2 / C * stride, stride),
                       std::make_index_sequence<Total>());
  }
}
template <int First, class P, size_t... Lane>
ONEPASS_INLINE auto part_of(P v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, int(First + Lane)...);
}

// Swaps the elements of two vectors that are `D` lanes and `D` rows apart. For floats the first two levels are unpacks
// of quarters, which are one instruction each.
template <int D, class P, size_t... Lane>
ONEPASS_INLINE void swap_blocks(P& a, P& b, std::index_sequence<Lane...>) {
  constexpr int n = int(sizeof...(Lane));
  const P low = __builtin_shufflevector(a, b, (Lane & D ? n + int(Lane) - D : int(Lane))...);
  b = __builtin_shufflevector(a, b, (Lane & D ? n + int(Lane) : int(Lane) + D)...);
  a = low;
}
template <class P, size_t... Lane>
ONEPASS_INLINE void transpose_quarters(P& a, P& b, P& c, P& d, std::index_sequence<Lane...>) {
  constexpr int n = int(sizeof...(Lane));
  const P ab = __builtin_shufflevector(a, b, (int(Lane & ~3u) + int(Lane >> 1 & 1) + (Lane & 1 ? n : 0))...);
  const P ab_high = __builtin_shufflevector(a, b, (int(Lane & ~3u) + 2 + int(Lane >> 1 & 1) + (Lane & 1 ? n : 0))...);
  const P cd = __builtin_shufflevector(c, d, (int(Lane & ~3u) + int(Lane >> 1 & 1) + (Lane & 1 ? n : 0))...);
  const P cd_high = __builtin_shufflevector(c, d, (int(Lane & ~3u) + 2 + int(Lane >> 1 & 1) + (Lane & 1 ? n : 0))...);
  a = __builtin_shufflevector(ab, cd, (int(Lane & ~3u) + int(Lane & 1) + (Lane & 2 ? n : 0))...);
  b = __builtin_shufflevector(ab, cd, (int(Lane & ~3u) + 2 + int(Lane & 1) + (Lane & 2 ? n : 0))...);
  c = __builtin_shufflevector(ab_high, cd_high, (int(Lane & ~3u) + int(Lane & 1) + (Lane & 2 ? n : 0))...);
  d = __builtin_shufflevector(ab_high, cd_high, (int(Lane & ~3u) + 2 + int(Lane & 1) + (Lane & 2 ? n : 0))...);
}
template <int D, int C, class P>
ONEPASS_INLINE void swap_levels(P (&v)[C]) {
  using Index = std::make_index_sequence<kLanes<std::decay_t<decltype(v[0][0])>>>;
  if constexpr (D < C) {
#pragma GCC unroll 16
    for (int i = 0; i < C; ++i) {
      if (!(i & D)) swap_blocks<D>(v[i], v[i + D], Index());
    }
    swap_levels<2 * D>(v);
  }
}
// Transposes each block of C lanes of C vectors.
template <class A, int C, class P>
ONEPASS_INLINE void transpose(P (&v)[C]) {
  if constexpr (sizeof(A) == 4) {
#pragma GCC unroll 4
    for (int i = 0; i < C; i += 4) {
      transpose_quarters(v[i], v[i + 1], v[i + 2], v[i + 3], std::make_index_sequence<kLanes<A>>());
    }
    swap_levels<4>(v);
  } else {
    swap_levels<1>(v);
  }
}

// Transposes between kLanes consecutive slices of `count` elements and vectors with one slice per lane. Elements behind
// a slice may be read. They may also be written, and are then overwritten by the next slice. So both buffers have room
// for one more vector.
template <int C, class A>
ONEPASS_INLINE void block_in(const A* flat, int64_t count, int64_t k, A* t, int64_t ahead) {
  V<A> v[C];
  if (ahead) {
    for (int j = 0; j < kLanes<A>; ++j) __builtin_prefetch(flat + j * count + k + ahead);
  }
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) v[j] = V<A>(load_pieces<C, kLanes<A>>(flat + j * count + k, C * count));
  transpose<A>(v);
  const int64_t stored = count - k < C ? count - k : C;
  if (stored == C) {
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) store_as(t + (k + j) * kLanes<A>, v[j]);
  } else {
    for (int j = 0; j < stored; ++j) store_as(t + (k + j) * kLanes<A>, v[j]);
  }
}
template <int C, int Block = 0, class A>
ONEPASS_INLINE void store_pieces(const V<A> (&v)[C], A* flat, int64_t count) {
  if constexpr (Block < kLanes<A> / C) {
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) {
      store_as(flat + (Block * C + j) * count, part_of<Block * C>(v[j], std::make_index_sequence<C>()));
    }
    store_pieces<C, Block + 1>(v, flat, count);
  }
}
template <int C, class A>
ONEPASS_INLINE void block_out(const A* t, int64_t count, int64_t k, A* flat) {
  V<A> v[C];
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) v[j] = load_as<A>(t + (k + j) * kLanes<A>);
  transpose<A>(v);
  store_pieces<C, 0, A>(v, flat + k, count);
}
// Calls block(C, k) for blocks of C elements, from element k on. The last block ends with the slice, unless the slice
// is shorter than a block.
template <class A, class Block>
ONEPASS_INLINE void for_each_block(int64_t count, Block block) {
  constexpr int L = kLanes<A>, least = sizeof(A) == 4 ? 4 : 2;
  int64_t k = 0;
  for (; k + L <= count; k += L) block(std::integral_constant<int, L>(), k);
  const int64_t rest = count - k;
  const auto last = [&](auto size)
                        __attribute__((always_inline)) { block(size, count < size.value ? 0 : count - size.value); };
  if (rest == 0) return;
  if constexpr (least < L) {
    if (rest <= least) return last(std::integral_constant<int, least>());
  }
  if constexpr (2 * least < L) {
    if (rest <= 2 * least) return last(std::integral_constant<int, 2 * least>());
  }
  last(std::integral_constant<int, L>());
}
// The elements `ahead` of those that are read are prefetched.
template <class A>
__attribute__((noinline)) void transpose_in(const A* flat, int64_t count, A* t, int64_t ahead = 0) {
  for_each_block<A>(count, [=](auto size, int64_t k)
                               __attribute__((always_inline)) { block_in<size.value>(flat, count, k, t, ahead); });
}
template <class A>
__attribute__((noinline)) void transpose_out(const A* t, int64_t count, A* flat) {
  for_each_block<A>(
      count, [=](auto size, int64_t k) __attribute__((always_inline)) { block_out<size.value>(t, count, k, flat); });
}

}  // namespace onepass::ONEPASS_ISA
