// barriers.h: how threads wait for each other, and what they copy and send without waiting.
#pragma once

#include "arithmetic.h"

namespace emulator {

// Barriers of threads ------------------------------------------------------------------------------------------------

// One more thread of `expected` has arrived. Returns the phase that it arrived in.
inline uint64_t arrive(Thread* t, ThreadBarrier& barrier, uint32_t expected) {
  const uint64_t phase = barrier.phase;
  has_happened(t);
  if (++barrier.arrived >= expected) barrier.arrived = 0, ++barrier.phase;
  return phase;
}
// Waits until `expected` threads have arrived. Returns the phase that has ended.
inline uint64_t arrive_and_wait(Thread* t, ThreadBarrier& barrier, uint32_t expected) {
  const uint64_t phase = arrive(t, barrier, expected);
  while (barrier.phase == phase) wait(t);
  return phase;
}

inline uint32_t threads_of(Thread* t) { return uint32_t(t->block->threads.size()); }
inline ThreadBarrier& barrier_of(Thread* t, uint32_t number) {
  if (number >= 16) fail("no such barrier");
  return t->block->barriers[number];
}
inline void block_sync(Thread* t, uint32_t number, uint32_t count) { arrive_and_wait(t, barrier_of(t, number), count); }
inline void block_sync(Thread* t, uint32_t number) { block_sync(t, number, threads_of(t)); }
inline void block_arrive(Thread* t, uint32_t number, uint32_t count) { arrive(t, barrier_of(t, number), count); }
// How many threads say yes.
inline uint32_t block_count(Thread* t, uint32_t number, bool mine) {
  ThreadBarrier& barrier = barrier_of(t, number);
  uint32_t& of_phase = barrier.count[barrier.phase & 1];
  of_phase = mine + (barrier.arrived > 0 ? of_phase : 0);  // others may still read that of the phase before
  return barrier.count[arrive_and_wait(t, barrier, threads_of(t)) & 1];
}
inline bool block_any(Thread* t, uint32_t number, bool mine) { return block_count(t, number, mine) > 0; }
inline bool block_all(Thread* t, uint32_t number, bool mine) { return block_count(t, number, !mine) == 0; }

struct Warp {
  ThreadBarrier& barrier;
  uint32_t mask;

  Warp(Thread* t, uint32_t mask) : Warp(t, t->index / 32 * 32, mask) {}

  // The values that lanes came with.
  const uint32_t* values(Thread* t, uint32_t mine) {
    barrier.values[barrier.phase & 1][t->lane] = mine;
    return barrier.values[arrive_and_wait(t, barrier, uint32_t(__builtin_popcount(mask))) & 1];
  }

 private:
  Warp(Thread* t, uint32_t first, uint32_t named)
      : barrier(t->block->warps[{first, named}]),
        mask(threads_of(t) - first < 32 ? named & ((1u << (threads_of(t) - first)) - 1) : named) {
    if (!(mask >> t->lane & 1)) fail("a lane outside of its own mask");
  }
};

inline void warp_sync(Thread* t, uint32_t mask) { Warp(t, mask).values(t, 0); }

inline int32_t largest_of_warp(Thread* t, int32_t mine, uint32_t mask) {
  Warp warp(t, mask);
  const uint32_t* const all = warp.values(t, uint32_t(mine));
  int32_t most = mine;
  for (uint32_t lane = 0; lane < 32; ++lane) most = std::max(most, warp.mask >> lane & 1 ? int32_t(all[lane]) : mine);
  return most;
}

// Of each lane a bit.
inline uint32_t ballot(Thread* t, bool mine, uint32_t mask) {
  Warp warp(t, mask);
  const uint32_t* const all = warp.values(t, mine);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) bits |= (warp.mask >> lane & 1 ? all[lane] : 0) << lane;
  return bits;
}

// The value of another lane.
inline uint32_t exchanged(Thread* t, uint32_t value, uint32_t from, uint32_t mask) {
  Warp warp(t, mask);
  if (from > 31 || !(warp.mask >> from & 1)) fail("a shuffle from a lane that is not there");
  return warp.values(t, value)[from];
}

inline void arrive_in_cluster(Thread* t) {
  Grid& grid = *t->block->grid;
  t->cluster_turn = grid.cluster_turn;
  has_happened(t);
  if (++grid.cluster_arrived == grid.launch.block * grid.together.size()) grid.cluster_arrived = 0, ++grid.cluster_turn;
}
inline void await_cluster(Thread* t) {
  while (t->block->grid->cluster_turn == t->cluster_turn) wait(t);
}

// Barriers of bytes --------------------------------------------------------------------------------------------------

// An mbarrier, in the eight bytes that it has in shared memory.
struct TxBarrier {
  uint8_t phase, count, pending, unused;
  int32_t bytes;

  void turn() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
  }
};

inline TxBarrier* barrier_at(Thread* t, uint32_t at) { return reinterpret_cast<TxBarrier*>(shared_at(t, at, 8)); }
inline void open_barrier(Thread* t, uint32_t at, uint32_t count) {
  *barrier_at(t, at) = {0, uint8_t(count), uint8_t(count), 0, 0};
}
inline void expect(Thread* t, uint32_t at, uint32_t bytes) {
  TxBarrier& barrier = *barrier_at(t, at);
  if (!barrier.pending) fail("more arrivals at a barrier than it has");
  barrier.bytes += int32_t(bytes), --barrier.pending;
  barrier.turn();
  has_happened(t);
}
inline bool is_over(Thread* t, uint32_t at, uint32_t parity) {
  if (barrier_at(t, at)->phase == (parity & 1)) wait(t);
  return barrier_at(t, at)->phase != (parity & 1);
}

// Makes of what is there, and a value, what is there from now on. Returns what was there before.
template <class T, class F>
T update(Thread* t, char* to, T value, F f) {
  const T before = load<T>(to);
  store(to, f(before, value));
  has_happened(t);
  return before;
}

// Copies and messages ------------------------------------------------------------------------------------------------

inline void copy_async(Thread* t, uint32_t to, uint64_t from, int size) {
  const Copy copy = {shared_at(t, to, size), global_at(t, from, size, false), size};
  if (t->block->grid->late())
    t->open.push_back(copy);
  else
    std::memcpy(copy.to, copy.from, size_t(size));
}
inline void commit_copies(Thread* t) { t->groups.push_back(std::exchange(t->open, {})); }
inline void await_copies(Thread* t, uint32_t all_but) {
  for (; t->groups.size() > all_but; t->groups.pop_front()) {
    for (const Copy& copy : t->groups.front()) std::memcpy(copy.to, copy.from, size_t(copy.size));
  }
}

// What `copy` copies arrives now or later, at a barrier that counts its bytes.
template <class F>
void arrive_at(Thread* t, uint32_t counter, size_t size, F copy) {
  TxBarrier* const barrier = barrier_at(t, counter);
  const auto arrive = [=] {
    copy();
    barrier->bytes -= int32_t(size);
    barrier->turn();
    has_happened(t);
  };
  if (t->block->grid->late())
    t->block->grid->messages.push_back(arrive);
  else
    arrive();
}

// Whole vectors of 16 bytes to shared memory, which a barrier counts.
inline void copy_bulk(Thread* t, uint32_t to, uint64_t from, int size, uint32_t counter) {
  if (size <= 0 || size % 16) fail("a copy of no whole vectors");
  const Copy copy = {shared_at(t, to, size, 16), global_at(t, from, size, false, 16), size};
  arrive_at(t, counter, size_t(size), [=] { std::memcpy(copy.to, copy.from, size_t(copy.size)); });
}
// And from there: what is copied is what is there when the thread waits for it.
inline void store_bulk(Thread* t, uint64_t to, uint32_t from, int size) {
  if (size <= 0 || size % 16) fail("a copy of no whole vectors");
  t->open_stores.push_back({global_at(t, to, size, true, 16), shared_at(t, from, size, 16), size});
}
inline void commit_stores(Thread* t) {
  for (const Copy& copy : std::exchange(t->open_stores, {})) {
    if (t->block->grid->late())
      t->stores.push_back(copy);
    else
      std::memcpy(copy.to, copy.from, size_t(copy.size));
  }
}
inline void await_stores(Thread* t) {
  for (const Copy& copy : std::exchange(t->stores, {})) std::memcpy(copy.to, copy.from, size_t(copy.size));
}

// Words to a block of the cluster, which counts them in a barrier.
template <int Words>
void send(Thread* t, uint32_t to, const uint32_t (&words)[Words], uint32_t counter) {
  char* const there = shared_at(t, to, sizeof words);
  const std::vector<uint32_t> sent(words, words + Words);
  arrive_at(t, counter, sizeof words, [=] { std::memcpy(there, sent.data(), sizeof words); });
}

}  // namespace emulator
