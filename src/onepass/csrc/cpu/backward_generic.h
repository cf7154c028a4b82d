// backward_generic.h: gradients in doubles: of doubles, in plain loops that a compiler makes vectors of; of rows of any
// strides and of tensors of any types, an element at a time.
#pragma once

#include "backward.h"
#include "engine.h"

namespace onepass::ONEPASS_ISA {

// exp(x) to 1 ulp, for any x: 2^k in two factors, and the series of exp(r) for |r| <= ln(2) / 2.
inline double exp_any(double x) {
  const double low = x < -746.0 ? -746.0 : x, v = low > 710.0 ? 710.0 : low;
  const double shifted = v * 1.4426950408889634 + 6755399441055744.0, k = shifted - 6755399441055744.0;
  const double r = (v - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const uint64_t whole = bits - 0x4338000000000000, half = ((whole + 4096) >> 1) - 2048;
  const uint64_t one = (half + 1023) << 52, two = (whole - half + 1023) << 52;
  double first, second;
  std::memcpy(&first, &one, sizeof first);
  std::memcpy(&second, &two, sizeof second);
  return p * first * second;
}

inline double any_term(Kind kind, double y, double g) { return kind == Kind::soft ? y * g : g; }
// `a` is the sum, and `b` a sign; of logsumexp they are the result's gradient and the result.
inline double any_last(Kind kind, double y, double g, double a, double b) {
  if (kind == Kind::soft) return y * (g - a) * b;
  if (kind == Kind::log) return g - exp_any(y) * a;
  return a * exp_any(y - b);
}

// Steps through a bag in order without a division an element.
struct BackwardOdometer {
  const BackwardBag& bag;
  int64_t at[kMaxDims];
  int64_t offset[kBackwardTensors] = {};

  BackwardOdometer(const BackwardBag& over, int64_t index) : bag(over) {
    for (int i = bag.count - 1; i >= 0; --i) {
      at[i] = index % bag.dims[i].size;
      index /= bag.dims[i].size;
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] += at[i] * bag.dims[i].strides[t];
    }
  }

  ONEPASS_INLINE void next() {
    for (int i = bag.count - 1; i >= 0; --i) {
      const BackwardDim& dim = bag.dims[i];
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] += dim.strides[t];
      if (++at[i] < dim.size) return;
      for (int t = 0; t < kBackwardTensors; ++t) offset[t] -= at[i] * dim.strides[t];
      at[i] = 0;
    }
  }
};

// Tensors of any types.
inline double element(const void* tensor, DType type, int64_t at) {
  switch (type) {
    case DType::float32: return static_cast<const float*>(tensor)[at];
    case DType::float64: return static_cast<const double*>(tensor)[at];
    case DType::float16: return to_wide(static_cast<const float16*>(tensor)[at]);
    case DType::bfloat16: return to_wide(static_cast<const bfloat16*>(tensor)[at]);
  }
  return 0;
}
inline void set_element(void* tensor, DType type, int64_t at, double value) {
  switch (type) {
    case DType::float32: static_cast<float*>(tensor)[at] = Narrow<float>::from(value); return;
    case DType::float64: static_cast<double*>(tensor)[at] = value; return;
    case DType::float16: static_cast<float16*>(tensor)[at] = Narrow<float16>::from(value); return;
    case DType::bfloat16: static_cast<bfloat16*>(tensor)[at] = Narrow<bfloat16>::from(value); return;
  }
}

// Rows [begin, end) of any strides.
inline void any_rows(const BackwardProblem& call, Kind kind, int64_t begin, int64_t end) {
  const BackwardLayout& layout = call.layout;
  BackwardOdometer row(layout.outer, begin);
  for (int64_t r = begin; r < end; ++r, row.next()) {
    const auto y = [&](const int64_t* o) {
      return element(call.tensors[kSaved].data, call.type(kSaved), row.offset[kSaved] + o[kSaved]);
    };
    const auto g = [&](const int64_t* o) {
      return element(call.tensors[kGrad].data, call.type(kGrad), row.offset[kGrad] + o[kGrad]);
    };
    double a, b = call.function == Function::softmin ? -1 : 1;
    if (kind == Kind::lse) {
      a = element(call.tensors[kGrad].data, call.type(kGrad), row.offset[kGrad]),
      b = element(call.tensors[kLse].data, call.type(kGrad), row.offset[kLse]);
    } else {
      Total total;
      BackwardOdometer at(layout.reduced, 0);
      for (int64_t i = 0; i < layout.n; ++i, at.next()) total.add(any_term(kind, y(at.offset), g(at.offset)));
      a = total.value();
    }
    BackwardOdometer at(layout.reduced, 0);
    for (int64_t i = 0; i < layout.n; ++i, at.next()) {
      const double of_g = kind == Kind::lse ? 0 : g(at.offset);
      set_element(call.tensors[kDx].data, call.type(kDx), row.offset[kDx] + at.offset[kDx],
                  any_last(kind, y(at.offset), of_g, a, b));
    }
  }
}

constexpr int kLanes = 16;
constexpr int64_t kDoubleTile = 64;  // rows side by side that go together

// A sum of many lanes, and what its additions rounded off.
ONEPASS_INLINE void add_double(double* sum, double* rest, double e) {
  const double next = *sum + e, part = next - *sum;
  *rest += (*sum - (next - part)) + (e - part);
  *sum = next;
}

// A row of doubles of unit stride. `g_stride` is 0 or 1.
template <Kind K>
void double_row(const double* y, const double* g, int64_t g_stride, double* dx, int64_t n, double a, double b) {
  if constexpr (K != Kind::lse) {
    double sum[kLanes] = {}, rest[kLanes] = {};
    const auto add = [&](int64_t i, int lane) __attribute__((always_inline)) {
      add_double(&sum[lane], &rest[lane], any_term(K, y[i], g[i * g_stride]));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (int lane = 0; i < n; ++i, ++lane) add(i, lane);
    Total total;
    for (int lane = 0; lane < kLanes; ++lane) total.add(sum[lane]), total.rest += rest[lane];
    a = total.value();
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = any_last(K, y[i], K == Kind::lse ? 0 : g[i * g_stride], a, b);
}

// Rows of doubles side by side, a tile of `width` of them. What has a number a row has `strides` to the next.
template <Kind K>
void double_columns(const double* y, const double* g, const double* lse, double* dx, const BackwardDim& n,
                    const int64_t* strides, int64_t width, double sign) {
  double a[kDoubleTile] = {}, b[kDoubleTile], rest[kDoubleTile] = {};
  for (int64_t j = 0; j < width; ++j) {
    b[j] = K == Kind::lse ? lse[j * strides[kLse]] : sign;
    if (K == Kind::lse) a[j] = g[j * strides[kGrad]];
  }
  for (int64_t i = 0; K != Kind::lse && i < n.size; ++i) {
    const double *const y_row = y + i * n.strides[kSaved], *const g_row = g + i * n.strides[kGrad];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) add_double(&a[j], &rest[j], any_term(K, y_row[j], g_row[j * strides[kGrad]]));
  }
  for (int64_t j = 0; K != Kind::lse && j < width; ++j) a[j] = Total{a[j], rest[j]}.value();
  for (int64_t i = 0; i < n.size; ++i) {
    const double *const y_row = y + i * n.strides[kSaved], *const g_row = g + i * n.strides[kGrad];
    double* const to = dx + i * n.strides[kDx];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      to[j] = any_last(K, y_row[j], K == Kind::lse ? 0 : g_row[j * strides[kGrad]], a[j], b[j]);
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
