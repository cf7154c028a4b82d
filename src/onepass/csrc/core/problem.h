// problem.h: one problem, checked and laid out: a function, a direction (forward or backward) and the tensors. The
// operators make problems, the planners plan them, and the engines run them. Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// Whether a reduction of rows of type `x` may have results of type `y`. A state has the type in which rows are
// computed. logsumexp has the type of its input or, for half types, also the type in which rows are computed.
inline bool reduces_to(Function function, DType x, DType y) {
  const DType wide = x == DType::float64 ? DType::float64 : DType::float32;
  return y == wide || (function == Function::logsumexp && y == x);
}

constexpr int64_t kCpuGrain = 16384;  // with fewer elements, a second CPU thread does not pay

struct TensorArg {
  DType type;
  void* data;  // null if the problem has no such tensor
};

struct Problem {
  Function function;
  Direction direction;
  TensorArg tensors[kMaxTensors];  // numbered as in ForwardTensor or BackwardTensor
  Layout layout;
  int64_t threads = 1;  // threads of the CPU engine; the plan of a gradient depends on it
  double factor = 1;    // (CPU engine) only in a gradient

  DType type(int tensor) const { return tensors[tensor].type; }
  uint64_t address(int tensor) const { return uint64_t(tensors[tensor].data); }
  template <class T>
  T* data(int tensor) const {
    return static_cast<T*>(tensors[tensor].data);
  }
  bool is_reduction() const { return onepass::is_reduction(function); }
  bool is_backward() const { return direction == Direction::backward; }
  // The number of tensors, without the result of logsumexp, which only its gradient reads.
  int count_tensors() const { return is_backward() ? int(kLse) : int(kForwardTensors); }
  // The types that a kernel is compiled for: what it reads, and what it writes. The gradient of logsumexp also reads
  // the input of logsumexp, which has the type of the gradient.
  DType in_type() const { return type(is_backward() ? int(kGrad) : int(kX)); }
  DType out_type() const { return type(is_backward() ? int(kDx) : int(kY)); }

  // Whether each row is contiguous in memory. Other layouts are served by the kernels of columns.
  bool has_rows() const { return layout.view == View::rows && layout.outer.count <= 1; }
  // Whether the gradient of the result has one value per row, although the result has as many elements as the input.
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
  // `result_type` is the type of the forward's result, and so of its gradient.
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
