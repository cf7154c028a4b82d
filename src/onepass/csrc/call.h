// call.h: one call of the family, checked and laid out: what the engines take. Pure.
#pragma once

#include "plan.h"

namespace onepass {

struct Call {
  Function function;
  DType x_type, y_type;
  const void* x;
  void* y;
  Layout layout;

  bool reduces() const { return function == Function::logsumexp; }  // one output element a row
};

}  // namespace onepass
