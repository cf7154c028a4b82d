// engine.h: the CUDA engine's entry point.
#pragma once

#include "../../plan/rows.h"
#include "../../core/stable_tensor.h"

namespace onepass::cuda {

// Runs a problem whose result is not empty. Rows of unit stride go to the kernels of rows, other layouts to those of
// columns. Of more dims than those take, and in the batch-invariant mode, the tensors `args` are gathered: copied to
// rows, and the result copied back. A plan that is given is taken; an error says why it cannot be.
void run(const Problem& problem, const TensorArgs& args, const CudaPlan* plan);

}  // namespace onepass::cuda
