// scalar.h: rows and columns in plain loops that the compiler vectorises: doubles, rows of any strides, and rows whose
// maximum is too large for the vector code.
//
//   row      one row at a time, in blocks that stay in the L1 cache as floats or doubles. A row of one block is read
//            once: load -> maximum -> exp -> sum -> scale -> store. A longer one is read twice: an online state over
//            its blocks, then epilogue -> store.
//   columns  a tile of neighbouring rows whose elements are a stride apart, one row per SIMD lane, so that every access
//            has unit stride: maximum over n -> exp and sum over n -> epilogue over n -> store. The input is read three
//            times, but from the second on it is in a cache, if n is moderate.
#pragma once

#include "epilogue.h"
#include "score.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kScalarBlock = 2048;  // 8 KB of floats
constexpr int64_t kScalarCols = 64;     // rows per tile: 64 floats are four cache lines

template <class A>
inline A maximum(const A* values, int64_t count, A m) {
  // `a > b ? a : b` ignores a NaN; the sum carries it.
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < count; ++i) m = values[i] > m ? values[i] : m;
  return m;
}

// values <- exp(values - s). Returns their sum.
inline Compensated exp_sum(float* values, int64_t count, float s) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float e = exp_difference(values[i], s);
    values[i] = e;
    sum += double(e);
  }
  return {sum, 0};
}
inline Compensated exp_sum(double* values, int64_t count, double s) {
  Compensated sum;
  for (int64_t i = 0; i < count; ++i) sum.add(values[i] = exp_difference(values[i], s));
  return sum;
}

// The offsets of a row's elements: unit stride, or any strides of any number of reduced dims (by default one dim of
// stride 1).
struct UnitStride {
  int64_t x(int64_t i) const { return i; }
  int64_t y(int64_t i) const { return i; }
};
struct AnyStride {
  const DimGroup* dims;  // null if there is one reduced dim or none
  int64_t x_stride, y_stride;
  AnyStride() : dims(nullptr), x_stride(1), y_stride(1) {}
  explicit AnyStride(const DimGroup& reduced)
      : dims(reduced.count > 1 ? &reduced : nullptr),
        x_stride(reduced.innermost().strides[kX]),
        y_stride(reduced.innermost().strides[kY]) {}
  int64_t x(int64_t i) const { return dims ? dims->offset(i, kX) : i * x_stride; }
  int64_t y(int64_t i) const { return dims ? dims->offset(i, kY) : i * y_stride; }
};

template <class In, class At, class A>
void load_block(const In& x, const At& at, int64_t first, int64_t count, A* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = x[at.x(first + i)];
}

template <class Y, class At, class A>
void store_block(Y* y, const At& at, int64_t first, int64_t count, const A* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[at.y(first + i)] = from_acc<Y>(values[i]);
}

template <class Epilogue, class In, class Y, class At>
void row_scalar(const In& x, Y* y, const At& at, int64_t n, int64_t sum_offset) {
  using A = Acc<Y>;
  constexpr bool reduces = Epilogue::kOnePerRow, from_exp = reduces || Epilogue::kFromExp;
  alignas(64) A values[kScalarBlock];
  State<A> state;
  for (int64_t first = 0; first < n; first += kScalarBlock) {
    const int64_t count = n - first < kScalarBlock ? n - first : kScalarBlock;
    load_block(x, at, first, count, values);
    State<A> part;
    part.m = maximum(values, count, -kInf<A>);
    if (!from_exp && n <= kScalarBlock) {
      // The epilogue of this row needs its values, so the exponentials go to another buffer.
      alignas(64) A exps[kScalarBlock];
      std::memcpy(exps, values, size_t(count) * sizeof(A));
      part.l = exp_sum(exps, count, finite_or_zero(part.m));
    } else {
      part.l = exp_sum(values, count, finite_or_zero(part.m));
    }
    state = n <= kScalarBlock ? part : merge(state, part);
  }
  if constexpr (reduces) {
    ReduceEpilogue::store(state, y, sum_offset);
  } else {
    const ScalarEpilogue<Epilogue, A> epilogue(state);
    for (int64_t first = 0; first < n; first += kScalarBlock) {
      const int64_t count = n - first < kScalarBlock ? n - first : kScalarBlock;
      if (n <= kScalarBlock && from_exp) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = epilogue.from_exp(values[i]);
      } else {
        if (n > kScalarBlock) load_block(x, at, first, count, values);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = epilogue(values[i]);
      }
      store_block(y, at, first, count, values);
    }
  }
}

template <class Epilogue, class In, class Y>
void columns_scalar(const In& x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t width,
                    int64_t sum_offset) {
  using A = Acc<Y>;
  A m[kScalarCols], s[kScalarCols];
  ExpTotal<A> l[kScalarCols];
  for (int64_t j = 0; j < width; ++j) m[j] = -kInf<A>;
  for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const A value = x[i * x_stride + j];
      m[j] = value > m[j] ? value : m[j];
    }
  }
  for (int64_t j = 0; j < width; ++j) s[j] = finite_or_zero(m[j]);
  for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) l[j].add(exp_difference(x[i * x_stride + j], s[j]));
  }
  const auto state = [&](int64_t j) { return State<A>{m[j], l[j].compensated()}; };
  if constexpr (Epilogue::kOnePerRow) {
    for (int64_t j = 0; j < width; ++j) ReduceEpilogue::store(state(j), y + j, sum_offset);
  } else {
    ScalarEpilogue<Epilogue, A> epilogue[kScalarCols];
    for (int64_t j = 0; j < width; ++j) epilogue[j] = ScalarEpilogue<Epilogue, A>(state(j));
    for (int64_t i = 0; i < n; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) y[i * y_stride + j] = from_acc<Y>(epilogue[j](x[i * x_stride + j]));
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
