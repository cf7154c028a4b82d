// scored.h: scores on the CPU: the plan and the entry points, one set per compiled instruction set. No torch here.
#pragma once

#include "../core/scored_problem.h"
#include "engine.h"

namespace onepass {

// rows        rows that a thread takes one after another
// small_rows  (forward) some dozen short rows at a time
// columns     tiles of rows, one per lane, that lie side by side; or of short ones at equal distances
// row_chunks  chunks of long rows
enum class ScoredRoute { rows, small_rows, columns, row_chunks };

// How a call is executed. No two threads share a work item, and an item is computed the same way whatever thread takes
// it.
struct ScoredPlan {
  ScoredRoute route = ScoredRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;        // work items below which a second thread does not pay
  int64_t width = 1;             // rows of a tile of columns
  int64_t chunks = 0;            // per row; 0 if rows are not cut
  bool reduces = false;          // the states of chunks are merged before results can be stored
  bool stores = true;            // there are results per element
  bool stores_in_place = false;  // results lie side by side, and are not scattered
  bool streaming = false;        // results are written by streaming stores
};

// The state of a chunk: maximum, sum and its rounding error; of a gradient, whether an element takes part, and the sum.
// The merged states of the rows lie behind those of the chunks.
struct ScoredState {
  double m, l, error;
};

// The phases of chunks that reduce are those of CpuPhase. All else has one, `whole`. `run_scored_backward` is the part
// of `run_scored` that scored_backward.cpp has.
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
