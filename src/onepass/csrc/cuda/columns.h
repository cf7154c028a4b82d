// columns.h: calls over rows that are not one piece of memory each.
#pragma once

#include "../backward_layout.h"
#include "../call.h"
#include "../tensors.h"

namespace onepass::cuda {

// Launch a call, or a gradient, in place, by the plan given or its own; `like` is on the
// device. False where it has more dims than the kernels
// take.
bool run_columns(const Call& call, const Operand& like, const CudaPlan* forced);
bool run_backward_columns(const BackwardCall& call, const Operand& like, const CudaPlan* forced);

}  // namespace onepass::cuda
