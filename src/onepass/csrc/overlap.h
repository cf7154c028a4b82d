// overlap.h: whether a call may write its output while it reads its input, as strides alone tell it in nearly all
// cases; overlap.py tells it in all. Pure: no torch, no CUDA.
#pragma once

#include <cstdint>

namespace onepass {

// A strided tensor in memory: the address of its first element, and its elements' size in bytes.
struct Extent {
  uint64_t first;
  int size, rank;
  const int64_t *sizes, *strides;

  uint64_t end() const {  // the address behind its last byte, where it has any element
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) last += (sizes[i] - 1) * strides[i];
    return first + uint64_t(last * size + size);
  }
};

// Has each element memory of its own? So it has where a step of each dim leaps over all that the dims of smaller
// strides reach. False says nothing.
inline bool surely_distinct(const Extent& t) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.sizes[i] <= 1) continue;
    int64_t reach = 0;
    for (int j = 0; j < t.rank; ++j) {
      const bool below = t.strides[j] < t.strides[i] || (t.strides[j] == t.strides[i] && j > i);
      if (j != i && t.sizes[j] > 1 && below) reach += (t.sizes[j] - 1) * t.strides[j];
    }
    if (t.strides[i] <= reach) return false;
  }
  return true;
}

// Does one of two tensors that have elements lie wholly behind the other? False says nothing.
inline bool surely_apart(const Extent& a, const Extent& b) { return a.end() <= b.first || b.end() <= a.first; }

// Are two tensors of one shape the same elements in the same order?
inline bool same_elements(const Extent& a, const Extent& b) {
  if (a.first != b.first || a.size != b.size || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.sizes[i] != b.sizes[i] || (a.sizes[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

}  // namespace onepass
