// vector_access.cuh: how a thread reads and writes vectors of a row. Vectors are aligned in memory, even if the row
// begins in the middle of one: the vectors that the row overlaps are its aligned span. The first and the last vector of
// the span may belong to the row only in part. Their elements are moved one by one, so that nothing beside the row is
// touched.
#pragma once

#include "state.cuh"

// How rows, or columns, lie relative to aligned vectors. plan/rows.h and plan/column_view.h number them in the same
// order.
enum class VecAccess {
  predicated,    // a row may begin and end within a vector
  scalar,        // the same, but each element always goes to the same thread, so that a row's bits do not depend
                 // on its address: elements are moved one by one
  aligned,       // rows are whole vectors; this saves half of the instructions
  slab,          // columns: the memory of whole columns is one span (see column_tile.cuh)
  slab_aligned,  // a slab of whole vectors
  strided,       // columns: any strides, elements are moved one by one
  shifted,       // columns: lines begin at different elements of a vector
};

__device__ inline bool is_inside(int i, int n) { return (unsigned)i < (unsigned)n; }
__device__ inline bool is_inside(int64_t i, int64_t n) { return (uint64_t)i < (uint64_t)n; }

// Whether the whole vector that begins at element `first` belongs to a row of n elements. `first` may be negative.
template <class C>
__device__ inline bool is_full(int first, int n) {
  constexpr int V = C::kVecSize;
  if (C::kAligned) return first < n;
  return (unsigned)first < (unsigned)(n < V ? 0 : n - V + 1);
}
template <class C>
__device__ inline bool is_full(int64_t first, int64_t n) {
  if (C::kAligned) return first < n;
  return first >= 0 && first + C::kVecSize <= n;
}

// Whether any element of the vector that begins at element `first` belongs to the row.
template <class C>
__device__ inline bool overlaps_row(int first, int n) {
  constexpr int V = C::kVecSize;
  return (unsigned)(first + V - 1) < (unsigned)(n + V - 1);
}
template <class C>
__device__ inline bool overlaps_row(int64_t first, int64_t n) {
  return first > -C::kVecSize && first < n;
}

// Whether the vector that begins at element `first` is moved by one instruction.
template <class C, class Index>
__device__ inline bool moves_as_vector(Index first, Index n) {
  return !C::kScalar && is_full<C>(first, n);
}

// The position of head or tail element number `i` in a row, or -1. Head elements precede the first whole vector of V
// elements, and tail elements follow the last one. `before`: the misalignment of the row.
template <int V, class Index>
__device__ inline Index tail_position(int i, int before, Index n) {
  const int to_aligned = (V - before) % V, head = to_aligned < n ? to_aligned : (int)n;
  if (i < head) return i;
  const int tail = (int)((n - head) % V), at = i - head;
  return at < tail ? n - tail + at : -1;
}

// Stores a vector, which may be of half2. If it is not all in a row of n elements, only the row's elements are stored.
template <class C, class Index, class Any>
__device__ inline void store_predicated(typename C::Out* row, Index first, Index n, Any vector) {
  if (moves_as_vector<C>(first, n)) {
    store_vector(row + first, vector);
  } else if (!C::kAligned) {
    typename C::Out* const to = row + first;
    unroll<C::kVecSize>([&](int v) {
      if (is_inside(first + v, n)) to[v] = get_element<typename C::Out>(vector, v);
    });
  }
}

// The number of elements between the start of a row's aligned span and the row.
template <class C, class T>
__device__ inline int misalignment(const T* row) {
  return (int)((uint64_t)row / sizeof(T) % C::kVecSize);
}
