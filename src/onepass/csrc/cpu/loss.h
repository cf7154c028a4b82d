// loss.h: losses on the CPU: the plan and the entry points, one set per compiled instruction set. No torch here.
#pragma once

#include "../core/loss_problem.h"

namespace onepass {

// How a call is executed. No two threads share a work item, and an item is computed the same way whatever thread takes
// it. The numbers of a row do not depend on the rows beside it.
struct LossPlan {
  bool in_columns = false;  // tiles of rows, one per lane; otherwise rows, or chunks of them
  bool is_plain = false;    // (backward) elements lie side by side and have one factor, and rows few numbers
  bool streaming = false;   // the gradient is written by streaming stores
  int64_t work_items = 0;
  int64_t grain_size = 1;  // work items below which a second thread does not pay
  int64_t width = 1;       // rows of a tile
  int64_t per_dim = 1;     // tiles of the rows of the last dim; chunks of a row
};

// `plan_loss` throws where a class is out of range. `run_loss_backward` is the part of `run_loss` that
// loss_backward.cpp has.
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
