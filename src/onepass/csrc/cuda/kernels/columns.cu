// columns.cu: columns of which a block, or the blocks of a cluster, keep a tile in registers. Each element is read once
// and written once.
//
//   load -> each thread the states of its columns -> block -> cluster -> finish what was kept -> store
//
// One compiled instance a set of: IN, OUT (types), FUNCTION, SLOTS (vectors a thread keeps), VECTOR, EDGES (see
// columns.cuh), THREADS (of a block, at most), CLUSTER, GRID, AHEAD, SHELVED (see column_tile.cuh), and
//   STREAM   1: nothing is kept, and the columns, of any length, are read twice
constexpr int kOperands = 1;
#include "column_state.cuh"

constexpr int kHeld = SLOTS * V * sizeof(IN) / 4;  // registers of the elements
constexpr int kOwn = 2 * V * sizeof(A) / 4;        // of columns

extern "C" __global__ void __launch_bounds__(THREADS, (GRID || kRinged) && !STREAM ? kBlocks : blocks_of(kHeld + kOwn))
    onepass_kernel(const IN* x, OUT* y, const __grid_constant__ Tiles tiles) {
  __shared__ Meeting<States<A, L>, WholeColumn, kOwnTops> meeting;
  Rendezvous all_clear;
  meeting.open(tiles, &all_clear);
  const int rank = sharing_rank();
  const uint64_t begins = (uint64_t)x / sizeof(IN) % V;
  const int64_t all = tiles.side * tiles.tall, step = GRID ? gridDim.y : gridDim.x / CLUSTER;
  uint32_t round = 0;
  const int64_t begun = GRID ? blockIdx.y : blockIdx.x / CLUSTER;
  int64_t tile = begun;
  const auto ahead = [&](int64_t next) {
    if constexpr (AHEAD) {
      if (next < all) fetch_vectors(0, x, Place<2>(tiles, next, rank, begins), 0, 0, SLOTS);
      commit_copies();
    }
  };
  ahead(tile);
  Ring ring(tiles);

  for (; tile < all; tile += step) {
    const Place<2> place(tiles, tile, rank, begins);
    Held<IN, SLOTS> held;
    Held<IN, kChunk> chunk;
    const auto load = [&](int from) { take<AHEAD>(held, x, place, 0, from, nothing<FUNCTION, IN>(), 0, 0); };
    const auto load_chunk = [&](int c) { take<SHELVED>(chunk, x, place, 0, SLOTS + c, nothing<FUNCTION, IN>(), 0, c); };
    const auto load_lead = [&] { take<SHELVED>(chunk, x, place, 0, 0, nothing<FUNCTION, IN>(), 0, 0); };
    const bool meets = CLUSTER > 1 || GRID || kSlab || tiles.parts > 1;
    A m[V], own[V];
    if constexpr (kRinged) {
      if (tile == begun) {
        ring.turn_to(place, true, 0, x, x), ring.fill();
      }
    }
    const bool goes_on = kRinged && tile + step < all;
    const Place<2> coming(tiles, goes_on ? tile + step : tile, rank, begins);
    const auto ask = [&] {
      if (ring.rest <= 0) ring.turn_to(coming, goes_on, 0, x, x);
      ring.ask();
    };
    if constexpr (kRinged) {
      OnlineState state;
      state.begin();
      const auto come = [&](int q, int staying) {
        take_chunk(chunk, x, place, 0, q, nothing<FUNCTION, IN>(), 0, ring.take(staying));
        OnlineState::Tops here;
        Coming<kPairs>::largest(chunk, here);
        chunk.forget();
        state.raise(here);
      };
      const auto add_up = [&] {
#pragma unroll
        for (int v = 0; v < V; ++v) state.add_up(v, chunk, [&](int i) { return value<true>(chunk, i, v); });
      };
#pragma unroll
      for (int q = 0; q < (kReduces ? 0 : SLOTS); q += kChunk) {
        if (q < tiles.turns) come(q, 0), ask(), keep(held, q, chunk), add_up();
      }
      if (round == 0) meeting.await_clear(&all_clear);
#pragma unroll 1
      for (int q = kReduces ? 0 : SLOTS; q < tiles.turns; q += kChunk) {
        come(q, kReduces ? 0 : (q - SLOTS) / kChunk);
        if constexpr (kReduces) ask();
        add_up();
      }
      held.forget();
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = state.maximum(v);
      if (!kOwnTops && meets) meeting.highest(m, place);
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = state.below(v, m[v]);
    } else if constexpr (STREAM) {
      L l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = -INFINITY_, l[v] = L{};
      for (int from = 0; from < tiles.turns; from += SLOTS) load(from), absorb(held, m, l);
      if (round == 0) meeting.await_clear(&all_clear);
      A top[V];
#pragma unroll
      for (int v = 0; v < V; ++v) top[v] = m[v];
      if (meets) meeting.highest(top, place);
#pragma unroll
      for (int v = 0; v < V; ++v)
        own[v] = value_of(scaled(l[v], exp_to_add(m[v] - shift_to_add(top[v])))), m[v] = top[v];
    } else if constexpr (kEarly) {
      for (bool again = false;; again = true) {
        fetch_chunks(x, x, place, 0, 0, 0, kLead);
        load(kLead);
        fetch_chunks(x, x, place, 0, SLOTS + kLead, kLead, tiles.shelf);
        await_all_but(again ? 0 : tiles.shelf / kChunk - 1);
        load_lead(), largest(chunk, m), chunk.forget();
        if (__builtin_expect(again, false)) {
          raise_to(held, m);
#pragma unroll 1
          for (int c = kLead; c < tiles.shelf; c += kChunk) load_chunk(c), raise_to(chunk, m);
        } else if (round == 0) {
          meeting.await_clear(&all_clear);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) m[v] = max_(m[v], A(-3.40282347e38f));  // all else is far above -inf
        if (meets) meeting.highest(m, place);
        load_lead();
#pragma unroll
        for (int v = 0; v < V; ++v) own[v] = sum_below(chunk, v, m[v]);
#pragma unroll
        for (int v = 0; v < V; ++v) own[v] += sum_below(held, v, m[v]);
        held.forget();
#pragma unroll 1
        for (int c = kLead; c < tiles.shelf; c += kChunk) {
          await_all_but((tiles.shelf - c) / kChunk - 1);
          load_chunk(c);
#pragma unroll
          for (int v = 0; v < V; ++v) own[v] += sum_below(chunk, v, m[v]);
        }
        // Something is so far above them that sums overflow: all once more, relative to the block's maximum.
        bool high = false;
#pragma unroll
        for (int v = 0; v < V; ++v) high |= own[v] > 1e30f;
        high &= !again;
        if (meets) high = meeting.tell(own, place, high);
        if (__builtin_expect(!high, true)) break;
      }
    } else {
      uint32_t lowest = 0xff800000;  // -inf
      if constexpr (SHELVED && !kComes) fetch_chunks(x, x, place, 0, SLOTS, 0, tiles.shelf, lowest);
      if constexpr (AHEAD) await_copies<0>();
      load(0);
      if constexpr (kComes) lowest = fetch_chunks(x, x, place, 0, SLOTS, 0, tiles.shelf, lowest);
      largest(held, m, kComes ? A(__uint_as_float(lowest)) : A(-INFINITY_));
      held.forget();
      if (round == 0) meeting.await_clear(&all_clear);
      ahead(tile + step);
      if constexpr (SHELVED && !kComes) {
        await_copies<0>();
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          A here[V];
          load_chunk(c), largest(chunk, here);
#pragma unroll
          for (int v = 0; v < V; ++v) m[v] = max_(here[v], m[v]);
        }
      }
      if (!kOwnTops && meets) meeting.highest(m, place);
      Own::type l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) l[v] = Own::of(sum_below(held, v, m[v]));
      held.forget();
      bool raised = false;
      // What there is so far, to be relative to larger maxima.
      const auto raise = [&](const A(&to)[V], int count) {
        A by[V];
#pragma unroll
        for (int v = 0; v < V; ++v) by[v] = m[v] - to[v], m[v] = to[v];
        lower(l, by), lower(held, by);
        if constexpr (kComes) {
#pragma unroll 1
          for (int c = 0; c < count; c += kChunk) load_chunk(c), lower(chunk, by), shelve(chunk, c);
        }
      };
      if constexpr (SHELVED) {
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          if constexpr (kComes) await_all_but((tiles.shelf - c) / kChunk - 1);
          load_chunk(c);
          if constexpr (kComes) {
            A here[V];
            bool higher = false;
            largest(chunk, here);
#pragma unroll
            for (int v = 0; v < V; ++v) higher |= here[v] - m[v] > kSlack;
            if (__builtin_expect(higher, false)) {
#pragma unroll
              for (int v = 0; v < V; ++v) here[v] = max_(here[v], m[v]);
              raise(here, c), load_chunk(c), raised = true;
            }
          }
#pragma unroll
          for (int v = 0; v < V; ++v) l[v] = add(l[v], Own::of(sum_below(chunk, v, m[v])));
          if constexpr (kKeeps) shelve(chunk, c);
        }
      }
      if constexpr (kComes) {
        if (meets && __syncthreads_or(raised)) {
          A top[V];
#pragma unroll
          for (int v = 0; v < V; ++v) top[v] = m[v];
          meeting.highest(top, place);
          raise(top, tiles.shelf);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = value_of(l[v]);
    }

    const auto reduced = [&](int column, State<A> whole) {
      if (rank > 0 || place.column + column >= tiles.inner) return;
      int64_t at[2] = {0, place.origin + (place.column + column) * tiles.steps[1]};
      if constexpr (kStrided) at[1] = 0, locate<2>(tiles.outer, place.column + column, at);
      store_reduced<FUNCTION>(whole, y + at[1], tiles.plane);
    };
    WholeColumn whole[V];
    if (meets) {
      meeting.meet<kEarly>(m, own, whole, place, round++, [&](int column, PairOf<A> part, A top) {
        if constexpr (kReduces) reduced(column, {part.m, part.l});
        return WholeColumn::of({part.m, part.l}, top);
      });
    } else {  // a thread has its columns to itself
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kReduces) {
          if (threadIdx.x < tiles.across) reduced(threadIdx.x * V + v, {m[v], own[v]});
        } else {
          whole[v] = WholeColumn::of({m[v], own[v]}, m[v]);
        }
      }
    }
    if constexpr (!kReduces) {
      const auto write = [&](int from) {
        give<SLOTS>(y, place, 1, from, [&](int i, int v) { return whole[v](left(held, i, v)); });
      };
      if constexpr (kRinged) {
        ring.back(staying(tiles));
        OUT* to = y + place.element(1, 0);
        const auto go = [&](int q) {
          to = give_from<kChunk>(to, y, place, 1, q, [&](int i, int v) { return whole[v](left(chunk, i, v)); });
        };
#pragma unroll
        for (int q = 0; q < SLOTS; q += kChunk) {
          if (q < tiles.turns) kept(held, q, chunk), go(q);
        }
#pragma unroll 1
        for (int q = SLOTS; q < tiles.turns; q += kChunk) {
          take_chunk(chunk, x, place, 0, q, nothing<FUNCTION, IN>(), 0, ring.again());
          go(q);
          ask();
        }
      } else if constexpr (STREAM) {  // backwards: what was read last may still be in the L2 cache
        for (int from = (tiles.turns - 1) / SLOTS * SLOTS; from >= 0; from -= SLOTS) load(from), write(from);
      } else {
        write(kLead);
        if constexpr (SHELVED) {
#pragma unroll 1
          for (int c = 0; c < tiles.shelf; c += kChunk) {
            const int q = kLead && !c ? 0 : SLOTS + c;
            take<true>(chunk, x, place, 0, q, nothing<FUNCTION, IN>(), 0, c);
            give<kChunk>(y, place, 1, q, [&](int i, int v) { return whole[v](left(chunk, i, v)); });
          }
        }
      }
    }
  }
}
