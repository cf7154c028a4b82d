// broadcast_sum.h: sums over the dims that a tensor was broadcast along, on the CPU: the plan of a call and the entry
// points, one set for each compiled instruction set. There is no torch here.
#pragma once

#include "../core/sum_problem.h"

namespace onepass {

// How a call is executed. A work item is a chunk of the elements of one or several sums. Chunks depend only on the
// shape, and their sums are added in order, so the bits do not depend on the number of threads.
struct SumPlan {
  bool in_columns = false;  // adjacent elements belong to different sums; otherwise to one sum
  int64_t width = 1;        // sums in a tile; 1 if not in_columns
  int64_t tiles = 1;
  int64_t run = 1;         // contiguous slices that are added as one
  int64_t chunk = 1;       // elements of each sum in a work item
  int64_t chunks = 1;      // chunks of each tile
  int64_t grain_size = 1;  // with fewer work items, a second thread does not pay
  int64_t parts() const { return chunks > 1 ? tiles * chunks * width : 0; }  // stored sums of chunks
};

// `run_sum` computes sums, or the sums of chunks. `merge_sums` merges the latter for the tiles [begin, end).
#define ONEPASS_DECLARE_SUM(isa)                                                                       \
  namespace isa {                                                                                      \
  SumPlan plan_sum(const SumProblem& problem);                                                         \
  void run_sum(const SumProblem&, const SumPlan&, double* parts, int64_t begin, int64_t end);          \
  void merge_sums(const SumProblem&, const SumPlan&, const double* parts, int64_t begin, int64_t end); \
  }
ONEPASS_DECLARE_SUM(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE_SUM(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE_SUM(avx512)
#endif
#undef ONEPASS_DECLARE_SUM

}  // namespace onepass
