// scored.cpp: the plans of scored problems, and the dispatch of a call to its types, compiled once per instruction set
// (ONEPASS_ISA is its name and namespace).
#include "../core/batch_invariant.h"
#include "scored_forward.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kMinGatheredRows = 2;  // for each lane

// The most elements of a row that is gathered. A row that is computed alone costs a function the time of some hundred
// elements, more for doubles, and less in a gradient.
int64_t max_gathered_row(const ScoredProblem& p) {
  if (p.is_backward()) return 64;
  return p.accumulator() == DType::float64 ? 256 : 96;
}

// Whether the results of a row, or of neighbouring columns, are adjacent in memory.
bool stores_in_place(const ScoredProblem& p, bool in_columns) {
  if (p.is_backward() ? p.in != p.out : is_reduction(p.function)) return !p.is_backward();
  const auto& dims = in_columns ? p.outer : p.reduced;
  return dims.count == 0 || (dims.innermost().strides[kResult] == 1 && (in_columns || dims.count == 1));
}

// Whether the results of a step begin at a cache line in each tile of columns.
bool are_at_lines(const ScoredProblem& p, int64_t width) {
  const int64_t size = size_of(p.out), columns = p.outer.count - 1;
  bool all =
      uintptr_t(p.data[kResult]) % kLine == 0 && (width * size % kLine == 0 || width >= p.outer.dims[columns].size);
  for (int d = 0; d < columns; ++d) all &= p.outer.dims[d].strides[kResult] * size % kLine == 0;
  for (int d = 0; d < p.reduced.count; ++d) all &= p.reduced.dims[d].strides[kResult] * size % kLine == 0;
  return all;
}

// Whether tiles have a row in each lane. Either rows lie side by side. Or they are short and at a fixed stride along
// the longest dim; that dim then becomes the innermost one, and the elements are gathered.
bool is_tiled(ScoredProblem& p, bool is_small, int64_t lanes) {
  if (p.outer.count == 0) return false;
  const auto column = p.outer.innermost();
  // A step of a function costs about the same with few columns as with a whole vector of them, and less than gathering.
  // In a gradient this holds if several steps are processed together.
  const bool is_narrow =
      !p.is_backward() || (p.function != Function::logsumexp && p.reduced.innermost().strides[kInput] == column.size);
  const int64_t least = is_narrow ? std::max<int64_t>(2, lanes / 4) : lanes;
  if (column.size >= least && column.strides[kInput] == 1 && p.reduced.innermost().strides[kInput] != 1) return true;
  if (is_small || p.n > max_gathered_row(p) || batch_invariant()) return false;
  auto* const dims = p.outer.dims;
  const auto by_size = [](const auto& a, const auto& b) { return a.size < b.size; };
  auto* const longest = std::max_element(dims, dims + p.outer.count, by_size);
  if (longest->size < kMinGatheredRows * lanes) return false;
  std::rotate(longest, longest + 1, dims + p.outer.count);
  return true;
}

}  // namespace

ScoredPlan plan_scored(ScoredProblem& p) {
  const bool backward = p.is_backward(), wide = p.accumulator() == DType::float64;
  const int64_t size = wide ? 8 : 4, L = int64_t(sizeof(Vec)) / (wide ? 8 : 4);
  const int64_t most_small = size_of(p.out) == 2 ? kMaxSmallRow : 256;
  const bool is_small =
      p.reduced.count <= 1 && (backward ? p.reduced.innermost().strides[kInput] == 1
                                        : kHasFastPaths && !wide && stores_in_place(p, false) && p.n <= most_small);
  const bool in_columns = is_tiled(p, is_small, L);
  const auto column = p.outer.innermost();
  ScoredPlan plan;
  plan.stores = backward || !is_reduction(p.function);
  plan.stores_in_place = stores_in_place(p, in_columns);
  if (in_columns) {
    plan.route = ScoredRoute::columns;
    const int64_t fit = kScratch * int64_t(sizeof(float)) / size / (p.n + 1);
    // Gradients need no scratch memory. Steps of whole narrow lines are processed together. Short runs are slow to
    // read: if longer ones do not fit, columns are read twice, in long runs.
    const bool follows = p.reduced.count <= 1 && p.reduced.innermost().strides[kInput] == column.size;
    const bool is_whole = follows && column.size <= kMaxColumns / 2;
    int64_t most = backward       ? kGradLineBytes / size_of(p.in)
                   : is_whole     ? std::clamp<int64_t>(fit & -2 * L, up_to(column.size, 2 * L), most_columns(L))
                   : fit >= 4 * L ? std::min<int64_t>(fit & -2 * L, most_columns(L))
                                  : most_columns(L);
    // Columns whose steps may be processed together stay whole: bits must not depend on the number of threads.
    const bool may_narrow = backward && column.size > kGradTogether / 2;
    while (may_narrow && most > kMaxColumns && p.rows / column.size * ceil_div(column.size, most) < p.threads)
      most /= 2;
    // All tiles are about equally wide, and begin at cache lines.
    const int64_t line = std::max<int64_t>(L, kLine / size_of(p.out));
    plan.width = std::min(up_to(ceil_div(column.size, ceil_div(column.size, most)), line), most);
    plan.work_items = p.rows / column.size * ceil_div(column.size, plan.width);
  } else if (p.n > kMaxWholeRow / (wide ? 2 : 1)) {
    plan.route = ScoredRoute::row_chunks, plan.chunks = ceil_div(p.n, kChunk);
    plan.reduces = !backward || !is_reduction(p.function);
    plan.work_items = p.rows * plan.chunks;
  } else if (!backward && is_small) {
    plan.route = ScoredRoute::small_rows, plan.work_items = ceil_div(p.rows, kRowsPerItem);
  } else {
    plan.work_items = p.rows;
  }
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / std::max<int64_t>(1, p.rows * p.n / plan.work_items));
  const bool in_place = p.data[kResult] == p.data[kInput] || p.data[kResult] == p.data[kGradOf];
  // Runs with a large part outside of whole cache lines are slower with streaming stores. And elements before the first
  // line are rounded differently if they are halfway between two 16-bit numbers, hence none in the batch-invariant
  // mode.
  const int64_t run = plan.route == ScoredRoute::rows ? p.n * size_of(p.out) : kLine;
  plan.streaming = kHasStreamingStores && plan.stores && !in_place && !batch_invariant() &&
                   p.rows * p.n * size_of(p.out) >= kStreamingBytes && (run % kLine == 0 || run >= 16 * kLine) &&
                   (!in_columns || are_at_lines(p, plan.width));
  return plan;
}

void run_scored(const ScoredProblem& p, const ScoredPlan& plan, CpuPhase phase, ScoredState* states, int64_t begin,
                int64_t end) {
  if (p.is_backward()) return run_scored_backward(p, plan, phase, states, begin, end);
  dispatch_type(plan.stores_in_place ? p.out : p.accumulator(), [&](auto type) {
    using Y = TypeOf<decltype(type)>;
    switch (p.function) {
      case Function::softmax: return ScoredForward<Function::softmax, Y>{p, plan}.run(phase, states, begin, end);
      case Function::log_softmax:
        return ScoredForward<Function::log_softmax, Y>{p, plan}.run(phase, states, begin, end);
      default: return ScoredForward<Function::logsumexp, Y>{p, plan}.run(phase, states, begin, end);
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
