// launch.h: from a problem and a plan to the launch of a kernel.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../../core/divergence_problem.h"
#include "../../core/loss_problem.h"
#include "../../core/problem.h"
#include "../../core/scored_problem.h"
#include "../../core/segment_problem.h"
#include "../kernels/loss_map.cuh"
#include "../kernels/rank_map.cuh"
#include "../kernels/score_map.cuh"
#include "../kernels/segment_map.cuh"
#include "cuda_driver.h"

namespace onepass::cuda {

// What a kernel computes: a function, its gradient, or that from a gradient of the result with one value per row.
enum class Pass { forward, backward, backward_broadcast };

// The kernels of losses: terms or gradients; terms from states of parts; one number from the losses of rows; and states
// of rows from those of parts.
enum class LossStep { main, merge, total, states };

// What the kernels of a problem have in common; a plan tells them apart. The kernels of a gradient read the type of the
// forward's result and write that of its input.
struct KernelKind {
  Function function;
  Pass pass;
  DType in, out;
  unsigned score_parts = 0;  // of ScorePart (kernels/score_map.cuh)
  DType bias = DType::float32;
  unsigned loss_parts = 0;  // of LossPart (kernels/loss_map.cuh)
  LossStep loss_step = LossStep::main;
  unsigned segment_parts = 0;  // of SegmentPart (kernels/segment_map.cuh)
  bool over_ranks = false;     // rows that are split over GPUs
};
KernelKind kind_of(const Problem& problem);

// The source file and the defines that make the kernel of a plan.
const char* source_of(const KernelKind& kind, Tier tier);
std::vector<std::string> defines_of(const KernelKind& kind, const CudaPlan& plan);
// Both, which tell kernels apart.
std::string kernel_name(const KernelKind& kind, const CudaPlan& plan);

// Compiles or loads the kernel of a plan on `device`, where this process does not have it yet.
void load_kernel(const KernelKind& kind, const CudaPlan& plan, int device);

// The bytes of what a block of the tier grid sends to the others, as grid_sync.cuh has it.
constexpr int64_t message_size(DType in, DType out) { return in == DType::float64 || out == DType::float64 ? 48 : 16; }

// All of a launch but its addresses and its stream.
struct Launch {
  Handle kernel;
  unsigned blocks, groups;  // the grid: blocks per group; several groups where the blocks of one exchange messages
  int cluster;              // blocks of a cluster, 0 where there are none
  unsigned threads;         // per block
  unsigned shared;          // bytes of shared memory per block beyond what the kernel declares
  int64_t message_bytes;    // of the buffer through which blocks exchange messages; the launch is then cooperative
  bool overlaps;            // its blocks may start before the kernel before it ends, for which they wait by themselves

  // What the kernel takes beside the tensors: rows take numbers, columns take Tiles.
  bool has_tiles;
  int64_t rows, n, strides[kMaxTensors];
  int64_t chunks_per_row;  // of the gradient of logsumexp
  FastDivisor by_chunks;
  int numbers[3];  // what a tier takes besides
  Tiles tiles;

  bool cooperative() const { return message_bytes > 0; }
};

// The launch of a problem by a plan that is given; throws where the plan cannot serve it. Compiles or loads the kernel
// where this process does not have it yet.
Launch make_checked_launch(const CudaPlan& plan, const Problem& problem, int device);

// The launch by the problem's own plan. Each thread caches those that it made lately.
const Launch& cached_launch(const Problem& problem, int device);

// The launch by the plan that the problem has where the device takes no cooperative launches.
Launch make_fallback_launch(const Problem& problem, int device);

// While one lives, this thread makes and starts launches for a GPU that need not be here: kernels are neither compiled
// nor launched, but noted.
class DryRun {
 public:
  struct Noted {
    KernelKind kind;
    CudaPlan plan;
  };
  struct Started {
    size_t kernel;  // its place in `kernels`
    unsigned blocks, threads;
  };
  std::vector<Noted> kernels;
  std::vector<Started> launches;
  static inline thread_local DryRun* running = nullptr;

  explicit DryRun(const Gpu& gpu) { gpu_of_dry_run = &gpu, running = this; }
  ~DryRun() { gpu_of_dry_run = nullptr, running = nullptr; }
  DryRun(const DryRun&) = delete;

  // A handle is the number of the kernel, from 1 up.
  Handle note(const KernelKind& kind, const CudaPlan& plan) {
    kernels.push_back({kind, plan});
    return reinterpret_cast<Handle>(kernels.size());
  }
  void start(const Launch& launch) {
    launches.push_back({reinterpret_cast<size_t>(launch.kernel) - 1, launch.blocks * launch.groups, launch.threads});
  }
};

// Launches on `stream` in the current context, with a buffer for messages. False where the driver refuses a cooperative
// launch.
bool start(const Launch& launch, const Problem& problem, void* messages, void* stream);

// Loads the kernel of a plan, or compiles it; the caller is in the context of the device.
Handle find_or_load(const KernelKind& kind, const CudaPlan& plan, int device);
// Bytes of shared memory for a tile of the tier staged, which begins and ends within 16 bytes.
inline int64_t tile_bytes(const CudaPlan& plan, int64_t n, int size) {
  return (plan.group() * n * size + 2 * 16 - 1) / 16 * 16;
}

// The launch of columns by a plan, by a kernel of this kind.
Launch make_column_launch(const CudaPlan& plan, const Problem& problem, const KernelKind& kind, int device);

// Whether a kernel may start before the one before it ends (kernels/launch_overlap.cuh).
inline bool can_overlap(int device) { return device_info(device).arch >= 90; }

// Launches with these arguments; false where the driver refuses a cooperative launch.
bool start_kernel(const Launch& launch, void** arguments, void* stream);

// How many blocks of a launch run at a time.
int64_t count_resident(const Launch& launch, const Gpu& gpu);

// Whether there is a kernel for a problem of segments, and its launches: first that of the rows that are not long, then
// that of the long ones, which has no blocks where there are none. Where the driver takes no cooperative launch, two
// others take its place.
struct SegmentLaunch : Launch {
  Launch rows;
  SegmentMap rows_map, map;
};
bool can_launch_segments(const SegmentProblem& problem);
SegmentLaunch make_segment_launch(const SegmentProblem& problem, int device);
void start_segments(SegmentLaunch launch, void* messages, void* stream);
// Finds where the segments of a sorted index begin.
void start_segment_offsets(const SortedIndex& of, int device, void* stream);
// A pass of items of 2, 4 or 8 bytes.
void start_item_moves(const MoveMap& map, int item_bytes, int device, void* stream);

// Whether there is a kernel for a scored problem; its launch, by a plan that is given or by its own; and its start, as
// of other problems.
struct ScoredLaunch : Launch {
  ScoreMap map;
};
bool can_launch_scored(const ScoredProblem& problem);
ScoredLaunch make_scored_launch(const ScoredProblem& problem, int device, const CudaPlan* plan, bool cooperative);
bool start_scored(const ScoredLaunch& launch, void* messages, void* stream);

// Whether there is a kernel for a problem of losses; its launches, which need memory for states where rows are cut into
// parts, and for four numbers of each block that `sums` losses; their start; and how such sums become one number.
struct LossLaunch {
  DivergenceMap map;  // a kernel of losses takes the part of it that is a LossMap
  Handle kernel, merge;
  int threads;
  int64_t blocks, merge_blocks, shared, state_bytes;
  bool overlaps;  // the merge
  int64_t sums() const { return merge ? merge_blocks : blocks; }
};
bool can_launch_loss(const LossProblem& problem);
// How many threads share a row of so many vectors: few, as long as rows are many, since the reduction at the end of a
// row costs a thread as much for few vectors, and more with `has_long_ends`. A gradient has no reduction. Measured on
// an H200, 2026-11-30.
int threads_of_row(int64_t vecs, int64_t vec_bytes, int64_t rows, bool backward, int vecs_at_a_time, const Gpu& gpu,
                   bool has_long_ends = false);
constexpr int64_t kResidentThreads = 1024;  // of a multiprocessor, in blocks that take rows in turn
LossLaunch make_loss_launch(LossProblem problem, int device);
// Launches of a divergence, which sums nothing over rows.
bool can_launch_divergence(const DivergenceProblem& problem);
LossLaunch make_divergence_launch(const DivergenceProblem& problem, int device);
void start_loss(const LossLaunch& launch, void* states, void* partials, void* stream);
void start_loss_total(const LossProblem& problem, const LossTotal& total, int device, void* stream);
void start_state_merge(const StateMerge& merge, DType type, int device, void* stream);

// Launches a forward, or a gradient, of contiguous rows, of which this GPU has n elements each and the GPUs of `links`
// the others; the numbers of the call in `links` are filled in. `tensors` are in the order of ForwardTensor or
// BackwardTensor. Throws where this GPU's part of a row is too long, or the tensors begin at different elements of a
// vector.
void start_over_ranks(Function function, bool backward, DType in, DType out, void* const* tensors, int64_t rows,
                      int64_t n, RankLinks links, int device, void* stream);

// Launches by the plan given, or by the problem's own; where the driver refuses a cooperative launch, by the one that
// the problem has without. `start` gets a Launch, and gives what onepass::cuda::start does.
template <class Start>
void launch_with_fallback(const Problem& problem, int device, const CudaPlan* plan, const Start& start) {
  if (plan) {
    if (start(make_checked_launch(*plan, problem, device))) return;
    throw std::runtime_error("onepass: the driver refuses a cooperative launch of this plan");
  }
  if (!start(cached_launch(problem, device))) start(make_fallback_launch(problem, device));
}
// The same for a scored problem.
template <class Start>
void launch_scored(const ScoredProblem& problem, int device, const CudaPlan* plan, const Start& start) {
  if (!start(make_scored_launch(problem, device, plan, true))) start(make_scored_launch(problem, device, plan, false));
}

}  // namespace onepass::cuda
