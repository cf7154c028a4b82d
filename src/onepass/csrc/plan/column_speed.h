// column_speed.h: ColumnSpeed estimates what fraction of the speed of memory a plan of columns reaches. ColumnPlanner
// compares plans by it. The estimate is a small neural network, fitted to the times of many plans of random shapes
// (scripts/fit_columns.py). Pure: no torch, no CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "column_features.h"
#include "column_view.h"
#include "column_weights.h"
#include "rows.h"

namespace onepass {

struct ColumnSpeed {
  const ColumnView& view;
  const Gpu& gpu;
  const int operands;  // tensors that are kept on the chip
  const int bytes;     // of an element of the widest type that is accessed by vectors
  const int read;      // bytes of an element that is read
  const bool merges;   // whether threads merge partial states: not in the gradient of logsumexp
  const bool gradient, half_result;
  const bool early;   // columns are reduced while vectors arrive (kProvisionalMax, cuda/kernels/column_softmax.cuh)
  const int on_chip;  // bytes of an element as it is kept on the chip: as it was read, or its score

  const int64_t n = view.n(), inner = view.inner();

  typedef std::array<float, kSpeedFeatures> Features;

  // The longest step of a tensor from one slice to the next, if slices follow one another.
  int64_t slice_step() const {
    int64_t step = n * inner;
    for (const int64_t of_tensor : view.slice_steps) step = std::max(step, of_tensor);
    return step;
  }
  // Whether there are gaps between the lines or slices of the result.
  bool result_has_gaps() const {
    const int result = gradient ? int(kDx) : int(kY);
    return view.tiles.steps[result] > inner || view.slice_steps[result] > n * inner;
  }
  // The vectors of a thread in the tier columns_smem.
  int64_t vecs_in_smem(const CudaPlan& plan) const {
    const int64_t lines = int64_t(plan.threads_y()) * plan.blocks_per_tile();
    if (plan.is_shifted()) return ceil_div(n, lines);
    return ceil_div(n * inner + (view.slab_begins ? 0 : plan.vec_size - 1),
                    int64_t(plan.threads_x()) * plan.vec_size * lines);
  }

  // The estimate: the fraction of the speed of memory that a plan reaches, up to a factor that all plans of a problem
  // share.
  double expected(const CudaPlan& plan) const {
    const Features x = features(plan);
    std::array<float, kSpeedFeatures> scaled;
    for (int i = 0; i < kSpeedFeatures; ++i)
      scaled[i] = (std::clamp(x[i], kSpeedRange[i][0], kSpeedRange[i][1]) - kSpeedRange[i][2]) * kSpeedRange[i][3];
    const double log_speed = layer(kSpeedOut, layer(kSpeedSecond, layer(kSpeedFirst, scaled)))[0];
    // Gaps between slices are read with them; results with gaps are written one by one. (H200, 2026-11-26)
    const double without_gaps = !plan.is_staged()
                                    ? 1
                                    : double((operands + 1) * n * inner) / double(operands * slice_step() + n * inner) *
                                          (result_has_gaps() ? 0.5 : 1);
    return std::exp(log_speed) * without_gaps;
  }

  Features features(const CudaPlan& plan) const {
    const bool slab = plan.takes_slabs(), staged = plan.is_staged(), in_smem = plan.is_in_smem(),
               twice = plan.tier == Tier::columns_twopass, shifted = plan.is_shifted();
    const int vector = plan.vec_size, threads = plan.threads(), shared_by = plan.blocks_per_tile(),
              vecs = plan.vecs_per_thread(), smem_vecs = plan.keeps_vecs_in_smem() ? plan.smem_vecs : 0,
              words = vecs * operands * std::max(1, vector * on_chip / 4) + vector * (operands > 1 ? 1 : 2);
    const int64_t side = int64_t(plan.threads_x()) * vector, cols = slab ? inner : side - view.shifted_by(plan),
                  tiles = slab || staged ? 1 : ceil_div(inner, cols), groups = staged ? plan.slices_per_group() : 1,
                  blocks = ceil_div(view.slices(), groups) * tiles * shared_by;
    // The vectors of a thread, of a group of slices those of its columns.
    const int64_t each = in_smem ? vecs_in_smem(plan)
                         : slab  ? ceil_div(n * inner, int64_t(threads) * vector * shared_by)
                                 : ceil_div(n, int64_t(plan.threads_y()) * shared_by);
    const bool pipelined = smem_vecs && vecs % kStageVecs == 0 && on_chip == read &&
                           (plan.in_grid() || (operands == 1 && half_result && shared_by <= 2));
    const double elements = double(n) * inner * groups, line = double(std::min(cols, inner)) * read;
    // Bytes of shared memory of a block, and blocks that a multiprocessor has room for.
    const int64_t smem = staged    ? int64_t(elements) * read * operands * plan.stages()
                         : in_smem ? each * plan.threads_y() * (side + (slab ? 0 : 32 / read)) * read * operands +
                                         int64_t(threads) * vector * 8 + 2048
                                   : count_smem_vecs_bytes(plan, vector * on_chip * operands) + 4096,
                  registers = int64_t(plan.max_threads()) * (in_smem     ? 72
                                                             : pipelined ? 128
                                                                         : words + 34);
    const int64_t resident =
        std::clamp<int64_t>(std::min({gpu.shared / smem, 65536 / registers, int64_t(2048 / threads)}), 1, 32);
    const double waves = double(blocks) / double(gpu.sm_count * resident),
                 busy = double(threads) * double(std::min(resident, ceil_div(blocks, int64_t(gpu.sm_count)))),
                 loads = double(in_smem || staged ? each : std::min<int64_t>(each, vecs + smem_vecs)),
                 at_a_time = std::min(double(blocks), double(gpu.sm_count) * resident) / shared_by;
    const double held =
        staged ? double(tiles) * threads * vector * each
               : double(tiles) * (slab ? int64_t(threads) * vector : side * plan.threads_y()) * each * shared_by;
    const auto log2 = [](double value) { return float(std::log2(std::max(value, 1e-3))); };
    Features x{};
    x[kIsHalf] = bytes == 2, x[kIsTwo] = operands > 1, x[kIsEarly] = early;
    x[kLogN] = log2(double(n)), x[kLogInner] = log2(double(inner)), x[kWholeLines] = inner * read % 128 == 0;
    x[in_smem                           ? slab ? kSmemSlab : kSmemLines
      : staged                          ? kGroups
      : slab                            ? plan.access == VecAccess::slab ? kSlab : kAlignedSlab
      : plan.tier == Tier::columns_grid ? kOverGrid
      : twice                           ? shifted ? kShiftedTwice : kAlignedTwice
      : shifted                         ? kShiftedTile
                                        : kAlignedTile] = 1;
    x[kLogVecBytes] = log2(vector * read), x[kLogThreads] = log2(threads), x[kLogDown] = log2(plan.threads_y());
    x[kLogBlocks] = log2(shared_by), x[kLogSmemVecs] = log2(1 + smem_vecs), x[kLogVecs] = log2(vecs);
    x[kRegisterWords] = float(words) / 32, x[kLogEach] = log2(double(each));
    x[kIsKept] = staged || in_smem || each <= vecs + smem_vecs;
    x[kIsPipelined] = pipelined;
    x[kLogResident] = log2(double(resident)), x[kLogBusyThreads] = log2(busy);
    x[kLogOnWay] = log2(busy * loads * vector * read * operands / 1024);
    x[kLogUsed] = log2(elements / held), x[kLogWaves] = log2(waves);
    x[kLogFull] = log2(waves < 1 ? waves : waves / std::ceil(waves));
    x[kLogLine] = log2(line), x[kLogTile] = log2(double(n) * line * double(groups) * operands / 1024);
    x[kLogAtATime] = log2(at_a_time * double(n) * line * double(groups) * operands / (1 << 20));
    x[kLogTiles] = log2(double(tiles));
    return x;
  }

 private:
  // A layer of the network: weights of each output, the last one added. All outputs but those of the last layer are at
  // least 0.
  template <size_t Out, size_t In, size_t Count>
  static std::array<float, Out> layer(const float (&weights)[Out][In], const std::array<float, Count>& x) {
    static_assert(In == Count + 1);
    std::array<float, Out> y;
    for (size_t o = 0; o < Out; ++o) {
      float sum = weights[o][Count];
      for (size_t i = 0; i < Count; ++i) sum += weights[o][i] * x[i];
      y[o] = Out > 1 ? std::max(sum, 0.0f) : sum;
    }
    return y;
  }
};

}  // namespace onepass
