// scored_problem.h: one problem of scores, checked and laid out: a softmax, log_softmax or logsumexp of scores, which
// depend on other tensors (a bias, a mask and others) and on the position of an element (scores.py has the definition).
// Pure: no torch, no CUDA.
#pragma once

#include <limits>
#include <optional>

#include "layout.h"
#include "types.h"

namespace onepass {

// The tensors of a scored problem. Each has strides along all dims of the input, which are 0 where it is broadcast.
// kDistance is not a tensor in memory: it counts k - (q + offset), which says whether an element is inside the window.
//
//   kInput   forward: x. Backward: the forward's result y; for logsumexp, whose result is kRowLse: x
//   kGradOf  backward: the gradient of the result
//   kResult  forward: y. Backward: the gradient of x
//   kRowLse  forward: the logsumexp of each row, if it is written. Backward: the same, for logsumexp; or to compute the
//            slope of a softcap from it, y and a bias
//   kOfCap   backward, with a softcap, except for logsumexp: x
//   kBias    backward, with bias_parts: the gradient of a bias, or parts of it, one after another without gaps
enum ScoredTensor {
  kInput,
  kResult,
  kGradOf,
  kScale,
  kBias,
  kAlibi,
  kSink,
  kMask,
  kRowLse,
  kOfCap,
  kDistance,
  kScoredTensors
};

struct ScoredProblem {
  Function function;
  Direction direction;
  DType in, out;                                 // of what is read (x, or y and its gradient) and of what is written
  DType bias_type = DType::float32;              // scale, alibi, sink and the logsumexp have the accumulator's type
  void* data[kScoredTensors] = {};               // null if the problem has no such tensor. A mask has bytes, 0 or 1
  const void* storage_end[kScoredTensors] = {};  // the end of the memory that holds a tensor
  DimGroupOf<kScoredTensors> outer, reduced;
  int64_t rows = 1, n = 1;
  int64_t distance = 0;                                    // the distance of the first element
  double factor = 1;                                       // the scale, if it is a number
  double softcap = 0;                                      // 0: none
  double sink = -std::numeric_limits<double>::infinity();  // if it is a number; -inf: none
  // The range of distances inside the window, both ends included.
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  bool empty_is_zero = false;  // the result of a row in which no element takes part: 0, or else NaN
  int bias_parts = 0;          // (gradient of a bias) so many parts are written; the gradient is their sum
  bool of_scores = false;      // (gradient of logsumexp) the gradient of the scores, not of the elements
  int64_t threads = 1;         // threads of the CPU engine; the plan of a gradient depends on it

  bool has(ScoredTensor tensor) const { return data[tensor] != nullptr; }
  bool is_backward() const { return direction == Direction::backward; }
  bool makes_bias_grad() const { return bias_parts > 0; }
  // Whether the slope of a softcap is computed from the result.
  bool has_slope_of_result() const { return is_backward() && has(kRowLse) && !is_reduction(function); }
  bool has_window() const {
    return least != std::numeric_limits<int64_t>::min() || most != std::numeric_limits<int64_t>::max();
  }
  // The type in which rows are computed. In the forward, x is rounded to `out` first if `out` does not hold all its
  // values.
  DType accumulator() const { return (is_backward() ? in : out) == DType::float64 ? DType::float64 : DType::float32; }

  // Sets the layout. `strides[t]` are the strides of tensor t along the dims, 0 where it is broadcast; null if there is
  // no such tensor. A window and slopes use the distances along the last two dims. By default the last query is at the
  // same position as the last key.
  void lay_out(int rank, const int64_t* sizes, const int64_t* const* strides, const bool* reduce,
               std::optional<int64_t> offset) {
    const bool has_distances = has_window() || has(kAlibi);
    for (int i = 0; i < rank; ++i) {
      DimOf<kScoredTensors> dim = {sizes[i], {}};
      for (int t = 0; t < kDistance; ++t) dim.strides[t] = strides[t] && sizes[i] > 1 ? strides[t][i] : 0;
      if (has_distances && i >= rank - 2) dim.strides[kDistance] = i == rank - 1 ? 1 : -1;
      (reduce[i] ? reduced : outer).insert(dim);
      (reduce[i] ? n : rows) *= dim.size;
    }
    if (rank >= 2) distance = -offset.value_or(sizes[rank - 1] - sizes[rank - 2]);
    if (rows && n) outer.merge(), reduced.merge();
  }
  // Whether the elements of a row are contiguous in all tensors that have one for each.
  bool has_rows() const {
    if (reduced.count == 0) return true;
    const DimOf<kScoredTensors>& dim = reduced.dims[0];
    return reduced.count == 1 && dim.strides[kInput] == 1 && (!has(kGradOf) || dim.strides[kGradOf] == 1) &&
           (!has(kOfCap) || dim.strides[kOfCap] == 1) &&
           (dim.strides[kResult] == 1 || (function == Function::logsumexp && !is_backward()));
  }
};

// Runs a problem whose result is not empty. The plan may reorder the outer dims of the problem.
void run_scored_cpu(ScoredProblem& problem);

}  // namespace onepass
