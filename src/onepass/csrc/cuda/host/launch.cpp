// launch.cpp: chooses and loads the kernel of a problem and a plan, and makes and starts its launch.
#include "launch.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

#include "../../core/batch_invariant.h"
#include "../../plan/columns.h"
#include "../../plan/validate.h"
#include "launch_cache.h"

namespace onepass::cuda {

// Kernels -------------------------------------------------------------------------------------------------------------

namespace {

const char* type_name(DType type) {
  constexpr const char* kNames[] = {"float", "double", "half_t", "bfloat16_t"};
  return kNames[int(type)];
}

constexpr int kPortableCluster = 8;  // the most blocks of a cluster that every GPU with clusters supports

// Whether the blocks that share a row form a cluster.
bool in_cluster(const CudaPlan& plan) {
  return plan.tier == Tier::cluster ||
         ((plan.tier == Tier::columns || plan.tier == Tier::columns_smem) && plan.blocks_per_row > 1);
}

// Everything that distinguishes two kernels of one process. The numbers of threads and rows count only in the tiers
// warp and staged, and the number of blocks only in clusters.
struct KernelId {
  uint64_t numbers;
  uint32_t score, loss, segment;
  bool operator==(const KernelId& other) const {
    return numbers == other.numbers && score == other.score && loss == other.loss && segment == other.segment;
  }
};
struct HashKernelId {
  size_t operator()(const KernelId& id) const {
    return size_t(id.numbers ^ uint64_t(id.score) << 40 ^ uint64_t(id.loss) << 20 ^ uint64_t(id.segment) << 52);
  }
};
// Whether it is a kernel of scores, losses or segments. These are compiled for a number of threads.
bool is_of_family(const KernelKind& kind) { return kind.score_parts || kind.loss_parts || kind.segment_parts; }

// The number of threads of a block that a kernel is compiled for, or 0. It is the most threads, but the exact number
// for scored rows that blocks share.
int block_threads(const KernelKind& kind, const CudaPlan& plan) {
  const bool shared = plan.tier == Tier::block || plan.tier == Tier::cluster;
  if (kind.score_parts && kind.pass == Pass::forward && shared) return plan.threads();
  return plan.of_columns() || is_of_family(kind) ? plan.max_threads() : 0;
}

KernelId identity(const KernelKind& kind, const CudaPlan& plan, int device) {
  const bool row_in_warp = plan.tier == Tier::warp || plan.tier == Tier::staged;
  uint64_t id = uint64_t(device);
  const auto add = [&](int value, int bits) { id = id << bits | uint64_t(value); };
  add(int(kind.function), 3), add(int(kind.in), 2), add(int(kind.out), 2), add(int(plan.tier), 4);
  add(row_in_warp ? plan.threads_per_row : 0, 6);
  add(row_in_warp ? plan.rows_per_block : block_threads(kind, plan), 11);
  add(plan.items_per_thread, 9), add(plan.vec_size, 4);
  add(in_cluster(plan) ? plan.blocks_per_row : 0, 5);
  add(plan.keeps_vecs_in_smem() ? 1 : plan.prefetches() ? 2 : 0, 2);
  add(plan.in_grid(), 1), add(int(plan.access), 3), add(int(kind.pass), 2), add(kind.over_ranks, 1);
  return {id, kind.score_parts << 2 | uint32_t(kind.bias), kind.loss_parts << 2 | uint32_t(kind.loss_step),
          kind.segment_parts << 2 | uint32_t(kind.bias)};
}

Handle compile_and_load(const KernelKind& kind, const CudaPlan& plan, int device) {
  const Gpu& gpu = device_info(device);
  const std::string source = source_of(kind, plan.tier);
  const std::vector<std::string> defines = defines_of(kind, plan);
  Handle module, kernel;
  if (driver().module_load(&module, cubin(source, defines, gpu.arch).data())) {
    // Either the driver is older than the compiler of a packaged kernel, or the file in the cache is wrong.
    const std::string code = cubin(source, defines, gpu.arch, nullptr, false);
    check(driver().module_load(&module, code.data()), "cuModuleLoadData");
  }
  check(driver().module_function(&kernel, module, "onepass_kernel"), "cuModuleGetFunction");
  if (in_cluster(plan) && plan.blocks_per_row > kPortableCluster)
    check(driver().function_set(kernel, kNonPortableCluster, 1), "cuFuncSetAttribute");
  int declared;
  check(driver().function_get(&declared, kSharedStatic, kernel), "cuFuncGetAttribute");
  check(driver().function_set(kernel, kSharedDynamic, gpu.shared - declared), "cuFuncSetAttribute");
  return kernel;
}

}  // namespace

Handle find_or_load(const KernelKind& kind, const CudaPlan& plan, int device) {
  if (DryRun::running) return DryRun::running->note(kind, plan);
  static std::shared_mutex mutex;
  static std::unordered_map<KernelId, Handle, HashKernelId> kernels;
  const KernelId id = identity(kind, plan, device);
  {
    std::shared_lock lock(mutex);
    if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  }
  std::unique_lock lock(mutex);
  if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  return kernels.emplace(id, compile_and_load(kind, plan, device)).first->second;
}

KernelKind kind_of(const Problem& problem) {
  Pass pass = Pass::forward;
  if (problem.is_backward()) {
    const bool is_broadcast = problem.has_rows() ? problem.grad_is_broadcast() : grad_is_broadcast_in_tile(problem);
    pass = is_broadcast ? Pass::backward_broadcast : Pass::backward;
  }
  return {problem.function, pass, problem.in_type(), problem.out_type()};
}

const char* source_of(const KernelKind& kind, Tier tier) {
  const bool forward = kind.pass == Pass::forward;
  const bool is_divergence = kind.loss_parts & (kLossShares | kLossKl | kLossProduct);
  if (kind.loss_step == LossStep::merge) return is_divergence ? "divergence_merge.cu" : "loss_merge.cu";
  if (is_divergence) return "divergence.cu";
  if (kind.loss_step == LossStep::total) return "loss_total.cu";
  if (kind.loss_step == LossStep::states) return "merge_states.cu";
  if (kind.loss_parts & kLossStaged) return "loss_staged.cu";
  if (kind.segment_parts & kSegmentOffsets) return "segment_offsets.cu";
  if (kind.segment_parts & kSegmentMoves) return "item_moves.cu";
  if (kind.segment_parts & kSegmentInvariant) return "segments_invariant.cu";
  if (kind.segment_parts) return kind.segment_parts & kSegmentLong ? "segments_long.cu" : "segments_tiled.cu";
  if (kind.loss_parts) return kind.loss_parts & kLossColumns ? "loss_columns.cu" : "loss_rows.cu";
  if (is_of_columns(tier)) return "columns.cu";
  if (kind.score_parts & kScoreBiasGrad) return "rows_bias_grad.cu";
  if (tier == Tier::grid) return "rows_grid.cu";
  if (tier == Tier::pipelined) return kind.over_ranks ? "rows_over_ranks.cu" : "rows_pipelined.cu";
  if (!forward && is_reduction(kind.function)) return kind.score_parts ? "scored_pointwise.cu" : "rows_pointwise.cu";
  if (tier == Tier::twopass) return "rows_twopass.cu";
  return tier == Tier::staged ? "rows_staged.cu" : "rows_onchip.cu";
}

std::vector<std::string> defines_of(const KernelKind& kind, const CudaPlan& plan) {
  const auto define = [](const char* name, const std::string& value) { return std::string("-D") + name + "=" + value; };
  const auto number = [&](const char* name, int value) { return define(name, std::to_string(value)); };
  const bool row_in_warp = plan.tier == Tier::warp || plan.tier == Tier::staged;
  std::vector<std::string> defines = {define("IN_TYPE", type_name(kind.in)),
                                      define("OUT_TYPE", type_name(kind.out)),
                                      define("FUNCTION", std::string("Function::") + traits_of(kind.function).name),
                                      number("IS_BACKWARD", kind.pass != Pass::forward),
                                      number("THREADS_PER_ROW", row_in_warp ? plan.threads_per_row : 0),
                                      number("ROWS_PER_BLOCK", plan.of_columns() ? 1 : plan.rows_per_block),
                                      number("VECS_PER_THREAD", plan.vecs_per_thread()),
                                      number("VEC_SIZE", plan.vec_size),
                                      number("VEC_ACCESS", int(plan.access)),
                                      number("CLUSTER_SIZE", in_cluster(plan) ? plan.blocks_per_row : 1),
                                      number("USES_SMEM_VECS", plan.keeps_vecs_in_smem()),
                                      number("BROADCAST_GRAD", kind.pass == Pass::backward_broadcast),
                                      number("BLOCK_THREADS", block_threads(kind, plan)),
                                      number("PREFETCHES_TILE", plan.of_columns() && plan.prefetches()),
                                      number("USES_GRID", plan.of_columns() && plan.in_grid()),
                                      number("STAGES_GROUPS", plan.is_staged()),
                                      number("KEEPS_TILE_IN_SMEM", plan.is_in_smem()),
                                      number("TWO_PASS", plan.tier == Tier::columns_twopass)};
  if (kind.over_ranks) defines.push_back(number("OVER_RANKS", 1));
  if (kind.loss_parts) defines.push_back(number("LOSS_PARTS", int(kind.loss_parts)));
  if (kind.segment_parts) {
    defines.push_back(number("SEGMENT_PARTS", int(kind.segment_parts)));
    defines.push_back(define("BIAS_TYPE", type_name(kind.bias)));
  }
  if (kind.score_parts) {
    defines.push_back(number("SCORE_PARTS", int(kind.score_parts)));
    defines.push_back(define("BIAS_TYPE", type_name(kind.bias)));
  }
  return defines;
}

std::string kernel_name(const KernelKind& kind, const CudaPlan& plan) {
  std::string name = source_of(kind, plan.tier);
  for (const std::string& define : defines_of(kind, plan)) name += " " + define;
  return name;
}

void load_kernel(const KernelKind& kind, const CudaPlan& plan, int device) {
  enter_context(device);
  find_or_load(kind, plan, device);
}

// Launches ------------------------------------------------------------------------------------------------------------

namespace {

// A launch in the form that the driver takes. It points into itself.
struct DriverLaunch {
  LaunchConfig config;
  LaunchAttribute attributes[2] = {};

  DriverLaunch(const Launch& launch, void* stream) {
    const auto on = static_cast<Handle>(stream);
    config = {launch.blocks, launch.groups, 1, launch.threads, 1, 1, launch.shared, on, attributes, 0};
    if (launch.cluster) {
      LaunchAttribute& cluster = add(kClusterDimension);
      cluster.cluster[0] = unsigned(launch.cluster), cluster.cluster[1] = cluster.cluster[2] = 1;
    } else if (launch.cooperative()) {
      add(kCooperative).cooperative = 1;
    }
    if (launch.overlaps) add(kOverlaps).overlaps = 1;
  }
  DriverLaunch(const DriverLaunch&) = delete;

 private:
  LaunchAttribute& add(int id) {
    LaunchAttribute& added = attributes[config.attribute_count++];
    added.id = id;
    return added;
  }
};

}  // namespace

// The driver is asked once per kernel.
int64_t count_resident(const Launch& launch, const Gpu& gpu) {
  if (DryRun::running) return gpu.sm_count;  // at least
  static std::mutex mutex;
  static std::map<std::tuple<Handle, unsigned, unsigned>, int64_t> known;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace({launch.kernel, launch.threads, launch.shared}, 0);
  if (is_new) {
    int count = 0;
    if (launch.cluster) {
      const DriverLaunch as(launch, nullptr);
      check(driver().active_clusters(&count, launch.kernel, &as.config), "cuOccupancyMaxActiveClusters");
      found->second = int64_t(count) * launch.cluster;
    } else {
      check(driver().active_blocks(&count, launch.kernel, int(launch.threads), launch.shared),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor");
      found->second = int64_t(count) * gpu.sm_count;
    }
  }
  return found->second;
}

namespace {

void set_shared(Launch* launch, int64_t bytes, int64_t room) {
  if (bytes > room) {
    throw std::runtime_error("onepass: a block may have " + std::to_string(room) +
                             " bytes of shared memory here, the plan takes " + std::to_string(bytes));
  }
  launch->shared = unsigned(bytes);
}

// Whether the tier staged needs its own tile for results in shared memory. It does if results and the elements that
// they would replace begin at different bytes of a vector, or differ in size or in the gaps between rows.
bool needs_result_tile(const Problem& problem) {
  const int from = problem.is_backward() ? int(kSaved) : int(kX), to = problem.is_backward() ? int(kDx) : int(kY);
  return !problem.is_reduction() && (problem.layout.row_stride(from) != problem.layout.row_stride(to) ||
                                     size_of(problem.type(from)) != size_of(problem.type(to)) ||
                                     (problem.address(from) ^ problem.address(to)) % 16);
}

Launch make_row_launch(const CudaPlan& plan, const Problem& problem, int device, const Gpu& gpu) {
  const DType in = problem.in_type(), out = problem.out_type();
  const int64_t n = problem.layout.n;
  const bool backward = problem.is_backward();
  const int operands = backward && !problem.grad_is_broadcast() ? 2 : 1;
  Launch launch = {};
  launch.kernel = find_or_load(kind_of(problem), plan, device);
  launch.threads = unsigned(plan.threads());
  launch.rows = problem.layout.rows, launch.n = n;
  for (int t = 0; t < kMaxTensors; ++t) launch.strides[t] = problem.layout.row_stride(t);
  launch.groups = 1, launch.chunks_per_row = 1;
  launch.cluster = plan.tier == Tier::cluster ? plan.blocks_per_row : 0;
  launch.blocks = unsigned(plan.grid(launch.rows));
  int64_t shared = int64_t(plan.smem_vecs) * plan.threads_per_row * plan.vec_size * size_of(in) * operands;
  if (plan.tier == Tier::staged) {
    const auto bytes_of = [&](int tensor) {
      return tile_bytes(plan, launch.rows == 1 ? n : launch.strides[tensor], size_of(problem.type(tensor)));
    };
    const int64_t first = bytes_of(backward ? int(kSaved) : int(kX)), second = backward ? bytes_of(kGrad) : 0;
    const bool has_result_tile = needs_result_tile(problem);
    shared = first + second + (has_result_tile ? bytes_of(backward ? int(kDx) : int(kY)) : 0);
    launch.numbers[0] = int(plan.group()), launch.numbers[1] = int(first);
    launch.numbers[2] = has_result_tile ? int(first + second) : 0;
  } else if (plan.sends_messages()) {
    // As many groups of blocks as there are rows, and as multiprocessors allow. Each block has two messages.
    launch.groups = unsigned(plan.rows_at_once(launch.rows, gpu.sm_count));
    launch.blocks = unsigned(plan.blocks_per_row);
    int64_t messages = 2 * int64_t(launch.groups) * plan.blocks_per_row;
    const RowChunks chunks(plan, n, backward ? 2 : 1);
    launch.numbers[0] = plan.smem_vecs / chunks.thread_vecs;
    if (plan.tier == Tier::pipelined) {
      launch.numbers[1] = int(launch.groups);
      launch.blocks = unsigned(gpu.sm_count) / launch.groups * launch.groups, launch.groups = 1;
      messages = kPipelinedMessages * int64_t(launch.blocks);
    } else {
      launch.numbers[1] = int(chunks.chunk_vecs), launch.numbers[2] = int(std::max<int64_t>(chunks.count, backward));
      messages += backward ? 0 : launch.groups;  // forward also has a word for the row of each group
    }
    launch.message_bytes = messages * message_size(in, out);
  } else if (backward && problem.is_reduction()) {
    const int64_t before = plan.access == VecAccess::aligned ? 0 : plan.vec_size - 1;
    const int64_t chunks = ceil_div(n + before, int64_t(plan.threads_per_row) * plan.items_per_thread);
    launch.chunks_per_row = chunks, launch.by_chunks = divider_of(chunks);
    const int64_t most = CudaPlan::kMaxGrid * plan.rows_per_block;
    launch.blocks = unsigned(launch.rows < most / chunks ? ceil_div(launch.rows * chunks, plan.rows_per_block)
                                                         : CudaPlan::kMaxGrid);
  } else {
    launch.numbers[0] = plan.smem_vecs;
  }
  set_shared(&launch, shared, gpu.shared - kStaticShared);
  return launch;
}

Launch make_launch(const CudaPlan& plan, const Problem& problem, int device, const Gpu& gpu) {
  return problem.has_rows() ? make_row_launch(plan, problem, device, gpu)
                            : make_column_launch(plan, problem, kind_of(problem), device);
}

Launch make_own_launch(const Problem& problem, int device, bool cooperative) {
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  return make_launch(plan_cuda(problem, gpu, batch_invariant()), problem, device, gpu);
}

thread_local LaunchCache<LaunchKey, Launch> cache;

}  // namespace

Launch make_column_launch(const CudaPlan& plan, const Problem& problem, const KernelKind& kind, int device) {
  const Gpu& gpu = device_info(device);
  const ColumnView view = column_view(problem, plan);
  const ColumnPlanner planner = column_planner(view, gpu, problem, kind.score_parts != 0);
  const DType result = problem.is_backward() ? problem.in_type() : problem.out_type();
  Launch launch = {};
  launch.has_tiles = true;
  Tiles& tiles = launch.tiles = tiles_of(planner.view, plan);
  if (plan.is_staged()) {
    set_staged_bytes(tiles, view, problem, planner.operands);
  } else if (plan.is_in_smem()) {
    set_smem_bytes(tiles, view, problem, plan, planner.operands);
  } else {
    tiles.smem_vecs_bytes = int(count_smem_vecs_bytes(plan, planner.operands * plan.vec_size * planner.on_chip));
  }
  set_shared(&launch,
             count_column_bytes(tiles, plan, result == DType::float64 ? 8 : 4, planner.gradient, planner.half_result),
             gpu.shared - kColumnStatic);
  launch.kernel = find_or_load(kind, plan, device);
  launch.blocks = unsigned(plan.blocks_per_row), launch.groups = 1;
  launch.threads = unsigned(plan.threads());
  const bool in_grid = plan.in_grid();
  if (!in_grid && plan.blocks_per_row > 1) launch.cluster = plan.blocks_per_row;
  // As many groups of blocks as there are tiles. But if blocks wait for each other, or for what they prefetch, not more
  // than can run at the same time.
  const int64_t all = plan.is_staged() ? tiles.slices : tiles.tiles_per_slice * tiles.slices;
  const int64_t places =
      (in_grid || plan.prefetches() || plan.is_staged() ? count_resident(launch, gpu) : CudaPlan::kMaxGrid) /
      plan.blocks_per_row;
  const int64_t groups = places < all ? places > 1 ? places : 1 : all;
  (in_grid ? launch.groups : launch.blocks) *= unsigned(groups);
  // A block has two messages for each column. The gradient of logsumexp merges nothing and sends none.
  if (in_grid && planner.merges) {
    launch.message_bytes =
        2 * groups * plan.blocks_per_row * tiles.tile_cols * message_size(problem.in_type(), problem.out_type());
  }
  return launch;
}

Launch make_checked_launch(const CudaPlan& plan, const Problem& problem, int device) {
  const Gpu& gpu = device_info(device);
  if (const auto fault = validate(plan, problem, gpu)) throw std::runtime_error("onepass: " + *fault);
  return make_launch(plan, problem, device, gpu);
}

const Launch& cached_launch(const Problem& problem, int device) {
  const LaunchKey key(problem, device, batch_invariant(), tables_version.load(std::memory_order_acquire));
  if (const Launch* found = cache.find(key)) return *found;
  return cache.put(key, make_own_launch(problem, device, true));
}

Launch make_fallback_launch(const Problem& problem, int device) { return make_own_launch(problem, device, false); }

bool start(const Launch& launch, const Problem& problem, void* messages, void* stream) {
  Tiles tiles;
  void* arguments[16];  // the addresses of the kernel's arguments
  int count = 0;
  const auto add = [&](const void* argument) { arguments[count++] = const_cast<void*>(argument); };
  const bool backward = problem.is_backward();
  const int count_of_tensors = backward && launch.has_tiles ? int(kBackwardTensors) : problem.count_tensors();
  // The first argument of the kernel: ForwardRows or BackwardRows (kernels/row_map.cuh), or Tensors
  // (column_softmax.cuh). Both end with a word for the score, which has no members.
  int64_t rows[2 * kMaxTensors + 2 + 1] = {}, tensors[kMaxTensors + 1] = {};
  if (launch.has_tiles) {
    for (int t = 0; t < count_of_tensors; ++t) tensors[t] = int64_t(problem.address(t));
    add(tensors);
    tiles = launch.tiles;
    tiles.messages = messages;
    add(&tiles);
  } else {
    rows[count_of_tensors] = launch.rows, rows[count_of_tensors + 1] = launch.n;
    for (int t = 0; t < count_of_tensors; ++t) {
      rows[t] = int64_t(problem.address(t));
      rows[count_of_tensors + 2 + t] = launch.strides[t];
    }
    add(rows);
    if (backward && problem.is_reduction()) {
      add(&problem.tensors[kLse].data), add(&launch.strides[kLse]), add(&launch.chunks_per_row);
      add(&launch.by_chunks);
    } else {  // a kernel reads as many as it has parameters
      for (const int& number : launch.numbers) add(&number);
      add(&messages);
    }
  }
  return start_kernel(launch, arguments, stream);
}

bool start_kernel(const Launch& launch, void** arguments, void* stream) {
  if (DryRun::running) return DryRun::running->start(launch), true;
  const DriverLaunch as(launch, stream);
  const Result result = driver().launch(&as.config, launch.kernel, arguments, nullptr);
  if (launch.cooperative() && (result == kTooLarge || result == kNotSupported)) return false;
  check(result, "cuLaunchKernelEx");
  return true;
}

}  // namespace onepass::cuda
