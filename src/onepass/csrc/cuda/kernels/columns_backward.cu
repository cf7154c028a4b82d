// columns_backward.cu: gradients of columns, in the shape of columns.cu with another state, one number a column. Each
// element of what the forward saved and of the result's gradient is read once, and dx written once.
//
//   load -> each thread the sums of its columns -> block -> cluster -> finish what was kept -> store
//
// The gradient of logsumexp, g exp(x - lse), merges nothing. Instances as of columns.cu
// (of logsumexp IN is the type of g and lse, OUT that of x and dx), and
//   EVEN   1: g has one value for all that a tile has of it
#include "row_backward.cuh"

constexpr bool kLse = FUNCTION == LOGSUMEXP, kAlike = !kLse && !EVEN;  // g has vectors as y has
constexpr int kOperands = kAlike ? 2 : 1;
#include "column_fragment.cuh"
#include "column_reduce.cuh"
#include "column_online.cuh"

enum { DX, SAVED, GRAD, LSE };

// What the forward saved: its result, or the input of logsumexp, of which IN is the result's type.
template <bool Lse>
struct Kept {
  typedef IN type;
};
template <>
struct Kept<true> {
  typedef OUT type;
};
typedef Kept<kLse>::type Saved;

template <bool Again, class T, int Slots>
__device__ inline A value(const Held<T, Slots>& held, int slot, int v) {
  if constexpr (Again && sizeof(T) == 2 && V > 1)
    return widen_again<T>(held.at[slot].at[v / 2], v % 2);
  else
    return to_wide(held.get(slot, v));
}

// Of the result's gradient: an element of its own, or the one value.
template <bool Again, class T, int Slots>
__device__ inline A value(const Held<T, Slots>& held, A even, int slot, int v) {
  if constexpr (kAlike)
    return value<Again>(held, slot, v);
  else
    return even;
}

constexpr int kHeld = SLOTS * V * sizeof(Saved) / 4 * (kAlike ? 2 : 1) + (kLse ? V : 0);  // registers of the elements

typedef Place<kAlike ? 3 : 2> Spot;

// A thread's vectors of both operands.
template <int Slots>
struct Both {
  Held<Saved, Slots> y;
  Held<IN, kAlike ? Slots : 1> g;

  // Vectors q, q + 1, ..., which wait from the slot `waits` on.
  template <bool Waits>
  __device__ void load(const Saved* saved, const IN* grad, const Spot& place, int q, int waits) {
    take<Waits>(y, saved, place, SAVED, q, narrow<Saved>(0.0f), 0, waits);
    if constexpr (kAlike) take<Waits>(g, grad, place, GRAD, q, narrow<IN>(0.0f), 1, waits);
  }
  // The first ones: by turns, so that products can be made of those that have come.
  __device__ void load_first(const Saved* saved, const IN* grad, const Spot& place) {
    if constexpr (!kAlike || kStrided) return load<false>(saved, grad, place, 0, 0);
    if (!place.all_whole(0, Slots)) return load<false>(saved, grad, place, 0, 0);
    if (kNears && place.tiles.narrow)
      by_turns<true>(saved, grad, place);
    else
      by_turns<false>(saved, grad, place);
  }
  // The same of a chunk that waits at `waits` in the ring.
  __device__ void come(const Saved* saved, const IN* grad, const Spot& place, int q, uint32_t waits) {
    take_chunk(y, saved, place, SAVED, q, narrow<Saved>(0.0f), 0, waits);
    if constexpr (kAlike) take_chunk(g, grad, place, GRAD, q, narrow<IN>(0.0f), 1, waits);
  }
  template <int Count = Slots, int Q = 0>
  __device__ A part(A even, int v) const {
    return plain_sum<Count, Q>([&](int i) { return term(value<false>(y, i, v), value<false>(g, even, i, v)); });
  }
  // A chunk at a time.
  template <int Q = 0>
  __device__ void absorb(A even, L (&sums)[V]) const {
    constexpr int kCount = Slots - Q < kChunk ? Slots - Q : kChunk;
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = add(sums[v], Adder<Summed>::of(part<kCount, Q>(even, v)));
    if constexpr (Q + kCount < Slots) absorb<Q + kCount>(even, sums);
  }
  __device__ A result(A even, A s, int i, int v) const {
    return gradient(value<true>(y, i, v), value<true>(g, even, i, v), s);
  }
  __device__ void forget() { y.forget(), g.forget(); }
  // A chunk to the vectors q, q + 1, ..., and from there, where those are kept.
  __device__ void keep(int q, const Both<kChunk>& chunk) {
    ::keep(y, q, chunk.y);
    if constexpr (kAlike) ::keep(g, q, chunk.g);
  }
  __device__ void give(int q, Both<kChunk>& chunk) const {
    ::kept(y, q, chunk.y);
    if constexpr (kAlike) ::kept(g, q, chunk.g);
  }

 private:
  template <bool Near>
  __device__ void by_turns(const Saved* saved, const IN* grad, const Spot& place) {
    if constexpr (kAlike) {
      saved += place.element(SAVED, 0), grad += place.element(GRAD, 0);
#pragma unroll
      for (int i = 0; i < Slots; ++i) {
        y.put(i, load_global<typename Held<Saved, Slots>::Raw, Near>(saved));
        g.put(i, load_global<typename Held<IN, Slots>::Raw, Near>(grad));
        saved = next(saved, place.tiles.jump[SAVED]), grad = next(grad, place.tiles.jump[GRAD]);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, (GRID || kRinged) && !STREAM
                                                          ? kBlocks
                                                          : blocks_of(kHeld + (sizeof(A) == 8 ? 2 : 1) * V))
    onepass_kernel(OUT* dx, const Saved* saved, const IN* grad, const IN* lse, const __grid_constant__ Tiles tiles) {
  __shared__ Meeting<Sums<A, L>, A, false> meeting;
  Rendezvous all_clear;
  if (!kLse) meeting.open(tiles, &all_clear);
  const int rank = sharing_rank();
  const uint64_t begins = (uint64_t)saved / sizeof(Saved) % V;
  const int64_t all = tiles.side * tiles.tall, step = GRID ? gridDim.y : gridDim.x / CLUSTER;
  uint32_t round = 0;
  const int64_t begun = GRID ? blockIdx.y : blockIdx.x / CLUSTER;
  int64_t tile = begun;
  const auto ahead = [&](int64_t next) {
    if constexpr (AHEAD) {
      if (next >= all) return;
      const Spot spot(tiles, next, rank, begins);
      fetch_vectors(0, saved, spot, SAVED, 0, SLOTS);
      if constexpr (kAlike) fetch_vectors(1, grad, spot, GRAD, 0, SLOTS);
      commit_copies();
    }
  };
  if (!kLse) ahead(tile);
  Ring ring(tiles);

  for (; tile < all; tile += step) {
    const Spot place(tiles, tile, rank, begins);
    Both<SLOTS> held;
    if constexpr (kLse) {
      A of_g[V], of_lse[V];
      int64_t at[4] = {};
      if constexpr (!kStrided) locate<4>(tiles.outer, place.outer, at);
      int c = place.own;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = place.column + c;
        of_g[v] = of_lse[v] = 0;
        if (column < tiles.inner) {
          if constexpr (kStrided) {
            for (int t = 0; t < 4; ++t) at[t] = 0;
            locate<4>(tiles.outer, column, at);
          }
          of_g[v] = to_wide(grad[at[GRAD] + (kStrided ? 0 : column * tiles.steps[GRAD])]);
          of_lse[v] = to_wide(lse[at[LSE] + (kStrided ? 0 : column * tiles.steps[LSE])]);
        }
        c = place.after(c);
      }
      for (int from = 0; from < tiles.turns; from += SLOTS) {
        held.load<false>(saved, grad, place, from, 0);
        give<SLOTS>(dx, place, DX, from,
                    [&](int i, int v) { return of_g[v] * exp_<OUT>(value<false>(held.y, i, v) - of_lse[v]); });
      }
      continue;
    }

    A even = 0, own[V], s[V];
    if constexpr (EVEN) {
      int64_t at[3] = {};
      locate<3>(tiles.outer,
                kStrided ? (place.column + place.own < tiles.inner ? place.column + place.own : 0) : place.outer, at);
      even = to_wide(grad[at[GRAD]]);
    }
    Both<kChunk> chunk;
    if constexpr (kRinged) {
      if (tile == begun) {
        ring.turn_to(place, true, SAVED, saved, grad), ring.fill();
      }
    }
    const bool goes_on = kRinged && tile + step < all;
    const Spot coming(tiles, goes_on ? tile + step : tile, rank, begins);
    const auto ask = [&] {
      if (ring.rest <= 0) ring.turn_to(coming, goes_on, SAVED, saved, grad);
      ring.ask();
    };
    if constexpr (STREAM || SHELVED) {
      if constexpr (SHELVED && !kRinged) fetch_chunks((const IN*)saved, grad, place, SAVED, SLOTS, 0, tiles.shelf);
      L sums[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = L{};
      if constexpr (STREAM) {
        for (int from = 0; from < tiles.turns; from += SLOTS) {
          held.load<false>(saved, grad, place, from, 0);
          held.absorb(even, sums);
        }
      } else if constexpr (kRinged) {  // added up as they come
        const auto come = [&](int q, int staying) {
          chunk.come(saved, grad, place, q, ring.take(staying));
          chunk.absorb(even, sums);
        };
#pragma unroll
        for (int q = 0; q < SLOTS; q += kChunk) {
          if (q < tiles.turns) come(q, 0), held.keep(q, chunk), ask();
        }
        if (round == 0) meeting.await_clear(&all_clear);
#pragma unroll 1
        for (int q = SLOTS; q < tiles.turns; q += kChunk) come(q, (q - SLOTS) / kChunk);
      } else {
        held.load_first(saved, grad, place);
        held.absorb(even, sums);
        held.forget();
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          await_all_but((tiles.shelf - c) / kChunk - 1);
          chunk.load<SHELVED>(saved, grad, place, SLOTS + c, c);
          chunk.absorb(even, sums);
        }
      }
      if (!kRinged && round == 0) meeting.await_clear(&all_clear);
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = value_of(sums[v]);
    } else {
      if constexpr (AHEAD)
        await_copies<0>(), held.load<true>(saved, grad, place, 0, 0);
      else
        held.load_first(saved, grad, place);
      if (round == 0) meeting.await_clear(&all_clear);
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = held.part(even, v);
      held.forget();
      ahead(tile + step);
    }
    if (CLUSTER > 1 || GRID || kSlab || tiles.parts > 1) {
      meeting.meet<false>(own, own, s, place, round++, [](int, A part, A) { return part; });
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) s[v] = own[v];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) s[v] = EVEN ? even * (kLog ? A(tiles.n) : s[v]) : s[v];
    if constexpr (kRinged) {
      ring.back(staying(tiles));
      OUT* to = dx + place.element(DX, 0);
      const auto go = [&](int q) {
        to = give_from<kChunk>(to, dx, place, DX, q, [&](int i, int v) { return chunk.result(even, s[v], i, v); });
      };
#pragma unroll
      for (int q = 0; q < SLOTS; q += kChunk) {
        if (q < tiles.turns) held.give(q, chunk), go(q);
      }
#pragma unroll 1
      for (int q = SLOTS; q < tiles.turns; q += kChunk) {
        chunk.come(saved, grad, place, q, ring.again());
        go(q);
        ask();
      }
    } else if constexpr (STREAM) {  // backwards: what was read last may still be in the L2 cache
      for (int from = (tiles.turns - 1) / SLOTS * SLOTS; from >= 0; from -= SLOTS) {
        held.load<false>(saved, grad, place, from, 0);
        give<SLOTS>(dx, place, DX, from, [&](int i, int v) { return held.result(even, s[v], i, v); });
      }
    } else {
      give<SLOTS>(dx, place, DX, 0, [&](int i, int v) { return held.result(even, s[v], i, v); });
      if constexpr (SHELVED) {
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          chunk.load<SHELVED>(saved, grad, place, SLOTS + c, c);
          give<kChunk>(dx, place, DX, SLOTS + c, [&](int i, int v) { return chunk.result(even, s[v], i, v); });
        }
      }
    }
  }
}
