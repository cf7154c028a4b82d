// plan_check.h: whether a plan that a caller gives is a plan, and can serve a problem. Pure: no torch, no CUDA.
#pragma once

#include <vector>

#include "../../core/problem.h"
#include "../../plan/rows.h"

namespace onepass::cuda {

// A plan from its numbers (in the order of CudaPlan); throws where one is wrong.
CudaPlan parse_plan(const std::vector<int64_t>& numbers);

// Throw where a plan cannot serve a problem of rows.
void check_plan(const CudaPlan& plan, const ForwardProblem& problem, const Gpu& gpu);
void check_plan(const CudaPlan& plan, const BackwardProblem& problem, const Gpu& gpu);

}  // namespace onepass::cuda
