// loss_map.cuh: LossMap and DivergenceMap, which tell kernels where the rows of a loss are, their terms (the numbers
// per row that the loss is computed from) and the other tensors of the loss. The host fills them in.
// core/loss_problem.h and core/divergence_problem.h have the definitions. Both sides include this file, so it has no
// CUDA.
#pragma once

#include "column_params.cuh"

// The parts of a loss. A kernel is compiled for a set of them.
enum LossPart : unsigned {
  kLoss = 1,           // always set
  kLossPicks = 2,      // the terms of the classes in `index` (the picks)
  kLossWeight = 4,     // a weight per class
  kLossSpread = 8,     // the sum of the terms of all classes, weighted
  kLossEntropy = 16,   // the entropy
  kLossSoftcap = 32,   // c tanh(s / c)
  kLossScale = 64,     // a factor per row
  kLossCross = 128,    // the loss of a cross-entropy, or its gradient
  kLossGradLse = 256,  // cross-entropy: lse has a gradient too
  kLossColumns = 512,  // neighbouring elements belong to neighbouring rows; otherwise to neighbouring classes of a row
  kLossStaged = 1024,  // short rows without gaps
  // For two tensors (a divergence): y has shares of classes, or it is the KL divergence of two tensors of logits; and
  // which gradients are asked for.
  kLossShares = 2048,
  kLossKl = 4096,
  kLossOfX = 8192,
  kLossOfY = 16384,
  kLossProduct = 32768,  // two tensors: the sums of their products, or the gradient of a softmax from such a sum
};

constexpr int kLossDims = 6;  // dims of the rows that cannot be merged

struct LossMap {
  const void* x;
  void* dx;
  long long rows, n;
  long long x_step, dx_step;  // from one class of a row to the next
  int dims;                   // the dims of the rows, the last one fastest
  int sizes[kLossDims];
  long long x_strides[kLossDims], dx_strides[kLossDims];
  FastDivisor divisors[kLossDims];
  int parts;  // into which the classes of a row are cut
  FastDivisor by_parts;
  long long part_n;  // classes of a part. Staged: bytes of a tile
  // Columns: the vectors of a slice, which is one index of all dims but the last, and of all slices; threads_x: threads
  // side by side. Staged: the vectors of a row.
  long long slice_vecs, vecs;
  int threads_x;
  FastDivisor by_slice_vecs;

  void *terms, *result, *states, *partials;
  const long long* index;
  int picks, grads_per_row, is_wide;
  const void *weight, *weight_sum, *scale, *grads, *total, *grad_lse;
  long long ignore_index;
  double factor, softcap, per_softcap, smoothing, z_loss;
  float factor_f32, softcap_f32, per_softcap_f32, smoothing_f32, z_loss_f32;  // the same as float
};

// A LossMap with a second tensor, for a divergence. `smoothing` applies to its shares.
struct DivergenceMap : LossMap {
  const void* y;
  void* dy;
  long long y_step, dy_step, y_strides[kLossDims], dy_strides[kLossDims];
};

// The states of parts of rows, (count, 2, rows): m and l. They are merged to (4, rows): m, log l, 1 / l and l of the
// rows. log l and 1 / l are NaN if m is infinite.
struct StateMerge {
  const void* parts;
  void* planes;
  long long rows, count;
};

// How the sums of the blocks become the loss, one number.
struct LossTotal {
  const void* partials;  // four numbers of each of `count` blocks, in planes: the sums of losses and of the weights of
                         // their classes, each with its rounding error
  long long count;
  void *result, *total;  // the loss, and the sum of the weights
  int is_mean, is_wide;
};
