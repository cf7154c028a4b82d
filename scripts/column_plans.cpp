// column_plans.cpp: what ColumnPlanner compares, for scripts/sweep_columns.py and scripts/fit_columns.py, on an H200.
// Each line of the input is a softmax over the middle dim of a contiguous tensor: its three sizes, the numbers of its
// dtype and function, 1 if it is a gradient, and perhaps plans. For each line it prints a line of plans, each with
// ColumnSpeed's estimate and features of it: of the plans that are given, else of the planner's own, then all
// candidates.
#include <cstdio>
#include <iostream>
#include <sstream>

#include "plan/columns.h"
#include "plan/validate.h"

using namespace onepass;

int main() {
  const Gpu gpu = typical(90, kTuned, "NVIDIA H200");
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    int64_t sizes[3];
    int dtype, function, backward;
    words >> sizes[0] >> sizes[1] >> sizes[2] >> dtype >> function >> backward;
    const int64_t strides[] = {sizes[1] * sizes[2], sizes[2], 1}, none[] = {0, 0, 0};
    const int64_t* const each[] = {strides, strides, strides, none};
    const bool reduce[] = {false, true, false};
    Problem problem = backward ? Problem::backward(make_backward_layout(3, sizes, each, reduce, false),
                                                   Function(function), DType(dtype), DType(dtype))
                               : Problem::forward(make_forward_layout(3, sizes, strides, strides, reduce, false),
                                                  Function(function), DType(dtype), DType(dtype));
    for (int t = 0; t < problem.count_tensors(); ++t) problem.tensors[t].data = reinterpret_cast<void*>(1 << 20);
    const ColumnView view = column_view(problem);
    const ColumnPlanner planner = column_planner(view, gpu, problem);
    const auto print = [&](const CudaPlan& plan) {
      std::printf("%d,%d,%d,%d,%d,%d,%d,%d:", int(plan.tier), plan.threads_per_row, plan.rows_per_block,
                  plan.items_per_thread, plan.vec_size, plan.blocks_per_row, plan.smem_vecs, int(plan.access));
      std::printf("%.6g:", planner.expected(plan));
      for (const float x : planner.features(plan)) std::printf("%.6g,", double(x));
      std::printf(" ");
    };
    bool is_given = false;
    for (std::string numbers; words >> numbers; is_given = true) {
      std::istringstream digits(numbers);
      std::vector<int64_t> plan(8);
      char comma;
      for (int64_t& number : plan) digits >> number >> comma;
      print(make_plan(plan));
    }
    if (!is_given) print(planner.plan()), planner.for_each_candidate(print);
    std::printf("\n");
  }
}
