// columns.cu: columns of which a block, or the blocks of a cluster, keep a tile in registers. Each element is read once
// and written once.
//
//   load -> each thread the states of its columns -> block -> cluster -> finish what was kept -> store
//
// One compiled instance a set of: IN, OUT (types), FUNCTION, SLOTS (vectors a thread keeps), VECTOR, EDGES (see
// columns.cuh), THREADS (of a block, at most), CLUSTER, GRID, AHEAD, SHELVED (see columns.cuh), and
//   STREAM   1: nothing is kept, and the columns, of any length, are read twice
constexpr int kOperands = 1;
#include "columns.cuh"
#include "online.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE, kLog = FUNCTION == LOG_SOFTMAX;
typedef Accumulator<OUT>::type A;
typedef Adder<OUT>::type L;
constexpr bool kHalf = sizeof(OUT) == 2;
constexpr bool kOnline = GRID && SHELVED;  // see online.cuh
constexpr bool kKeeps =
    !STREAM && !kOnline && !kReduces && !kLog && sizeof(IN) == sizeof(OUT) && sizeof(A) == sizeof(IN);

// The element of a slot, as the function takes it.
template <bool Again, class T, int Slots>
__device__ inline A value(const Held<T, Slots>& held, int slot, int v) {
  const A sign = FUNCTION == SOFTMIN ? A(-1) : A(1);
  if constexpr (Again && sizeof(T) == 2 && V > 1 && Widens<T, OUT>::value)
    return sign * widen_again<T>(held.at[slot].at[v / 2], v % 2);
  else
    return sign * load_value<T, OUT>(held.get(slot, v));
}

// The largest of a thread's elements of each column.
template <class T, int Slots>
__device__ inline void largest(const Held<T, Slots>& held, A (&m)[V]) {
  if constexpr (sizeof(T) == 2 && V > 1 && Widens<T, OUT>::value) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      uint32_t top = held.at[0].at[w];
#pragma unroll
      for (int i = 1; i < Slots; ++i)
        top = FUNCTION == SOFTMIN ? min_of_pairs<T>(top, held.at[i].at[w]) : max_of_pairs<T>(top, held.at[i].at[w]);
      const A sign = FUNCTION == SOFTMIN ? A(-1) : A(1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        m[2 * w + half] = max_(sign * to_wide(T{(uint16_t)(top >> half * 16)}), A(-INFINITY_));  // a NaN is none
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      m[v] = -INFINITY_;
#pragma unroll
      for (int i = 0; i < Slots; ++i) m[v] = max_(value<false>(held, i, v), m[v]);
    }
  }
}

// The sum of exp(x - m) of a thread's elements of a column, all up to m. For half results by one fused multiply-add an
// exponential: what the product m log2(e) is rounded by is the same in all, and comes off the sum. Where exponentials
// take no more room than elements they take their place.
template <class T, int Slots>
__device__ inline A sum_below(Held<T, Slots>& held, int v, A m) {
  const A s = shift(m);
  if constexpr (kKeeps) {
    return plain_sum<Slots, 0>([&](int i) {
      const A e = exp_<OUT>(value<true>(held, i, v) - s);
      held.put(i, v, e);
      return e;
    });
  } else if constexpr (kHalf) {
    const A high = s * kLog2e, low = fmaf(s, kLog2e, -high);
    const A sum = plain_sum<Slots, 0>([&](int i) { return exp2_(fmaf(value<true>(held, i, v), kLog2e, -high)); });
    return sum * fmaf(low, -0.693147181f, 1.0f);  // exp2(-low), which is next to 1
  } else {
    return plain_sum<Slots, 0>([&](int i) { return exp_to_add(value<true>(held, i, v) - s); });
  }
}

// What there is of an element at the end: its exponential, or itself.
template <class T, int Slots>
__device__ inline A left(const Held<T, Slots>& held, int slot, int v) {
  if constexpr (kKeeps)
    return held.get(slot, v);
  else
    return value<true>(held, slot, v);
}

// The states of all elements before, and of these.
template <int Slots>
__device__ inline void absorb(Held<IN, Slots>& held, A (&m)[V], L (&l)[V]) {
  A here[V];
  largest(held, here);
  held.forget();
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const A before = m[v];
    m[v] = max_(before, here[v]);
    l[v] = add(scaled(l[v], exp_to_add(before - shift(m[v]))), Adder<OUT>::of(sum_below(held, v, m[v])));
  }
}

// The states of all vectors, each absorbed when it has come while later ones are on their way, and the first of them in
// registers. `between`: what to do between those and the others.
template <class F>
__device__ inline void absorb_as_they_come(Held<IN, SLOTS>& held, Online<OUT>& state, const IN* x,
                                           const Place<2>& place, Ring<SLOTS>& ring, F between) {
  const auto ask = [&](int q, int slot) { fetch_chunk(0, x, place, 0, q, slot); };
  const auto take_in = [&](auto& some, int q, int number) {
    ring.await();
    take_chunk(some, x, place, 0, q, nothing<FUNCTION, IN>(), 0, ring.next());
    A here[V];
    largest(some, here);
    some.forget();
    number == 0 ? state.begin(here) : state.raise(here);
    ring.refill(number, ask);
#pragma unroll
    for (int v = 0; v < V; ++v) state.add_up(v, some, [&](int i) { return value<true>(some, i, v); });
  };
  const auto keep = [&](auto some, int from) {
    take_in(some, from, from / kChunk);
#pragma unroll
    for (int i = 0; i < (int)(sizeof(some.at) / sizeof(some.at[0])); ++i) held.at[from + i] = some.at[i];
  };
  ring.begin(place.tiles.shelf, ask);
#pragma unroll
  for (int from = 0; from + kChunk <= SLOTS; from += kChunk) keep(Held<IN, kChunk>(), from);
  constexpr int kOver = SLOTS % kChunk;
  if constexpr (kOver > 0) keep(Held<IN, kOver ? kOver : 1>(), SLOTS - kOver);
  between();
  Held<IN, kChunk> chunk;
#pragma unroll 1
  for (int c = 0; c < place.tiles.shelf; c += kChunk) take_in(chunk, SLOTS + c, ring.kKept + c / kChunk);
}

// What finishes the elements of a column, made once from its state and the block's maximum.
template <bool Half, bool Keeps, class Float>
struct Whole {
  Finish<FUNCTION, OUT, A> finish;
  __device__ static Whole of(State<Float> whole, Float) { return {Finish<FUNCTION, OUT, A>(whole)}; }
  __device__ Float operator()(Float x) const { return finish(x); }
};
// Of half results: exp2(x log2(e) - high - low).
template <class Float>
struct alignas(8) Whole<true, false, Float> {
  float high, low;
  __device__ static Whole of(State<float> whole, float) {
    const float high = whole.m * kLog2e;
    return {high, isfinite_(whole.m) ? fmaf(whole.m, kLog2e, -high) + log2_(whole.l) : NAN_};
  }
  __device__ float operator()(float x) const { return exp2_(fmaf(x, kLog2e, -high) - low); }
};
// Of what is kept: exp(x - top), `top` the block's maximum, that it is to be multiplied by.
template <class Float>
struct alignas(2 * sizeof(Float)) Whole<false, true, Float> {
  Float last, rest;
  __device__ static Whole of(State<Float> whole, Float top) {
    const Finish<FUNCTION, OUT, Float> finish(whole);
    Whole made = {finish.last, sizeof(Float) == 8 ? 1 : finish.rest};
    if constexpr (CLUSTER > 1 || GRID) made.lower(top == -INFINITY_ ? 0 : shift(top) - shift(whole.m));
    return made;
  }
  __device__ Float operator()(Float e) const {
    if constexpr (sizeof(Float) == 8)
      return e * rest / last;
    else
      return fmaf(e, last, e * rest);
  }

 private:
  // By exp(d), d <= 0: 1 + low, as exact as `last` and `rest` together are. (A NaN is the column's already.)
  __device__ void lower(float d) {
    d = fmaxf(d, -300.0f);
    const float j = rintf(d * kLog2e), r = fmaf(j, -1.42860677e-6f, fmaf(j, -0.693145752f, d));
    float low = fmaf(r, 1.98412698e-4f, 1.38888889e-3f);
    low = fmaf(low, r, 8.33333333e-3f), low = fmaf(low, r, 4.16666667e-2f), low = fmaf(low, r, 1.66666667e-1f);
    low = fmaf(low, r, 0.5f), low = fmaf(low * r, r, r);
    const float high = fmaf(last, low, last), scale = exp2_(rintf(j * 0.5f)), again = exp2_(j - rintf(j * 0.5f));
    rest = (fmaf(last, low, last - high) + fmaf(rest, low, rest)) * scale * again;
    last = high * scale * again;
  }
  __device__ void lower(double d) { rest = exp(d); }
};
typedef Whole<kHalf && !kLog, kKeeps, A> WholeColumn;

constexpr int kHeld = SLOTS * V * sizeof(IN) / 4;  // registers of the elements

extern "C" __global__ void __launch_bounds__(THREADS,
                                             GRID && !STREAM ? kBlocks : blocks_of(kHeld + 2 * V * sizeof(A) / 4))
    onepass_kernel(const IN* x, OUT* y, const __grid_constant__ Tiles tiles) {
  __shared__ Meeting<States<A, L>, WholeColumn> meeting;
  Rendezvous all_clear;
  meeting.open(tiles, &all_clear);
  const int rank = sharing_rank();
  const uint64_t begins = (uint64_t)x / sizeof(IN) % V;
  const int64_t all = tiles.side * tiles.tall, step = GRID ? gridDim.y : gridDim.x / CLUSTER;
  uint32_t round = 0;
  int64_t tile = GRID ? blockIdx.y : blockIdx.x / CLUSTER;
  const auto ahead = [&](int64_t next) {
    if constexpr (AHEAD) {
      if (next < all) fetch_vectors(0, x, Place<2>(tiles, next, rank, begins), 0, 0, SLOTS);
      commit_copies();
    }
  };
  ahead(tile);

  for (; tile < all; tile += step) {
    const Place<2> place(tiles, tile, rank, begins);
    Held<IN, SLOTS> held;
    Held<IN, kChunk> chunk;
    const auto load = [&](int from) { take<AHEAD>(held, x, place, 0, from, nothing<FUNCTION, IN>(), 0, 0); };
    const auto load_chunk = [&](int c) { take<SHELVED>(chunk, x, place, 0, SLOTS + c, nothing<FUNCTION, IN>(), 0, c); };
    const bool meets = CLUSTER > 1 || GRID || kSlab || tiles.parts > 1;
    A m[V], own[V];
    Ring<SLOTS> ring;
    if constexpr (kOnline) {
      Online<OUT> state;
      absorb_as_they_come(held, state, x, place, ring, [&] {
        if (round == 0) meeting.await_clear(&all_clear);
      });
      held.forget();
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = state.m[v];
      if (meets) meeting.highest(m, place);
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = state.below(v, m[v]);
    } else if constexpr (STREAM) {
      L l[V];
      A top[V];
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = -INFINITY_, l[v] = L{};
      for (int from = 0; from < tiles.turns; from += SLOTS) load(from), absorb(held, m, l);
#pragma unroll
      for (int v = 0; v < V; ++v) top[v] = m[v];
      if (round == 0) meeting.await_clear(&all_clear);
      if (meets) meeting.highest(top, place);
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = value_of(scaled(l[v], exp_to_add(m[v] - shift(top[v])))), m[v] = top[v];
    } else {
      if constexpr (SHELVED) fetch_vectors(0, x, place, 0, SLOTS, tiles.shelf), commit_copies();
      if constexpr (AHEAD) await_copies<0>();
      load(0);
      largest(held, m);
      held.forget();
      if (round == 0) meeting.await_clear(&all_clear);
      ahead(tile + step);
      if constexpr (SHELVED) {
        await_copies<0>();
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          A here[V];
          load_chunk(c), largest(chunk, here);
#pragma unroll
          for (int v = 0; v < V; ++v) m[v] = max_(here[v], m[v]);
        }
      }
      if (meets) meeting.highest(m, place);
      L l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) l[v] = Adder<OUT>::of(sum_below(held, v, m[v]));
      held.forget();
      if constexpr (SHELVED) {
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          load_chunk(c);
#pragma unroll
          for (int v = 0; v < V; ++v) l[v] = add(l[v], Adder<OUT>::of(sum_below(chunk, v, m[v])));
          if constexpr (kKeeps) shelve(chunk, c);
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
      meeting.meet(own, whole, place, round++, [&](int column, PairOf<A> part, A top) {
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
      if constexpr (STREAM) {
        for (int from = 0; from < tiles.turns; from += SLOTS) load(from), write(from);
      } else {
        write(0);
      }
      if constexpr (SHELVED) {
#pragma unroll 1
        for (int c = 0; c < tiles.shelf; c += kChunk) {
          if constexpr (kOnline)
            take_chunk(chunk, x, place, 0, SLOTS + c, nothing<FUNCTION, IN>(), 0, ring.next());
          else
            load_chunk(c);
          give<kChunk>(y, place, 1, SLOTS + c, [&](int i, int v) { return whole[v](left(chunk, i, v)); });
        }
      }
    }
  }
}
