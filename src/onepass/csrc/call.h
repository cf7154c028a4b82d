// call.h: one call of the family, checked and laid out: what the engines take. Pure.
#pragma once

#include "plan.h"

namespace onepass {

// Functions whose result has no reduced dims: one element a row, or two planes of them (state: maxima, then sums).
constexpr bool reduces(Function function) { return function == Function::logsumexp || function == Function::state; }

struct Call {
  Function function;
  DType x_type, y_type;
  const void* x;
  void* y;
  Layout layout;

  bool reduces() const { return onepass::reduces(function); }
};

}  // namespace onepass
