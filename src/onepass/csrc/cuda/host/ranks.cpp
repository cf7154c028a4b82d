// ranks.cpp: from rows that are split over GPUs to the launch on this GPU (kernels/rows_over_ranks.cu).
#include <algorithm>

#include "../../plan/rows.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

// How many chunks fit beyond a row, and how many of them are prefetched. States take longer to another GPU than to the
// L2 cache (two H200s, 2026-11-27).
constexpr int kSpareOverRanks = 6, kAheadOverRanks = 3;
static_assert(kRankMessages == kPipelinedMessages);

// A number that must be the same on all ranks.
int kind_number(const KernelKind& kind) {
  return (int(kind.function) << 2 | int(kind.pass)) << 4 | int(kind.in) << 2 | int(kind.out);
}

}  // namespace

void start_over_ranks(Function function, bool backward, DType in, DType out, void* const* tensors, int64_t rows,
                      int64_t n, RankLinks links, int device, void* stream) {
  Layout layout;
  layout.add({rows, {n, n, n}}, false), layout.add({n, {1, 1, 1}}, true);
  layout.view = View::rows;
  const auto at = [&](int t) { return n ? tensors[t] : nullptr; };  // without elements, addresses do not matter
  const Problem problem = backward ? Problem::backward(layout, function, in, out, at(kDx), at(kSaved), at(kGrad))
                                   : Problem::forward(layout, function, in, out, at(kX), at(kY));
  const Gpu& gpu = device_info(device);
  if (!gpu.cooperative) throw std::runtime_error("onepass: this GPU takes no cooperative launches");
  if (gpu.sm_count > kRankBlocks)
    throw std::runtime_error("onepass: GPUs of up to " + std::to_string(kRankBlocks) +
                             " multiprocessors exchange states");
  RowPlanner planner(problem, gpu, false);
  const int full = planner.alignment.full;
  const auto phase = [&](int t) { return problem.address(t) / uint64_t(size_of(problem.type(t))) % uint64_t(full); };
  for (int t = 1; t < problem.count_tensors(); ++t) {
    if (phase(t) != phase(0))
      throw std::runtime_error("onepass: tensors over ranks have to begin at the same element of a vector");
  }
  planner.vec_size = full, planner.vecs = ceil_div(n + full - 1, full);  // even if this rank has few elements
  const auto plan = planner.pipelined_plan(kSpareOverRanks);
  if (!plan) {
    throw std::runtime_error("onepass: a row of " + std::to_string(n) +
                             " elements on each GPU is more than a kernel that exchanges states holds");
  }
  KernelKind kind = kind_of(problem);
  kind.over_ranks = true;
  links.ahead = kAheadOverRanks, links.blocks_per_row = plan->blocks_per_row, links.kind = kind_number(kind);
  Launch launch = {};
  launch.kernel = find_or_load(kind, *plan, device);
  launch.blocks = unsigned(gpu.sm_count), launch.groups = 1, launch.threads = unsigned(plan->threads());
  launch.shared = unsigned(plan->smem_vecs * plan->threads_per_row * full * planner.read_size * planner.operands);
  launch.message_bytes = 1;  // makes the launch cooperative: blocks of this GPU wait for each other
  // ForwardRows or BackwardRows (kernels/row_map.cuh), which end with a word for the score.
  const int count = problem.count_tensors(), places = plan->smem_vecs / kPipelinedVecs;
  int64_t map[2 * kMaxTensors + 2 + 1] = {};
  map[count] = rows, map[count + 1] = n;
  for (int t = 0; t < count; ++t) {
    map[t] = int64_t(problem.address(t)), map[count + 2 + t] = problem.layout.row_stride(t);
  }
  const void* const arguments[] = {map, &places, &links};
  if (!start_kernel(launch, const_cast<void**>(arguments), stream))
    throw std::runtime_error("onepass: the driver refuses to start all blocks of a kernel over ranks together");
}

}  // namespace onepass::cuda
