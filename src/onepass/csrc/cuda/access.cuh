// access.cuh: a thread's elements of a row, in vectors of V that neighbouring lanes take in turn.
#pragma once

#include "state.cuh"

// Element `first` and the V - 1 after it; those at or beyond n, and all of a row that is not there, read as -inf, which
// changes no state. Nothing beyond the row is touched: the last, partial vector goes element by element.
template <int F, int V, class Out, class In, class Index, class A>
__device__ inline void load_vector(const In* row, Index first, Index n, A* values) {
  const A sign = F == SOFTMIN ? A(-1) : A(1);
  if (first + V <= n) {
    const Vector<In, V> raw = *reinterpret_cast<const Vector<In, V>*>(row + first);
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = sign * load_value<In, Out>(raw.at[v]);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = first + v < n ? sign * load_value<In, Out>(row[first + v]) : -INFINITY_;
  }
}

template <int V, class Out, class Index, class A>
__device__ inline void store_vector(Out* row, Index first, Index n, const A* values) {
  if (first + V <= n) {
    Vector<Out, V> raw;
#pragma unroll
    for (int v = 0; v < V; ++v) raw.at[v] = narrow<Out>(values[v]);
    *reinterpret_cast<Vector<Out, V>*>(row + first) = raw;
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (first + v < n) row[first + v] = narrow<Out>(values[v]);
    }
  }
}
