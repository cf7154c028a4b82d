// scored.h: scores on the CPU: the plan and the entry points, one set per compiled instruction set. No torch here.
#pragma once

#include "../core/scored_problem.h"
#include "engine.h"

namespace onepass {

// rows        one row at a time, all lanes of a vector in it
// short_rows  tiles of some rows, transposed so that each lane has one
// columns     tiles of rows that lie side by side, one per lane
// row_chunks  chunks of rows that are too long for the scratch memory: they are read twice
enum class ScoredRoute { rows, short_rows, columns, row_chunks };

// How a call is executed. No two threads share a work item, and an item is computed the same way whatever thread takes
// it.
struct ScoredPlan {
  ScoredRoute route = ScoredRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;       // work items below which a second thread does not pay
  int64_t width = 1;            // rows of a work item
  int64_t chunks = 0;           // per row; 0 if rows are not cut
  bool reads_in_place = false;  // (rows of a gradient) no scratch memory
  bool streaming = false;       // results are written by streaming stores
};

// The state of a chunk: maximum, sum and its rounding error; of a gradient, whether an element takes part, and the sum.
// Merged, the numbers that the results of a row are made with.
struct ScoredState {
  double m, l, error;
};

// The phases of chunks are those of CpuPhase. Other routes have one, `whole`.
#define ONEPASS_DECLARE_SCORED(isa)                                                                             \
  namespace isa {                                                                                               \
  ScoredPlan plan_scored(const ScoredProblem& problem);                                                         \
  void run_scored(const ScoredProblem&, const ScoredPlan&, CpuPhase, ScoredState*, int64_t begin, int64_t end); \
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
