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

// Longer rows whose scores are kept in registers. A thread has at most kMostVecs vectors, so that all of its loads are
// in flight at once. A warp takes a row, or the warps of a block do. (A block has 1, 2, 4, ... warps: other numbers do
// not fill a multiprocessor's four schedulers evenly.) Of very long rows of half types, a thread keeps kKept scores in
// registers and its other elements in shared memory. If there is a bias or a mask, which would be read again, all are
// in registers (sweeps, H200, 2026-11-29).
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
  for (int some = 32; some <= kMostThreads; some *= 2) {
    const int64_t each = ceil_div(vecs, some);
    if (each <= kMostVecs && each * some * 8 < least * 7) threads = some, least = each * some;
  }
  if (threads == 32) {
    const int rows = (reads_beside ? kThreads / 2 : kThreads) / threads, items = int(ceil_div(vecs, threads)) * width;
    return CudaPlan{Tier::warp, threads, rows, items, width, 1, 0, access};
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

// Rows that few lanes share, of elements of two or four bytes (sweeps of 264 random calls, H200, 2026-11-30). What a
// thread computes once per row takes as long as about ten elements, so each has many. `by`: the elements of the widest
// vectors of which all rows are whole numbers. `width`: those of the widest vectors in which all tensors are in phase.
constexpr int64_t kMiddle = 704, kShort = 128, kTiled = 32;
constexpr int kStagedVector = 4;  // elements of a vector in the tier staged

inline std::optional<CudaPlan> plan_lanes(const ScoredProblem& problem, int by, int width, bool is_tiled) {
  const int64_t n = problem.n;
  const bool half = size_of(problem.in) == 2, whole = by > 1;
  // As few lanes as hold the row with at most `most` elements each, in blocks of `threads`.
  const auto share = [&](Tier tier, int vector, VecAccess access, int most, int threads) {
    const bool begins_whole = tier == Tier::staged || access == VecAccess::aligned;
    const int64_t vecs = ceil_div(n + (begins_whole ? 0 : vector - 1), int64_t(vector));
    int lanes = 1;
    while (lanes < 32 && ceil_div(vecs, lanes) * vector > most) lanes *= 2;
    const int items = int(ceil_div(vecs, lanes)) * vector, turns = tier == Tier::staged ? 2 : 0;
    return CudaPlan{tier, lanes, threads / lanes, items, vector, 1, turns, access};
  };
  const auto aligned = [&](int most, int threads) {
    return share(Tier::warp, problem.is_backward() ? by : std::min(by, 4), VecAccess::aligned, most, threads);
  };
  const auto unaligned = [&](int vector, int most, int threads) -> std::optional<CudaPlan> {
    vector = std::min(vector, width);
    if (vector == 1) return {};
    return share(Tier::warp, vector, VecAccess::predicated, most, threads);
  };
  // In the tier staged rows of a multiple of four elements would begin in few banks.
  const bool takes_tiles = n <= kTiled && n % 4 && is_tiled && (half || !whole);
  const auto tiles = [&](int most) {
    return share(Tier::staged, kStagedVector, VecAccess::predicated, most, kThreads);
  };
  if (problem.is_backward()) {
    if (n > kShort && half) return by == 8 ? aligned(24, kThreads) : unaligned(8, 24, kThreads);
    if (n > kShort) return by == 4 ? aligned(12, 64) : unaligned(4, 12, 64);
    if (by >= 4) return aligned(half ? 12 : 8, kThreads);
    if (takes_tiles) return tiles(20);
    if (!half) return whole && n <= kTiled ? aligned(4, 64) : unaligned(4, 12, 64);
    return whole ? unaligned(4, 16, 64) : unaligned(8, 16, kThreads);
  }
  if (n > kShort) {
    const int most = half ? 28 : 24, threads = half ? kThreads : 64;
    return whole ? aligned(most, threads) : unaligned(4, most, threads);
  }
  if (by >= 4) return aligned(n <= kTiled ? 12 : half ? 24 : 16, 64);
  if (takes_tiles) return tiles(36);
  if (n <= kShort / 2) return whole ? aligned(12, kThreads) : unaligned(2, 16, 64);
  return whole ? aligned(16, 64) : half ? unaligned(2, 24, 64) : unaligned(4, 16, 64);
}

// How the rows of a problem lie in memory.
struct ScoredAlignment {
  const ScoredProblem& problem;
  const ScoredOperands operands{problem};
  int width = operands.full();  // elements of the widest vectors in which all operands are in phase
  int64_t pitches[3] = {};      // the stride from row to row of each operand
  // Rows that lie one after another, with gaps of at most half a row, may be copied as one piece.
  bool is_tiled = problem.rows > 1 && !batch_invariant();

  explicit ScoredAlignment(const ScoredProblem& of) : problem(of) {
    while (width > 1 && (width > problem.n || !are_in_phase(width))) width /= 2;
    for (int i = 0; i < operands.count; ++i) {
      pitches[i] = pitch_of(problem, operands.tensors[i]);
      is_tiled &= pitches[i] >= problem.n && pitches[i] <= problem.n + problem.n / 2;
    }
  }
  // Whether all rows begin with a vector of so many elements.
  bool aligned_at(int by) const {
    bool aligned = true;
    for (int i = 0; i < operands.count; ++i) aligned &= is_aligned(problem, operands.tensors[i], operands.sizes[i], by);
    return aligned;
  }
  // The elements of the widest vectors of which all rows are whole numbers.
  int whole() const {
    int by = operands.full();
    while (by > 1 && !(problem.n % by == 0 && aligned_at(by))) by /= 2;
    return by;
  }

 private:
  bool are_in_phase(int by) const {
    bool same = true;
    for (int i = 1; i < operands.count; ++i)
      same &= in_phase(problem, kInput, operands.sizes[0], operands.tensors[i], operands.sizes[i], by);
    return same;
  }
};

// The plan of rows that are like these but have no score. Scores are kept in the accumulator's type, as the elements of
// other calls whose result is wider than a half type.
inline CudaPlan plan_unscored(const ScoredAlignment& rows, const Gpu& gpu) {
  const ScoredProblem& problem = rows.problem;
  const ScoredOperands& operands = rows.operands;
  const int64_t n = problem.n;
  const int full = operands.full();
  const bool backward = problem.is_backward(), is_tiled = rows.is_tiled;
  const DType wide = problem.accumulator();
  const DType kept = !backward && problem.in != wide && problem.out != wide ? wide : problem.out;
  // If the rows are no tile, their pitch is replaced by any pitch that is longer and aligns rows in the same way.
  const int64_t gap = up_to(n, full) + full, other = n + gap + (rows.aligned_at(full) ? up_to(n, full) - n : 1 - n % 2);
  const int64_t pitch = is_tiled ? rows.pitches[0] : other,
                second = is_tiled ? rows.pitches[1] : other + (rows.width < full ? rows.width : 0);
  Layout layout;
  layout.add({std::max<int64_t>(problem.rows, 2), {pitch, second, backward && is_tiled ? rows.pitches[1] : second, 0}},
             false);
  layout.add({n, {1, 1, 1, 0}}, true);
  layout.view = View::rows;
  Problem like = backward ? Problem::backward(layout, problem.function, problem.in, kept)
                          : Problem::forward(layout, problem.function, problem.in, kept);
  for (int i = 0; i < operands.count && is_tiled; ++i) {
    const int by = backward ? (i == 0 ? kSaved : i == 1 ? kGrad : kDx) : i;
    like.layout.outer.dims[0].strides[by] = rows.pitches[i];
    // The address of the same element of a vector, whatever the type.
    const uint64_t first = uint64_t(problem.data[operands.tensors[i]]) / uint64_t(operands.sizes[i]);
    like.tensors[by].data = reinterpret_cast<void*>(first * uint64_t(size_of(like.type(by))) % 16);
  }
  Gpu alone = gpu;  // blocks of scored rows exchange no messages
  alone.cooperative = 0;
  CudaPlan plan = plan_rows(like, alone, batch_invariant(), true);
  if (plan.tier == Tier::staged) {
    plan.vec_size = kStagedVector;
    plan.items_per_thread = int(ceil_div(n, plan.threads_per_row * kStagedVector)) * kStagedVector;
  }
  return plan;
}

inline CudaPlan plan_scored(const ScoredProblem& problem, const Gpu& gpu) {
  const ScoredAlignment rows(problem);
  const int size = size_of(problem.in), by = rows.whole();
  std::optional<CudaPlan> own;
  if (size == size_of(problem.out) && size <= 4 && !batch_invariant()) {
    const bool whole = by >= std::min(rows.width, rows.operands.full() / 2);
    if (problem.n <= kMiddle)
      own = plan_lanes(problem, by, rows.width, rows.is_tiled);
    else if (!problem.is_backward() && rows.width > 1)
      own = plan_registers(problem, whole ? by : rows.width, whole ? VecAccess::aligned : VecAccess::predicated, gpu);
  }
  return own ? *own : plan_unscored(rows, gpu);
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
