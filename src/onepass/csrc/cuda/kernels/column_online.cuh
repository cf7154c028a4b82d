// column_online.cuh: columns whose elements arrive stage after stage, and are reduced while later stages are on their
// way.
#pragma once

#include "column_fragment.cuh"

// Blocks of a multiprocessor: 128 registers per thread, and all there are for doubles, whose exponentials take many.
template <class C>
constexpr int pipelined_blocks =
    C::kBlockThreads >= 512 ? 1 : (sizeof(typename C::Out) == 8 ? 256 : 512) / C::kBlockThreads;

// Whether all vectors arrive through a pipeline.
template <class C>
constexpr bool is_pipelined = C::kUsesSmemVecs && C::kVecs % kStageVecs == 0 &&
                              ((C::kGrid && sizeof(typename C::Out) < 8) ||
                               (C::kOperands == 1 && sizeof(typename C::Out) == 2 && C::kClusterSize <= 2));

template <class C>
using ColumnPipeline = Pipeline<C, AsyncCopy>;

// Stages of a tile that stay in shared memory.
template <class C>
__device__ inline int resident_stages(const Tiles& tiles) {
  return tiles.vecs_per_thread_max > C::kVecs ? (tiles.vecs_per_thread_max - C::kVecs + kStageVecs - 1) / kStageVecs
                                              : 0;
}

// Loads the vectors q, q + 1, ... of a tensor from a stage at the address `smem`.
template <class C, class T, int Vecs, int Tensors>
__device__ inline void load_stage(ColumnFragment<C, T, Vecs>& fragment, const T* from,
                                  const ThreadTile<C, Tensors>& tile, int tensor, int q, T neutral, int operand,
                                  uint32_t smem) {
  typedef typename ColumnFragment<C, T, Vecs>::Raw Raw;
  typedef ColumnPipeline<C> Pipe;
  if constexpr (is_pipelined<C>) {
    smem += operand * (Pipe::kSlotBytes / C::kOperands);
    if (tile.are_full(q, Vecs)) {
#pragma unroll
      for (int i = 0; i < Vecs; ++i) fragment.set(i, load_smem<Raw>(smem + i * Pipe::kSlotBytes));
      return;
    }
#pragma unroll
    for (int i = 0; i < Vecs; ++i) {
      if (tile.is_full(q + i)) {
        fragment.set(i, load_smem<Raw>(smem + i * Pipe::kSlotBytes));
        continue;
      }
      fragment.fill(i, neutral);
      if constexpr (!C::kAligned) {
#pragma unroll
        for (int v = 0; v < C::kVecSize; ++v) {
          if (tile.has_element(q + i, v)) fragment.set(i, v, from[tile.offset(tensor, q + i) + v]);
        }
      }
    }
  }
}

__device__ inline float clamp_to_finite(float v) { return fminf(fmaxf(v, -3.40282347e38f), 3.40282347e38f); }
__device__ inline double clamp_to_finite(double v) {
  return fmin(fmax(v, -1.7976931348623157e308), 1.7976931348623157e308);
}

// The states of a thread's columns. Sums are not relative to the maximum but to a base: the maximum at the time when an
// element was last kSlack above the base. So hardly any stage but the first rescales them. The base is finite: -inf is
// below it, and inf above.
template <class C>
struct OnlineState {
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize, kSlack = 8;
  typedef A Maxima[V];
  Maxima m;
  A base[V];
  typename C::Sum l[V];

  __device__ void init() {
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = -infinity(), base[v] = clamp_to_finite(m[v]), l[v] = typename C::Sum{};
  }
  // Takes the maxima of a stage, before its elements are added.
  __device__ void update_max(const Maxima& stage_max) {
    bool is_higher = false;
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = max_(m[v], stage_max[v]), is_higher |= stage_max[v] - base[v] > kSlack;
    if (!is_higher) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A old_base = base[v];
      base[v] = clamp_to_finite(m[v]);
      l[v] = scale(l[v], exp_for_sum(old_base - base[v]));
    }
  }
  // Adds `element(0)`, ... of column v, as many as the fragment has.
  template <class T, int Vecs, class F>
  __device__ void add_elements(int v, const ColumnFragment<C, T, Vecs>&, F element) {
    l[v] = add(l[v], pairwise_sum<Vecs, 0>([&](int i) { return exp_of(element(i) - base[v]); }));
  }
  __device__ A max(int v) const { return m[v]; }
  // The sum relative to `max`, which is no less than the maximum. (Where that is infinite it may be relative to 0.)
  __device__ A sum_relative_to(int v, A max) const {
    const A difference = base[v] - finite_or_zero(max);
    return value_of(scale(l[v], exp_for_sum(difference < 0 ? difference : A(0))));
  }

 private:
  static __device__ A exp_of(A v) {
    if constexpr (sizeof(Out) == 2)
      return exp_<Out>(v);
    else
      return exp_for_sum(v);
  }
};
