// dispatch.h: the step from run-time types and functions to template arguments, and walks through dims. Forward and
// backward share it. (walk.h walks through tiles.)
#pragma once

#include "engine.h"
#include "simd.h"

namespace onepass::ONEPASS_ISA {

template <class T>
struct Type {
  using type = T;
};
template <class Tag>
using TypeOf = typename Tag::type;

// Calls f(Type<T>) for the type of an element.
template <class F>
auto dispatch_type(DType type, F f) {
  switch (type) {
    case DType::float64: return f(Type<double>());
    case DType::float16: return f(Type<float16>());
    case DType::bfloat16: return f(Type<bfloat16>());
    default: return f(Type<float>());
  }
}

template <class F>
void dispatch_function(Function function, F f) {
  switch (function) {
    case Function::softmax: return f(std::integral_constant<Function, Function::softmax>());
    case Function::log_softmax: return f(std::integral_constant<Function, Function::log_softmax>());
    case Function::softmin: return f(std::integral_constant<Function, Function::softmin>());
    case Function::logsumexp: return f(std::integral_constant<Function, Function::logsumexp>());
    case Function::state: return f(std::integral_constant<Function, Function::state>());
  }
}

// Calls f(Type<A>, Type<B>, function) for the pairs of types that cpu_fuses names.
template <class F>
void dispatch(DType a, DType b, Function function, F f) {
  dispatch_type(a, [&](auto type_a) {
    dispatch_type(b, [&](auto type_b) {
      using A = TypeOf<decltype(type_a)>;
      using B = TypeOf<decltype(type_b)>;
      if constexpr (std::is_same_v<A, B> || sizeof(A) * sizeof(B) == 8) {  // the same, or float32 and a 16-bit type
        dispatch_function(function, [&](auto constant) { f(type_a, type_b, constant); });
      }
    });
  });
}

// Steps through dims in order, except through the innermost ones, without a division per element.
struct OffsetCalculator {
  const DimGroup& dims;
  const int count;
  int64_t at[kMaxDims];
  int64_t offset[kMaxTensors] = {};

  OffsetCalculator(const DimGroup& over, int64_t index, int innermost = 0)
      : dims(over), count(over.count > innermost ? over.count - innermost : 0) {
    for (int i = count - 1; i >= 0; --i) {
      at[i] = index % dims.dims[i].size;
      index /= dims.dims[i].size;
      for (int t = 0; t < kMaxTensors; ++t) offset[t] += at[i] * dims.dims[i].strides[t];
    }
  }

  ONEPASS_INLINE void next() {
    for (int i = count - 1; i >= 0; --i) {
      const Dim& dim = dims.dims[i];
      for (int t = 0; t < kMaxTensors; ++t) offset[t] += dim.strides[t];
      if (++at[i] < dim.size) return;
      for (int t = 0; t < kMaxTensors; ++t) offset[t] -= at[i] * dim.strides[t];
      at[i] = 0;
    }
  }
  // The same as `steps` calls of next().
  void advance(int64_t steps) {
    for (int i = count - 1; i >= 0 && steps > 0; --i) {
      const Dim& dim = dims.dims[i];
      const int64_t sum = at[i] + steps, to = sum % dim.size;
      for (int t = 0; t < kMaxTensors; ++t) offset[t] += (to - at[i]) * dim.strides[t];
      at[i] = to, steps = sum / dim.size;
    }
  }
};

// Calls work(offsets, n) for the rows [begin, end). `offsets`: where the row begins in each tensor. n: its length.
template <class Work>
inline void for_each_row(const Layout& layout, int64_t begin, int64_t end, Work work) {
  OffsetCalculator at(layout.outer, begin);
  for (int64_t r = begin; r < end; ++r, at.next()) work(at.offset, layout.n);
}

}  // namespace onepass::ONEPASS_ISA
