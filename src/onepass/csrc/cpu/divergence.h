// divergence.h: divergences on the CPU: the plan of a call and the entry points, one set for each compiled instruction
// set. There is no torch here.
#pragma once

#include "../core/divergence_problem.h"

namespace onepass {

// How a call is executed. No two threads share a work item, and an item is computed in the same way by any thread. The
// numbers of a row do not depend on the rows beside it.
struct DivergencePlan {
  bool in_columns = false;  // the lanes of a vector are rows; otherwise classes of a row
  bool streaming = false;   // gradients are written by streaming stores
  int64_t work_items = 0;
  int64_t grain_size = 1;  // with fewer work items, a second thread does not pay
  int64_t width = 1;       // rows of a work item
  int64_t span = 1;        // rows that are cut into work items together: all rows, or those of the last dim
};

#define ONEPASS_DECLARE_DIVERGENCE(isa)                                                             \
  namespace isa {                                                                                   \
  DivergencePlan plan_divergence(const DivergenceProblem& problem);                                 \
  void run_divergence(const DivergenceProblem&, const DivergencePlan&, int64_t begin, int64_t end); \
  }
ONEPASS_DECLARE_DIVERGENCE(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE_DIVERGENCE(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE_DIVERGENCE(avx512)
#endif
#undef ONEPASS_DECLARE_DIVERGENCE

}  // namespace onepass
