// column_online.cuh: columns whose elements come one chunk after another, worked on while later ones are on their way.
#pragma once

#include "column_fragment.cuh"
#include "pipeline.cuh"

// Blocks of a multiprocessor: 128 registers a thread, of doubles, whose exponentials take many, all there are.
constexpr int kBlocks = THREADS >= 512 ? 1 : (sizeof(OUT) == 8 ? 256 : 512) / THREADS;

// Do all vectors come through a ring?
constexpr bool kRinged = SHELVED && SLOTS % kChunk == 0 &&
                         ((GRID && sizeof(OUT) < 8) || (kOperands == 1 && sizeof(OUT) == 2 && CLUSTER <= 2));

// Chunks of a tile that stay on the shelf.
__device__ inline int staying(const Tiles& tiles) {
  return tiles.turns > SLOTS ? (tiles.turns - SLOTS + kChunk - 1) / kChunk : 0;
}
// Takes the vectors q, q + 1, ... of a tensor, which wait at `waits`.
template <class T, int Slots, int Tensors>
__device__ inline void take_chunk(Held<T, Slots>& held, const T* from, const Place<Tensors>& place, int tensor, int q,
                                  T none, int operand, uint32_t waits) {
  typedef typename Held<T, Slots>::Raw Raw;
  if constexpr (kRinged) {
    waits += operand * (Ring::kSlot / kOperands);
    if (place.all_whole(q, Slots)) {
#pragma unroll
      for (int i = 0; i < Slots; ++i) held.put(i, load_shared<Raw>(waits + i * Ring::kSlot));
      return;
    }
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      if (place.is_whole(q + i)) {
        held.put(i, load_shared<Raw>(waits + i * Ring::kSlot));
        continue;
      }
      held.fill(i, none);
      if constexpr (!kFull) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.has(q + i, v)) held.put(i, v, from[place.element(tensor, q + i) + v]);
        }
      }
    }
  }
}

__device__ inline float clamped(float v) { return fminf(fmaxf(v, -3.40282347e38f), 3.40282347e38f); }
__device__ inline double clamped(double v) { return fmin(fmax(v, -1.7976931348623157e308), 1.7976931348623157e308); }

template <class A>
__device__ inline Total<A> add(Total<A> total, A value) {
  const A sum = total.sum + value, part = sum - total.sum;
  return {sum, total.rest + ((total.sum - (sum - part)) + (value - part))};
}

// The states of a thread's columns. Sums are relative not to the maximum but to what it was when an element was last
// kSlack above that: hardly any chunk but the first has them scaled. It is finite: -inf is below it, and inf above.
template <class Out>
struct Online {
  typedef typename Accumulator<Out>::type A;
  typedef typename Adder<Out>::type L;
  static constexpr int kSlack = 8;
  typedef A Tops[V];
  Tops m;
  A base[V];
  L l[V];

  // Of no element.
  __device__ void begin() {
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = -INFINITY_, base[v] = clamped(m[v]), l[v] = L{};
  }
  // The maxima of a chunk, before its elements are added.
  __device__ void raise(const Tops& here) {
    bool higher = false;
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = max_(m[v], here[v]), higher |= here[v] - base[v] > kSlack;
    if (!higher) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A before = base[v];
      base[v] = clamped(m[v]);
      l[v] = scaled(l[v], exp_to_add(before - base[v]));
    }
  }
  // Adds `element(0)`, ... of a column, as many as `some` has.
  template <class T, int Slots, class F>
  __device__ void add_up(int v, const Held<T, Slots>&, F element) {
    l[v] = add(l[v], plain_sum<Slots, 0>([&](int i) { return exp_of(element(i) - base[v]); }));
  }
  __device__ A maximum(int v) const { return m[v]; }
  // The sum relative to `top`, which is no less than the maximum. (Where that is infinite it may be to 0.)
  __device__ A below(int v, A top) const {
    const A down = base[v] - shift(top);
    return value_of(scaled(l[v], exp_to_add(down < 0 ? down : A(0))));
  }

 private:
  static __device__ A exp_of(A v) {
    if constexpr (sizeof(Out) == 2)
      return exp_<Out>(v);
    else
      return exp_to_add(v);
  }
};
