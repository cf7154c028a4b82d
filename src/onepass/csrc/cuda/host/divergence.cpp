// divergence.cpp: from a problem of divergences to the launches of its kernels.
#include <algorithm>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 256;  // of a block
constexpr int kCount = 8;      // classes that a thread has on their way at a time
constexpr int64_t kMostClasses = int64_t(1) << 30;
constexpr int64_t kWaves = 4;   // blocks of a multiprocessor, below which rows are cut into parts
constexpr int64_t kBlocks = 8;  // of a multiprocessor, which take rows in turn

using Problem = DivergenceProblem;

struct DivergencePlan {
  bool in_columns;  // neighbouring threads have neighbouring rows
  int vec_size;
  int vecs;               // of a thread, on their way at a time
  int rows;               // of a block
  int64_t parts, part_n;  // of a row

  unsigned used(const Problem& problem) const {
    unsigned parts = kLoss | (problem.is_kl ? kLossKl : kLossShares);
    if (problem.weight) parts |= kLossWeight;
    if (problem.softcap != 0) parts |= kLossSoftcap;
    if (problem.factor != 1) parts |= kLossScale;
    if (in_columns) parts |= kLossColumns;
    if (problem.dx) parts |= kLossOfX;
    if (problem.dy) parts |= kLossOfY;
    return parts;
  }
};

// The largest vector that all rows begin with; of columns, single elements.
int width_of(const Problem& problem) {
  const void* const begins[] = {problem.x, problem.y, problem.dx, problem.dy};
  const int size = size_of(problem.type);
  int width = 16 / size;
  const auto fits = [&](int by) {
    for (int t = 0; t < Problem::kTensors; ++t) {
      bool all = problem.steps[t] == 1 && uint64_t(begins[t]) % (by * size) == 0;
      for (int d = 0; d < problem.dims; ++d) all &= problem.strides[t][d] % by == 0;
      if (!all) return false;
    }
    return true;
  };
  while (width > 1 && (width > problem.n || !fits(width))) width /= 2;
  return width;
}

DivergencePlan plan_of(const Problem& problem, const Gpu& gpu) {
  const int64_t n = problem.n, step = problem.steps[0];
  const bool invariant = batch_invariant() && !problem.is_backward();
  DivergencePlan plan = {};
  plan.in_columns = n > 1 && step != 1 && problem.dims && problem.strides[0][problem.dims - 1] < step;
  if (invariant) plan.in_columns = n > 1 && step != 1;  // the bits of a row may not depend on the rows beside it,
  plan.vec_size = plan.in_columns || invariant ? 1 : width_of(problem);  // nor on its address
  plan.vecs = int(std::min<int64_t>(std::max(1, kCount / plan.vec_size), ceil_div(n, plan.vec_size)));
  const int64_t chunk = plan.vecs * plan.vec_size, wanted = kWaves * gpu.sm_count;
  int threads = 1;  // of a row
  const auto has_few_blocks = [&] { return ceil_div(problem.rows * threads, kThreads) < wanted; };
  if (plan.in_columns) {
    while (threads < 32 && threads * chunk * 2 <= n && (invariant || has_few_blocks())) threads *= 2;
  } else {
    while (threads < kThreads && threads * chunk < n) threads *= 2;
    // A warp takes a row of some vectors where there are rows enough.
    if (!invariant && threads > 32 && n <= 1024 * plan.vec_size && problem.rows * 32 >= kThreads * wanted) threads = 32;
  }
  plan.rows = kThreads / threads;
  plan.parts = 1, plan.part_n = up_to(n, threads * chunk);
  const int64_t tiles = ceil_div(problem.rows, plan.rows);
  if (!invariant && tiles < wanted) {
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
  map.parts = int(plan.parts), map.part_n = plan.part_n, map.threads_x = plan.rows;
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
  const CudaPlan as = {Tier::twopass, kThreads, 1, plan.vecs * plan.vec_size,
                       plan.vec_size, 1,        0, plan.vec_size == 1 ? VecAccess::scalar : VecAccess::aligned};
  KernelKind kind = {Function::logsumexp, problem.is_backward() ? Pass::backward : Pass::forward, problem.type,
                     problem.type};
  kind.loss_parts = plan.used(problem);
  LossLaunch launch = {};
  launch.map = map_of(problem, plan);
  launch.kernel = find_or_load(kind, as, device);
  launch.threads = kThreads;
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
