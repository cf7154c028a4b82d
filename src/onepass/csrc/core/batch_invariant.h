// batch_invariant.h: whether plans may depend on the number of rows and on their addresses. There is a switch for the
// process, and one for each thread, which overrides it.
#pragma once

#include <atomic>

namespace onepass {

inline std::atomic<bool> process_invariant{false};
inline thread_local int thread_invariant = -1;  // -1: the switch of the process counts

inline bool batch_invariant() {
  return thread_invariant < 0 ? process_invariant.load(std::memory_order_relaxed) : thread_invariant != 0;
}

}  // namespace onepass
