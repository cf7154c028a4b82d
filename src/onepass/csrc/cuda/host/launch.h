// launch.h: makes the launch of a kernel from a problem and a plan, and starts it. A KernelKind and a CudaPlan together
// say which kernel is compiled (source file and -D macros). A Launch is everything about a launch except addresses and
// stream.
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

// What a kernel computes: a function, or its gradient; backward_broadcast if the upstream gradient has one value per
// row.
enum class Pass { forward, backward, backward_broadcast };

// The kernels of losses. main: the terms of rows, or gradients. merge: terms from the states of parts of rows. total:
// one number from the losses of rows. states: the states of rows from the states of their parts.
enum class LossStep { main, merge, total, states };

// What all kernels for a problem have in common; the plan says the rest. The kernels of a gradient read the type of the
// forward's result, and write the type of its input.
struct KernelKind {
  Function function;
  Pass pass;
  DType in, out;
  unsigned score_parts = 0;  // a set of ScorePart (kernels/score_map.cuh)
  DType bias = DType::float32;
  unsigned loss_parts = 0;  // a set of LossPart (kernels/loss_map.cuh)
  LossStep loss_step = LossStep::main;
  unsigned segment_parts = 0;  // a set of SegmentPart (kernels/segment_map.cuh)
  bool over_ranks = false;     // rows that are split over GPUs
};
KernelKind kind_of(const Problem& problem);

// The source file and the -D macros of the kernel of a plan.
const char* source_of(const KernelKind& kind, Tier tier);
std::vector<std::string> defines_of(const KernelKind& kind, const CudaPlan& plan);
// The source file and the macros as one string. It identifies the kernel.
std::string kernel_name(const KernelKind& kind, const CudaPlan& plan);

// Compiles or loads the kernel of a plan on `device`, unless this process already has it.
void load_kernel(const KernelKind& kind, const CudaPlan& plan, int device);

// The bytes of a message in the tier grid, which a block sends to the other blocks (GridMessage in grid_sync.cuh).
constexpr int64_t message_size(DType in, DType out) { return in == DType::float64 || out == DType::float64 ? 48 : 16; }

// Everything about a launch except its addresses and its stream.
struct Launch {
  Handle kernel;
  unsigned blocks, groups;  // the grid: blocks per group; several groups, if the blocks of a group exchange messages
  int cluster;              // blocks of a cluster, or 0 without clusters
  unsigned threads;         // per block
  unsigned shared;          // bytes of dynamic shared memory per block
  int64_t message_bytes;    // size of the buffer for messages between blocks; if it is not 0, the launch is cooperative
  bool overlaps;            // its blocks may start before the last kernel has ended, and wait for its end themselves

  // The arguments of the kernel besides the tensors: rows take numbers, columns take Tiles.
  bool has_tiles;
  int64_t rows, n, strides[kMaxTensors];
  int64_t chunks_per_row;  // only for the gradient of logsumexp
  FastDivisor by_chunks;
  int numbers[3];  // further arguments, which depend on the tier
  Tiles tiles;

  bool cooperative() const { return message_bytes > 0; }
};

// The launch of a problem by a given plan. Throws if the plan cannot serve the problem. Compiles or loads the kernel,
// unless this process already has it.
Launch make_checked_launch(const CudaPlan& plan, const Problem& problem, int device);

// The launch by the problem's own plan. Each thread caches the launches that it has made lately.
const Launch& cached_launch(const Problem& problem, int device);

// The launch by the plan that the problem has if the device allows no cooperative launches.
Launch make_fallback_launch(const Problem& problem, int device);

// While an object of this class lives, this thread makes and starts launches for a GPU that need not exist: kernels are
// neither compiled nor launched, only recorded.
class DryRun {
 public:
  struct Noted {
    KernelKind kind;
    CudaPlan plan;
  };
  struct Started {
    size_t kernel;  // its index in `kernels`
    unsigned blocks, threads;
  };
  std::vector<Noted> kernels;
  std::vector<Started> launches;
  static inline thread_local DryRun* running = nullptr;

  explicit DryRun(const Gpu& gpu) { gpu_of_dry_run = &gpu, running = this; }
  ~DryRun() { gpu_of_dry_run = nullptr, running = nullptr; }
  DryRun(const DryRun&) = delete;

  // A handle is the number of the recorded kernel, counted from 1.
  Handle note(const KernelKind& kind, const CudaPlan& plan) {
    kernels.push_back({kind, plan});
    return reinterpret_cast<Handle>(kernels.size());
  }
  void start(const Launch& launch) {
    launches.push_back({reinterpret_cast<size_t>(launch.kernel) - 1, launch.blocks * launch.groups, launch.threads});
  }
};

// Launches on `stream` in the current context. `messages`: the buffer for messages. Returns false if the driver refuses
// a cooperative launch.
bool start(const Launch& launch, const Problem& problem, void* messages, void* stream);

// Loads or compiles the kernel of a plan. The caller is in the context of the device.
Handle find_or_load(const KernelKind& kind, const CudaPlan& plan, int device);
// The bytes of shared memory for a tile of the tier staged, which may begin and end anywhere within 16 bytes.
inline int64_t tile_bytes(const CudaPlan& plan, int64_t n, int size) {
  return (plan.group() * n * size + 2 * 16 - 1) / 16 * 16;
}

// The launch of columns by a plan, with a kernel of this kind.
Launch make_column_launch(const CudaPlan& plan, const Problem& problem, const KernelKind& kind, int device);

// Whether a kernel may start before the kernel before it has ended (kernels/launch_overlap.cuh).
inline bool can_overlap(int device) { return device_info(device).arch >= 90; }

// Launches with these arguments. Returns false if the driver refuses a cooperative launch.
bool start_kernel(const Launch& launch, void** arguments, void* stream);

// How many blocks of a launch can run at the same time.
int64_t count_resident(const Launch& launch, const Gpu& gpu);

// Whether kernels exist for a problem of segments, and their launches. `rows` is the launch for the rows that are not
// long. The SegmentLaunch itself is the launch for long rows; it has no blocks if there are none. If the driver refuses
// it as a cooperative launch, two launches replace it.
struct SegmentLaunch : Launch {
  Launch rows;
  SegmentMap rows_map, map;
};
bool can_launch_segments(const SegmentProblem& problem);
SegmentLaunch make_segment_launch(const SegmentProblem& problem, int device);
void start_segments(SegmentLaunch launch, void* messages, void* stream);
// Starts the kernel that finds where the segments of a sorted index begin.
void start_segment_offsets(const SortedIndex& of, int device, void* stream);
// Starts a pass that moves items of 2, 4 or 8 bytes.
void start_item_moves(const MoveMap& map, int item_bytes, int device, void* stream);

// Whether a kernel exists for a scored problem; its launch, by a given plan or by the problem's own; and its start, as
// for other problems.
struct ScoredLaunch : Launch {
  ScoreMap map;
};
bool can_launch_scored(const ScoredProblem& problem);
ScoredLaunch make_scored_launch(const ScoredProblem& problem, int device, const CudaPlan* plan, bool cooperative);
bool start_scored(const ScoredLaunch& launch, void* messages, void* stream);

// Whether kernels exist for a problem of losses, and their launches. A launch needs memory for states if rows are cut
// into parts (state_bytes), and for four numbers of each of the sums() blocks that sum losses. start_loss starts them,
// and start_loss_total starts the kernel that makes one number of these sums.
struct LossLaunch {
  DivergenceMap map;  // a kernel of losses reads the part that is a LossMap
  Handle kernel, merge;
  int threads;
  int64_t blocks, merge_blocks, shared, state_bytes;
  bool overlaps;  // the merge overlaps with the kernel before it
  int64_t sums() const { return merge ? merge_blocks : blocks; }
};
bool can_launch_loss(const LossProblem& problem);
// How many threads share a row of `vecs` vectors. If there are many rows, it is few: the reduction at the end of a row
// costs a thread the same for few vectors as for many, and more with `has_long_ends`. A gradient has no reduction.
// Measured on an H200, 2026-11-30.
int threads_of_row(int64_t vecs, int64_t vec_bytes, int64_t rows, bool backward, int vecs_at_a_time, const Gpu& gpu,
                   bool has_long_ends = false);
constexpr int64_t kResidentThreads = 1024;  // per multiprocessor, in blocks that take rows in turn
LossLaunch make_loss_launch(LossProblem problem, int device);
// Launches of a divergence. It sums nothing over rows.
bool can_launch_divergence(const DivergenceProblem& problem);
LossLaunch make_divergence_launch(const DivergenceProblem& problem, int device);
void start_loss(const LossLaunch& launch, void* states, void* partials, void* stream);
void start_loss_total(const LossProblem& problem, const LossTotal& total, int device, void* stream);
void start_state_merge(const StateMerge& merge, DType type, int device, void* stream);

// Launches a forward, or a gradient, of contiguous rows that are split over GPUs. This GPU has n elements of each row,
// and the other GPUs of `links` have the rest. This function fills in the numbers of the call in `links`. `tensors` are
// in the order of ForwardTensor or BackwardTensor. Throws if this GPU's part of a row is too long, or if the tensors
// begin at different elements of a vector.
void start_over_ranks(Function function, bool backward, DType in, DType out, void* const* tensors, int64_t rows,
                      int64_t n, RankLinks links, int device, void* stream);

// Launches by the plan given, or by the problem's own. If the driver refuses a cooperative launch, the problem's plan
// without one is used. `start` gets a Launch, and returns what onepass::cuda::start returns.
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
