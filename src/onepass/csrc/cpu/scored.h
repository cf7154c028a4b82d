// scored.h: functions of scores on the CPU: the plan of a call and the entry points, one set for each compiled
// instruction set. There is no torch here.
#pragma once

#include "../core/scored_problem.h"
#include "engine.h"

namespace onepass {

// The routes:
//
//   rows        a thread computes one row after another
//   small_rows  (forward) some dozen short rows at a time
//   columns     tiles of rows, one per lane. The rows lie side by side, or they are short and at a fixed stride
//   row_chunks  long rows, cut into chunks
enum class ScoredRoute { rows, small_rows, columns, row_chunks };

// How a call is executed. No two threads share a work item, and an item is computed in the same way by any thread.
struct ScoredPlan {
  ScoredRoute route = ScoredRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;        // with fewer work items, a second thread does not pay
  int64_t width = 1;             // rows of a tile of columns
  int64_t chunks = 0;            // per row; 0 if rows are not cut
  bool reduces = false;          // the states of chunks must be merged before results can be stored
  bool stores = true;            // there is a result for each element
  bool stores_in_place = false;  // results are adjacent in memory, and need not be scattered
  bool streaming = false;        // results are written by streaming stores
};

// The state of a chunk: maximum, sum and its rounding error. In a gradient: whether any element takes part, and the
// sum. The merged states of the rows are stored behind the states of the chunks.
struct ScoredState {
  double m, l, error;
};

// Chunks that are reduced have the phases of CpuPhase. All other calls have one phase, `whole`. run_scored() calls
// `run_scored_backward`, which is in scored_backward.cpp, for gradients.
#define ONEPASS_DECLARE_SCORED(isa)                                                                             \
  namespace isa {                                                                                               \
  ScoredPlan plan_scored(ScoredProblem& problem);                                                               \
  void run_scored(const ScoredProblem&, const ScoredPlan&, CpuPhase, ScoredState*, int64_t begin, int64_t end); \
  void run_scored_backward(const ScoredProblem&, const ScoredPlan&, CpuPhase, ScoredState*, int64_t begin,      \
                           int64_t end);                                                                        \
  }
ONEPASS_DECLARE_SCORED(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE_SCORED(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE_SCORED(avx512)
#endif
#undef ONEPASS_DECLARE_SCORED

}  // namespace onepass
