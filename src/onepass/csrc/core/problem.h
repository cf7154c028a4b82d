// problem.h: one problem of the family, checked and laid out: a function, a direction and the tensors. The operators
// make it, the planners plan it, the engines run it. Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// Whether a reduction of rows of type `x` gives results of type `y`. A state has the type that rows are computed in;
// logsumexp has its input's type or, for half types, the type that rows are computed in.
inline bool reduces_to(Function function, DType x, DType y) {
  const DType wide = x == DType::float64 ? DType::float64 : DType::float32;
  return y == wide || (function == Function::logsumexp && y == x);
}

constexpr int64_t kCpuGrain = 16384;  // elements below which a second CPU thread does not pay

struct TensorArg {
  DType type;
  void* data;  // null where the problem has no such tensor
};

struct Problem {
  Function function;
  Direction direction;
  TensorArg tensors[kMaxTensors];  // as ForwardTensor or BackwardTensor number them
  Layout layout;
  int64_t threads = 1;  // of the CPU engine; the plan of a gradient depends on it
  double factor = 1;    // (CPU engine) of a gradient

  DType type(int tensor) const { return tensors[tensor].type; }
  uint64_t address(int tensor) const { return uint64_t(tensors[tensor].data); }
  template <class T>
  T* data(int tensor) const {
    return static_cast<T*>(tensors[tensor].data);
  }
  bool is_reduction() const { return onepass::is_reduction(function); }
  bool is_backward() const { return direction == Direction::backward; }
  // The tensors without the result of logsumexp, which only that gradient reads.
  int count_tensors() const { return is_backward() ? int(kLse) : int(kForwardTensors); }
  // The types that a kernel is compiled for: of what it reads, and of what it writes. The input of logsumexp, which its
  // gradient reads, has the type of that gradient.
  DType in_type() const { return type(is_backward() ? int(kGrad) : int(kX)); }
  DType out_type() const { return type(is_backward() ? int(kDx) : int(kY)); }

  // Whether each row is one piece of memory. The kernels of columns take other layouts.
  bool has_rows() const { return layout.view == View::rows && layout.outer.count <= 1; }
  // Whether the result's gradient has one value per row although the result has as many elements as the input.
  bool grad_is_broadcast() const {
    return is_backward() && !is_reduction() && layout.n > 1 && layout.reduced.innermost().strides[kGrad] == 0;
  }
  // Whether a tensor has one element per row.
  bool is_one_per_row(int tensor) const {
    if (!is_backward()) return tensor == kY && is_reduction();
    return tensor == kLse || (tensor == kGrad && (is_reduction() || grad_is_broadcast()));
  }

  static Problem forward(const Layout& layout, Function function, DType x_type, DType y_type, const void* x = nullptr,
                         void* y = nullptr) {
    return {function, Direction::forward, {{x_type, const_cast<void*>(x)}, {y_type, y}}, layout};
  }
  // `result_type` is the type of the forward's result and so of its gradient.
  static Problem backward(const Layout& layout, Function function, DType result_type, DType dx_type, void* dx = nullptr,
                          const void* saved = nullptr, const void* grad = nullptr, const void* lse = nullptr) {
    const DType saved_type = onepass::is_reduction(function) ? dx_type : result_type;
    return {function,
            Direction::backward,
            {{dx_type, dx},
             {saved_type, const_cast<void*>(saved)},
             {result_type, const_cast<void*>(grad)},
             {result_type, const_cast<void*>(lse)}},
            layout};
  }
};

}  // namespace onepass
