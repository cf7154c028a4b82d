// loss_problem.h: one problem of losses, checked and laid out: the numbers per row that losses are computed from, and
// the gradient of the input from the gradients of these numbers (losses.py has the definitions). Pure: no torch, no
// CUDA.
#pragma once

#include "layout.h"
#include "types.h"

namespace onepass {

// A row has a score s for each class, from its elements x: s = factor * x, or scale[row] * factor * x. With a softcap
// c, s becomes c * tanh(s / c). The numbers of a row are called its terms. They are stored in planes, one number per
// row, in the type in which rows are computed:
//
//   0, 1     m and log l: the maximum, and the logarithm of the sum of exp(s - m). lse = m + log l
//   spread   if `has_spread`: the sum of weight[c] (lse - s_c) over the classes c
//   entropy  if `has_entropy`: the sum of p (lse - s), p = exp(s - lse)
//   picks    `picks` planes: lse - s of the class index[row * picks + k]
//
// A cross-entropy (`is_cross`) has one pick, and one plane after the first two, the loss of a row. (On CUDA the loss is
// only in `result` or in a sum.) It is
//
//   (1 - smoothing) w (lse - s_y) + smoothing / n * spread + z_loss * lse^2
//
// where y is the row's class and w = weight[y]. If y is `ignore_index`, the loss is 0. Without weights they are 1.
//
// The gradient of the input comes from the gradients of the terms, which are in the same planes. Plane 1 has the
// gradient of lse; plane 0 is not read. For a cross-entropy it comes from the gradient of the result: one number per
// row, or one number for all, which is divided by `total` if there is one. An ignored row has the gradient 0.
struct LossProblem {
  Direction direction;
  DType type;  // of the input and of its gradient

  // These dims number the rows, the last one fastest. `step`: from one class to the next.
  int dims = 0;
  int64_t sizes[kMaxDims], x_strides[kMaxDims], dx_strides[kMaxDims];
  int64_t rows = 1, n = 1, x_step = 1, dx_step = 1;

  const void* x = nullptr;
  void* dx = nullptr;
  void* terms = nullptr;           // written forward, read backward. Backward reads planes 0, 1 and that of the entropy
  void* result = nullptr;          // cross-entropy, forward: the loss of each row, if given
  const int64_t* index = nullptr;  // classes
  int64_t picks = 0;               // per row
  const void* weight = nullptr;    // a weight per class, of the type in which rows are computed
  const void* weight_sum = nullptr;  // the sum of the weights, one number; n without weights
  const void* scale = nullptr;       // a factor per row, of the type in which rows are computed
  const void* grads = nullptr;       // backward
  bool grads_per_row = true;         // cross-entropy: one gradient per row
  const void* total = nullptr;       // cross-entropy, backward
  const void* grad_lse = nullptr;    // cross-entropy, backward: a gradient of lse per row, of the computation's type
  bool has_spread = false, has_entropy = false, is_cross = false;
  bool is_wide = false;  // cross-entropy: the result and its gradient have the type in which rows are computed
  int64_t ignore_index = -100;
  double factor = 1, softcap = 0, smoothing = 0, z_loss = 0;  // softcap 0: none

  bool is_backward() const { return direction == Direction::backward; }
  DType accumulator() const { return type == DType::float64 ? DType::float64 : DType::float32; }
  int spread_plane() const { return 2; }
  int entropy_plane() const { return 2 + has_spread; }
  int first_pick_plane() const { return 2 + has_spread + has_entropy; }

  // Adds the next dim of the rows. Merges it with the dim before it if both have one common stride.
  void add_dim(int64_t size, int64_t x_stride, int64_t dx_stride) {
    rows *= size;
    if (size == 1) return;
    if (dims && x_strides[dims - 1] == size * x_stride && dx_strides[dims - 1] == size * dx_stride) {
      --dims, size *= sizes[dims];
    }
    sizes[dims] = size, x_strides[dims] = x_stride, dx_strides[dims++] = dx_stride;
  }
};

// Runs a problem that has rows and classes.
void run_loss_cpu(const LossProblem& problem);

}  // namespace onepass
