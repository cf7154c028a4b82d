// scored.cpp: from a scored problem to the launch of a kernel of rows, of columns, or of lines (the gradient of
// logsumexp).
#include <numeric>

#include "../../plan/columns.h"
#include "../../plan/scored_rows.h"
#include "launch.h"
#include "launch_cache.h"

namespace onepass::cuda {

namespace {

// If a bias or mask has at least so many bytes, the order of the rows follows from it.
constexpr int64_t kReordered = int64_t(8) << 20;
// Kernels have distances, rows and elements as ints. No distance is as large as kMostDistance.
constexpr int64_t kMost = int64_t(1) << 31, kMostDistance = int64_t(1) << 30;

// The end of the aligned word that has the last byte of a tensor.
uint64_t end_of_words(const ScoredProblem& problem, ScoredTensor tensor, int size) {
  int64_t last = 0;
  for (const auto* group : {&problem.outer, &problem.reduced}) {
    for (int d = 0; d < group->count; ++d)
      last += std::max<int64_t>(stride_of(*group, d, tensor), 0) * (group->dims[d].size - 1);
  }
  const uint64_t end = uint64_t(problem.data[tensor]) + uint64_t(last + 1) * uint64_t(size);
  return (end + 3) / 4 * 4;
}
bool has_int_distances(const ScoredProblem& problem) {
  if (!problem.has_window() && !problem.has(kAlibi)) return true;
  int64_t reach = std::abs(problem.distance);
  for (const auto* group : {&problem.outer, &problem.reduced}) {
    for (int d = 0; d < group->count; ++d) reach += std::abs(stride_of(*group, d, kDistance)) * group->dims[d].size;
  }
  return reach < kMostDistance / 2;
}

// The outer dims in the order in which rows are processed, the slowest first. Rows that use the same row of a large
// tensor come one after another, so that this row is read from memory once.
void order_dims(const ScoredProblem& problem, int* order) {
  const int count = problem.outer.count;
  if (problem.makes_bias_grad()) {  // rows that share a row of the bias come one after another
    std::stable_partition(order, order + count, [&](int d) { return stride_of(problem.outer, d, kBias) != 0; });
    return;
  }
  for (const ScoredTensor tensor : {kMask, kBias}) {
    if (!problem.has(tensor)) continue;
    int64_t elements = step_of(problem, tensor) ? problem.n : 1;
    for (int d = 0; d < count; ++d)
      if (stride_of(problem.outer, d, tensor)) elements *= problem.outer.dims[d].size;
    if (elements * (tensor == kMask ? 1 : size_of(problem.bias_type)) < kReordered) continue;
    std::stable_partition(order, order + count, [&](int d) { return stride_of(problem.outer, d, tensor) != 0; });
  }
}

ScoreMap map_of(const ScoredProblem& problem, bool takes_any_order) {
  constexpr ScoredTensor kBy[kMapTensors] = {kInput, kResult, kGradOf, kScale,  kBias,
                                             kAlibi, kSink,   kMask,   kRowLse, kOfCap};
  ScoreMap map = {};
  int order[kMaxDims];
  std::iota(order, order + kMaxDims, 0);
  if (takes_any_order) order_dims(problem, order);
  map.dims = problem.outer.count;
  for (int t = 0; t < kMapTensors; ++t) map.data[t] = problem.data[kBy[t]];
  for (int i = 0; i < map.dims; ++i) {
    const int d = order[map.dims - 1 - i];
    for (int t = 0; t < kMapTensors; ++t) map.strides[t][i] = stride_of(problem.outer, d, kBy[t]);
    map.distances[i] = stride_of(problem.outer, d, kDistance);
    map.sizes[i] = int(problem.outer.dims[d].size), map.divisors[i] = divider_of(map.sizes[i]);
  }
  for (const MapTensor t : {kMapInput, kMapResult, kMapGrad}) map.pitches[t] = pitch_of(problem, kBy[t]);
  for (int t = 0; t < kMapTensors; ++t) map.steps[t] = step_of(problem, kBy[t]);
  map.reduced_dims = problem.reduced.count;
  for (int d = 0; d < map.reduced_dims; ++d) {
    for (int t = 0; t < kMapTensors; ++t) map.reduced_strides[t][d] = stride_of(problem.reduced, d, kBy[t]);
    map.reduced_distances[d] = stride_of(problem.reduced, d, kDistance);
    map.reduced_sizes[d] = int(problem.reduced.dims[d].size);
    map.reduced_divisors[d] = divider_of(map.reduced_sizes[d]);
  }
  map.distance_step = int(step_of(problem, kDistance));
  map.count = problem.rows, map.n = problem.n;
  map.distance = int(problem.distance);
  map.least = int(std::max(problem.least, -kMostDistance)), map.most = int(std::min(problem.most, kMostDistance));
  map.factor = problem.factor, map.softcap = problem.softcap, map.sink = problem.sink;
  map.factor_f32 = float(map.factor), map.softcap_f32 = float(map.softcap), map.sink_f32 = float(map.sink);
  map.per_softcap = map.softcap ? 1 / map.softcap : 0, map.per_softcap_f32 = float(map.per_softcap);
  map.empty_is_zero = problem.empty_is_zero, map.of_scores = problem.of_scores;
  map.sink_is_same = problem.has(kSink);
  for (int d = 0; d < problem.outer.count; ++d) map.sink_is_same &= !stride_of(problem.outer, d, kSink);
  return map;
}

// The tier staged: a tile of each operand in shared memory, and one of the results if they cannot replace the input, as
// for other rows (needs_result_tile in launch.cpp).
void set_staged(const ScoredProblem& problem, const CudaPlan& plan, Launch& launch) {
  const auto bytes_of = [&](ScoredTensor tensor, DType type) {
    return tile_bytes(plan, problem.rows == 1 ? problem.n : pitch_of(problem, tensor), size_of(type));
  };
  const int64_t first = bytes_of(kInput, problem.in),
                second = problem.is_backward() ? bytes_of(kGradOf, problem.in) : 0;
  const bool writes = problem.is_backward() || !is_reduction(problem.function);
  const bool has_result_tile = writes && (pitch_of(problem, kInput) != pitch_of(problem, kResult) ||
                                          size_of(problem.in) != size_of(problem.out) ||
                                          (uint64_t(problem.data[kInput]) ^ uint64_t(problem.data[kResult])) % 16);
  launch.numbers[0] = int(plan.group()), launch.numbers[1] = int(first);
  launch.numbers[2] = has_result_tile ? int(first + second) : 0;
  launch.shared = unsigned(first + second + (has_result_tile ? bytes_of(kResult, problem.out) : 0));
}

// The type of the bias that a kernel is compiled for: always the same one if there is no bias.
DType bias_kind(const ScoredProblem& problem) { return problem.has(kBias) ? problem.bias_type : DType::float32; }

// The parts of the score that a kernel is compiled for, except those about vectors.
unsigned parts_of(const ScoredProblem& problem) {
  unsigned parts = kScored;
  if (problem.has(kScale)) parts |= kScoreScale;
  if (problem.has(kBias)) parts |= problem.makes_bias_grad() ? kScoreBiasGrad : kScoreBias;
  if (problem.has(kMask)) parts |= kScoreMask;
  if (problem.has_window()) parts |= kScoreWindow;
  if (problem.has(kAlibi)) parts |= kScoreAlibi;
  if (problem.softcap != 0) parts |= kScoreSoftcap;
  if (is_pointwise(problem)) {
    for (const ScoredTensor t : {kScale, kAlibi, kGradOf, kRowLse})
      if (step_of(problem, t)) parts |= kScoreRowsInLine;
  } else if (problem.is_backward()) {
    if (problem.has_slope_of_result()) parts |= kScoreSlopeOfY;
  } else if (problem.has(kSink) || problem.has(kRowLse) || problem.empty_is_zero ||
             problem.sink > -std::numeric_limits<double>::infinity()) {
    parts |= kScoreRow;
  }
  return parts;
}

// How vectors of the other tensors than x or y are loaded. step_of(tensor): from one of a vector's elements to the
// next. in_phase(tensor, size): whether the tensor has aligned vectors where x or y has them.
template <class Step, class Phase>
unsigned vector_parts(const ScoredProblem& problem, int width, Step step_of, Phase in_phase, bool x_by_words = false) {
  unsigned parts = 0;
  const auto add = [&](ScoredTensor tensor, int size, unsigned vectors, unsigned same, bool by_words = true) {
    if (!problem.has(tensor) || width == 1) return;
    const bool has_last_word = end_of_words(problem, tensor, size) <= uint64_t(problem.storage_end[tensor]);
    if (same && step_of(tensor) == 0)
      parts |= same;
    else if (step_of(tensor) == 1 && uint64_t(problem.data[tensor]) % uint64_t(size) == 0 && in_phase(tensor, size))
      parts |= vectors;
    else if (by_words && (step_of(tensor) != 1 || !has_last_word))
      parts |= kScoreElements;
  };
  const bool is_read = !problem.makes_bias_grad();
  add(kBias, size_of(problem.bias_type), kScoreBiasVectors, is_read ? kScoreBiasSame : 0u, is_read);
  add(kMask, 1, kScoreMaskVectors, kScoreMaskSame);
  if (!problem.has_slope_of_result()) add(kOfCap, size_of(problem.out), kScoreXVectors, 0, x_by_words);
  return parts;
}

unsigned row_parts(const ScoredProblem& problem, const CudaPlan& plan) {
  const int width = plan.vec_size;
  const bool has_parts = problem.makes_bias_grad() && problem.bias_parts > 1;  // each begins at the end of another
  return parts_of(problem) |
         vector_parts(
             problem, problem.n == 1 ? 1 : width, [&](ScoredTensor tensor) { return step_of(problem, tensor); },
             [&](ScoredTensor tensor, int size) {
               if (plan.tier == Tier::staged) return is_aligned(problem, tensor, size, width);
               return plan.access != VecAccess::scalar && !(has_parts && tensor == kBias && problem.n % width) &&
                      in_phase(problem, kInput, size_of(problem.in), tensor, size, width);
             },
             true);
}

// Columns -------------------------------------------------------------------------------------------------------------

// The tensors of columns that a problem without scores has too.
constexpr ScoredTensor kForwardColumns[] = {kInput, kResult}, kBackwardColumns[] = {kResult, kInput, kGradOf};

// A tensor has aligned vectors where the first one has them, if lines and columns begin at the same element of a vector
// in both.
unsigned column_parts(const ScoredProblem& problem, const CudaPlan& plan) {
  constexpr int64_t kLeastSkipped = 128;  // for shorter columns, reading all is faster than finding out what to read
  const bool backward = problem.is_backward();
  const bool skips = backward && problem.function != Function::log_softmax && problem.has_window() &&
                     problem.n >= kLeastSkipped && !plan.is_staged();
  const ScoredTensor lead = backward ? kResult : kInput;
  const int width = plan.vec_size, lead_size = size_of(backward ? problem.out : problem.in);
  // Vectors of slices in shared memory may begin at any element in memory.
  const bool are_vectors = !plan.is_staged() || is_aligned(problem, lead, lead_size, width, true);
  return parts_of(problem) | (skips ? kScoreSkips : 0u) |
         vector_parts(
             problem, width,
             [&](ScoredTensor tensor) { return stride_of(problem.outer, problem.outer.count - 1, tensor); },
             [&](ScoredTensor tensor, int size) {
               return are_vectors && (step_of(problem, tensor) - step_of(problem, lead)) % width == 0 &&
                      in_phase(problem, lead, lead_size, tensor, size, width);
             });
}

// The same columns without scores, as the planner takes them.
Problem plain_columns(const ScoredProblem& problem) {
  const bool backward = problem.is_backward();
  const ScoredTensor* const tensors = backward ? kBackwardColumns : kForwardColumns;
  const int count = backward ? 3 : 2;
  Layout layout;
  layout.rows = problem.rows, layout.n = problem.n;
  const auto take = [&](const DimGroupOf<kScoredTensors>& group, DimGroup& made) {
    made.count = group.count;
    for (int d = 0; d < group.count; ++d) {
      made.dims[d] = {group.dims[d].size, {}};
      for (int t = 0; t < count; ++t) made.dims[d].strides[t] = group.dims[d].strides[tensors[t]];
    }
  };
  take(problem.outer, layout.outer), take(problem.reduced, layout.reduced);
  Problem plain = backward ? Problem::backward(layout, problem.function, problem.in, problem.out)
                           : Problem::forward(layout, problem.function, problem.in, problem.out);
  for (int t = 0; t < count; ++t) plain.tensors[t].data = problem.data[tensors[t]];
  plain.layout.view = column_view(plain).strided ? View::strided : View::columns;
  return plain;
}

// What the plan of scored columns depends on beside the columns: whether x of a softcap is read, and another tensor.
bool reads_x(const ScoredProblem& problem) { return problem.has(kOfCap) && !problem.has_slope_of_result(); }
bool reads_beside(const ScoredProblem& problem) {
  return problem.has(kBias) || (problem.has(kMask) && !problem.is_backward());
}

CudaPlan plan_columns(const ScoredProblem& problem, const Problem& plain, const Gpu& gpu) {
  ColumnView view = column_view(plain);
  // If slices are small and their lines do not fill a warp, threads take columns of several slices.
  constexpr int64_t kWarp = 32;
  const bool is_tiny = view.n() * view.inner() * size_of(plain.in_type()) < kTinySlice && view.inner() < kWarp,
             is_short = is_tiny && view.slices() > 1;
  if (view.is_scattered || (is_short && !view.slices_follow) || !view.tile) view = column_view(plain, true);
  // Once x is in shared memory, other tensors are read element by element (24 shapes, H200, 2026-11-29).
  const double of_staged = is_short                ? 100
                           : reads_x(problem)      ? 0.25
                           : reads_beside(problem) ? 0.4
                           : problem.is_backward() ? 0.75
                                                   : 0.9;
  return column_planner(view, gpu, plain, true).plan_of_scores(of_staged);
}

// The same, of which each thread remembers the latest. A hundred plans are compared, which takes longer than the
// launch.
CudaPlan find_column_plan(const ScoredProblem& problem, const Problem& plain, int device, const Gpu& gpu) {
  if (DryRun::running) return plan_columns(problem, plain, gpu);  // perhaps for another GPU
  thread_local LaunchCache<LaunchKey, CudaPlan> plans;
  const unsigned scores = reads_x(problem) << 2 | reads_beside(problem) << 1 | (gpu.cooperative != 0);
  const LaunchKey key(plain, device, batch_invariant(), tables_version.load(std::memory_order_acquire), scores);
  const CudaPlan* const found = plans.find(key);
  return found ? *found : plans.put(key, plan_columns(problem, plain, gpu));
}

Launch make_scored_columns(const ScoredProblem& problem, int device, const CudaPlan* given, const Gpu& gpu) {
  const Problem plain = plain_columns(problem);
  const CudaPlan plan = given ? *given : find_column_plan(problem, plain, device, gpu);
  KernelKind kind = kind_of(plain);
  kind.score_parts = column_parts(problem, plan), kind.bias = bias_kind(problem);
  return make_column_launch(plan, plain, kind, device);
}

// Lines ---------------------------------------------------------------------------------------------------------------

// A pointwise problem as one whose rows are the lines of x (scored_pointwise.cu).
ScoredProblem in_lines(const ScoredProblem& problem) {
  ScoredProblem lines = problem;
  for (int d = 0; d < problem.reduced.count; ++d) lines.outer.insert(problem.reduced.dims[d]);
  lines.outer.merge();
  lines.reduced.count = std::min(lines.outer.count, 1);
  if (lines.outer.count) lines.reduced.dims[0] = lines.outer.dims[--lines.outer.count];
  lines.n = lines.reduced.count ? lines.reduced.dims[0].size : 1, lines.rows = problem.rows * problem.n / lines.n;
  return lines;
}

int64_t line_vecs(const ScoredProblem& lines, int width, VecAccess access) {
  return ceil_div(lines.n + (access == VecAccess::predicated ? width - 1 : 0), width);
}

CudaPlan plan_lines(const ScoredProblem& lines) {
  constexpr int kLineThreads = 256, kLineVecs = 4;
  const ScoredOperands operands(lines);  // x and its gradient
  int width = operands.full();
  const auto goes_by = [&](int by) {
    return step_of(lines, kInput) == 1 && step_of(lines, kResult) == 1 && by <= lines.n &&
           in_phase(lines, kInput, operands.sizes[0], kResult, operands.sizes[1], by);
  };
  while (width > 1 && !goes_by(width)) width /= 2;
  const bool aligned = lines.n % width == 0 && is_aligned(lines, kInput, operands.sizes[0], width);
  const VecAccess access = width == 1 ? VecAccess::scalar : aligned ? VecAccess::aligned : VecAccess::predicated;
  const int64_t vecs = line_vecs(lines, width, access);
  int each = kLineVecs;  // vectors of a thread
  while (each > 1 && up_to(vecs, each) * 8 > vecs * 9) each /= 2;
  return {Tier::twopass, kLineThreads, 1, each * width, width, 1, 0, access};
}

ScoredLaunch make_scored_lines(const ScoredProblem& lines, int device) {
  const CudaPlan plan = plan_lines(lines);
  unsigned parts = row_parts(lines, plan);
  // The numbers of rows have the type of the computation, and are vectors if they lie as the elements of x do.
  bool in_vectors = plan.access == VecAccess::aligned;
  for (const ScoredTensor t : {kScale, kAlibi, kGradOf, kRowLse}) {
    if (lines.has(t))
      in_vectors &= step_of(lines, t) == 1 && is_aligned(lines, t, size_of(lines.accumulator()), plan.vec_size);
  }
  if (in_vectors) parts |= kScoreRowVectors;
  const KernelKind kind = {lines.function, Pass::backward, lines.in, lines.out, parts, bias_kind(lines)};
  ScoredLaunch launch = {};
  launch.map = map_of(lines, true);
  launch.kernel = find_or_load(kind, plan, device);
  launch.threads = unsigned(plan.threads()), launch.groups = 1;
  const int64_t threads = ceil_div(line_vecs(lines, plan.vec_size, plan.access), plan.vecs_per_thread());
  launch.numbers[0] = int(threads);
  launch.blocks = unsigned(std::min(ceil_div(lines.rows * threads, launch.threads), CudaPlan::kMaxGrid));
  return launch;
}

}  // namespace

bool can_launch_scored(const ScoredProblem& problem) {
  if (problem.makes_bias_grad() && !plan_bias_grad(problem)) return false;
  if (is_pointwise(problem)) {
    const ScoredProblem lines = in_lines(problem);
    return lines.outer.count <= kMapDims && lines.n < kMost / 2 && lines.rows < kMost && has_int_distances(problem);
  }
  const bool widens = problem.is_backward() || !is_reduction(problem.function);
  if (!problem.has_rows() && batch_invariant()) return false;  // how columns are merged depends on their number
  if (problem.outer.count > kMapDims || problem.reduced.count > kMapDims ||
      (!widens && problem.in != problem.out && problem.out != problem.accumulator()))
    return false;
  // The kernel sees single elements. From one element it cannot tell that no element of the row takes part.
  if (problem.is_backward() && problem.function == Function::log_softmax && problem.empty_is_zero) return false;
  if (problem.n >= kMost / 2 || problem.rows >= kMost) return false;
  for (int d = 0; d < problem.reduced.count; ++d)
    if (stride_of(problem.reduced, d, kAlibi)) return false;  // each element would have its own slope
  return has_int_distances(problem);
}

ScoredLaunch make_scored_launch(const ScoredProblem& problem, int device, const CudaPlan* given, bool cooperative) {
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  if (is_pointwise(problem)) return make_scored_lines(in_lines(problem), device);
  if (!problem.has_rows()) return {make_scored_columns(problem, device, given, gpu), map_of(problem, false)};
  const bool makes_bias_grad = problem.makes_bias_grad();
  const CudaPlan plan = given ? *given : makes_bias_grad ? *plan_bias_grad(problem) : plan_scored(problem, gpu);
  KernelKind kind = {};
  kind.function = problem.function, kind.pass = problem.is_backward() ? Pass::backward : Pass::forward;
  kind.in = problem.in, kind.out = problem.out;
  kind.score_parts = row_parts(problem, plan), kind.bias = bias_kind(problem);
  ScoredLaunch launch = {};
  launch.map = map_of(problem, plan.tier != Tier::staged);
  launch.kernel = find_or_load(kind, plan, device);
  launch.threads = unsigned(plan.threads()), launch.groups = 1;
  launch.cluster = plan.tier == Tier::cluster ? plan.blocks_per_row : 0;
  launch.blocks = unsigned(plan.grid(problem.rows));
  launch.numbers[0] = plan.smem_vecs;
  if (makes_bias_grad) {
    int64_t sharing = 1;
    for (int d = 0; d < problem.outer.count; ++d)
      if (!stride_of(problem.outer, d, kBias)) sharing *= problem.outer.dims[d].size;
    launch.numbers[0] = int(sharing), launch.numbers[1] = problem.bias_parts;
    launch.numbers[2] = int(ceil_div(sharing, int64_t(problem.bias_parts)));
    launch.blocks = unsigned(plan.grid(problem.rows / sharing * problem.bias_parts));
  } else if (plan.tier == Tier::staged) {
    set_staged(problem, plan, launch);
  } else if (plan.tier == Tier::block || plan.tier == Tier::cluster) {
    const int size = problem.is_backward() ? 0 : size_of(problem.in);
    launch.shared = unsigned(plan.smem_vecs * plan.threads_per_row * plan.vec_size * size);
  }
  return launch;
}

bool start_scored(const ScoredLaunch& launch, void* messages, void* stream) {
  Tiles tiles = launch.tiles;
  tiles.messages = messages;
  const void* of_rows[] = {&launch.map, launch.numbers, launch.numbers + 1, launch.numbers + 2};
  const void* of_columns[] = {&launch.map, &tiles};
  return start_kernel(launch, const_cast<void**>(launch.has_tiles ? of_columns : of_rows), stream);
}

}  // namespace onepass::cuda
