// engine.h: the CUDA engine's entry point.
#pragma once

#include "../../core/problem.h"
#include "../../plan/rows.h"
#include "../../core/stable_tensor.h"

namespace onepass::cuda {

// A plan from its numbers (tier, lanes, rows a block, values, vector, split, shelf, edges), or an error that says which
// is wrong.
CudaPlan checked_plan(const std::vector<int64_t>& numbers);

// Runs a call whose output is not empty. Rows of unit stride go to the kernels of rows, other layouts to those of
// columns. In the batch-invariant mode, and of more dims than those take, a call is gathered: a copy to rows, the
// kernel, a copy back.
// `out` is looked at where a call is gathered only: else it is launched from the call alone.
void run(const Call& call, const Operand& input, const Operand& out, const bool* reduced, bool keepdim,
         const CudaPlan* forced);

}  // namespace onepass::cuda
