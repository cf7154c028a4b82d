// cpu.h: what the C++ variants share: their entry point, and the walk over the rows of a matrix. Strides are in
// elements.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>

// Element types, numbered as in gallery/native_calls.py.
enum { FLOAT32, FLOAT16, BFLOAT16 };

template <class T, class Softmax>
void each_row(const void* x, void* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride, Softmax softmax) {
  const T* in = static_cast<const T*>(x);
  T* out = static_cast<T*>(y);
  for (int64_t row = 0; row < rows; ++row) softmax(in + row * x_stride, out + row * y_stride, n);
}

// The function NAME for ctypes, which calls softmax(const T* x, T* y, int64_t n) for each row.
#define ONEPASS_VARIANT(NAME)                                                                                  \
  extern "C" __attribute__((visibility("default"))) void NAME(int type, const void* x, void* y, int64_t rows,  \
                                                              int64_t n, int64_t x_stride, int64_t y_stride) { \
    const auto each = [](auto in, auto out, int64_t count) { softmax(in, out, count); };                       \
    if (type == FLOAT32) each_row<float>(x, y, rows, n, x_stride, y_stride, each);                             \
    if (type == FLOAT16) each_row<torch::headeronly::Half>(x, y, rows, n, x_stride, y_stride, each);           \
    if (type == BFLOAT16) each_row<torch::headeronly::BFloat16>(x, y, rows, n, x_stride, y_stride, each);      \
  }
