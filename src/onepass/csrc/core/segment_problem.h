// segment_problem.h: one problem of rows of unequal length, checked and laid out: softmax, log_softmax, logsumexp or
// the state of the segments that a dim is cut into, and the gradients (segments.py has the definitions). Pure: no
// torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// One dim of x, the ragged one, has `items` items. Segment s is the items offsets[s] to offsets[s + 1]; the first
// offset is 0, the last one `items`, and none is less than the one before. With an `order`, a permutation, item k of
// the segments is at place order[k] of the ragged dim, in all tensors that have items. A row is a segment at one place
// of the inner dims, which are all others. The score of an item is s = factor * x + bias. Offsets and order are checked
// where the CPU engine gets them. Where nobody has looked at them, kernels keep what they read within the items.
//
// Forward, y is from x and bias:
//
//   softmax       exp(s - lse) for each item, lse = m + log l
//   log_softmax   s - lse for each item
//   logsumexp     lse for each row; -inf for a segment of nothing
//   state         m, the maximum of s, and `plane` elements behind it l, the sum of exp(s - m), for each row. (-inf, 0)
//                 for a segment of nothing
//
// Backward, dx is from the gradient of the result, `grad`, and the result, y; that of the bias is dx without the
// factor:
//
//   softmax       dx = factor * y * (grad - the sum of y * grad over the row)
//   log_softmax   dx = factor * (grad - exp(y) * the sum of grad over the row)
//   logsumexp     dx = factor * grad * exp(s - y), with x and the bias
//
// The gradient of a state is made of these (segment_arithmetic.py).
//
// Types. Forward: y has the type of x, or float32 where x has a 16-bit type; of a state it has the accumulator's type.
// Backward: y and grad have one type, and dx has it too, or a 16-bit type where they are float32; of logsumexp y and
// grad have the accumulator's type, and dx that of x. The bias has the type of x, or the accumulator's.
struct SegmentProblem {
  Function function = Function::softmax;
  Direction direction = Direction::forward;

  enum { kOfX, kOfBias, kOfY, kOfGrad, kOfDx, kTensors };
  const void* data[kTensors] = {};  // null where the problem has no such tensor
  DType types[kTensors] = {};
  // From one item to the next. Where the result has one number per row, y and grad step from segment to segment.
  int64_t steps[kTensors] = {};
  // The other dims: as few as all tensors together have, the slowest first; their strides are 0 where a tensor is
  // expanded, or not there.
  DimGroupOf<kTensors> inner;
  int64_t columns = 1;  // elements of the inner dims, so that there are segments * columns rows

  int64_t items = 0, segments = 0;
  const void *offsets = nullptr, *order = nullptr;  // segments + 1 numbers; `items` numbers, or null
  bool has_wide_indices = true;                     // whether those have 64 bits; otherwise 32
  int64_t plane = 0;                                // of a state
  double factor = 1;

  bool has(int tensor) const { return data[tensor] != nullptr; }
  bool is_backward() const { return direction == Direction::backward; }
  // Whether the result has one number per row.
  bool is_reduction() const { return onepass::is_reduction(function); }
  DType accumulator() const {
    const DType read = types[has(kOfX) ? kOfX : kOfY];
    return read == DType::float64 ? DType::float64 : DType::float32;
  }
  // The tensor that is made.
  int result() const { return is_backward() ? kOfDx : kOfY; }

  int64_t offset(int64_t segment) const { return index(offsets, segment); }
  // Where item k of the segments is.
  int64_t place(int64_t k) const { return order ? index(order, k) : k; }

 private:
  int64_t index(const void* from, int64_t i) const {
    return has_wide_indices ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
  }
};

// Runs a problem that has rows and items, and offsets that are checked.
void run_segments_cpu(const SegmentProblem& problem);

}  // namespace onepass
