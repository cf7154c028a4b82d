// operators.h: the operators' work on tensors that are there, for those who make the tensors: ops.cpp,
// aten_override.cpp.
#pragma once

#include <algorithm>

#include "../core/problem.h"
#include "../core/reduce_dims.h"
#include "../plan/rows.h"

namespace onepass {

// The dims of a result before those of the input: the two planes of a state.
constexpr int planes(Function function) { return function == Function::state; }

// The shape of a result. Its arrays are as long as they may get: nothing here is worth a walk to the heap.
struct Shape {
  int rank = 0;
  int64_t sizes[kMaxDims + 1];

  Shape(Function function, const Operand& x, const Mask& mask, bool keepdim) {
    if (planes(function)) sizes[rank++] = 2;
    for (int i = 0; i < x.rank; ++i) {
      if (!reduces(function) || !mask.reduced[i]) {
        sizes[rank++] = x.sizes[i];
      } else if (keepdim) {
        sizes[rank++] = 1;
      }
    }
    if (rank > kMaxDims) fail("a result of at most 64 dims, got " + std::to_string(rank));
  }

  bool is_of(const Operand& y) const { return rank == y.rank && std::equal(sizes, sizes + rank, y.sizes); }
};

// A call into `y`, of which is found out whether it is the result's; not, whether it shares memory with `x`.
void forward_into(Function function, const Operand& x, const Mask& mask, bool keepdim, const Operand& y,
                  const CudaPlan* forced = nullptr);

// Why a call may not write `y` while it reads `x`, or null where it may.
const char* out_refusal(Function function, const Operand& y, const Operand& x);

// The gradient of softmax or log_softmax over `dim`, contiguous.
Owned gradient(Function function, const Operand& grad, const Operand& y, int64_t dim, DType dx_type);

}  // namespace onepass
