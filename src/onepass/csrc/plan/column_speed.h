// column_speed.h: about which part of the speed of memory a plan of columns reaches, by which ColumnPlanner chooses
// one. Pure: no torch, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>

#include "column_view.h"
#include "rows.h"

namespace onepass {

constexpr int64_t kLargeSlice = 48 * 1024;  // bytes of a slice of which a multiprocessor has one at a time

struct ColumnSpeed {
  const ColumnView& view;
  const Gpu& gpu;
  const int operands;  // tensors that wait on the chip
  const int bytes;     // of an element of the widest type that goes by vectors
  const int read;      // bytes of an element that is read
  const bool merges;   // threads merge partial states: not in the gradient of logsumexp
  const bool gradient, half_result;
  const bool early;  // columns are reduced from the first vectors on (kProvisionalMax, cuda/kernels/column_softmax.cuh)

  const int64_t n = view.n(), inner = view.inner();

  // From one slice to the next of those that follow one another: the longest step of a tensor.
  int64_t slice_step() const {
    int64_t step = n * inner;
    for (const int64_t of_tensor : view.slice_steps) step = std::max(step, of_tensor);
    return step;
  }
  // Whether results are not one piece of memory.
  bool result_has_gaps() const {
    const int result = gradient ? int(kDx) : int(kY);
    return view.tiles.steps[result] > inner || view.slice_steps[result] > n * inner;
  }
  // About which part of the speed of memory a plan reaches, as random shapes of 64 to 300 MB have it (H200,
  // 2026-11-26).
  double expected(const CudaPlan& plan) const {
    const int64_t cols = plan.takes_slabs() ? inner : int64_t(plan.threads_x()) * plan.vec_size;
    const int64_t blocks = plan.is_staged() ? ceil_div(view.slices(), int64_t(plan.slices_per_group()))
                                            : view.slices() * ceil_div(inner, cols) * plan.blocks_per_tile();
    const double busy = blocks < gpu.sm_count ? double(blocks) / gpu.sm_count : 1;
    return busy * of_full_chip(plan);
  }

 private:
  // The part of the vectors of threads that exist.
  double used(const CudaPlan& plan) const {
    const int64_t lines = int64_t(plan.threads_y()) * plan.blocks_per_tile(),
                  side = int64_t(plan.threads_x()) * plan.vec_size,
                  tiles = ceil_div(inner, side - (plan.is_shifted() ? plan.vec_size - 1 : 0));
    return double(n) * inner / (double(tiles) * side * lines * ceil_div(n, lines));
  }

  double of_full_chip(const CudaPlan& plan) const {
    const bool half = bytes == 2, two = operands > 1;
    const int blocks = plan.blocks_per_tile();
    const int64_t slice = n * inner * read * operands;
    const int vec_bytes = plan.vec_size * bytes;
    const double over_chip = plan.tier == Tier::columns_twopass ? vec_bytes < 8 ? 0.45 : 0.51
                             : vec_bytes >= 16                  ? 0.65
                             : two                              ? 0.34
                             : half                             ? 0.45
                                                                : 0.55;
    if (plan.is_staged()) {
      const double without_gaps = double((operands + 1) * n * inner) / double(operands * slice_step() + n * inner) *
                                  (result_has_gaps() ? 0.5 : 1);
      const double room = slice > 2 * kLargeSlice ? 0.62 : plan.stages() == 1 || slice > kLargeSlice ? 0.8 : 1;
      if (!half) return without_gaps * room * (n < 8 || two ? 0.86 : plan.threads_y() > 1 ? 0.9 : 0.95);
      const double of_length = n < 3 ? 0.72 : n < 4 ? 0.75 : (n < 8 || inner > 32 ? 0.86 : 0.83) * (n > 32 ? 0.92 : 1);
      const double merged = plan.threads_y() == 1 ? 1 : inner % 2 ? two ? 0.92 : 0.8 : 0.85;
      return without_gaps * room * merged * of_length;
    }
    if (plan.takes_slabs()) {
      const double small = slice < 2048 ? 0.4 : slice < 8192 ? 0.7 : 1;
      const double shared = blocks > 16 ? over_chip : plan.in_grid() ? 0.65 : 1;
      if (plan.access == VecAccess::slab) return (half ? 0.5 : two ? 0.6 : 0.65) * shared * small;
      if (two)
        return (!half ? 0.9 : plan.prefetches() && blocks > 1 ? 0.57 : blocks > 4 ? 0.78 : 0.88) * shared * small;
      return 0.84 * (plan.threads_x() > 256 ? 0.95 : 1) * (half && n < 64 ? 0.75 : 1) * shared * small;
    }
    if (plan.tier == Tier::columns) return of_tile(plan);
    const bool wide = plan.tier == Tier::columns_twopass && plan.threads_x() * vec_bytes > 256 + vec_bytes;
    return (plan.is_shifted() ? 0.75 : vec_bytes >= 4 ? 1 : 0.95) * (wide ? 0.93 : 1) * over_chip;
  }
  // The same for tiles that stay on the chip: factors that were fitted to 5,600 plans of random shapes
  // (benchmarks/results/sweep-tiles-h200-2026-11-26.txt), and corrected where other shapes were slower than expected.
  double of_tile(const CudaPlan& plan) const {
    const bool half = bytes == 2, shift = plan.is_shifted(), two = operands > 1;
    const int vector = plan.vec_size, vec_bytes = vector * read, threads = plan.threads(),
              blocks = plan.blocks_per_tile(), smem_vecs = plan.keeps_vecs_in_smem() ? plan.smem_vecs : 0;
    const int64_t each = ceil_div(n, int64_t(plan.threads_y()) * blocks),
                  cols = int64_t(plan.threads_x()) * vector - (shift ? vector - 1 : 0), tiles = ceil_div(inner, cols);
    // Blocks of a multiprocessor, and the KB that those have on their way.
    const int words = plan.vecs_per_thread() * operands * std::max(1, vec_bytes / 4) + 34 + vector * (two ? 1 : 2);
    int64_t resident = std::min(std::min(65536 / (threads * words), 2048 / threads), 32);
    if (smem_vecs)
      resident = std::min<int64_t>(resident, gpu.shared / (count_smem_vecs_bytes(plan, vec_bytes * operands) + 4096));
    resident = std::max<int64_t>(resident, 1);
    const double on_way = double(resident) / 1024 * plan.threads_x() * plan.threads_y() *
                          std::min<int64_t>(plan.vecs_per_thread() + smem_vecs, each) * vec_bytes * operands;
    const auto below = [](double value, double enough, double power) {
      return value < enough ? std::pow(value / enough, power) : 1;
    };
    const double line = double(std::min<int64_t>(cols, inner)) * read;
    const double tile = double(n) * line * operands / 1024;  // KB
    const bool whole_lines = inner * read % 128 == 0;        // of the cache
    return (shift             ? half ? 0.72 : 0.83
            : vec_bytes >= 16 ? 1
            : vec_bytes >= 8  ? 0.98
            : vec_bytes >= 4  ? 0.93
                              : 0.64) *
           (shift && two && !half ? 1.1 : 1) * (shift && blocks > 2 ? 0.9 : 1) *
           (blocks > 8   ? two ? 0.75 : 0.71
            : blocks > 4 ? two ? 0.82 : 0.775
            : blocks > 2 ? 0.83
            : blocks > 1 ? 0.855
                         : 1) *
           (smem_vecs > 24 ? 0.93 : 1) * (two && smem_vecs && blocks == 1 ? 0.86 : 1) *
           (two && !half && blocks > 4 ? 1.15
            : two || !half || shift    ? 1
            : blocks == 1              ? 1.1
            : blocks > 4               ? 0.9
                                       : 1) *
           (resident > 2   ? 1
            : resident > 1 ? 0.95
                           : 0.86) *
           (threads > 256 ? 0.85 : 1) *
           (!smem_vecs                    ? 1
            : half && !two && blocks <= 2 ? 0.77
                                          : 0.965) *
           (plan.prefetches() ? 0.8 : 1) * below(used(plan), 1, 0.57) * below(on_way, 30, 0.44) *
           below(on_way, 80, 0.32) * (tiles > 1 ? below(line, whole_lines ? 128 : 256, whole_lines ? 0.23 : 0.42) : 1) *
           (tile < 1     ? 0.4
            : tile < 1.5 ? 0.5
            : tile < 2.2 ? 0.7
                         : 1);
  }
};

}  // namespace onepass
