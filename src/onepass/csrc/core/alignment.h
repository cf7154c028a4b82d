// alignment.h: how the rows of a call lie over the vectors of their memory. Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// How rows lie over the vectors of their memory.
enum Edges {
  kWindow,  // a row may begin and end within a vector
  kApart,   // elements go to threads by their place in the row alone, and come one by one where that is in no phase
  kWhole,   // rows are whole vectors (tiers warp, block and cluster, without a shelf: with one it was 1% slower)
  // Of the tiers of columns, where window and whole are of tiles that end within a vector, or do not:
  kSlab,       // all columns of a piece of memory, as they lie
  kWholeSlab,  // the same, a whole number of vectors
  kStrided,    // element by element
};
constexpr const char* kEdgesNames[] = {"window", "apart", "whole", "slab", "whole slab", "strided"};

// With which element of a vector the rows of a call begin.
struct Phase {
  int full;    // elements of a vector of 16 bytes of the wider type
  int widest;  // the most elements of a vector so that each row has one phase in both tensors
  uint64_t first, y_first;
  int64_t step, y_step;
  bool writes_rows;  // not a reduction

  Phase(DType x, DType y, uint64_t x_address, uint64_t y_address, const Layout& layout, bool reduced_output) {
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
