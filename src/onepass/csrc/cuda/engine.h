// engine.h: the CUDA engine's entry point.
#pragma once

#include "../call.h"
#include "../tensors.h"

namespace onepass::cuda {

// A plan from its numbers (tier, lanes, rows a block, values, vector, split, shelf, edges), or an error that says which
// is wrong.
CudaPlan checked_plan(const std::vector<int64_t>& numbers);

// Runs a call whose output is not empty. Rows of unit stride go straight to a kernel; other layouts are gathered: a
// copy to rows, the kernel, a copy back.
// `out` is looked at where a call is gathered only: rows are launched from the call alone.
void run(const Call& call, const Operand& input, const Operand& out, const bool* reduced, bool keepdim,
         const CudaPlan* forced);

}  // namespace onepass::cuda
