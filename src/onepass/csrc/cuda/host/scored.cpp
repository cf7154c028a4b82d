// scored.cpp: from a scored problem to the launch of a kernel of rows or of columns.
#include <climits>
#include <numeric>

#include "../../core/batch_invariant.h"
#include "../../plan/columns.h"
#include "../../plan/rows.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

// Bytes of a tensor beside x from which on the order of the rows follows from it.
constexpr int64_t kReordered = int64_t(8) << 20;
// Distances are ints in the kernels, and so are rows and their elements. No distance is as large as this one.
constexpr int64_t kMost = int64_t(1) << 31, kMostDistance = int64_t(1) << 30;

int64_t stride_of(const DimGroupOf<kScoredTensors>& group, int dim, ScoredTensor tensor) {
  return group.dims[dim].strides[tensor];
}
int64_t step_of(const ScoredProblem& problem, ScoredTensor tensor) {
  return problem.reduced.count ? problem.reduced.dims[0].strides[tensor] : 0;
}

// Whether all rows of a tensor begin at the same element of a vector of `width` elements as those of another do.
bool in_phase(const ScoredProblem& problem, ScoredTensor a, int a_size, ScoredTensor b, int b_size, int64_t width) {
  const auto first = [&](ScoredTensor t, int size) { return int64_t(uint64_t(problem.data[t]) / uint64_t(size)); };
  bool same = (first(a, a_size) - first(b, b_size)) % width == 0;
  for (int d = 0; d < problem.outer.count; ++d)
    same &= (stride_of(problem.outer, d, a) - stride_of(problem.outer, d, b)) % width == 0;
  return same;
}
// Where the aligned word with the last byte of a tensor ends.
uint64_t end_of_words(const ScoredProblem& problem, ScoredTensor tensor, int size) {
  int64_t last = 0;
  for (const auto* group : {&problem.outer, &problem.reduced}) {
    for (int d = 0; d < group->count; ++d)
      last += std::max<int64_t>(stride_of(*group, d, tensor), 0) * (group->dims[d].size - 1);
  }
  const uint64_t end = uint64_t(problem.data[tensor]) + uint64_t(last + 1) * uint64_t(size);
  return (end + 3) / 4 * 4;
}
// Whether all rows begin with a vector, or all lines of columns, which the last of the outer dims is along.
bool is_aligned(const ScoredProblem& problem, ScoredTensor tensor, int size, int64_t width, bool of_lines = false) {
  bool aligned = uint64_t(problem.data[tensor]) % uint64_t(size * width) == 0;
  if (of_lines) aligned &= step_of(problem, tensor) % width == 0;
  for (int d = 0; d < problem.outer.count - of_lines; ++d) aligned &= stride_of(problem.outer, d, tensor) % width == 0;
  return aligned;
}

// The gradient of logsumexp reduces nothing.
bool is_pointwise(const ScoredProblem& problem) { return problem.is_backward() && is_reduction(problem.function); }

bool has_int_distances(const ScoredProblem& problem) {
  if (!problem.has_window() && !problem.has(kAlibi)) return true;
  int64_t reach = std::abs(problem.distance);
  for (const auto* group : {&problem.outer, &problem.reduced}) {
    for (int d = 0; d < group->count; ++d) reach += std::abs(stride_of(*group, d, kDistance)) * group->dims[d].size;
  }
  return reach < kMostDistance / 2;
}

// The vector tensors of a problem: what is read and written element by element of a row.
struct Operands {
  ScoredTensor tensors[3];
  int sizes[3], count = 0;
  explicit Operands(const ScoredProblem& problem) {
    const auto add = [&](ScoredTensor t, DType type) { tensors[count] = t, sizes[count++] = size_of(type); };
    add(kInput, problem.in);
    if (problem.is_backward() && !is_pointwise(problem)) add(kGradOf, problem.in);
    if (problem.is_backward() || !is_reduction(problem.function)) add(kResult, problem.out);
  }
  // Elements of a vector of 16 bytes of the widest type.
  int full() const { return 16 / *std::max_element(sizes, sizes + count); }
};

// From row to row of a tensor, where all rows are at one distance and in the order of the outer dims; else 0.
int64_t pitch_of(const ScoredProblem& problem, ScoredTensor tensor) {
  const int last = problem.outer.count - 1;
  for (int d = 0; d < last; ++d) {
    const int64_t of_next = stride_of(problem.outer, d + 1, tensor) * problem.outer.dims[d + 1].size;
    if (stride_of(problem.outer, d, tensor) != of_next) return 0;
  }
  return last < 0 ? problem.n : stride_of(problem.outer, last, tensor);
}

// Rows whose scores wait in registers, a thread having at most kMostVecs vectors of them, so that all of its loads are
// on their way at once: lanes of a warp share a row, or the warps of a block. (A block has 1, 2, 4, ... warps: others
// do not fill a multiprocessor's four schedulers alike.) Of longer rows of half types kKept scores of a thread wait in
// registers and the other elements in shared memory, unless there is a bias or a mask, which would be read again
// (sweeps, H200, 2026-11-29).
constexpr int kMostVecs = 5, kKept = 16, kManyScores = 48;
constexpr int kLeastThreads = 64, kMostThreads = 256, kMostEach = 80;

std::optional<CudaPlan> plan_registers(const ScoredProblem& problem, int width, VecAccess access, const Gpu& gpu) {
  const bool aligned = access == VecAccess::aligned, reads_beside = problem.has(kBias) || problem.has(kMask);
  // Those inside the row, and, of rows that wait in shared memory, those in which it begins and ends.
  const int64_t vecs = std::max<int64_t>(problem.n / width, 1), all_vecs = vecs + (aligned ? 0 : 2);
  // Of the numbers of threads that hold the row, the least, or one of which an eighth fewer have nothing to do.
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
  // Blocks and threads are chosen in the same way; few blocks before many.
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

// The plan of rows that are like these and have no score. Scores are kept as accumulators, and so are the elements of
// other calls whose result is wider than a half type.
CudaPlan plan_scored(const ScoredProblem& problem, const Gpu& gpu) {
  const Operands operands(problem);
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
  // Rows that lie one after another, with gaps at most half as long, may be copied as one piece.
  int64_t pitches[3] = {};
  bool is_tiled = problem.rows > 1 && !batch_invariant();
  for (int i = 0; i < operands.count; ++i) {
    pitches[i] = pitch_of(problem, operands.tensors[i]);
    is_tiled &= pitches[i] >= n && pitches[i] <= n + n / 2;
  }
  // Otherwise any pitch stands for theirs that is longer and begins rows at a vector where these begin there.
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
    Gpu alone = gpu;  // blocks exchange no messages
    alone.cooperative = 0;
    return plan_rows(like, alone, batch_invariant(), true);
  };
  const CudaPlan plan = plan_like(problem.in, kept);
  const bool of_one_size = !backward && size_of(problem.in) == size_of(problem.out) && size_of(problem.in) <= 4;
  if (!of_one_size || batch_invariant()) return plan;
  constexpr int64_t kLeastVecs = 8;  // of rows in vectors that begin anywhere
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

// The gradient of a bias (rows_bias_grad.cu): a thread has up to so many elements of each of the rows that share a row
// of the bias. Elements have to be the same thread's in all of them, so those rows begin at the same element of a
// vector. Short rows cost a thread more than two launches (64 and 200 elements 1.1 to 1.4 times as long, 577 .8, H200,
// 2026-11-29).
std::optional<CudaPlan> plan_bias_grad(const ScoredProblem& problem) {
  constexpr int kMostThreads = 512, kLeast = 256;
  if (!problem.has_rows() || problem.n < kLeast || batch_invariant() || step_of(problem, kBias) != 1) return {};
  const Operands operands(problem);
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

// The outer dims in the order in which rows are taken, the slowest first. Rows beside which the same row of a large
// tensor lies come one after another, so that it is read from memory once.
void order_dims(const ScoredProblem& problem, int* order) {
  const int count = problem.outer.count;
  if (problem.makes_bias_grad()) {  // the rows that share one of the bias
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
  return map;
}

// The tier staged: a tile of each operand in shared memory, and one of the results where they cannot take the place of
// the input, as of other rows (launch.cpp).
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

// The parts of the score that a kernel is compiled for, but those of vectors.
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
  } else if (problem.has(kSink) || problem.has(kRowLse) || problem.empty_is_zero ||
             problem.sink > -std::numeric_limits<double>::infinity()) {
    parts |= kScoreRow;
  }
  return parts;
}

// How the vectors of the tensors beside x or y are loaded. `step_of(tensor)`: from one of a vector's elements to the
// next; `in_phase(tensor, size)`: whether vectors that are aligned in x or y are aligned there.
template <class Step, class Phase>
unsigned vector_parts(const ScoredProblem& problem, int width, Step step_of, Phase in_phase) {
  unsigned parts = 0;
  const auto add = [&](ScoredTensor tensor, int size, unsigned vectors, unsigned same) {
    if (!problem.has(tensor) || width == 1) return;
    const bool has_last_word = end_of_words(problem, tensor, size) <= uint64_t(problem.storage_end[tensor]);
    if (same && step_of(tensor) == 0)
      parts |= same;
    else if (step_of(tensor) == 1 && uint64_t(problem.data[tensor]) % uint64_t(size) == 0 && in_phase(tensor, size))
      parts |= vectors;
    else if (same && (step_of(tensor) != 1 || !has_last_word))
      parts |= kScoreElements;
  };
  const bool is_read = !problem.makes_bias_grad();
  add(kBias, size_of(problem.bias_type), kScoreBiasVectors, is_read ? kScoreBiasSame : 0u);
  add(kMask, 1, kScoreMaskVectors, kScoreMaskSame);
  add(kOfCap, size_of(problem.out), kScoreXVectors, 0);
  return parts;
}

unsigned row_parts(const ScoredProblem& problem, const CudaPlan& plan) {
  const int width = plan.vec_size;
  const bool has_parts = problem.makes_bias_grad() && problem.bias_parts > 1;  // each begins where the last one ends
  return parts_of(problem) |
         vector_parts(
             problem, problem.n == 1 ? 1 : width, [&](ScoredTensor tensor) { return step_of(problem, tensor); },
             [&](ScoredTensor tensor, int size) {
               return plan.access != VecAccess::scalar && !(has_parts && tensor == kBias && problem.n % width) &&
                      in_phase(problem, kInput, size_of(problem.in), tensor, size, width);
             });
}

// Columns -------------------------------------------------------------------------------------------------------------

// The tensors of columns as a problem without scores has them.
constexpr ScoredTensor kForwardColumns[] = {kInput, kResult}, kBackwardColumns[] = {kResult, kInput, kGradOf};

// The vectors of a tensor are aligned where those of the first one are if lines and columns begin at the same elements
// of vectors.
unsigned column_parts(const ScoredProblem& problem, const CudaPlan& plan) {
  constexpr int64_t kLeastSkipped = 128;  // shorter columns are read sooner than it is found out what to read of them
  const bool backward = problem.is_backward();
  const bool skips = backward && problem.function != Function::log_softmax && problem.has_window() &&
                     problem.n >= kLeastSkipped && !plan.is_staged();
  const ScoredTensor lead = backward ? kResult : kInput;
  const int width = plan.vec_size, lead_size = size_of(backward ? problem.out : problem.in);
  // Vectors of slices in shared memory begin at any element in memory.
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

// The columns alone, as the planner takes them.
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

CudaPlan plan_columns(const ScoredProblem& problem, const Problem& plain, const Gpu& gpu) {
  ColumnView view = column_view(plain);
  // Of small slices whose lines do not fill a warp, threads take columns of several.
  constexpr int64_t kWarp = 32;
  const bool is_tiny = view.n() * view.inner() * size_of(plain.in_type()) < kTinySlice && view.inner() < kWarp,
             is_short = is_tiny && view.slices() > 1;
  if (view.is_scattered || (is_short && !view.slices_follow) || !view.tile) view = column_view(plain, true);
  // What lies beside x is read element by element once x is in shared memory (24 shapes, H200, 2026-11-29).
  const bool reads_beside = problem.has(kBias) || problem.has(kMask);
  const double of_staged = is_short                ? 100
                           : problem.has(kOfCap)   ? 0.25
                           : problem.is_backward() ? 0.75
                           : reads_beside          ? 0.4
                                                   : 0.9;
  return column_planner(view, gpu, plain, true).plan_of_scores(of_staged);
}

Launch make_scored_columns(const ScoredProblem& problem, int device, const CudaPlan* given, const Gpu& gpu) {
  const Problem plain = plain_columns(problem);
  const CudaPlan plan = given ? *given : plan_columns(problem, plain, gpu);
  KernelKind kind = kind_of(plain);
  kind.score_parts = column_parts(problem, plan), kind.bias = problem.bias_type;
  return make_column_launch(plan, plain, kind, device);
}

// Lines ---------------------------------------------------------------------------------------------------------------

// A pointwise problem whose rows are the lines of x (scored_pointwise.cu).
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
  const Operands operands(lines);  // x and its gradient
  int width = operands.full();
  const auto goes_by = [&](int by) {
    return step_of(lines, kInput) == 1 && step_of(lines, kResult) == 1 && by <= lines.n &&
           in_phase(lines, kInput, operands.sizes[0], kResult, operands.sizes[1], by);
  };
  while (width > 1 && !goes_by(width)) width /= 2;
  const bool aligned = lines.n % width == 0 && is_aligned(lines, kInput, operands.sizes[0], width);
  const VecAccess access = width == 1 ? VecAccess::scalar : aligned ? VecAccess::aligned : VecAccess::predicated;
  const int64_t vecs = line_vecs(lines, width, access);
  int each = kLineVecs;  // of a thread
  while (each > 1 && up_to(vecs, each) * 8 > vecs * 9) each /= 2;
  return {Tier::twopass, kLineThreads, 1, each * width, width, 1, 0, access};
}

ScoredLaunch make_scored_lines(const ScoredProblem& lines, int device) {
  const CudaPlan plan = plan_lines(lines);
  unsigned parts = row_parts(lines, plan);
  // What rows have is of the computation's type, and lies as the elements of x do.
  bool in_vectors = plan.access == VecAccess::aligned;
  for (const ScoredTensor t : {kScale, kAlibi, kGradOf, kRowLse}) {
    if (lines.has(t))
      in_vectors &= step_of(lines, t) == 1 && is_aligned(lines, t, size_of(lines.accumulator()), plan.vec_size);
  }
  if (in_vectors) parts |= kScoreRowVectors;
  const KernelKind kind = {lines.function, Pass::backward, lines.in, lines.out, parts, lines.bias_type};
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
  if (!problem.has_rows() && batch_invariant()) return false;  // columns are merged as their number has it
  if (problem.outer.count > kMapDims || problem.reduced.count > kMapDims ||
      (!widens && problem.in != problem.out && problem.out != problem.accumulator()))
    return false;
  // A row of which nothing takes part is not told from another by one of its elements.
  if (problem.is_backward() && problem.function == Function::log_softmax && problem.empty_is_zero) return false;
  if (problem.n >= kMost / 2 || problem.rows >= kMost) return false;
  for (int d = 0; d < problem.reduced.count; ++d)
    if (stride_of(problem.reduced, d, kAlibi)) return false;  // a slope per element
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
  kind.score_parts = row_parts(problem, plan), kind.bias = problem.bias_type;
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
