// broadcast_sum.h: sums over the dims that a tensor was broadcast along, on the CPU: the plan and the entry points, one
// set per compiled instruction set. No torch here.
#pragma once

#include "../core/sum_problem.h"

namespace onepass {

// How a call is executed. A work item is a chunk of the elements of some sums. Chunks follow from the shape alone, and
// their sums are added in order, so that bits do not depend on the number of threads.
struct SumPlan {
  bool in_columns = false;  // neighbours in memory belong to different sums; otherwise to one
  int64_t width = 1;        // sums of a tile; all others take one at a time
  int64_t tiles = 1;
  int64_t run = 1;         // slices that follow each other in memory and are added as one
  int64_t chunk = 1;       // elements of each sum that are one work item
  int64_t chunks = 1;      // of each tile
  int64_t grain_size = 1;  // work items below which a second thread does not pay
  int64_t parts() const { return chunks > 1 ? tiles * chunks * width : 0; }  // sums of chunks, which are kept
};

// `run_sum` makes sums, or those of chunks; `merge_sums` makes sums of these, for the tiles [begin, end).
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
