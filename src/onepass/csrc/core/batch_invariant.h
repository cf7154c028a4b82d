// batch_invariant.h: whether plans may look at the number of rows and at where they lie. A switch of the process, and
// one of each thread that goes before it.
#pragma once

#include <atomic>

namespace onepass {

inline std::atomic<bool> process_invariant{false};
inline thread_local int thread_invariant = -1;  // -1: as the process has it

inline bool batch_invariant() {
  return thread_invariant < 0 ? process_invariant.load(std::memory_order_relaxed) : thread_invariant != 0;
}

}  // namespace onepass
