// draw.h: random problems over any dims, forward and backward, for programs that plan and launch them without a GPU.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "plan/columns.h"

using namespace onepass;

namespace {

thread_local std::mt19937 draw;
int64_t below(int64_t bound) { return int64_t(draw() % uint64_t(bound)); }
int64_t one_of(std::initializer_list<int64_t> from) { return from.begin()[below(int64_t(from.size()))]; }
DType draw_type() { return DType(below(4)); }
DType wide_type(DType type) { return type == DType::float64 ? type : DType::float32; }

// Prints what is wrong, for a caller that returns false.
[[maybe_unused]] bool complain(const std::string& what) { return std::printf("%s\n", what.c_str()), false; }

constexpr int kMaxRank = 6;

// Sizes, an order of dims in memory, and which are reduced.
struct Shape {
  int rank = int(1 + below(kMaxRank));
  int64_t sizes[kMaxRank];
  bool reduce[kMaxRank] = {};
  std::vector<int> order;

  explicit Shape(bool small) {
    int64_t total = 1;
    for (int i = 0; i < rank; ++i) {
      sizes[i] = below(3)   ? one_of({1, 2, 3, 4, 5, 7, 8})
                 : small    ? one_of({6, 9, 16, 21, 24, 49})
                 : below(8) ? one_of({16, 33, 49, 64, 100, 128, 196, 197, 256, 1000, 1024})
                            : one_of({4096, 5001, 16384, 50257, 131072, 1000003, 16777216});
      if (sizes[i] > (int64_t(1) << 40) / total) sizes[i] = 1;
      total *= sizes[i];
      order.push_back(i);
    }
    if (below(4) == 0) std::shuffle(order.begin(), order.end(), draw);
    for (int64_t dims = below(4) ? 1 : 2; dims > 0; --dims) reduce[below(rank)] = true;
  }
  // `padded`: there may be something between dims. Reduced dims that are skipped, and expanded ones, have stride 0.
  std::vector<int64_t> strides(bool padded, bool skips_reduced = false, bool expands = false) const {
    std::vector<int64_t> made(kMaxRank);
    int64_t step = padded && below(8) == 0 ? 2 : 1;
    for (int i = rank - 1; i >= 0; --i) {
      const int d = order[size_t(i)];
      if (skips_reduced && reduce[d]) continue;
      made[size_t(d)] = expands && below(2) ? 0 : step;
      step *= sizes[d];
      if (padded && below(4) == 0) step += one_of({1, 2, 4, 8, 16});
    }
    return made;
  }
};

// Gives each tensor that the problem has an address.
void place(Problem* problem) {
  const int count = problem->count_tensors() + (problem->is_backward() && problem->is_reduction());
  for (int t = 0; t < count; ++t) {
    const int64_t first = one_of({0, 0, 0, 1, 2, 3, 4, 6});
    problem->tensors[t].data = reinterpret_cast<void*>(0x10000 * (t + 1) + size_of(problem->type(t)) * first);
  }
}

Problem draw_forward(bool small) {
  const Shape shape(small);
  const Function function = Function(below(5));
  const bool reduces = is_reduction(function), padded = below(3) == 0, apart = below(8) == 0;
  const DType x = draw_type(), other = draw_type();
  const DType y = function == Function::state ? wide_type(x) : below(3) ? x : reduces ? wide_type(x) : other;
  const auto x_strides = shape.strides(padded);
  const auto y_strides = apart || reduces || padded ? shape.strides(apart, reduces) : x_strides;
  return Problem::forward(
      make_forward_layout(shape.rank, shape.sizes, x_strides.data(), y_strides.data(), shape.reduce, reduces), function,
      x, y);
}

Problem draw_backward(bool small) {
  const Shape shape(small);
  const bool lse = below(4) == 0, padded = below(3) == 0;
  const DType dx_type = draw_type(), other = draw_type();
  const DType type = below(3) ? dx_type : lse ? wide_type(dx_type) : other;
  const auto saved = shape.strides(padded), dx = padded ? shape.strides(below(2)) : saved;
  const auto grad = shape.strides(below(8) == 0, lse, below(3) == 0);
  const auto of_lse = lse ? shape.strides(false, true) : std::vector<int64_t>(kMaxRank);
  const int64_t* const each[] = {dx.data(), saved.data(), grad.data(), of_lse.data()};
  return Problem::backward(make_backward_layout(shape.rank, shape.sizes, each, shape.reduce, lse),
                           lse ? Function::logsumexp : Function(below(3)), type, dx_type);
}

Problem draw_problem(bool small) {
  Problem problem = below(2) ? draw_forward(small) : draw_backward(small);
  place(&problem);
  return problem;
}

}  // namespace
