// machine.h: the machine that a kernel translated from PTX (ptx.py) runs on: threads, each a context of its own, which
// run one at a time until they have to wait; blocks, those of a cluster or of a cooperative launch together; memory
// with bounds. What hardware leaves open is drawn: which thread goes on next, and when an asynchronous copy, or a
// message to another block, arrives: at once, or no sooner than somebody has to wait for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

struct Range {
  const char* begin;
  int64_t size;
  bool writable;
};

struct Launch {
  uint32_t grid_x, grid_y, block, cluster, shared;
  bool cooperative;
};

struct Copy {
  char* to;
  const char* from;
  int size;
};

struct Block;

struct Thread {
  Block* block;
  uint32_t index, lane;
  std::vector<Copy> open;                 // not committed
  std::deque<std::vector<Copy>> groups;   // committed, and not there yet
  std::vector<Copy> open_stores, stores;  // the same of copies from shared memory
  uint64_t cluster_turn = 0;
};

// A barrier of the threads of a block, of a warp or of a part of one.
struct ThreadBarrier {
  uint32_t arrived = 0;
  uint64_t phase = 0;
  uint32_t values[2][32] = {};  // of this phase and the one before
  uint32_t count[2] = {};
};

struct Grid;

struct Block {
  Grid* grid;
  uint32_t x, y, rank;
  std::vector<char> memory;
  char* shared;
  size_t size;  // of shared memory
  std::vector<Thread> threads;
  ThreadBarrier barriers[16];
  std::map<std::pair<uint32_t, uint32_t>, ThreadBarrier> warps;  // by first thread and mask
};

struct Grid {
  Launch launch;
  const char* params;
  char* workspace;            // what a cooperative launch has for its barrier
  std::vector<Range> ranges;  // of global memory
  int lateness;               // of copies and messages: 0 none, 1 the most, 2 drawn
  std::mt19937 draw;
  void (*yield)(Thread*);
  std::vector<Block*> together;  // blocks that run now
  bool others = false;           // whether another process may write what is waited for
  uint32_t cluster_arrived = 0;
  uint64_t cluster_turn = 0, progress = 0;  // progress: of anything that others may wait for
  std::vector<std::function<void()>> messages;

  bool late() { return lateness == 1 || (lateness == 2 && draw() & 1); }
};

// Until something may have happened.
inline void wait(Thread* t) { t->block->grid->yield(t); }
inline uint64_t nanoseconds() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
inline void has_happened(Thread* t) { ++t->block->grid->progress; }

// Memory -------------------------------------------------------------------------------------------------------------

// An address in shared memory is an offset, with a block of the cluster, and one more, in its highest byte.
inline char* shared_at(Thread* t, uint32_t at, int size, int alignment) {
  const Block* block = t->block;
  if (const uint32_t peer = at >> 24) {
    if (peer > block->grid->launch.cluster) fail("shared memory of no block of the cluster");
    block = block->grid->together[peer - 1];
  }
  const uint32_t offset = at & 0xffffff;
  if (offset % uint32_t(alignment)) fail("misaligned access to shared memory");
  if (offset + size_t(size) > block->size) fail("an access beyond shared memory");
  return block->shared + offset;
}
inline char* shared_at(Thread* t, uint32_t at, int size) { return shared_at(t, at, size, size); }

inline bool within(const char* at, int size, const char* begin, int64_t count) {
  return at >= begin && at + size <= begin + count;
}

// `is_generic`: an address of shared memory will do.
inline char* memory_at(Thread* t, uint64_t address, int size, bool writes, int alignment, bool is_generic) {
  char* const at = reinterpret_cast<char*>(address);
  const Block& block = *t->block;
  if (address % uint64_t(alignment)) fail("misaligned access to global memory");
  for (const Range& range : block.grid->ranges) {
    if (!within(at, size, range.begin, range.size)) continue;
    if (writes && !range.writable) fail("a write to what is only read");
    return at;
  }
  if (is_generic && within(at, size, block.shared, int64_t(block.size))) return at;
  fail(std::string(writes ? "a write" : "a read") + " outside of all tensors");
}
inline char* global_at(Thread* t, uint64_t address, int size, bool writes, int alignment) {
  return memory_at(t, address, size, writes, alignment, false);
}
inline char* global_at(Thread* t, uint64_t address, int size, bool writes) {
  return global_at(t, address, size, writes, size);
}
inline char* generic_at(Thread* t, uint64_t address, int size, bool writes) {
  return memory_at(t, address, size, writes, size, true);
}

// In a thread's own memory.
inline char* local_at(uint64_t address, int size, char* begin, size_t count) {
  char* const at = reinterpret_cast<char*>(address);
  if (!within(at, size, begin, int64_t(count))) fail("an access beyond the arrays of a thread");
  return at;
}

inline const char* param_at(uint64_t address) { return reinterpret_cast<const char*>(address); }

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void store(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace emulator
