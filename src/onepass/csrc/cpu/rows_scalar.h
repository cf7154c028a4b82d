// rows_scalar.h: one row at a time, in blocks that wait in the L1 cache as floats (doubles). A row of one block is read
// once:
//
//   load -> maximum -> exp -> sum -> scale -> store
//
// A longer one is read twice: an online state over its blocks, then finish -> store.
#pragma once

#include "state.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kBlock = 2048;  // 8 KB of floats

template <class A>
inline A maximum(const A* values, int64_t count, A m) {
  // `a > b ? a : b` ignores a NaN; the sum carries it.
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < count; ++i) m = values[i] > m ? values[i] : m;
  return m;
}

// values <- exp(values - s); returns their sum.
inline Total exp_sum(float* values, int64_t count, float s) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float e = exp_minus(values[i], s);
    values[i] = e;
    sum += double(e);
  }
  return {sum, 0};
}
inline Total exp_sum(double* values, int64_t count, double s) {
  Total total;
  for (int64_t i = 0; i < count; ++i) total.add(values[i] = exp_minus(values[i], s));
  return total;
}

// Where the elements of a row are: next to each other, or anywhere: one stride, or any number of reduced dims.
struct Unit {
  int64_t x(int64_t i) const { return i; }
  int64_t y(int64_t i) const { return i; }
};
struct Anywhere {
  const Bag* many;  // or null
  int64_t x_stride, y_stride;
  explicit Anywhere(int64_t x_stride, int64_t y_stride) : many(nullptr), x_stride(x_stride), y_stride(y_stride) {}
  explicit Anywhere(const Bag& reduced)
      : many(reduced.count > 1 ? &reduced : nullptr),
        x_stride(reduced.count ? reduced.dims[0].x_stride : 1),
        y_stride(reduced.count ? reduced.dims[0].y_stride : 1) {}
  int64_t x(int64_t i) const { return many ? offsets(i).first : i * x_stride; }
  int64_t y(int64_t i) const { return many ? offsets(i).second : i * y_stride; }

 private:
  struct Pair {
    int64_t first, second;
  };
  Pair offsets(int64_t i) const {
    Pair pair;
    many->offsets(i, &pair.first, &pair.second);
    return pair;
  }
};

template <class X, class Y, class At>
void load_block(const X* x, const At& at, int64_t first, int64_t count, typename Wide<Y>::type* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = load<Y>(x[at.x(first + i)]);
}

template <class Y, class At, class A>
void store_block(Y* y, const At& at, int64_t first, int64_t count, const A* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[at.y(first + i)] = Narrow<Y>::from(values[i]);
}

template <Function F, class X, class Y, class At>
void row(const X* x, Y* y, const At& at, int64_t n, int64_t plane) {
  using A = typename Wide<Y>::type;
  alignas(64) A values[kBlock];
  State<A> state;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    load_block<X, Y>(x, at, first, count, values);
    State<A> part;
    part.m = maximum(values, count, -kInf<A>);
    if (F == Function::log_softmax && n <= kBlock) {
      // This row finishes from its values, so the exponentials go elsewhere.
      alignas(64) A exps[kBlock];
      std::memcpy(exps, values, size_t(count) * sizeof(A));
      part.l = exp_sum(exps, count, shift(part.m));
    } else {
      part.l = exp_sum(values, count, shift(part.m));
    }
    state = n <= kBlock ? part : merge(state, part);
  }
  if constexpr (reduces(F)) return store_reduced<F>(state, y, plane);
  const Finish<F, A> finish(state);
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    if (n <= kBlock && F != Function::log_softmax) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) values[i] = finish.from_exp(values[i]);
    } else {
      if (n > kBlock) load_block<X, Y>(x, at, first, count, values);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) values[i] = finish(values[i]);
    }
    store_block(y, at, first, count, values);
  }
}

}  // namespace onepass::ONEPASS_ISA
