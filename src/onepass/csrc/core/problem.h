// problem.h: one call of the family, checked and laid out: what the engines take. Pure.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// Functions whose result has no reduced dims: one element a row, or two planes of them (state: maxima, then sums).
constexpr bool reduces(Function function) { return function == Function::logsumexp || function == Function::state; }

// Does a function that reduces give results of type `y` of rows of type `x`? A state has the type that rows are
// computed in, logsumexp its input's or, of half types, that one too.
inline bool reduces_to(Function function, DType x, DType y) {
  const DType wide = x == DType::float64 ? DType::float64 : DType::float32;
  return y == wide || (function == Function::logsumexp && y == x);
}

constexpr int64_t kCpuGrain = 16384;  // elements below which a second CPU thread does not pay

struct Call {
  Function function;
  DType x_type, y_type;
  const void* x;
  void* y;
  Layout layout;

  bool reduces() const { return onepass::reduces(function); }
};

}  // namespace onepass
