// divergence.cpp: from a problem of divergences to a plan, and to the launches of its kernels.
#include <algorithm>
#include <limits>
#include <utility>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 256;      // of a block
constexpr int kCount = 8;          // classes that a thread has in flight; a gradient has at least two vectors
constexpr int kColumnThreads = 8;  // the most threads of a row in columns, where neighbouring rows fill cache lines
constexpr int64_t kMostClasses = int64_t(1) << 30;
constexpr int64_t kGradChunks = 4;  // chunks of a block, which computes a part of a long row's gradient
constexpr int64_t kWaves = 4;       // blocks per multiprocessor; with fewer, rows are cut into parts
constexpr int64_t kBlocks = 8;      // per multiprocessor; they take rows in turn

using Problem = DivergenceProblem;

struct DivergencePlan {
  bool in_columns;  // neighbouring threads have neighbouring rows
  int vec_size;
  VecAccess access;
  int vecs;               // vectors that a thread has in flight
  int rows;               // of a block
  int64_t parts, part_n;  // parts of a row

  unsigned used(const Problem& problem) const {
    unsigned parts = kLoss | (problem.is_product ? kLossProduct : problem.is_kl ? kLossKl : kLossShares);
    if (problem.weight) parts |= kLossWeight;
    if (problem.softcap != 0) parts |= kLossSoftcap;
    if (problem.factor != 1) parts |= kLossScale;
    if (in_columns) parts |= kLossColumns;
    if (problem.dx) parts |= kLossOfX;
    if (problem.dy) parts |= kLossOfY;
    return parts;
  }
};

// The largest vector size with which all tensors have their vectors at the same elements of rows; and whether all rows
// begin with a vector.
std::pair<int, bool> width_of(const Problem& problem) {
  const void* const begins[] = {problem.x, problem.y, problem.dx, problem.dy};
  const int64_t size = size_of(problem.type);
  // Whether addresses and strides of each tensor, minus those of the first one unless `alone`, are multiples of `by`.
  const auto fits = [&](int by, bool alone) {
    for (int t = 0; t < Problem::kTensors; ++t) {
      if (!begins[t]) continue;
      const auto is_multiple = [&](int64_t own, int64_t first) { return (own - (alone ? 0 : first)) % by == 0; };
      bool all = problem.steps[t] == 1 && is_multiple(uint64_t(begins[t]) / size, uint64_t(problem.x) / size);
      for (int d = 0; d < problem.dims; ++d) all &= is_multiple(problem.strides[t][d], problem.strides[0][d]);
      if (!all) return false;
    }
    return true;
  };
  int width = 16 / int(size);
  while (width > 1 && (width > problem.n || !fits(width, false))) width /= 2;
  return {width, fits(width, true)};
}

DivergencePlan plan_of(const Problem& problem, const Gpu& gpu) {
  const int64_t step = problem.steps[0];
  const bool invariant = batch_invariant() && !problem.is_backward();
  DivergencePlan plan = {};
  int64_t n = problem.n;
  plan.in_columns = n > 1 && step != 1 && problem.dims && problem.strides[0][problem.dims - 1] < step;
  if (invariant) plan.in_columns = n > 1 && step != 1;  // the bits of a row must not depend on the rows beside it,
  const auto [width, are_aligned] = width_of(problem);
  plan.vec_size = plan.in_columns || invariant ? 1 : width;  // nor on its address
  plan.access = plan.vec_size == 1 ? VecAccess::scalar : are_aligned ? VecAccess::aligned : VecAccess::predicated;
  if (plan.access == VecAccess::predicated) n += plan.vec_size - 1;
  const int vecs = std::max(problem.is_backward() && plan.vec_size > 1 ? 2 : 1, kCount / plan.vec_size);
  plan.vecs = int(std::min<int64_t>(vecs, ceil_div(n, plan.vec_size)));
  const int64_t chunk = plan.vecs * plan.vec_size, wanted = kWaves * gpu.sm_count;
  int threads = 1;  // threads of a row
  const auto has_few_blocks = [&] { return ceil_div(problem.rows * threads, kThreads) < wanted; };
  if (plan.in_columns) {
    const int most = invariant ? 32 : kColumnThreads;
    while (threads < most && threads * chunk * 2 <= n && (invariant || has_few_blocks())) threads *= 2;
  } else {
    const int64_t rows = invariant ? std::numeric_limits<int64_t>::max() : problem.rows;
    threads = std::min(kThreads, threads_of_row(ceil_div(n, plan.vec_size), plan.vec_size * size_of(problem.type), rows,
                                                problem.is_backward(), plan.vecs, gpu));
  }
  plan.rows = kThreads / threads;
  plan.parts = 1, plan.part_n = up_to(n, threads * chunk);
  const int64_t tiles = ceil_div(problem.rows, plan.rows);
  if (problem.is_backward() && threads > 32) {
    plan.part_n = threads * chunk * kGradChunks, plan.parts = ceil_div(n, plan.part_n);
  } else if (!invariant && tiles < wanted) {
    plan.parts = std::clamp<int64_t>(wanted / tiles, 1, ceil_div(n, threads * chunk));
    plan.part_n = up_to(ceil_div(n, plan.parts), threads * chunk);
    plan.parts = ceil_div(n, plan.part_n);
  }
  return plan;
}

DivergenceMap map_of(const Problem& problem, const DivergencePlan& plan) {
  DivergenceMap map = {};
  map.x = problem.x, map.y = problem.y, map.dx = problem.dx, map.dy = problem.dy;
  map.rows = problem.rows, map.n = problem.n;
  map.x_step = problem.steps[Problem::kOfX], map.y_step = problem.steps[Problem::kOfY];
  map.dx_step = problem.steps[Problem::kOfDx], map.dy_step = problem.steps[Problem::kOfDy];
  map.dims = problem.dims;
  for (int d = 0; d < problem.dims; ++d) {
    map.sizes[d] = int(problem.sizes[d]), map.divisors[d] = divider_of(problem.sizes[d]);
    map.x_strides[d] = problem.strides[Problem::kOfX][d], map.y_strides[d] = problem.strides[Problem::kOfY][d];
    map.dx_strides[d] = problem.strides[Problem::kOfDx][d], map.dy_strides[d] = problem.strides[Problem::kOfDy][d];
  }
  map.parts = int(plan.parts), map.by_parts = divider_of(plan.parts), map.part_n = plan.part_n,
  map.threads_x = plan.rows;
  map.terms = problem.terms, map.grads = problem.grads, map.weight = problem.weight;
  map.factor = problem.factor, map.softcap = problem.softcap, map.smoothing = problem.smoothing;
  map.per_softcap = problem.softcap != 0 ? 1 / problem.softcap : 0;
  map.factor_f32 = float(map.factor), map.softcap_f32 = float(map.softcap);
  map.per_softcap_f32 = float(map.per_softcap), map.smoothing_f32 = float(map.smoothing);
  return map;
}

}  // namespace

bool can_launch_divergence(const Problem& problem) {
  bool fits = problem.dims <= kLossDims && problem.n < kMostClasses;
  for (int d = 0; d < problem.dims; ++d) fits &= problem.sizes[d] < (int64_t(1) << 31);
  return fits;
}

LossLaunch make_divergence_launch(const Problem& problem, int device) {
  const Gpu& gpu = device_info(device);
  const DivergencePlan plan = plan_of(problem, gpu);
  const CudaPlan as = {Tier::twopass, kThreads, 1, plan.vecs * plan.vec_size, plan.vec_size, 1, 0, plan.access};
  KernelKind kind = {Function::logsumexp, problem.is_backward() ? Pass::backward : Pass::forward, problem.type,
                     problem.type};
  kind.loss_parts = plan.used(problem);
  LossLaunch launch = {};
  launch.map = map_of(problem, plan);
  launch.kernel = find_or_load(kind, as, device);
  launch.threads = kThreads, launch.overlaps = can_overlap(device);
  const int64_t most = kBlocks * gpu.sm_count;
  launch.blocks = ceil_div(problem.rows, plan.rows) * plan.parts;
  if (problem.is_backward()) return launch;
  launch.blocks = std::min(launch.blocks, most);
  if (plan.parts == 1) return launch;
  kind.loss_step = LossStep::merge;
  launch.merge = find_or_load(kind, as, device);
  launch.merge_blocks = std::min(ceil_div(problem.rows, kThreads / 32), most);
  launch.state_bytes = problem.rows * plan.parts * 5 * size_of(problem.accumulator());
  return launch;
}

}  // namespace onepass::cuda
