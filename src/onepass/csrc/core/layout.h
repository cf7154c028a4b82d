// layout.h: from sizes, strides and the reduced dims to the canonical view of a call. Pure: no torch, no CUDA.
//
// A softmax does not care about the order of its rows nor about the order of the elements in a row, so the dims fall
// into two bags, outer (the rows) and reduced (the elements of a row). Within a bag dims are sorted by stride and
// merged wherever input and output both step through them as through one dim. What is left over says which kernel can
// serve it:
//
//   rows      reduced: one dim of stride 1 in input and output; outer: at most one dim
//   columns   reduced: one dim; outer: the innermost dim has stride 1 in input and output
//   strided   everything else
#pragma once

#include <cstdint>

namespace onepass {

constexpr int kMaxDims = 64;  // torch's own limit

struct Dim {
  int64_t size;
  int64_t x_stride;  // in elements of the input
  int64_t y_stride;  // in elements of the output
};

struct Bag {
  int count = 0;
  Dim dims[kMaxDims];  // the slowest first

  int64_t numel() const {
    int64_t total = 1;
    for (int i = 0; i < count; ++i) total *= dims[i].size;
    return total;
  }

  // Insert by falling input stride (then output stride), so that neighbours can merge.
  void insert(const Dim& dim) {
    if (dim.size == 1) return;
    int at = count++;
    for (; at > 0; --at) {
      const Dim& before = dims[at - 1];
      const bool in_place =
          before.x_stride != dim.x_stride ? before.x_stride > dim.x_stride : before.y_stride >= dim.y_stride;
      if (in_place) break;
      dims[at] = before;
    }
    dims[at] = dim;
  }

  void merge() {
    int kept = 0;
    for (int i = 1; i < count; ++i) {
      Dim& slow = dims[kept];
      const Dim& fast = dims[i];
      if (slow.x_stride == fast.size * fast.x_stride && slow.y_stride == fast.size * fast.y_stride) {
        slow = {slow.size * fast.size, fast.x_stride, fast.y_stride};
      } else {
        dims[++kept] = fast;
      }
    }
    if (count > 0) count = kept + 1;
  }

  // Offsets of element `index` of this bag in the input and in the output.
  void offsets(int64_t index, int64_t* x_offset, int64_t* y_offset) const {
    *x_offset = *y_offset = 0;
    for (int i = count - 1; i >= 0; --i) {
      const int64_t at = index % dims[i].size;
      index /= dims[i].size;
      *x_offset += at * dims[i].x_stride;
      *y_offset += at * dims[i].y_stride;
    }
  }
};

enum class View { rows, columns, strided };

inline const char* name(View view) {
  return view == View::rows ? "rows" : view == View::columns ? "columns" : "strided";
}

struct Layout {
  Bag outer, reduced;
  int64_t rows = 1;  // number of rows
  int64_t n = 1;     // elements a row
  View view = View::strided;

  // Do the elements of each row lie side by side in input and output?
  bool unit_rows() const {
    const Dim* const dim = reduced.dims;
    return reduced.count == 0 || (reduced.count == 1 && dim->x_stride == 1 && dim->y_stride == 1);
  }

  // Strides of the single remaining dim of a bag (0 where the bag is a single element).
  int64_t row_x_stride() const { return outer.count ? outer.dims[outer.count - 1].x_stride : 0; }
  int64_t row_y_stride() const { return outer.count ? outer.dims[outer.count - 1].y_stride : 0; }
};

// `reduce[i]` says whether dim i is reduced. Where the output has no reduced dims (logsumexp, state), pass y strides of
// 0 (or any) for the reduced dims, and reduced_output = true.
inline Layout make_layout(int ndim, const int64_t* sizes, const int64_t* x_strides, const int64_t* y_strides,
                          const bool* reduce, bool reduced_output) {
  Layout layout;
  for (int i = 0; i < ndim; ++i) {
    if (!reduce[i]) {
      layout.outer.insert({sizes[i], x_strides[i], y_strides[i]});
    } else {
      // A reduced output has no steps along a row: give it those of the input, so that only the input decides.
      layout.reduced.insert({sizes[i], x_strides[i], reduced_output ? x_strides[i] : y_strides[i]});
    }
  }
  layout.rows = layout.outer.numel();
  layout.n = layout.reduced.numel();
  if (layout.rows == 0 || layout.n == 0) return layout;
  layout.outer.merge();
  layout.reduced.merge();
  const bool one_reduced = layout.reduced.count <= 1;
  const bool unit_inner = layout.outer.count > 0 && layout.row_x_stride() == 1 && layout.row_y_stride() == 1;
  if (layout.unit_rows() && layout.outer.count <= 1) {
    layout.view = View::rows;
  } else if (one_reduced && unit_inner) {
    layout.view = View::columns;
  }
  return layout;
}

// What is copied before or after a call on the CPU, whose engine takes rows or columns that lie side by side in input
// and output alike, and all others element by element, some ten times as slowly.
enum class Copied { nothing, input, result };
constexpr const char* kCopiedNames[] = {"nothing", "input", "result"};

// From the layouts of a call, of its input with itself, and of its output with itself.
inline Copied copied(const Layout& call, const Layout& of_x, const Layout& of_y) {
  const auto scattered = [](const Layout& layout) { return layout.view == View::strided && !layout.unit_rows(); };
  if (!scattered(call)) return Copied::nothing;
  if (!of_x.unit_rows() && !scattered(of_y)) return Copied::input;
  return scattered(of_x) ? Copied::nothing : Copied::result;
}

// What make_layout makes of the last dim of contiguous tensors that are not empty, without its bags to sort and merge.
inline Layout contiguous_layout(int64_t rows, int64_t n, bool reduced_output) {
  Layout layout;
  layout.outer.insert({rows, n, reduced_output ? 1 : n});
  layout.reduced.insert({n, 1, 1});
  layout.rows = rows;
  layout.n = n;
  layout.view = View::rows;
  return layout;
}

// Steps through a bag in order without a division an element.
struct Odometer {
  const Bag& bag;
  int64_t at[kMaxDims];
  int64_t x = 0, y = 0;

  Odometer(const Bag& over, int64_t index) : bag(over) {
    for (int i = bag.count - 1; i >= 0; --i) {
      at[i] = index % bag.dims[i].size;
      index /= bag.dims[i].size;
      x += at[i] * bag.dims[i].x_stride;
      y += at[i] * bag.dims[i].y_stride;
    }
  }

  void next() {
    for (int i = bag.count - 1; i >= 0; --i) {
      x += bag.dims[i].x_stride;
      y += bag.dims[i].y_stride;
      if (++at[i] < bag.dims[i].size) return;
      x -= at[i] * bag.dims[i].x_stride;
      y -= at[i] * bag.dims[i].y_stride;
      at[i] = 0;
    }
  }
};

}  // namespace onepass
