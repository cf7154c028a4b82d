// segment_problem.h: one problem of rows of unequal length, checked and laid out: softmax, log_softmax, logsumexp or
// the state of the segments that a dim is cut into, and the gradients (segments.py has the definitions). Pure: no
// torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// One dim of x, the ragged one, has `items` items. Segment s is the items from offsets[s] to before offsets[s + 1]. The
// first offset is 0, the last one is `items`, and they never decrease. `order` is a permutation: with it, item k of the
// segments is at place order[k] of the ragged dim, in all tensors that have items. All other dims are inner dims. A row
// is a segment at one place of the inner dims. The score of an item is s = factor * x + bias. The CPU engine's offsets
// and order have been checked. If nobody has checked them, kernels keep what they read within the items.
//
// Forward, y is computed from x and bias:
//
//   softmax       exp(s - lse) for each item, lse = m + log l
//   log_softmax   s - lse for each item
//   logsumexp     lse for each row; -inf for an empty segment
//   state         for each row m, the maximum of s, and `plane` elements behind it l, the sum of exp(s - m);
//                 (-inf, 0) for an empty segment
//
// Backward, dx is computed from the result y and its gradient `grad`. The gradient of the bias is dx without the
// factor:
//
//   softmax       dx = factor * y * (grad - the sum of y * grad over the row)
//   log_softmax   dx = factor * (grad - exp(y) * the sum of grad over the row)
//   logsumexp     dx = factor * grad * exp(s - y), with x and the bias
//
// The gradient of a state is computed from these (segment_arithmetic.py).
//
// Types. Forward: y has the type of x, or float32 if x has a 16-bit type; a state has the accumulator's type. Backward:
// y and grad have one type. dx has the same type, or a 16-bit type if they are float32. For logsumexp, y and grad have
// the accumulator's type, and dx that of x. The bias has the type of x, or the accumulator's.
struct SegmentProblem {
  Function function = Function::softmax;
  Direction direction = Direction::forward;

  enum { kOfX, kOfBias, kOfY, kOfGrad, kOfDx, kTensors };
  const void* data[kTensors] = {};  // null if the problem has no such tensor
  DType types[kTensors] = {};
  // The stride from one item to the next. If the result has one number per row, the step of y and grad is from one
  // segment to the next.
  int64_t steps[kTensors] = {};
  // The other dims, merged as far as all tensors allow, the slowest first. Strides are 0 for tensors that are expanded
  // or that the problem lacks.
  DimGroupOf<kTensors> inner;
  int64_t columns = 1;  // elements of the inner dims; there are segments * columns rows

  int64_t items = 0, segments = 0;
  const void *offsets = nullptr, *order = nullptr;  // segments + 1 numbers; and `items` numbers, or null
  bool has_wide_indices = true;                     // whether these have 64 bits; otherwise 32
  int64_t plane = 0;                                // distance between the two planes of a state
  double factor = 1;

  bool has(int tensor) const { return data[tensor] != nullptr; }
  bool is_backward() const { return direction == Direction::backward; }
  // Whether the result has one number per row.
  bool is_reduction() const { return onepass::is_reduction(function); }
  DType accumulator() const {
    const DType read = types[has(kOfX) ? kOfX : kOfY];
    return read == DType::float64 ? DType::float64 : DType::float32;
  }
  // The tensor that is computed.
  int result() const { return is_backward() ? kOfDx : kOfY; }

  int64_t offset(int64_t segment) const { return index(offsets, segment); }
  // The place of item k of the segments in the ragged dim.
  int64_t place(int64_t k) const { return order ? index(order, k) : k; }

 private:
  int64_t index(const void* from, int64_t i) const {
    return has_wide_indices ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
  }
};

// Runs a problem that has rows and items, and whose offsets have been checked.
void run_segments_cpu(const SegmentProblem& problem);

}  // namespace onepass
