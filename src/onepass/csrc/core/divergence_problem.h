// divergence_problem.h: one problem of two tensors, checked and laid out: the divergence of two distributions over
// classes, which is one number per row, and its gradients (losses.py has the definitions); or the gradient of a softmax
// in two steps (state_ops.py). Pure: no torch, no CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// x and y have the same shape and type. A row has a score s for each class, from its elements x: s = factor * x. With a
// softcap c, s becomes c * tanh(s / c). p = exp(s - lse) are the probabilities, with lse = m + log l. The numbers of a
// row are called its terms. They are stored in planes, one number per row, in the type in which rows are computed.
//
// For the KL divergence (`is_kl`), y has logits as x has. Their scores r = factor * y have the probabilities q:
//
//   0, 1   m and log l of s
//   2      the sum of p (log p - log q). A class whose p is 0 adds 0
//   3, 4   m and log l of r
//
// For a cross-entropy with probabilities y, a class has the share t = ((1 - smoothing) y + smoothing / n) weight[c]:
//
//   0, 1   m and log l of s
//   2      the sum of t (lse - s)
//   3      the sum of t
//
// If m of a row is infinite, log l is NaN, so that the terms and gradients of the row are NaN, as in torch.
//
// For a product (`is_product`) there is one plane, the sum of x y. It has no weights, factor, softcap or smoothing.
//
// The gradients come from the gradients of the terms: g of plane 2, and h of plane 1 (for the KL divergence h is 0 and
// not read):
//
//   KL divergence   dx = factor g p (log p - log q - plane 2), 0 where p is 0
//                   dy = factor g (q - p)
//   cross-entropy   dx = (p (g * plane 3 + h) - g t) ds / dx
//                   dy = (1 - smoothing) weight[c] g (lse - s)
//
// The backward of a product has no gradients of terms. It is dx = x (y - plane 0): the gradient of a softmax with
// result x, where y is the gradient of x.
struct DivergenceProblem {
  Direction direction;
  DType type;  // of x, y and their gradients

  // These dims number the rows, the last one fastest. Strides of x, y, dx and dy; `steps`: from class to class.
  enum { kOfX, kOfY, kOfDx, kOfDy, kTensors };
  int dims = 0;
  int64_t sizes[kMaxDims], strides[kTensors][kMaxDims];
  int64_t rows = 1, n = 1, steps[kTensors] = {1, 1, 1, 1};

  const void *x = nullptr, *y = nullptr;
  void *dx = nullptr, *dy = nullptr;  // backward; null if it is not asked for. Then its strides are 0, and its step 1
  const void* weight = nullptr;       // a weight per class, of the type in which rows are computed; without it 1
  void* terms = nullptr;              // (planes, rows); written forward, read backward
  const void* grads = nullptr;        // backward: the gradients of the terms, in the same planes
  bool is_kl = false, is_product = false;
  double factor = 1, softcap = 0, smoothing = 0;  // softcap 0: none. The KL divergence has no softcap and smoothing

  bool is_backward() const { return direction == Direction::backward; }
  DType accumulator() const { return type == DType::float64 ? DType::float64 : DType::float32; }
  int planes() const { return is_product ? 1 : is_kl ? 5 : 4; }

  // Adds the next dim of the rows. Merges it with the dim before it if both have one common stride in all tensors.
  void add_dim(int64_t size, const int64_t (&by)[kTensors]) {
    rows *= size;
    if (size == 1) return;
    bool merges = dims > 0;
    for (int t = 0; t < kTensors && merges; ++t) merges = strides[t][dims - 1] == size * by[t];
    if (merges) --dims, size *= sizes[dims];
    for (int t = 0; t < kTensors; ++t) strides[t][dims] = by[t];
    sizes[dims++] = size;
  }
};

// Runs a problem that has rows and classes.
void run_divergence_cpu(const DivergenceProblem& problem);

}  // namespace onepass
