// tensor_args.h: the dims and the tensors of a problem as an operator got them.
#pragma once

#include "problem.h"
#include "stable_tensor.h"

namespace onepass {

using Dims = std::vector<int64_t>;

inline std::string to_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The dims that are reduced, checked. A 0-d tensor has the one dim 0 (or -1) of size 1, as in torch.
struct ReduceDims {
  bool reduced[kMaxDims] = {};
  bool is_last;  // the last dim, and no other

  ReduceDims(const int64_t* dims, int count, int rank) {
    if (rank > kMaxDims) fail("takes at most 64 dims, got " + std::to_string(rank));
    for (int i = 0; i < count; ++i) {
      const int64_t dim = dims[i], bound = rank ? rank : 1, at = dim < 0 ? dim + bound : dim;
      if (at < 0 || at >= bound) {
        fail("dim " + std::to_string(dim) + " is out of range for a tensor of " + std::to_string(rank) + " dims");
      }
      if (rank && reduced[at]) fail("dim " + std::to_string(at) + " appears twice in " + to_text(dims, count));
      if (rank) reduced[at] = true;
    }
    is_last = count == 1 && rank && reduced[rank - 1];
  }
  ReduceDims(const Dims& dims, int rank) : ReduceDims(dims.data(), int(dims.size()), rank) {}
  ReduceDims(int64_t dim, int rank) : ReduceDims(&dim, 1, rank) {}
};

// The tensors of a problem, in the order of Problem, null where there is none.
struct TensorArgs : ScoredFunction {
  Direction direction;
  const TensorRef* tensors[kMaxTensors];
  const ReduceDims& dims;
  bool keepdim;  // whether a reduction's result has the reduced dims, of size 1

  // The tensor that has the shape of the input.
  const TensorRef& like() const { return *tensors[direction == Direction::forward ? int(kX) : int(kSaved)]; }
  int output() const { return direction == Direction::forward ? int(kY) : int(kDx); }
  bool is_one_per_row(int tensor) const {
    if (!is_reduction()) return false;
    return direction == Direction::forward ? tensor == kY : tensor == kGrad || tensor == kLse;
  }
  bool has_planes(int tensor) const {
    return direction == Direction::forward && tensor == kY && traits_of(function).leading_planes;
  }

  // A tensor's strides by the dims of the input: 0 for a dim that the tensor lacks, or has in size 1 only.
  void get_strides(int tensor, int64_t* strides) const {
    const bool drops = is_one_per_row(tensor);
    for (int i = 0, at = has_planes(tensor); i < like().rank; ++i) {
      const bool is_dropped = drops && dims.reduced[i];
      strides[i] = is_dropped ? 0 : tensors[tensor]->strides[at];
      at += !is_dropped || keepdim;
    }
  }
};

}  // namespace onepass
