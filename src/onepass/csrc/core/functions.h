// functions.h: the list of functions. C++ (types.h), the CUDA kernels and, through native.py, Python read it. It has
// only preprocessor code, so that NVRTC accepts it as it is.
//
// F(name, is_reduction, leading_planes) for each function, in the order of their numbers:
//   is_reduction     the result has one element per row instead of one per element
//   leading_planes   the size of the dim that a result has before the input's dims, or 0 if it has none (a state has
//                    two planes: maxima and sums)
#pragma once

#define ONEPASS_FUNCTIONS(F) \
  F(softmax, false, 0)       \
  F(log_softmax, false, 0)   \
  F(softmin, false, 0)       \
  F(logsumexp, true, 0)      \
  F(state, true, 2)
