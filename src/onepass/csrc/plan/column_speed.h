// column_speed.h: ColumnSpeed estimates what fraction of the speed of memory a plan of columns reaches. ColumnPlanner
// chooses plans by it. Pure: no torch, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>

#include "column_view.h"
#include "rows.h"

namespace onepass {

constexpr int64_t kLargeSlice = 48 * 1024;  // a multiprocessor holds one slice of so many bytes at a time

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
  // The estimate: the fraction of the speed of memory that a plan reaches. Fitted to random shapes of 64 to 300 MB
  // (H200, 2026-11-26).
  double expected(const CudaPlan& plan) const {
    const int64_t cols = plan.takes_slabs() ? inner : int64_t(plan.threads_x()) * plan.vec_size - view.shifted_by(plan);
    const int64_t blocks = plan.is_staged() ? ceil_div(view.slices(), int64_t(plan.slices_per_group()))
                                            : view.slices() * ceil_div(inner, cols) * plan.blocks_per_tile();
    if (plan.is_in_smem()) return std::exp(log_of_smem(plan, blocks));
    if (plan.is_staged()) return busy(blocks) * of_staged(plan);
    if (plan.takes_slabs()) return busy(blocks) * of_slab(plan);
    if (plan.tier == Tier::columns_grid) return busy(blocks) * of_grid(plan);
    if (plan.tier == Tier::columns_twopass) return std::exp(log_of_twopass(plan, blocks));
    return busy(blocks) * of_tile(plan);
  }

 private:
  double busy(int64_t blocks) const { return blocks < gpu.sm_count ? double(blocks) / gpu.sm_count : 1; }
  // The fraction of the elements of all tiles that exist in the tensor.
  double used(const CudaPlan& plan) const {
    const int64_t lines = int64_t(plan.threads_y()) * plan.blocks_per_tile(),
                  side = int64_t(plan.threads_x()) * plan.vec_size,
                  tiles = ceil_div(inner, side - view.shifted_by(plan));
    return double(n) * inner / (double(tiles) * side * lines * ceil_div(n, lines));
  }
  // The logarithm of value / enough; 0 if the value is enough.
  static double below(double value, double enough) { return value < enough ? std::log(value / enough) : 0; }
  // The fraction of the places for blocks that are taken, over all waves.
  static double full_waves(double waves) { return waves < 1 ? waves : waves / std::ceil(waves); }

  double of_staged(const CudaPlan& plan) const {
    const bool half = bytes == 2, two = operands > 1, merges = plan.threads_y() > 1;
    const int64_t slice = n * inner * read * operands;
    const double without_gaps = double((operands + 1) * n * inner) / double(operands * slice_step() + n * inner) *
                                (result_has_gaps() ? 0.5 : 1);
    const double room = slice > 2 * kLargeSlice ? 0.62 : plan.stages() == 1 || slice > kLargeSlice ? 0.8 : 1;
    if (!half)
      return without_gaps * room * (n < 8 || two ? 0.86 : !merges ? 0.88 : slice <= kLargeSlice / 2 ? 0.9 : 0.72);
    const double of_length = n < 3 ? 0.72 : n < 4 ? 0.75 : (n < 8 || inner > 32 ? 0.86 : 0.83) * (n > 32 ? 0.92 : 1);
    const double merged = !merges ? 1 : inner % 2 ? two ? 0.92 : 0.8 : 0.85;
    return without_gaps * room * merged * of_length;
  }
  // The fraction for slabs in registers.
  double of_slab(const CudaPlan& plan) const {
    const bool half = bytes == 2, two = operands > 1;
    const int64_t slice = n * inner * read * operands;
    const int blocks = plan.blocks_per_tile();
    const double small = slice < 2048 ? 0.4 : slice < 8192 ? 0.7 : 1;
    const double shared = blocks > 16 ? 0.45 : plan.in_grid() ? 0.65 : 1;
    if (plan.access == VecAccess::slab) return (half ? 0.5 : two ? 0.6 : 0.65) * shared * small;
    if (two) return (!half ? 0.9 : plan.prefetches() && blocks > 1 ? 0.57 : blocks > 4 ? 0.78 : 0.88) * shared * small;
    return 0.84 * (plan.threads_x() > 256 ? 0.95 : 1) * (half && n < 64 ? 0.75 : 1) * shared * small;
  }
  double of_grid(const CudaPlan& plan) const {
    const int64_t each = ceil_div(n, int64_t(plan.threads_y()) * plan.blocks_per_tile());
    if (plan.vec_size * bytes >= 16) return 0.65;
    const double whole = operands > 1 ? 0.34 : bytes == 2 ? 0.45 : 0.35;
    return whole * std::exp(0.35 * below(double(each), 32)) * (2 * plan.blocks_per_tile() > gpu.sm_count ? 0.5 : 1);
  }
  // The same for tiles that stay on the chip. Its factors were fitted to 5,600 plans of random shapes
  // (benchmarks/results/sweep-tiles-h200-2026-11-26.txt), and corrected for other shapes that were slower than
  // expected.
  double of_tile(const CudaPlan& plan) const {
    const bool half = bytes == 2, shift = plan.is_shifted(), two = operands > 1;
    const int vector = plan.vec_size, vec_bytes = vector * read, threads = plan.threads(),
              blocks = plan.blocks_per_tile(), smem_vecs = plan.keeps_vecs_in_smem() ? plan.smem_vecs : 0;
    const int64_t each = ceil_div(n, int64_t(plan.threads_y()) * blocks),
                  cols = int64_t(plan.threads_x()) * vector - (shift ? vector - 1 : 0), tiles = ceil_div(inner, cols);
    // Resident blocks of a multiprocessor, and the KB that they have in flight.
    const int words =
        plan.vecs_per_thread() * operands * std::max(1, vector * on_chip / 4) + 34 + vector * (two ? 1 : 2);
    int64_t resident = std::min(std::min(65536 / (threads * words), 2048 / threads), 32);
    if (smem_vecs)
      resident =
          std::min<int64_t>(resident, gpu.shared / (count_smem_vecs_bytes(plan, vector * on_chip * operands) + 4096));
    resident = std::max<int64_t>(resident, 1);
    const double on_way = double(resident) / 1024 * plan.threads_x() * plan.threads_y() *
                          std::min<int64_t>(plan.vecs_per_thread() + smem_vecs, each) * vec_bytes * operands;
    const auto power = [](double value, double enough, double exponent) {
      return std::exp(exponent * below(value, enough));
    };
    const double line = double(std::min<int64_t>(cols, inner)) * read;
    const double tile = double(n) * line * operands / 1024;  // KB
    const bool whole_lines = inner * read % 128 == 0;        // of the cache: do lines of columns consist of them?
    return (shift             ? half ? 0.72 : 0.83
            : vec_bytes >= 16 ? 1
            : vec_bytes >= 8  ? 0.98
            : vec_bytes >= 4  ? 0.93
                              : 0.8) *
           (shift && two && !half ? 1.1 : 1) * (shift && blocks > 2 ? 0.9 : 1) *
           (blocks > 8   ? two ? 0.75 : 0.72
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
           (plan.prefetches() ? 0.8 : 1) * power(used(plan), 1, 0.57) * power(on_way, 30, 0.44) *
           power(on_way, 80, 0.32) * (tiles > 1 ? power(line, whole_lines ? 128 : 256, whole_lines ? 0.23 : 0.42) : 1) *
           (tile < 1             ? 0.4
            : tile < 1.5         ? 0.5
            : tile < 2.2         ? 0.7
            : half && tile < 3.5 ? 0.78
                                 : 1);
  }
  // The logarithm of the fraction for tiles that are read twice, a weighted sum. Its weights were fitted to 4,400 plans
  // (benchmarks/results/sweep-columns-h200-2026-11-26.txt) and averaged with earlier guesses.
  double log_of_twopass(const CudaPlan& plan, int64_t blocks) const {
    const bool half = bytes == 2, shift = plan.is_shifted(), two = operands > 1;
    const int vector = plan.vec_size, vec_bytes = vector * read, threads = plan.threads(),
              shared_by = plan.blocks_per_tile();
    const int64_t each = ceil_div(n, int64_t(plan.threads_y()) * shared_by),
                  cols = int64_t(plan.threads_x()) * vector - view.shifted_by(plan), tiles = ceil_div(inner, cols);
    const int words =
        plan.vecs_per_thread() * operands * std::max(1, vector * on_chip / 4) + 34 + vector * (two ? 1 : 2);
    const int64_t resident = std::max(std::min(65536 / (plan.max_threads() * words), 2048 / threads), 1);
    const double on_way = double(std::min(resident, ceil_div(blocks, int64_t(gpu.sm_count)))) / 1024 * threads *
                          std::min<int64_t>(plan.vecs_per_thread(), each) * vec_bytes * operands;
    const double line = double(std::min<int64_t>(cols, inner)) * read, elements = double(each) * vector;
    const bool whole_lines = inner * read % 128 == 0;  // of the cache
    const double at_a_time = std::min<double>(double(blocks), double(gpu.sm_count) * resident) / shared_by,
                 megabytes = at_a_time * n * line * operands / (1 << 20);  // which the L2 cache should hold
    return -0.34 + 0.4 * std::log(used(plan)) +
           0.21 * std::log(full_waves(double(blocks) / double(resident * gpu.sm_count))) +
           0.4 * below(double(blocks), gpu.sm_count) + 0.16 * below(on_way, 30) + 0.3 * below(elements, 32) +
           (tiles > 1 && !whole_lines ? 0.19 * std::log(line / (line + 32)) : 0) + 0.07 * below(16, plan.threads_y()) -
           (shift            ? 0.44
            : vec_bytes == 2 ? 0.13
            : vec_bytes == 4 ? 0.21
            : vec_bytes == 8 ? 0.05
                             : 0) -
           (half ? 0.1 : 0) + (two ? 0.05 : 0) - (shared_by == 1 ? 0.2 : 0) - 0.04 * std::log2(shared_by) +
           0.07 * below(40, megabytes);
  }
  // The same for tiles and slabs in shared memory. The weights were fitted to 800 plans of that sweep.
  double log_of_smem(const CudaPlan& plan, int64_t blocks) const {
    const bool half = bytes == 2, two = operands > 1, slab = plan.takes_slabs();
    const int shared_by = plan.blocks_per_tile(), vector = plan.vec_size;
    const int64_t vecs = vecs_in_smem(plan), side = int64_t(plan.threads_x()) * vector,
                  cols = side - view.shifted_by(plan), pieces = vecs * plan.threads_y(),
                  smem =
                      pieces * (side + (slab ? 0 : 32 / read)) * read * operands + plan.threads() * vector * 8 + 2048;
    const int registers = slab ? 72 * plan.threads() : 80 * plan.max_threads();
    const int64_t resident = std::max<int64_t>(std::min<int64_t>(gpu.shared / smem, 65536 / registers), 1);
    const double useful = double(n) * inner / (double(slab ? 1 : ceil_div(inner, cols)) * side * pieces * shared_by);
    const double threads = double(plan.threads()) * double(std::min(resident, ceil_div(blocks, int64_t(gpu.sm_count))));
    const double elements = double(vecs) * vector;
    const double same = 0.6 * below(double(blocks), gpu.sm_count) + 0.22 * below(threads, 768) -
                        0.085 * std::log2(shared_by) - (resident == 1 ? 0.08 : 0);
    if (slab)
      return same - 0.04 + 0.3 * std::log(useful) + 0.15 * below(elements, 128) + 0.35 * below(elements, 48) -
             (half ? 0.14 : 0) + (two ? 0.08 : 0);
    return same - 0.23 + 0.39 * std::log(useful) + 0.18 * below(double(std::min(cols, inner)) * read, 512) -
           (shared_by == 16 ? 0.07 : 0) - (half ? 0.07 : 0) + (two ? half ? -0.05 : 0.27 : 0) +
           0.15 * below(elements, 48) - (view.shift < vector ? 0.08 : 0);
  }
};

}  // namespace onepass
