// loss.h: losses on the CPU: the plan of a call and the entry points, one set for each compiled instruction set. There
// is no torch here.
#pragma once

#include "../core/loss_problem.h"

namespace onepass {

// How a call is executed. No two threads share a work item, and an item is computed in the same way by any thread. The
// numbers of a row do not depend on the rows beside it.
struct LossPlan {
  bool in_columns = false;  // tiles of rows, one row per lane; otherwise rows, or chunks of rows
  bool is_plain = false;    // (backward) elements are contiguous and have one factor, and rows have few numbers
  bool streaming = false;   // the gradient is written by streaming stores
  int64_t work_items = 0;
  int64_t grain_size = 1;  // with fewer work items, a second thread does not pay
  int64_t width = 1;       // rows of a tile
  int64_t per_dim = 1;     // tiles in the rows of the last dim, or chunks in a row
};

// `plan_loss` throws if a class is out of range. run_loss() calls `run_loss_backward`, which is in loss_backward.cpp,
// for gradients.
#define ONEPASS_DECLARE_LOSS(isa)                                                          \
  namespace isa {                                                                          \
  LossPlan plan_loss(const LossProblem& problem);                                          \
  void run_loss(const LossProblem&, const LossPlan&, int64_t begin, int64_t end);          \
  void run_loss_backward(const LossProblem&, const LossPlan&, int64_t begin, int64_t end); \
  }
ONEPASS_DECLARE_LOSS(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE_LOSS(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE_LOSS(avx512)
#endif
#undef ONEPASS_DECLARE_LOSS

}  // namespace onepass
