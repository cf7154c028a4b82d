// backward.h: the CUDA engine's entry point for gradients.
#pragma once

#include "../../core/backward_layout.h"
#include "../../plan/rows.h"
#include "../../core/stable_tensor.h"

namespace onepass::cuda {

// The tensors of a gradient in the order of BackwardTensor, the last one null but of logsumexp, and their strides by
// the dims of the input, of which `reduced` marks some.
struct BackwardTensors {
  const Operand* each[kBackwardTensors];
  const int64_t* strides[kBackwardTensors];
  int rank;
  const int64_t* sizes;
  const bool* reduced;
};

// Makes a gradient that is not empty. Rows of unit stride go to the kernels of rows, other layouts to those of columns;
// gathered are what engine.h says: copies to rows, the kernel, a copy back. A plan that is given is taken, or an error
// says why it cannot be.
void run_backward(const BackwardCall& call, const BackwardTensors& tensors, const CudaPlan* forced);

}  // namespace onepass::cuda
