// alignment.h: how rows lie over the vectors of their memory, forward and backward. Pure: no torch, no CUDA.
#pragma once

#include "problem.h"

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

// Where the rows of a problem begin within vectors, over all tensors whose elements are accessed by vectors: neither
// the result of a reduction nor a broadcast gradient is.
struct Alignment {
  int full = 0;    // elements of a vector of 16 bytes of the widest type
  int widest = 0;  // elements of the widest vector so that each row begins at the same element of it in all tensors

  explicit Alignment(const Problem& problem) {
    for (int t = 0; t < problem.count_tensors(); ++t) {
      if (!problem.is_one_per_row(t)) add(problem, t, problem.layout.row_stride(t));
    }
    find_widest(problem.layout.n);
  }

  // Whether any row begins within a vector of `width` elements.
  bool begins_within(int width) const {
    for (int i = 0; i < count_; ++i) {
      if (first_[i] % uint64_t(width) || row_stride_[i] % width) return true;
    }
    return false;
  }
  // Whether rows of n elements are whole vectors of `width` elements.
  bool whole(int64_t n, int width) const { return n % width == 0 && !begins_within(width); }

 private:
  void add(const Problem& problem, int tensor, int64_t row_stride) {
    const int size = size_of(problem.type(tensor));
    full = full && full < 16 / size ? full : 16 / size;
    first_[count_] = problem.address(tensor) / uint64_t(size), row_stride_[count_] = row_stride;
    ++count_;
  }
  void find_widest(int64_t n) {
    const auto differ = [&](int width) {
      for (int i = 1; i < count_; ++i) {
        if ((first_[i] - first_[0]) % uint64_t(width) || (row_stride_[i] - row_stride_[0]) % width) return true;
      }
      return false;
    };
    widest = full;
    while (widest > 1 && (widest > n || differ(widest))) widest /= 2;
  }

  int count_ = 0;
  uint64_t first_[3];  // the index of the first element in memory, in elements
  int64_t row_stride_[3];
};

}  // namespace onepass
