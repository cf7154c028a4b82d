// alignment.h: how the rows of a call lie over the vectors of their memory. Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// How a kernel loads and stores vectors. The kernels number them the same way (vector_access.cuh, column_tile.cuh).
enum class VecAccess : int {
  predicated,  // A row, or a tile of columns, may begin or end within a vector.
  scalar,      // A thread's elements follow from their index in the row alone. They are loaded one by one where the row
               // does not begin with a vector.
  aligned,     // Rows, or tiles, are whole vectors. (Rows in shared memory do not use it: it was 1% slower there.)
  // In the tiers of columns only:
  slab,          // All columns of one contiguous piece of memory, which may begin or end within a vector.
  slab_aligned,  // The same, where the piece is a whole number of vectors.
  strided,       // Element by element.
};
constexpr const char* kVecAccessNames[] = {"predicated", "scalar", "aligned", "slab", "slab-aligned", "strided"};

// With which element of a vector the rows of a call begin.
struct Alignment {
  int full;    // elements of a vector of 16 bytes of the wider type
  int widest;  // the most elements of a vector so that each row has one alignment in both tensors
  uint64_t first, y_first;
  int64_t step, y_step;
  bool writes_rows;  // not a reduction

  Alignment(DType x, DType y, uint64_t x_address, uint64_t y_address, const Layout& layout, bool reduced_output) {
    writes_rows = !reduced_output;
    first = x_address / uint64_t(size_of(x));
    step = layout.rows > 1 ? layout.row_x_stride() : 0;
    y_first = y_address / uint64_t(size_of(y));
    y_step = layout.rows > 1 ? layout.row_y_stride() : 0;
    full = 16 / (writes_rows && size_of(y) > size_of(x) ? size_of(y) : size_of(x));
    widest = full;
    const auto differ = [&](int width) { return (first - y_first) % uint64_t(width) || (step - y_step) % width; };
    while (widest > 1 && (widest > layout.n || (writes_rows && differ(widest)))) widest /= 2;
  }
  // Does any row begin within a vector of `width` elements?
  bool begins_within(int width) const { return first % uint64_t(width) || step % width; }
  bool writes_within(int width) const { return writes_rows && (y_first % uint64_t(width) || y_step % width); }
  // Are rows of n elements whole vectors of `width`?
  bool whole(int64_t n, int width) const { return n % width == 0 && !begins_within(width) && !writes_within(width); }
};

// Do rows lie one after another, so that a tile of them is one piece of memory?
inline bool lies_flat(const Layout& layout, bool reduced_output) {
  return layout.rows == 1 ||
         (layout.row_x_stride() == layout.n && (reduced_output || layout.row_y_stride() == layout.n));
}

}  // namespace onepass
