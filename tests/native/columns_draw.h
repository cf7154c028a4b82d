// columns_draw.h: random problems over columns.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "plan/columns.h"

using namespace onepass;

namespace {

thread_local std::mt19937 draw;
int64_t below(int64_t bound) { return int64_t(draw() % uint64_t(bound)); }
int64_t one_of(std::initializer_list<int64_t> from) { return from.begin()[below(int64_t(from.size()))]; }

// Sizes, an order of dims with something between some of them, and which are reduced.
struct Shape {
  int rank;
  int64_t sizes[7];
  bool reduce[7] = {};
  int64_t rows = 1, n = 1;
  std::vector<int> order;

  explicit Shape(bool small) : rank(int(1 + below(6))) {
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
    if (below(4) == 0) {
      for (int i = rank - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(below(i + 1))]);
    }
    const int dims = below(4) ? 1 : 2;
    for (int i = 0; i < dims; ++i) reduce[below(rank)] = true;
    for (int i = 0; i < rank; ++i) (reduce[i] ? n : rows) *= sizes[i];
  }
  void strides(int64_t* made, bool padded, bool skips_reduced = false, bool expands = false) const {
    int64_t step = padded && below(8) == 0 ? 2 : 1;
    for (int i = rank - 1; i >= 0; --i) {
      const int d = order[size_t(i)];
      if (skips_reduced && reduce[d]) {
        made[d] = 0;
        continue;
      }
      made[d] = expands && below(2) ? 0 : step;
      step *= sizes[d];
      if (padded && below(4) == 0) step += one_of({1, 2, 4, 8, 16});
    }
  }
};

void* address(DType type) {
  return reinterpret_cast<void*>(0x10000 + size_of(type) * one_of({0, 0, 0, 1, 2, 3, 4, 6}));
}

// Gives each tensor that the problem has an address.
void place(Problem* problem) {
  const int count = problem->count_tensors() + (problem->is_backward() && problem->is_reduction());
  for (int t = 0; t < count; ++t) problem->tensors[t].data = address(problem->type(t));
}

// False where the problem is one of rows.
bool draw_forward(bool small, Problem* problem) {
  const Shape shape(small);
  const bool reduces = below(4) == 0, padded = below(3) == 0, apart = below(8) == 0;
  const DType x = DType(below(4)), y = below(3) ? x : reduces ? x : DType(below(4));
  int64_t x_strides[7], y_strides[7];
  shape.strides(x_strides, padded);
  if (apart || reduces || padded)
    shape.strides(y_strides, apart, reduces);
  else
    std::memcpy(y_strides, x_strides, sizeof x_strides);
  const bool state = reduces && reduces_to(Function::state, x, y) && below(2);
  const Function function = state ? Function::state : reduces ? Function::logsumexp : Function(below(3));
  *problem = Problem::forward(make_forward_layout(shape.rank, shape.sizes, x_strides, y_strides, shape.reduce, reduces),
                              function, x, y);
  place(problem);
  return !problem->has_rows();
}

bool draw_backward(bool small, Problem* problem) {
  const Shape shape(small);
  const bool lse = below(4) == 0, padded = below(3) == 0;
  const DType type = DType(below(4)), dx_type = below(3) ? type : DType(below(4));
  int64_t strides[kBackwardTensors][7] = {};
  shape.strides(strides[kSaved], padded);
  if (padded)
    shape.strides(strides[kDx], below(2));
  else
    std::memcpy(strides[kDx], strides[kSaved], sizeof strides[kDx]);
  shape.strides(strides[kGrad], below(8) == 0, lse, below(3) == 0);
  if (lse) shape.strides(strides[kLse], false, true);
  const int64_t* const each[] = {strides[0], strides[1], strides[2], strides[3]};
  *problem = Problem::backward(make_backward_layout(shape.rank, shape.sizes, each, shape.reduce, lse),
                               lse ? Function::logsumexp : Function(below(3)), type, dx_type);
  place(problem);
  return !problem->has_rows();
}

}  // namespace
