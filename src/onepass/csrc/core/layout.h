// layout.h: from sizes, strides and the reduced dims to the canonical view of a problem, forward and backward. Pure: no
// torch, no CUDA.
//
// A softmax does not depend on the order of its rows, nor on the order of the elements in a row. So dims form two
// groups: outer (the rows) and reduced (the elements of a row). Within a group, dims are sorted by stride. Neighbouring
// dims are merged if all tensors step through them as through one dim. The remaining dims decide which kernels can
// serve the problem, the view:
//
//   rows      reduced: one dim of stride 1; outer: in the forward at most one dim, in the backward any number
//   columns   reduced: one dim; outer: the innermost dim has stride 1
//   strided   everything else
//
// A tensor with one element per row has stride 0 along the reduced dims, and so has a broadcast gradient.
#pragma once

#include <algorithm>
#include <cstdint>

namespace onepass {

constexpr int kMaxDims = 64;  // torch's own limit

enum class Direction { forward, backward };

// The tensors of a problem. Forward: the input and the result. Backward: the gradient that is computed; the tensor that
// the forward saved (its result, or for logsumexp its input); the gradient of the result; and the result of logsumexp,
// which no other gradient reads. (On a CPU, gradients of scores have the scales of rows in its place.)
enum ForwardTensor { kX, kY, kForwardTensors };
enum BackwardTensor { kDx, kSaved, kGrad, kLse, kBackwardTensors };
constexpr int kMaxTensors = kBackwardTensors;

template <int Tensors>
struct DimOf {
  int64_t size;
  int64_t strides[Tensors];  // in elements of each tensor; 0 for a tensor that the problem lacks
};

template <int Tensors>
struct DimGroupOf {
  using Dim = DimOf<Tensors>;
  int count = 0;
  Dim dims[kMaxDims];  // the slowest first

  // A copy takes only the dims that exist: all of them would be 2.5 KB, as much time as a small call.
  DimGroupOf() {}
  DimGroupOf(const DimGroupOf& other) : count(other.count) { std::copy_n(other.dims, count, dims); }
  DimGroupOf& operator=(const DimGroupOf& other) {
    count = other.count;
    std::copy_n(other.dims, count, dims);
    return *this;
  }

  // Inserts a dim in the order of decreasing strides (of the first tensor, then of the next), so that neighbours can
  // merge.
  void insert(const Dim& dim) {
    if (dim.size == 1) return;
    int at = count++;
    for (; at > 0 && is_slower(dim, dims[at - 1]); --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }

  void merge() {
    int last = 0;
    for (int i = 1; i < count; ++i) {
      Dim& slow = dims[last];
      const Dim& fast = dims[i];
      bool is_one = true;
      for (int t = 0; t < Tensors; ++t) is_one &= slow.strides[t] == fast.size * fast.strides[t];
      if (is_one) {
        const int64_t size = slow.size * fast.size;
        slow = fast;
        slow.size = size;
      } else {
        dims[++last] = fast;
      }
    }
    if (count > 0) count = last + 1;
  }

  // The innermost dim; a dim of size 1 if the group is a single element.
  Dim innermost() const { return count ? dims[count - 1] : Dim{1, {1, 1, 1, 0}}; }

  // The offset of element `index` of this group in a tensor.
  int64_t offset(int64_t index, int tensor) const {
    int64_t sum = 0;
    for (int i = count - 1; i >= 0; --i) {
      sum += index % dims[i].size * dims[i].strides[tensor];
      index /= dims[i].size;
    }
    return sum;
  }

 private:
  static bool is_slower(const Dim& a, const Dim& b) {
    for (int t = 0; t < Tensors; ++t) {
      if (a.strides[t] != b.strides[t]) return a.strides[t] > b.strides[t];
    }
    return false;
  }
};

using Dim = DimOf<kMaxTensors>;
using DimGroup = DimGroupOf<kMaxTensors>;

enum class View { rows, columns, strided };

inline const char* name(View view) {
  return view == View::rows ? "rows" : view == View::columns ? "columns" : "strided";
}

struct Layout {
  DimGroup outer, reduced;
  int64_t rows = 1;  // number of rows
  int64_t n = 1;     // elements of a row
  View view = View::strided;

  // The stride from one row to the next if there is one outer dim; 0 if there is only one row.
  int64_t row_stride(int tensor) const { return outer.count ? outer.dims[outer.count - 1].strides[tensor] : 0; }

  // Forward: whether the elements of each row are contiguous in input and output.
  bool has_unit_rows() const {
    const int64_t* const strides = reduced.dims[0].strides;
    return reduced.count == 0 || (reduced.count == 1 && strides[kX] == 1 && uint64_t(strides[kY]) <= 1);
  }

  void add(const Dim& dim, bool is_reduced) {
    (is_reduced ? reduced : outer).insert(dim);
    (is_reduced ? n : rows) *= dim.size;
  }
};

// `reduce[i]` says whether dim i is reduced. The strides of a reduction's output along reduced dims are not read.
inline Layout make_forward_layout(int ndim, const int64_t* sizes, const int64_t* x_strides, const int64_t* y_strides,
                                  const bool* reduce, bool is_reduction) {
  Layout layout;
  for (int i = 0; i < ndim; ++i) {
    layout.add({sizes[i], {x_strides[i], is_reduction && reduce[i] ? 0 : y_strides[i]}}, reduce[i]);
  }
  if (layout.rows == 0 || layout.n == 0) return layout;
  layout.outer.merge();
  layout.reduced.merge();
  if (layout.has_unit_rows() && layout.outer.count <= 1) {
    layout.view = View::rows;
  } else if (layout.reduced.count <= 1 && layout.row_stride(kX) == 1 && layout.row_stride(kY) == 1) {
    layout.view = View::columns;
  }
  return layout;
}

// `strides[t][i]` is the stride of tensor t along dim i, or 0 if it has none.
inline Layout make_backward_layout(int ndim, const int64_t* sizes, const int64_t* const* strides, const bool* reduce,
                                   bool is_reduction) {
  Layout layout;
  for (int i = 0; i < ndim; ++i) {
    Dim dim = {sizes[i], {}};
    for (int t = 0; t < kBackwardTensors; ++t) dim.strides[t] = strides[t][i];
    layout.add(dim, reduce[i]);
  }
  if (layout.rows == 0 || layout.n == 0) return layout;
  layout.outer.merge();
  layout.reduced.merge();
  if (layout.reduced.count > 1) return layout;
  // The gradient of the result may also be one number per row, or one number for a whole tile of columns.
  const Dim n = layout.reduced.innermost(), inner = layout.outer.innermost();
  const bool has_unit_columns =
      layout.outer.count > 0 && inner.strides[kDx] == 1 && inner.strides[kSaved] == 1 &&
      (is_reduction || inner.strides[kGrad] == 1 || (inner.strides[kGrad] == 0 && n.strides[kGrad] == 0));
  const bool has_unit_rows =
      n.strides[kDx] == 1 && n.strides[kSaved] == 1 && (is_reduction || uint64_t(n.strides[kGrad]) <= 1);
  if (has_unit_columns && (layout.n == 1 || !has_unit_rows)) {
    layout.view = View::columns;
  } else if (has_unit_rows) {
    layout.view = View::rows;
  }
  return layout;
}

// The result of make_forward_layout for the last dim of contiguous tensors that are not empty, without groups to sort
// and merge.
inline Layout contiguous_layout(int64_t rows, int64_t n, bool is_reduction) {
  Layout layout;
  layout.add({rows, {n, is_reduction ? 1 : n}}, false);
  layout.add({n, {1, is_reduction ? 0 : 1}}, true);
  layout.view = View::rows;
  return layout;
}

// What is copied before or after a call on the CPU. Its engine is faster if rows or columns are contiguous in both
// input and output than if the two lie differently.
enum class Copied { nothing, input, result, both };
constexpr const char* kCopiedNames[] = {"nothing", "input", "result", "both"};

// Decides from the layouts of the call, of its input with itself, and of its output with itself.
inline Copied copied(const Layout& call, const Layout& of_x, const Layout& of_y) {
  const auto is_scattered = [](const Layout& layout) {
    return layout.view == View::strided && !layout.has_unit_rows();
  };
  if (!is_scattered(call)) return Copied::nothing;
  if (!of_x.has_unit_rows() && !is_scattered(of_y)) return Copied::input;
  return is_scattered(of_x) ? Copied::nothing : Copied::result;
}

}  // namespace onepass
