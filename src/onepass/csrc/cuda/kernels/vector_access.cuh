// vector_access.cuh: a row read and written through its window: whole vectors at aligned addresses, whatever element of
// a vector the row begins with. The first and the last vector of a window may belong to the row in part: those go
// element by element, so that nothing beside the row is touched.
#pragma once

#include "state.cuh"

// The value that stands for an element that is not there: it changes no state. (A softmin negates it.)
template <int F, class T>
__device__ inline T nothing() {
  return narrow<T>(F == SOFTMIN ? INFINITY_ : -INFINITY_);
}

__device__ inline bool inside(int i, int n) { return (unsigned)i < (unsigned)n; }
__device__ inline bool inside(int64_t i, int64_t n) { return (uint64_t)i < (uint64_t)n; }

// How rows lie over vectors: EDGES, as plan.h counts them.
//   kWindow  a row may begin and end within a vector
//   kApart   and yet the same elements go to the same threads, so that a row's bits do not depend on where it lies:
//            vectors are then read and written element by element
//   kWhole   rows are whole vectors, so that half of the instructions go, which would else have to be there
constexpr bool kApart = EDGES == 1, kWhole = EDGES == 2;

// Is the vector that begins at element `first` of a row of n, which may be negative, whole?
template <int V>
__device__ inline bool whole(int first, int n) {
  if (kWhole) return first < n;
  return (unsigned)first < (unsigned)(n < V ? 0 : n - V + 1);
}
template <int V>
__device__ inline bool whole(int64_t first, int64_t n) {
  if (kWhole) return first < n;
  return first >= 0 && first + V <= n;
}

// Has it any element of the row?
template <int V>
__device__ inline bool touches(int first, int n) {
  return (unsigned)(first + V - 1) < (unsigned)(n + V - 1);
}
template <int V>
__device__ inline bool touches(int64_t first, int64_t n) {
  return first > -V && first < n;
}

// Does it come and go in one piece?
template <int V, class Index>
__device__ inline bool in_one(Index first, Index n) {
  return !kApart && whole<V>(first, n);
}

template <int V, class Out, class Index>
__device__ inline void store_window(Out* row, Index first, Index n, Vector<Out, V> raw) {
  if (in_one<V>(first, n)) {
    store(row + first, raw);
  } else if (!kWhole) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (inside(first + v, n)) row[first + v] = raw.at[v];
    }
  }
}
