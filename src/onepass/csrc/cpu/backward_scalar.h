// backward_scalar.h: gradients in doubles: those of doubles, in plain loops that a compiler vectorises; and those of
// rows of any strides and tensors of any types, one element at a time.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

// exp(x) to 1 ulp, for any x: 2^k in two factors, and the series of exp(r) for |r| <= ln(2) / 2.
inline double exp_double(double x) {
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

inline double scalar_term(GradOp op, double y, double g) { return op == GradOp::softmax ? y * g : g; }
// `a` is the sum. For logsumexp `a` and `b` are the gradient of the result, times the slope, and the result.
inline double scalar_dx(GradOp op, double y, double g, double a, double b, double slope) {
  if (op == GradOp::softmax) return y * (g - a) * slope;
  if (op == GradOp::log_softmax) return (g - exp_double(y) * a) * slope;
  return a * exp_double(y * slope - b);
}

// Elements of tensors of any type.
inline double load_element(const void* tensor, DType type, int64_t at) {
  return dispatch_type(type,
                       [=](auto t) { return double(to_acc(static_cast<const TypeOf<decltype(t)>*>(tensor)[at])); });
}
inline void store_element(void* tensor, DType type, int64_t at, double value) {
  dispatch_type(type, [=](auto t) {
    using T = TypeOf<decltype(t)>;
    static_cast<T*>(tensor)[at] = from_acc<T>(value);
  });
}

// Rows [begin, end) of any strides.
inline void grad_elements(const Problem& call, GradOp op, int64_t begin, int64_t end) {
  const auto load = [&](BackwardTensor tensor, int64_t at) {
    return load_element(call.tensors[tensor].data, call.type(tensor == kLse ? kGrad : tensor), at);
  };
  for_each_row(call.layout, begin, end, [&](const int64_t* row, int64_t n) {
    const auto y = [&](const int64_t* offset) { return load(kSaved, row[kSaved] + offset[kSaved]); };
    const auto g = [&](const int64_t* offset) { return load(kGrad, row[kGrad] + offset[kGrad]); };
    const double slope = score_slope(call);
    double a, b = 0;
    if (op == GradOp::logsumexp) {
      a = load(kGrad, row[kGrad]) * slope, b = load(kLse, row[kLse]);
    } else {
      Compensated sum;
      OffsetCalculator at(call.layout.reduced, 0);
      for (int64_t i = 0; i < n; ++i, at.next()) sum.add(scalar_term(op, y(at.offset), g(at.offset)));
      a = sum.value();
    }
    OffsetCalculator at(call.layout.reduced, 0);
    for (int64_t i = 0; i < n; ++i, at.next()) {
      const double of_g = op == GradOp::logsumexp ? 0 : g(at.offset);
      store_element(call.tensors[kDx].data, call.type(kDx), row[kDx] + at.offset[kDx],
                    scalar_dx(op, y(at.offset), of_g, a, b, slope));
    }
  });
}

constexpr int kDoubleLanes = 16;

// A row of doubles of unit stride. `g_stride` is 0 or 1.
template <GradOp Op>
void grad_row_double(const double* y, const double* g, int64_t g_stride, double* dx, int64_t n, double a, double b,
                     double slope) {
  if constexpr (Op != GradOp::logsumexp) {
    double sum[kDoubleLanes] = {}, error[kDoubleLanes] = {};
    const auto add = [&](int64_t i, int lane) __attribute__((always_inline)) {
      add_compensated(sum[lane], error[lane], scalar_term(Op, y[i], g[i * g_stride]));
    };
    int64_t i = 0;
    for (; i + kDoubleLanes <= n; i += kDoubleLanes) {
#pragma omp simd
      for (int lane = 0; lane < kDoubleLanes; ++lane) add(i + lane, lane);
    }
    for (int lane = 0; i < n; ++i, ++lane) add(i, lane);
    Compensated total;
    for (int lane = 0; lane < kDoubleLanes; ++lane) total.add(sum[lane]), total.error += error[lane];
    a = total.value();
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i)
    dx[i] = scalar_dx(Op, y[i], Op == GradOp::logsumexp ? 0 : g[i * g_stride], a, b, slope);
}

// A tile of `width` columns of doubles. A tensor with one number per column has `strides` to the next.
template <GradOp Op>
void grad_columns_double(const double* y, const double* g, const double* lse, double* dx, const Dim& n,
                         const int64_t* strides, int64_t width, double slope) {
  constexpr bool lse_op = Op == GradOp::logsumexp;
  double a[kScalarTileCols] = {}, b[kScalarTileCols], error[kScalarTileCols] = {};
  for (int64_t j = 0; j < width; ++j) {
    b[j] = lse_op ? lse[j * strides[kLse]] : 0;
    if (lse_op) a[j] = g[j * strides[kGrad]] * slope;
  }
  for (int64_t i = 0; !lse_op && i < n.size; ++i) {
    const double *const y_i = y + i * n.strides[kSaved], *const g_i = g + i * n.strides[kGrad];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      add_compensated(a[j], error[j], scalar_term(Op, y_i[j], g_i[j * strides[kGrad]]));
    }
  }
  for (int64_t j = 0; !lse_op && j < width; ++j) a[j] = Compensated{a[j], error[j]}.value();
  for (int64_t i = 0; i < n.size; ++i) {
    const double *const y_i = y + i * n.strides[kSaved], *const g_i = g + i * n.strides[kGrad];
    double* const to = dx + i * n.strides[kDx];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      to[j] = scalar_dx(Op, y_i[j], lse_op ? 0 : g_i[j * strides[kGrad]], a[j], b[j], slope);
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
