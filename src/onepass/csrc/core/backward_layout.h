// backward_layout.h: the canonical view of a gradient's tensors, as layout.h has it of a call's two: dims in two bags,
// outer (the rows) and reduced (the elements of a row), sorted by stride and merged wherever all tensors step through
// them as through one dim. Pure: no torch.
//
//   rows      reduced: one dim of stride 1 (the result's gradient: 1, or 0 where it is the same along the row)
//   columns   reduced: one dim; outer: the innermost dim has stride 1 (or the result's gradient is one number a tile)
//   strided   everything else
#pragma once

#include <algorithm>

#include "layout.h"
#include "types.h"

namespace onepass {

// The tensors: the gradient that is made, what the forward saved (its result, or the input of logsumexp), the gradient
// of the result, and the result of logsumexp (elsewhere of stride 0).
enum BackwardTensor { kDx, kSaved, kGrad, kLse, kBackwardTensors };

struct BackwardDim {
  int64_t size;
  int64_t strides[kBackwardTensors];  // in elements
};

struct BackwardBag {
  int count = 0;
  BackwardDim dims[kMaxDims];  // the slowest first

  // Copies what is there: all dims would be 2.5 KB, and a small call's time.
  BackwardBag() = default;
  BackwardBag(const BackwardBag& other) : count(other.count) { std::copy_n(other.dims, count, dims); }
  BackwardBag& operator=(const BackwardBag& other) {
    count = other.count;
    std::copy_n(other.dims, count, dims);
    return *this;
  }

  // By falling strides: those of dx first.
  void insert(const BackwardDim& dim) {
    if (dim.size == 1) return;
    int at = count++;
    for (; at > 0 && slower(dim, dims[at - 1]); --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }

  void merge() {
    int kept = 0;
    for (int i = 1; i < count; ++i) {
      BackwardDim& slow = dims[kept];
      const BackwardDim& fast = dims[i];
      bool one = true;
      for (int t = 0; t < kBackwardTensors; ++t) one &= slow.strides[t] == fast.size * fast.strides[t];
      if (one) {
        const int64_t size = slow.size * fast.size;
        slow = fast;
        slow.size = size;
      } else {
        dims[++kept] = fast;
      }
    }
    if (count > 0) count = kept + 1;
  }

  // Its innermost dim; of a single element one of size 1.
  BackwardDim innermost() const { return count ? dims[count - 1] : BackwardDim{1, {1, 1, 1, 0}}; }

 private:
  static bool slower(const BackwardDim& a, const BackwardDim& b) {
    for (int t = 0; t < kBackwardTensors; ++t) {
      if (a.strides[t] != b.strides[t]) return a.strides[t] > b.strides[t];
    }
    return false;
  }
};

struct BackwardLayout {
  BackwardBag outer, reduced;
  int64_t rows = 1, n = 1;
  View view = View::strided;
};

// `reduce[i]` says whether dim i is reduced; strides[t][i] is the stride of tensor t there, 0 where it has none. Of
// logsumexp (`one_a_row`) the result and its gradient have one element a row.
inline BackwardLayout make_backward_layout(int ndim, const int64_t* sizes, const int64_t* const* strides,
                                           const bool* reduce, bool one_a_row) {
  BackwardLayout layout;
  for (int i = 0; i < ndim; ++i) {
    BackwardDim dim = {sizes[i], {}};
    for (int t = 0; t < kBackwardTensors; ++t) dim.strides[t] = strides[t][i];
    (reduce[i] ? layout.reduced : layout.outer).insert(dim);
    (reduce[i] ? layout.n : layout.rows) *= sizes[i];
  }
  if (layout.rows == 0 || layout.n == 0) return layout;
  layout.outer.merge();
  layout.reduced.merge();
  if (layout.reduced.count > 1) return layout;
  const BackwardDim n = layout.reduced.innermost(), inner = layout.outer.innermost();
  const bool aside = layout.outer.count > 0 && inner.strides[kDx] == 1 && inner.strides[kSaved] == 1 &&
                     (one_a_row || inner.strides[kGrad] == 1 || (inner.strides[kGrad] == 0 && n.strides[kGrad] == 0));
  const bool unit = n.strides[kDx] == 1 && n.strides[kSaved] == 1 && (one_a_row || uint64_t(n.strides[kGrad]) <= 1);
  if (aside && (layout.n == 1 || !unit)) {
    layout.view = View::columns;
  } else if (unit) {
    layout.view = View::rows;
  }
  return layout;
}

}  // namespace onepass
