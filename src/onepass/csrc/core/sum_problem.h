// sum_problem.h: one problem of sums: a tensor is summed over dims that another tensor lacks. Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// Strides are those of kX, the tensor that is summed, and kY, the sums, which has stride 0 along the summed dims.
struct SumProblem {
  DType in, out;
  const void* x;
  void* y;
  DimGroup kept, summed;
  int64_t sums = 1, n = 1;  // how many sums there are, and the elements of each
  double divisor = 1;       // each sum is divided by it

  void add(int64_t size, int64_t x_stride, int64_t y_stride, bool is_summed) {
    (is_summed ? summed : kept).insert({size, {x_stride, is_summed ? 0 : y_stride}});
    (is_summed ? n : sums) *= size;
  }
};

// Runs a problem whose tensors are not empty.
void run_sum_cpu(const SumProblem& problem);

}  // namespace onepass
