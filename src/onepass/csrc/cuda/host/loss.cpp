// loss.cpp: from a problem of losses to a plan, and to the launches of its kernels.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 256;  // the most threads of a block
constexpr int64_t kMostClasses = int64_t(1) << 30;
constexpr int64_t kWaves = 4;               // blocks per multiprocessor; with fewer, rows are cut into parts
constexpr int64_t kGradChunks = 2;          // chunks of a block, which computes a part of a row's gradient
constexpr int64_t kStagedBytes = 192;       // rows of up to so many bytes are staged,
constexpr int64_t kStagedVectorBytes = 64;  // and rows that are whole vectors only up to so many
constexpr int64_t kTileBytes = 32 << 10;    // the most bytes of the staged rows of a block
constexpr int kTogether = 20;               // the most elements of a staged row that a thread takes at a time

// How a kernel processes the rows of a problem.
//
//   rows     up to 32 lanes, or all threads of a block, share a row whose classes are adjacent in memory
//   staged   a thread computes a short row in shared memory
//   columns  neighbouring rows are adjacent in memory
enum class LossTier { rows, staged, columns };

struct LossPlan {
  LossTier tier;
  int vec_size;
  VecAccess access;
  int vecs;               // vectors that a thread has in flight
  int threads;            // of a block
  int threads_per_row;    // columns: threads side by side
  int64_t parts, part_n;  // parts of a row. Staged: part_n is the bytes of a tile

  int64_t rows_per_block() const { return tier == LossTier::staged ? threads : threads / threads_per_row; }
};

bool is_aligned(const LossProblem& problem, int width) {
  const int64_t bytes = int64_t(width) * size_of(problem.type);
  return uint64_t(problem.x) % bytes == 0 && uint64_t(problem.dx) % bytes == 0;
}
// The largest vector size such that all strides, except that between neighbouring rows, are multiples of it.
int width_of_columns(const LossProblem& problem) {
  const int last = problem.dims - 1;
  const bool backward = problem.is_backward();
  if (last < 0 || problem.x_strides[last] != 1 || (backward && problem.dx_strides[last] != 1)) return 1;
  int width = std::min(4, 16 / size_of(problem.type));  // 8 rows of a thread take too many registers
  const auto fits = [&](int by) {
    bool all = is_aligned(problem, by) && problem.sizes[last] % by == 0 && problem.x_step % by == 0 &&
               (!backward || problem.dx_step % by == 0);
    for (int d = 0; d < last; ++d)
      all &= problem.x_strides[d] % by == 0 && (!backward || problem.dx_strides[d] % by == 0);
    return all;
  };
  while (width > 1 && !fits(width)) width /= 2;
  return width;
}

// How many to process at a time, from `least` to `most`, so that rounds over n cost the least. A round has the extra
// cost of `extra` more, and the last round may be partly wasted.
int least_cost(int64_t n, int least, int most, int extra = 0) {
  int best = int(std::min<int64_t>(n, least));
  const auto cost = [&](int by) { return ceil_div(n, by) * (by + extra); };
  for (int by = best; by <= std::min<int64_t>(n, most); ++by) best = cost(by) <= cost(best) ? by : best;
  return best;
}

LossPlan plan_columns(const LossProblem& problem, const Gpu& gpu) {
  LossPlan plan = {LossTier::columns, width_of_columns(problem), VecAccess::aligned, 4, kThreads / 2, 1, 1, problem.n};
  const bool invariant = batch_invariant();
  if (!invariant) {  // a thread takes fewer rows if there would be too few threads
    while (plan.vec_size > 2 && problem.rows / plan.vec_size < kResidentThreads * gpu.sm_count) plan.vec_size /= 2;
    const bool wide = plan.vec_size >= 4, pairs = plan.vec_size == 2 && size_of(problem.type) > 2;
    plan.vecs = least_cost(problem.n, wide || pairs ? 4 : 8, wide ? 8 : pairs ? 6 : 16);
  }
  // Threads stand side by side. If this makes too few blocks, or if the batch-invariant mode requires one plan whatever
  // the number of rows, other threads take some of the classes.
  const int64_t vecs = problem.rows / plan.vec_size, wanted = kWaves * gpu.sm_count;
  int threads_x = plan.threads, threads_y = 1;
  while (threads_x > 8 && threads_y * plan.vecs * 2 <= problem.n && (invariant || ceil_div(vecs, threads_x) < wanted)) {
    threads_x /= 2, threads_y *= 2;
  }
  plan.threads_per_row = threads_x;
  const int64_t tiles = ceil_div(vecs, threads_x);
  if (!invariant && tiles < wanted) {
    const int64_t least = int64_t(threads_y) * plan.vecs * 2;  // a part should have at least so many classes
    plan.parts = std::max<int64_t>(1, std::min(wanted / tiles, problem.n / least));
    plan.part_n = ceil_div(problem.n, plan.parts), plan.parts = ceil_div(problem.n, plan.part_n);
  }
  return plan;
}

LossPlan plan_rows(const LossProblem& problem, const Gpu& gpu) {
  const int64_t size = size_of(problem.type), n = problem.n;
  LossPlan plan = {LossTier::rows, int(16 / size), VecAccess::predicated, 4, kThreads, kThreads, 1, 0};
  const bool backward = problem.is_backward(), invariant = batch_invariant() && !backward;
  const bool is_dense =
      problem.dims <= 1 && (!problem.dims || (problem.x_strides[0] == n && (!backward || problem.dx_strides[0] == n)));
  const auto goes_by = [&](int by) {
    if (!backward) return true;
    bool same = (uint64_t(problem.x) - uint64_t(problem.dx)) / size % by == 0;
    for (int d = 0; d < problem.dims; ++d) same &= (problem.x_strides[d] - problem.dx_strides[d]) % by == 0;
    return same;
  };
  const auto has_whole_rows = [&](int by) {
    bool all = is_aligned(problem, by) && n % by == 0;
    for (int d = 0; d < problem.dims; ++d) all &= problem.x_strides[d] % by == 0;
    return all;
  };
  const int64_t most_staged = has_whole_rows(plan.vec_size) ? kStagedVectorBytes : kStagedBytes;
  if (!invariant && is_dense && n * size <= most_staged && goes_by(plan.vec_size)) {
    plan.tier = LossTier::staged, plan.threads_per_row = 1, plan.access = VecAccess::aligned;
    while (plan.vec_size > 1 && !has_whole_rows(plan.vec_size)) plan.vec_size /= 2;
    const bool shares_edges = plan.vec_size == 1 && size == 2 && !backward;
    if (shares_edges) plan.vec_size = 2, plan.access = VecAccess::predicated;
    // Rows of whole vectors of 16 bytes are an odd number of vectors apart.
    const int64_t pitch = plan.vec_size * size == 16 ? (n / plan.vec_size | 1) * plan.vec_size : n;
    const auto tile_bytes = [&] { return up_to(plan.threads * pitch * size, 16) + 16; };
    if (tile_bytes() > kTileBytes) plan.threads /= 2;
    plan.part_n = tile_bytes();
    const int64_t vecs = std::max<int64_t>(1, shares_edges ? n / 2 : n / plan.vec_size);
    plan.vecs = int(ceil_div(vecs, ceil_div(vecs, std::max(1, kTogether / plan.vec_size))));
    return plan;
  }
  while (plan.vec_size > 1 && (plan.vec_size > n || !goes_by(plan.vec_size))) plan.vec_size /= 2;
  if (invariant) plan.vec_size = 1;  // the bits of a row must not depend on its address
  if (plan.vec_size == 1)
    plan.access = VecAccess::scalar;
  else if (has_whole_rows(plan.vec_size))
    plan.access = VecAccess::aligned;
  const int64_t vecs = ceil_div(n + (plan.access == VecAccess::predicated ? plan.vec_size - 1 : 0), plan.vec_size);
  const int64_t rows = invariant ? std::numeric_limits<int64_t>::max() : problem.rows;
  const bool has_long_ends = problem.has_spread && !backward;
  plan.threads_per_row = threads_of_row(vecs, plan.vec_size * size, rows, backward, 3, gpu, has_long_ends);
  const int64_t own_vecs = ceil_div(vecs, plan.threads_per_row);
  const bool is_in_warp = plan.threads_per_row <= 32;
  plan.vecs = backward ? least_cost(own_vecs, 2, 3, 1) : least_cost(own_vecs, 3, 4, is_in_warp && !has_long_ends);
  if (plan.vec_size == 1) plan.vecs = least_cost(own_vecs, 6, 8);
  plan.part_n = n + plan.vec_size;
  if (is_in_warp) return plan;
  plan.threads = plan.threads_per_row;
  const int64_t line = plan.vec_size == 1 ? 1 : 128 / size;  // a row is counted from the first element of a line
  const int64_t chunk = int64_t(plan.threads) * plan.vecs * plan.vec_size, chunks = ceil_div(n + line - 1, chunk);
  if (backward)
    plan.parts = std::max<int64_t>(1, chunks / kGradChunks);
  else if (!invariant && problem.rows < kWaves * gpu.sm_count)
    plan.parts = std::min(ceil_div(kWaves * gpu.sm_count, problem.rows), chunks);
  plan.part_n = ceil_div(chunks, plan.parts) * chunk, plan.parts = ceil_div(n + line - 1, plan.part_n);
  return plan;
}

unsigned parts_of(const LossProblem& problem, const LossPlan& plan) {
  unsigned parts = kLoss;
  if (problem.picks) parts |= kLossPicks;
  if (problem.weight) parts |= kLossWeight;
  if (problem.has_spread) parts |= kLossSpread;
  if (problem.has_entropy) parts |= kLossEntropy;
  if (problem.softcap != 0) parts |= kLossSoftcap;
  if (problem.scale || problem.factor != 1) parts |= kLossScale;
  if (problem.is_cross) parts |= kLossCross;
  if (problem.grad_lse) parts |= kLossGradLse;
  if (plan.tier == LossTier::columns) parts |= kLossColumns;
  if (plan.tier == LossTier::staged) parts |= kLossStaged;
  return parts;
}

DivergenceMap map_of(const LossProblem& problem, const LossPlan& plan) {
  DivergenceMap map = {};
  map.x = problem.x, map.dx = problem.dx;
  map.rows = problem.rows, map.n = problem.n, map.x_step = problem.x_step, map.dx_step = problem.dx_step;
  map.dims = problem.dims;
  for (int d = 0; d < problem.dims; ++d) {
    map.sizes[d] = int(problem.sizes[d]), map.divisors[d] = divider_of(problem.sizes[d]);
    map.x_strides[d] = problem.x_strides[d], map.dx_strides[d] = problem.dx_strides[d];
  }
  map.parts = int(plan.parts), map.by_parts = divider_of(plan.parts), map.part_n = plan.part_n;
  if (plan.tier == LossTier::staged) {
    map.slice_vecs = ceil_div(problem.n, plan.vec_size), map.by_slice_vecs = divider_of(map.slice_vecs);
  } else if (plan.tier == LossTier::columns) {
    map.slice_vecs = problem.sizes[problem.dims - 1] / plan.vec_size, map.vecs = problem.rows / plan.vec_size;
    map.threads_x = plan.threads_per_row, map.by_slice_vecs = divider_of(map.slice_vecs);
  }
  map.terms = problem.terms, map.result = problem.result;
  map.index = reinterpret_cast<const long long*>(problem.index), map.picks = int(problem.picks);
  map.weight = problem.weight, map.weight_sum = problem.weight_sum, map.scale = problem.scale;
  map.grads = problem.grads, map.grads_per_row = problem.grads_per_row, map.is_wide = problem.is_wide;
  map.total = problem.total, map.grad_lse = problem.grad_lse;
  map.ignore_index = problem.ignore_index;
  map.factor = problem.factor, map.softcap = problem.softcap;
  map.per_softcap = problem.softcap != 0 ? 1 / problem.softcap : 0;
  map.smoothing = problem.smoothing, map.z_loss = problem.z_loss;
  map.factor_f32 = float(map.factor), map.softcap_f32 = float(map.softcap);
  map.per_softcap_f32 = float(map.per_softcap);
  map.smoothing_f32 = float(map.smoothing), map.z_loss_f32 = float(map.z_loss);
  return map;
}

// Finds the kernel of losses that is compiled for a plan.
Handle find_kernel(const LossProblem& problem, const LossPlan& plan, LossStep step, int device) {
  const bool in_warp = plan.tier == LossTier::rows && plan.threads_per_row <= 32;
  CudaPlan as = {Tier::twopass, plan.threads, 1, plan.vecs * plan.vec_size, plan.vec_size, 1, 0, plan.access};
  if (in_warp)
    as.tier = Tier::warp, as.threads_per_row = plan.threads_per_row, as.rows_per_block = int(plan.rows_per_block());
  KernelKind kind = {Function::logsumexp, problem.is_backward() ? Pass::backward : Pass::forward, problem.type,
                     problem.type};
  kind.loss_parts = parts_of(problem, plan), kind.loss_step = step;
  return find_or_load(kind, as, device);
}

void start_loss(Handle kernel, int threads, int64_t blocks, int64_t shared, const void* argument, void* stream,
                bool overlaps = false) {
  Launch launch = {};
  launch.kernel = kernel, launch.blocks = unsigned(std::min(blocks, CudaPlan::kMaxGrid)), launch.groups = 1;
  launch.threads = unsigned(threads), launch.shared = unsigned(shared), launch.overlaps = overlaps;
  void* arguments[] = {const_cast<void*>(argument)};
  start_kernel(launch, arguments, stream);
}

}  // namespace

int threads_of_row(int64_t vecs, int64_t vec_bytes, int64_t rows, bool backward, int vecs_at_a_time, const Gpu& gpu,
                   bool has_long_ends) {
  const int64_t wanted = kResidentThreads * 3 / 4 * gpu.sm_count;
  const auto are_enough = [&](int threads, int64_t most) {
    return vecs <= most * threads && (rows >= wanted / threads || vecs <= int64_t(vecs_at_a_time) * threads);
  };
  // The most vectors of a thread: while few threads share a row, if a warp does, and if a block does.
  const int64_t of_few = backward ? 6 : has_long_ends ? 34 : 24, of_warp = backward ? 10 : 100, of_block = 100;
  int threads = int((backward ? 64 : 32) / vec_bytes);  // threads that read one sector of memory together, or two
  while (threads > vecs) threads /= 2;
  while (threads < (has_long_ends ? 8 : 32) && !are_enough(threads, of_few)) threads *= 2;
  while (threads < 32 && !are_enough(threads, of_warp)) threads *= 2;
  if (are_enough(threads, of_warp)) return threads;
  threads = 128;  // a gradient needs no more, because blocks take parts of a row
  while (!backward && threads < 512 && !are_enough(threads, of_block)) threads *= 2;
  return threads;
}

bool can_launch_loss(const LossProblem& problem) {
  bool fits = problem.dims <= kLossDims && problem.n < kMostClasses && problem.picks < (1 << 30);
  for (int d = 0; d < problem.dims; ++d) fits &= problem.sizes[d] < (int64_t(1) << 31);
  return fits;
}

LossLaunch make_loss_launch(LossProblem problem, int device) {
  const Gpu& gpu = device_info(device);
  const bool rows = problem.n == 1 || (problem.x_step == 1 && (!problem.is_backward() || problem.dx_step == 1));
  if (!rows && !problem.dims) problem.sizes[0] = problem.x_strides[0] = problem.dx_strides[0] = problem.dims = 1;
  const LossPlan plan = rows ? plan_rows(problem, gpu) : plan_columns(problem, gpu);
  LossLaunch launch = {};
  launch.map = map_of(problem, plan);
  launch.kernel = find_kernel(problem, plan, LossStep::main, device);
  launch.threads = plan.threads, launch.overlaps = can_overlap(device);
  const bool columns = plan.tier == LossTier::columns;
  // Kernels of rows use 64 registers, and prefetch. The other kernels need many blocks instead.
  const int64_t resident = plan.tier == LossTier::rows ? kResidentThreads : 2 * kResidentThreads;
  const int64_t most = resident / plan.threads * gpu.sm_count;
  launch.blocks = plan.parts * (columns ? ceil_div(launch.map.vecs, plan.threads_per_row)
                                        : ceil_div(problem.rows, plan.rows_per_block()));
  if (!problem.is_backward()) launch.blocks = std::min(launch.blocks, most);
  if (plan.tier == LossTier::staged) launch.shared = 2 * plan.part_n;
  if (plan.parts > 1 && !problem.is_backward()) {
    launch.merge = find_kernel(problem, plan, LossStep::merge, device);
    launch.merge_blocks = std::min(ceil_div(problem.rows, plan.threads / 32), most);
    launch.state_bytes = problem.rows * plan.parts * 4 * size_of(problem.accumulator());
  }
  return launch;
}

void start_loss(const LossLaunch& launch, void* states, void* partials, void* stream) {
  DivergenceMap map = launch.map;
  map.states = states, map.partials = launch.merge ? nullptr : partials;
  start_loss(launch.kernel, launch.threads, launch.blocks, launch.shared, &map, stream);
  if (!launch.merge) return;
  map.partials = partials;
  start_loss(launch.merge, launch.threads, launch.merge_blocks, 0, &map, stream, launch.overlaps);
}

void start_loss_total(const LossProblem& problem, const LossTotal& total, int device, void* stream) {
  constexpr int kTogether = 2 * kThreads;
  const LossPlan plan = {LossTier::rows, 1, VecAccess::scalar, 1, kTogether, kTogether, 1, 0};
  start_loss(find_kernel(problem, plan, LossStep::total, device), kTogether, 1, 0, &total, stream, can_overlap(device));
}

void start_state_merge(const StateMerge& merge, DType type, int device, void* stream) {
  KernelKind kind = {Function::state, Pass::forward, type, type};
  kind.loss_parts = kLoss, kind.loss_step = LossStep::states;
  const CudaPlan as = {Tier::twopass, kThreads, 1, 1, 1, 1, 0, VecAccess::scalar};
  const int64_t blocks = ceil_div(merge.rows, kThreads);
  start_loss(find_or_load(kind, as, device), kThreads, blocks, 0, &merge, stream);
}

}  // namespace onepass::cuda
