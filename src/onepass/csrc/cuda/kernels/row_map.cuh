// row_map.cuh: the map of rows, which is the first argument of a kernel of rows. It says where the operands of a row
// are, how long the row is, how its elements are scored, and where its results go. The two maps in this file, forward
// and backward, are for rows of one length at a fixed stride (host/launch.cpp fills them in).
#pragma once

#include "types.cuh"

template <class C>
struct ForwardRow {
  const typename C::In* x;
  int64_t n;
  typename C::Operand operand;
  // The operand whose address decides where vectors are aligned.
  __device__ const typename C::In* aligned() const { return x; }
};
template <class C>
struct ForwardRows {
  typedef ForwardRow<C> Row;
  const typename C::In* x;
  typename C::Result* y;
  int64_t count, n, x_stride, y_stride;
  typename C::Score score;

  // The row at an index; it has no elements if it does not exist.
  __device__ Row row(int64_t index, bool exists = true) const {
    return {x + index * x_stride, exists ? n : 0, {score}};
  }
  template <class... AnyRow>
  __device__ typename C::Result* result(int64_t index, const AnyRow&...) const {
    return y + index * y_stride;
  }
  // The tensors, for kernels that copy several rows at once.
  __device__ const typename C::In* operand(int) const { return x; }
  __device__ int64_t stride(int) const { return x_stride; }
  __device__ typename C::Result* results() const { return y; }
  __device__ int64_t result_stride() const { return y_stride; }
};

// Saved is the type of the tensor that the forward saved: its result y, or for logsumexp its input.
template <class C, class Saved = typename C::In>
struct BackwardRow {
  const Saved* y;
  const typename C::In* g;
  int64_t n;
  typename C::Score score;
  __device__ const Saved* aligned() const { return y; }
};
template <class C, class Saved = typename C::In>
struct BackwardRows {
  typedef BackwardRow<C, Saved> Row;
  typename C::Out* dx;
  const Saved* y;
  const typename C::In* g;
  int64_t count, n, dx_stride, y_stride, g_stride;
  typename C::Score score;

  // The same. A row that does not exist has the operands of the first row, because g may be loaded even if n is 0.
  __device__ Row row(int64_t index, bool exists = true) const {
    return {y + (exists ? index : 0) * y_stride, g + (exists ? index : 0) * g_stride, exists ? n : 0, score};
  }
  template <class... AnyRow>
  __device__ typename C::Out* result(int64_t index, const AnyRow&...) const {
    return dx + index * dx_stride;
  }
  __device__ const Saved* operand(int which) const { return which ? g : y; }
  __device__ int64_t stride(int which) const { return which ? g_stride : y_stride; }
  __device__ typename C::Out* results() const { return dx; }
  __device__ int64_t result_stride() const { return dx_stride; }
};
