// loss_map.cuh: where the rows of a loss, their terms and the tensors beside them lie, as the host tells the kernels.
// core/loss_problem.h and core/divergence_problem.h have the definitions. Both sides include it, so it has no CUDA.
#pragma once

#include "column_params.cuh"

// What a kernel of losses is compiled for.
enum LossPart : unsigned {
  kLoss = 1,           // always
  kLossPicks = 2,      // terms of the classes in `index`
  kLossWeight = 4,     // a weight per class
  kLossSpread = 8,     // the sum over all classes of their terms, weighted
  kLossEntropy = 16,   // the entropy
  kLossSoftcap = 32,   // c tanh(s / c)
  kLossScale = 64,     // a factor per row
  kLossCross = 128,    // the loss of a cross-entropy, or its gradient
  kLossGradLse = 256,  // cross-entropy: lse has a gradient too
  kLossColumns = 512,  // rows lie side by side; otherwise the classes of a row do
  kLossStaged = 1024,  // short rows without gaps
  // Of two tensors, a divergence: with shares of classes, unless it is that of logits; the gradients that are asked
  // for.
  kLossShares = 2048,
  kLossKl = 4096,
  kLossOfX = 8192,
  kLossOfY = 16384,
  kLossProduct = 32768,  // of two tensors, the sums of their products, or the gradient of a softmax from them
};

constexpr int kLossDims = 6;  // dims of the rows that do not merge

struct LossMap {
  const void* x;
  void* dx;
  long long rows, n;
  long long x_step, dx_step;  // from class to class
  int dims;                   // of the rows, the last one fastest
  int sizes[kLossDims];
  long long x_strides[kLossDims], dx_strides[kLossDims];
  FastDivisor divisors[kLossDims];
  int parts;  // of a row's classes
  FastDivisor by_parts;
  long long part_n;  // classes of a part; staged: bytes of a tile
  // Columns: vectors of a slice, which is one index of all dims but the last; threads side by side. Staged: vectors of
  // a row.
  long long slice_vecs, vecs;
  int threads_x;
  FastDivisor by_slice_vecs;

  void *terms, *result, *states, *partials;
  const long long* index;
  int picks, grads_per_row, is_wide;
  const void *weight, *weight_sum, *scale, *grads, *total, *grad_lse;
  long long ignore_index;
  double factor, softcap, per_softcap, smoothing, z_loss;
  float factor_f32, softcap_f32, per_softcap_f32, smoothing_f32, z_loss_f32;  // the same
};

// A LossMap of two tensors, for a divergence. `smoothing` is that of its shares.
struct DivergenceMap : LossMap {
  const void* y;
  void* dy;
  long long y_step, dy_step, y_strides[kLossDims], dy_strides[kLossDims];
};

// States of parts of rows, (count, 2, rows): m and l. What becomes of them, (4, rows): m, log l, 1 / l and l of the
// rows. The two in the middle are NaN where m is infinite.
struct StateMerge {
  const void* parts;
  void* planes;
  long long rows, count;
};

// How the sums of blocks become one number, the loss.
struct LossTotal {
  const void* partials;  // four numbers of each of `count` blocks, in planes: the sums of losses and of the weights of
                         // their classes, each with its rounding error
  long long count;
  void *result, *total;  // the loss, and the sum of the weights
  int is_mean, is_wide;
};
