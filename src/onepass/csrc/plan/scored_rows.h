// scored_rows.h: chooses the kernel and the launch numbers for scored rows, and for the gradient of a bias that rows
// share (cuda/host/scored.cpp makes the launches). Pure: no torch, no CUDA.
#pragma once

#include <climits>
#include <optional>

#include "../core/batch_invariant.h"
#include "../core/scored_problem.h"
#include "rows.h"

namespace onepass {

inline int64_t stride_of(const DimGroupOf<kScoredTensors>& group, int dim, ScoredTensor tensor) {
  return group.dims[dim].strides[tensor];
}
inline int64_t step_of(const ScoredProblem& problem, ScoredTensor tensor) {
  return problem.reduced.count ? problem.reduced.dims[0].strides[tensor] : 0;
}

// Whether all rows of tensor a begin at the same element of a vector of `width` elements as those of tensor b.
inline bool in_phase(const ScoredProblem& problem, ScoredTensor a, int a_size, ScoredTensor b, int b_size,
                     int64_t width) {
  const auto first = [&](ScoredTensor t, int size) { return int64_t(uint64_t(problem.data[t]) / uint64_t(size)); };
  bool same = (first(a, a_size) - first(b, b_size)) % width == 0;
  for (int d = 0; d < problem.outer.count; ++d)
    same &= (stride_of(problem.outer, d, a) - stride_of(problem.outer, d, b)) % width == 0;
  return same;
}
// Whether all rows begin with a vector; or, `of_lines`, all lines of columns, along the last of the outer dims.
inline bool is_aligned(const ScoredProblem& problem, ScoredTensor tensor, int size, int64_t width,
                       bool of_lines = false) {
  bool aligned = uint64_t(problem.data[tensor]) % uint64_t(size * width) == 0;
  if (of_lines) aligned &= step_of(problem, tensor) % width == 0;
  for (int d = 0; d < problem.outer.count - of_lines; ++d) aligned &= stride_of(problem.outer, d, tensor) % width == 0;
  return aligned;
}

// The gradient of logsumexp has no reduction.
inline bool is_pointwise(const ScoredProblem& problem) {
  return problem.is_backward() && is_reduction(problem.function);
}

// The tensors of a problem that are accessed by vectors: those that have an element for each element of a row.
struct ScoredOperands {
  ScoredTensor tensors[3];
  int sizes[3], count = 0;
  explicit ScoredOperands(const ScoredProblem& problem) {
    const auto add = [&](ScoredTensor t, DType type) { tensors[count] = t, sizes[count++] = size_of(type); };
    add(kInput, problem.in);
    if (problem.is_backward() && !is_pointwise(problem)) add(kGradOf, problem.in);
    if (problem.is_backward() || !is_reduction(problem.function)) add(kResult, problem.out);
  }
  // Elements of a vector of 16 bytes of the widest type.
  int full() const { return 16 / *std::max_element(sizes, sizes + count); }
};

// The stride from row to row of a tensor, if it is the same for all rows in the order of the outer dims; else 0.
inline int64_t pitch_of(const ScoredProblem& problem, ScoredTensor tensor) {
  const int last = problem.outer.count - 1;
  for (int d = 0; d < last; ++d) {
    const int64_t of_next = stride_of(problem.outer, d + 1, tensor) * problem.outer.dims[d + 1].size;
    if (stride_of(problem.outer, d, tensor) != of_next) return 0;
  }
  return last < 0 ? problem.n : stride_of(problem.outer, last, tensor);
}

// Rows whose scores are kept in registers. A thread has at most kMostVecs vectors, so that all of its loads are in
// flight at once. The lanes of a warp share a row, or the warps of a block do. (A block has 1, 2, 4, ... warps: other
// numbers do not fill a multiprocessor's four schedulers evenly.) Of longer rows of half types, a thread keeps kKept
// scores in registers and its other elements in shared memory. If there is a bias or a mask, which would be read again,
// all are in registers (sweeps, H200, 2026-11-29).
constexpr int kMostVecs = 5, kKept = 16, kManyScores = 48;
constexpr int kLeastThreads = 64, kMostThreads = 256, kMostEach = 80;

inline std::optional<CudaPlan> plan_registers(const ScoredProblem& problem, int width, VecAccess access,
                                              const Gpu& gpu) {
  const bool aligned = access == VecAccess::aligned, reads_beside = problem.has(kBias) || problem.has(kMask);
  // Vectors inside the row; and all vectors, including those in which a row in shared memory begins and ends.
  const int64_t vecs = std::max<int64_t>(problem.n / width, 1), all_vecs = vecs + (aligned ? 0 : 2);
  // The least number of threads that holds the row, or a larger one if an eighth fewer of them are idle.
  int threads = 0;
  int64_t least = INT64_MAX / 8;
  for (int some = 1; some <= kMostThreads; some *= 2) {
    const int64_t each = ceil_div(vecs, some), most = some < 4 ? 2 : some < 32 ? 3 : kMostVecs;
    if (each <= most && each * some * 8 < least * 7) threads = some, least = each * some;
    if (some >= vecs) break;
  }
  if (threads && threads <= 32) {
    const int together = reads_beside ? kThreads / 2 : kThreads;
    const int items = int(ceil_div(vecs, threads)) * width;
    return CudaPlan{Tier::warp, threads, together / threads, items, width, 1, 0, access};
  }
  const auto share = [&](int blocks, int threads, int kept_scores) {
    const auto each = [&](int64_t of) { return int(ceil_div(of, int64_t(threads) * blocks)); };
    const int kept = std::min(each(vecs), kept_scores / width);
    const int others = each(vecs) > kept ? int(up_to(each(all_vecs) - kept, 2)) : 0;
    return CudaPlan{blocks > 1 ? Tier::cluster : Tier::block,          threads, 1, kept * width, width, blocks, others,
                    others && aligned ? VecAccess::predicated : access};
  };
  if (threads) return share(1, threads, kMostVecs * width);
  if (size_of(problem.in) > 2 || width < 4) return {};  // cp.async takes 8 bytes
  // Blocks and threads are chosen in the same way; few blocks are tried before many.
  const int kept = reads_beside ? kManyScores : kKept, least_each = reads_beside ? kKept : kKept + width,
            most_each = reads_beside ? kManyScores : kMostEach;
  std::optional<CudaPlan> best;
  least = INT64_MAX / 8;
  for (int blocks = 1; blocks <= most_cluster(gpu); blocks *= 2) {
    for (int threads = kMostThreads; threads >= 2 * kLeastThreads; threads /= 2) {
      const int64_t each = ceil_div(vecs, int64_t(threads) * blocks), places = each * threads * blocks;
      if (each * width < least_each || each * width > most_each || (places - vecs) * 8 >= least * 7) continue;
      least = places - vecs, best = share(blocks, threads, kept);
    }
    if (best && least * 16 < vecs) break;
  }
  return best;
}

// The plan of rows that are like these but have no score. Scores are kept in the accumulator's type, as the elements of
// other calls whose result is wider than a half type.
inline CudaPlan plan_scored(const ScoredProblem& problem, const Gpu& gpu) {
  const ScoredOperands operands(problem);
  const int full = operands.full();
  int width = full;
  const auto differ = [&](int by) {
    for (int i = 1; i < operands.count; ++i) {
      if (!in_phase(problem, kInput, operands.sizes[0], operands.tensors[i], operands.sizes[i], by)) return true;
    }
    return false;
  };
  while (width > 1 && (width > problem.n || differ(width))) width /= 2;
  const auto aligned_at = [&](int by) {
    bool aligned = true;
    for (int i = 0; i < operands.count; ++i) aligned &= is_aligned(problem, operands.tensors[i], operands.sizes[i], by);
    return aligned;
  };
  const bool aligned = aligned_at(full);
  const int64_t n = problem.n;
  const bool backward = problem.is_backward();
  const DType wide = problem.accumulator();
  const DType kept = !backward && problem.in != wide && problem.out != wide ? wide : problem.out;
  // Rows that lie one after another, with gaps of at most half a row, may be copied as one piece.
  int64_t pitches[3] = {};
  bool is_tiled = problem.rows > 1 && !batch_invariant();
  for (int i = 0; i < operands.count; ++i) {
    pitches[i] = pitch_of(problem, operands.tensors[i]);
    is_tiled &= pitches[i] >= n && pitches[i] <= n + n / 2;
  }
  // Otherwise their pitch is replaced by any pitch that is longer and aligns rows in the same way.
  const int64_t gap = up_to(n, full) + full, other = n + gap + (aligned ? up_to(n, full) - n : 1 - n % 2);
  const int64_t pitch = is_tiled ? pitches[0] : other,
                second = is_tiled ? pitches[1] : other + (width < full ? width : 0);
  const auto plan_like = [&](DType in, DType out) {
    Layout layout;
    layout.add({std::max<int64_t>(problem.rows, 2), {pitch, second, backward && is_tiled ? pitches[1] : second, 0}},
               false);
    layout.add({n, {1, 1, 1, 0}}, true);
    layout.view = View::rows;
    Problem like = backward ? Problem::backward(layout, problem.function, in, out)
                            : Problem::forward(layout, problem.function, in, out);
    for (int i = 0; i < operands.count; ++i) {
      const int by = backward ? (i == 0 ? kSaved : i == 1 ? kGrad : kDx) : i;
      if (is_tiled) {
        like.layout.outer.dims[0].strides[by] = pitches[i];
        like.tensors[by].data = reinterpret_cast<void*>(uint64_t(problem.data[operands.tensors[i]]) % 16);
      }
    }
    Gpu alone = gpu;  // blocks of scored rows exchange no messages
    alone.cooperative = 0;
    return plan_rows(like, alone, batch_invariant(), true);
  };
  const CudaPlan plan = plan_like(problem.in, kept);
  const bool of_one_size = !backward && size_of(problem.in) == size_of(problem.out) && size_of(problem.in) <= 4;
  if (!of_one_size || batch_invariant()) return plan;
  constexpr int64_t kLeastVecs = 8;  // of rows whose vectors begin anywhere
  if (is_tiled && !aligned && n < width * kLeastVecs) {
    const CudaPlan of_its_types = plan_like(problem.in, problem.out);
    if (of_its_types.tier == Tier::staged) return of_its_types;
    if (of_its_types.tier == Tier::warp && of_its_types.access == VecAccess::aligned) return of_its_types;
  }
  int by = width;
  while (by > full / 2 && !(n % by == 0 && aligned_at(by))) by /= 2;
  const bool whole = n % by == 0 && aligned_at(by);
  if (width == 1) return plan;
  const auto own = plan_registers(problem, whole ? by : width, whole ? VecAccess::aligned : VecAccess::predicated, gpu);
  return own ? *own : plan;
}

// The gradient of a bias (rows_bias_grad.cu). A thread has a limited number of elements of each of the rows that share
// a row of the bias. An element must belong to the same thread in all of these rows, so the rows begin at the same
// element of a vector. For short rows this is slower than two launches (64 and 200 elements take 1.1 to 1.4 times as
// long, 577 take 0.8; H200, 2026-11-29).
inline std::optional<CudaPlan> plan_bias_grad(const ScoredProblem& problem) {
  constexpr int kMostThreads = 512, kLeast = 256;
  if (!problem.has_rows() || problem.n < kLeast || batch_invariant() || step_of(problem, kBias) != 1) return {};
  const ScoredOperands operands(problem);
  int width = operands.full();
  const auto goes_by = [&](int by) {
    bool goes = by <= problem.n;
    for (int i = 1; i < operands.count; ++i)
      goes &= in_phase(problem, kInput, operands.sizes[0], operands.tensors[i], operands.sizes[i], by);
    for (int d = 0; d < problem.outer.count; ++d)
      goes &= stride_of(problem.outer, d, kBias) != 0 || stride_of(problem.outer, d, kInput) % by == 0;
    return goes;
  };
  while (width > 1 && !goes_by(width)) width /= 2;
  if (width == 1) return {};
  bool aligned = problem.n % width == 0;
  for (int i = 0; i < operands.count; ++i)
    aligned &= is_aligned(problem, operands.tensors[i], operands.sizes[i], width);
  const int most = problem.accumulator() == DType::float64 ? 12 : operands.sizes[0] > 2 ? 20 : 32;
  const int64_t vecs = ceil_div(problem.n + (aligned ? 0 : width - 1), width);
  int threads = 1;
  while (threads < kMostThreads && ceil_div(vecs, threads) * width > most) threads *= 2;
  const int64_t items = ceil_div(vecs, threads) * width;
  if (items > most) return {};
  const bool is_warp = threads <= 32;
  return CudaPlan{is_warp ? Tier::warp : Tier::block,
                  threads,
                  is_warp ? kThreads / threads : 1,
                  int(items),
                  width,
                  1,
                  0,
                  aligned ? VecAccess::aligned : VecAccess::predicated};
}

}  // namespace onepass
