// window.cuh: a row read and written through its window: whole vectors at aligned addresses, whatever element of a
// vector the row begins with. The first and the last vector of a window may belong to the row in part: those go element
// by element, so that nothing beside the row is touched.
#pragma once

#include "state.cuh"

// The value that stands for an element that is not there: it changes no state. (A softmin negates it.)
template <int F, class T>
__device__ inline T nothing() {
  return narrow<T>(F == SOFTMIN ? INFINITY_ : -INFINITY_);
}

// Is the vector that begins at element `first` of a row of n, which may be negative, whole?
template <int V>
__device__ inline bool whole(int first, int n) {
  return (unsigned)first < (unsigned)(n < V ? 0 : n - V + 1);
}
template <int V>
__device__ inline bool whole(int64_t first, int64_t n) {
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

// APART: rows begin at any element of a vector and yet the same elements go to the same threads, so that a row's bits
// do not depend on where it lies. Vectors are then read and written element by element.
template <int V, class Index>
__device__ inline bool in_one(Index first, Index n) {
  return !APART && whole<V>(first, n);
}

template <int F, int V, class In, class Index>
__device__ inline Vector<In, V> load_window(const In* row, Index first, Index n) {
  if (in_one<V>(first, n)) return *reinterpret_cast<const Vector<In, V>*>(row + first);
  Vector<In, V> raw;
#pragma unroll
  for (int v = 0; v < V; ++v) raw.at[v] = first + v >= 0 && first + v < n ? row[first + v] : nothing<F, In>();
  return raw;
}

template <int V, class Out, class Index>
__device__ inline void store_window(Out* row, Index first, Index n, Vector<Out, V> raw) {
  if (in_one<V>(first, n)) {
    store(row + first, raw);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (first + v >= 0 && first + v < n) row[first + v] = raw.at[v];
    }
  }
}
