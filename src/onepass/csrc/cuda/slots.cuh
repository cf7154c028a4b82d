// slots.cuh: how a thread's vectors of a row come, from memory or from the shelf.
#pragma once

#include "shelf.cuh"

// Does `any(i, position)` for each of a thread's vectors, whose first elements are `step` apart; `full` instead for
// those that are whole by one look at the lot: all of a few where a row has whole warps, else those between the first
// and the last. Ten instructions a vector less. Where rows are whole vectors a look is one comparison, and a few
// vectors get one each: threads of the last warp that have one fewer take no other way then.
template <int V, int Slots, class Index, class Full, class Any>
__device__ inline void for_slots(Index first, Index step, Index n, Full full, Any any) {
  constexpr bool kFew = Slots <= 4, kAll = LANES == 0 && kFew && !kWhole;
  constexpr bool kMiddle = Slots > 2 && !(kWhole && kFew);
  if (!kApart && kAll && first >= 0 && first + (Slots - 1) * step + V <= n) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) full(i, first + i * step);
  } else if (!kApart && !kAll && kMiddle && whole<V>(first + (Slots - 2) * step, n)) {
    kWhole ? full(0, first) : any(0, first);
#pragma unroll
    for (int i = 1; i < Slots - 1; ++i) full(i, first + i * step);
    any(Slots - 1, first + (Slots - 1) * step);
  } else {
#pragma unroll
    for (int i = 0; i < Slots; ++i) any(i, first + i * step);
  }
}

// What both ways of keeping elements share: how they come. `Self` has Raw, a vector as it is read, put(slot, raw), and
// put_part(slot, at, first, n): element by element, from where they are.
template <class Self, int F, int V, int Slots, class In>
struct Loads {
  template <class Index>
  __device__ void load(const In* row, Index first, Index step, Index n) {
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index at) { self()->put(i, Self::template read<false>(row + at)); },
        [&](int i, Index at) {
          if (in_one<V>(at, n))
            self()->put(i, Self::template read<false>(row + at));
          else
            self()->put_part(i, row + at, at, n);
        });
  }
  // The same from the shelf, from its slot `shelf` on.
  template <class Index>
  __device__ void take(int shelf, Index first, Index step, Index n) {
    typedef Shelf<V, In> Shared;
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index) { put_whole(i, Shared::slot(shelf + i)); },
        [&](int i, Index at) {
          if (whole<V>(at, n))
            put_whole(i, Shared::slot(shelf + i));
          else
            self()->put_part(i, Shared::slot(shelf + i), at, n);
        });
  }

 private:
  __device__ Self* self() { return static_cast<Self*>(this); }
  __device__ void put_whole(int slot, const In* at) {
    self()->put(slot, *reinterpret_cast<const typename Self::Raw*>(at));
  }
};
