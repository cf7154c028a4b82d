// reduce_dims.h: the dims that a call names, checked.
#pragma once

#include "stable_tensor.h"

namespace onepass {

using Dims = std::vector<int64_t>;

inline std::string text_of(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// Which dims are reduced. A 0-d tensor has the one dim 0 (or -1) of size 1, as in torch.
struct Mask {
  bool reduced[kMaxDims] = {};
  bool only_last;

  Mask(const int64_t* dims, int count, int rank) {
    if (rank > kMaxDims) fail("takes at most 64 dims, got " + std::to_string(rank));
    for (int i = 0; i < count; ++i) {
      const int64_t dim = dims[i], bound = rank ? rank : 1, at = dim < 0 ? dim + bound : dim;
      if (at < 0 || at >= bound) {
        fail("dim " + std::to_string(dim) + " is out of range for a tensor of " + std::to_string(rank) + " dims");
      }
      if (rank && reduced[at]) fail("dim " + std::to_string(at) + " appears twice in " + text_of(dims, count));
      if (rank) reduced[at] = true;
    }
    only_last = count == 1 && rank && reduced[rank - 1];
  }
  Mask(const Dims& dims, int64_t rank) : Mask(dims.data(), int(dims.size()), int(rank)) {}
};

}  // namespace onepass
