// launch.cpp: from a plan to a loaded kernel to a launch.
#include "launch.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "../../core/batch_invariant.h"
#include "launch_cache.h"

namespace onepass::cuda {

namespace {

const char* type_name(DType type) {
  constexpr const char* kNames[] = {"float", "double", "half_t", "bfloat16_t"};
  return kNames[int(type)];
}

const char* macro_name(Function function) {
  constexpr const char* kNames[] = {"SOFTMAX", "LOG_SOFTMAX", "SOFTMIN", "LOGSUMEXP", "STATE"};
  return kNames[int(function)];
}

constexpr int kPortableCluster = 8;  // blocks of a cluster that every GPU with clusters takes

// Do the blocks that share a row form a cluster?
bool in_cluster(const CudaPlan& plan) {
  return plan.tier == Tier::cluster || (plan.tier == Tier::columns && plan.split > 1);
}

// Everything that tells two kernels of one process apart, in 64 bits. The numbers of threads and of rows do so in the
// tiers warp and flat only, the number of blocks in clusters.
uint64_t identity(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass) {
  const bool lanes = plan.tier == Tier::warp || plan.tier == Tier::flat, cluster = in_cluster(plan);
  uint64_t id = uint64_t(device);
  const auto add = [&](int value, int bits) { id = id << bits | uint64_t(value); };
  add(int(function), 3), add(int(x), 2), add(int(y), 2), add(int(plan.tier), 4);
  add(lanes ? plan.lanes : 0, 6), add(lanes ? plan.rows_per_block : plan.of_columns() ? plan.block() : 0, 11);
  add(plan.values, 9), add(plan.vector, 4);
  add(cluster ? plan.split : 0, 5),
      add(plan.shelved() ? 1
          : plan.ahead() ? 2
                         : 0,
          2),
      add(plan.in_grid(), 1), add(plan.edges, 3), add(int(pass), 2);
  return id;
}

Handle load(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass) {
  const Gpu& gpu = device_info(device);
  const std::string code =
      cubin(source_of(pass, function, plan.tier), defines_of(function, x, y, plan, pass), gpu.compute);
  Handle module, loaded;
  check(driver().module_load(&module, code.data()), "cuModuleLoadData");
  check(driver().module_function(&loaded, module, "onepass_kernel"), "cuModuleGetFunction");
  if (in_cluster(plan) && plan.split > kPortableCluster)
    check(driver().function_set(loaded, kNonPortableCluster, 1), "cuFuncSetAttribute");
  int declared;
  check(driver().function_get(&declared, kSharedStatic, loaded), "cuFuncGetAttribute");
  check(driver().function_set(loaded, kSharedDynamic, gpu.shared - declared), "cuFuncSetAttribute");
  return loaded;
}

// Bytes of the piece of memory that a tile of the tier flat takes in shared memory.
int64_t tile_bytes(const CudaPlan& plan, int64_t n, int size) {
  return (plan.group() * n * size + 2 * 16 - 1) / 16 * 16;
}

// Are tiles of the tier flat written apart from where they were read? So they are where the two begin at different
// bytes of a vector, or elements differ in size.
bool written_apart(const Call& call) {
  return !call.reduces() &&
         (size_of(call.x_type) != size_of(call.y_type) || (uint64_t(call.x) ^ uint64_t(call.y)) % 16);
}

}  // namespace

const char* source_of(Tier tier) {
  return tier == Tier::stream ? "rows_twopass.cu"
         : tier == Tier::flat ? "rows_staged.cu"
         : tier == Tier::grid ? "rows_grid.cu"
                              : "rows_onchip.cu";
}

const char* source_of(Pass pass, Function function, Tier tier) {
  if (is_of_columns(tier)) return pass == Pass::forward ? "columns.cu" : "columns_backward.cu";
  if (pass == Pass::forward) return source_of(tier);
  if (tier == Tier::grid) return "rows_grid_backward.cu";
  return function == Function::logsumexp ? "rows_pointwise.cu"
         : tier == Tier::stream          ? "rows_twopass_backward.cu"
                                         : "rows_onchip_backward.cu";
}

std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan, Pass pass) {
  const auto define = [](const char* name, const std::string& value) { return std::string("-D") + name + "=" + value; };
  const bool lanes = plan.tier == Tier::warp || plan.tier == Tier::flat;
  std::vector<std::string> defines = {define("IN", type_name(x)),
                                      define("OUT", type_name(y)),
                                      define("FUNCTION", macro_name(function)),
                                      define("LANES", std::to_string(lanes ? plan.lanes : 0)),
                                      define("ROWS", std::to_string(plan.of_columns() ? 1 : plan.rows_per_block)),
                                      define("SLOTS", std::to_string(plan.slots())),
                                      define("VECTOR", std::to_string(plan.vector)),
                                      define("CLUSTER", std::to_string(in_cluster(plan) ? plan.split : 1)),
                                      define("SHELVED", plan.shelved() ? "1" : "0"),
                                      define("EDGES", std::to_string(plan.edges)),
                                      define("EVEN", pass == Pass::backward_broadcast ? "1" : "0")};
  if (plan.of_columns()) {
    defines.push_back(define("THREADS", std::to_string(plan.block())));
    defines.push_back(define("AHEAD", plan.ahead() ? "1" : "0"));
    defines.push_back(define("GRID", plan.in_grid() ? "1" : "0"));
    defines.push_back(define("STREAM", plan.tier == Tier::columns_stream ? "1" : "0"));
  }
  return defines;
}

Handle kernel(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass) {
  static std::shared_mutex mutex;
  static std::unordered_map<uint64_t, Handle> kernels;
  const uint64_t id = identity(function, x, y, plan, device, pass);
  {
    std::shared_lock lock(mutex);
    if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  }
  std::unique_lock lock(mutex);
  if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  return kernels.emplace(id, load(function, x, y, plan, device, pass)).first->second;
}

void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass) {
  enter_context(device);
  kernel(function, x, y, plan, device, pass);
}

Launch launch_by(const CudaPlan& plan, const Call& call, int device) {
  const Gpu& gpu = device_info(device);
  const int64_t rows = call.layout.rows, n = call.layout.n;
  Launch made = {};
  made.threads = unsigned(plan.threads());
  made.groups = 1;
  int64_t blocks = plan.grid(rows), shared = int64_t(plan.shelf) * plan.lanes * plan.vector * size_of(call.x_type);
  if (plan.tier == Tier::flat) {
    const int64_t read = tile_bytes(plan, n, size_of(call.x_type));
    const bool apart = written_apart(call);
    shared = read + (apart ? tile_bytes(plan, n, size_of(call.y_type)) : 0);
    made.numbers[0] = int(plan.group());
    made.numbers[1] = apart ? int(read) : 0;
  } else if (plan.tier == Tier::grid) {
    // As many groups of blocks as there are rows and multiprocessors for.
    blocks = plan.grid(rows, gpu.multiprocessors);
    // Two messages of a block, and a word of a row.
    made.parts = (2 * blocks + blocks / plan.split) * message_bytes(call.x_type, call.y_type);
    made.numbers = {plan.shelf / plan.chunk(), int(plan.wide(n)), int(plan.chunks(n))};
    made.groups = unsigned(blocks / plan.split);
    blocks = plan.split;
  } else {
    made.numbers[0] = plan.shelf;
    made.cluster = plan.tier == Tier::cluster ? plan.split : 0;
  }
  const int64_t room = gpu.shared - kStaticShared;
  if (shared > room) {
    throw std::runtime_error("onepass: a block may have " + std::to_string(room) +
                             " bytes of shared memory here, the plan takes " + std::to_string(shared));
  }
  made.blocks = unsigned(blocks);
  made.shared = unsigned(shared);
  made.kernel = kernel(call.function, call.x_type, call.y_type, plan, device);
  return made;
}

Launch launch_of(const Call& call, int device, bool cooperative) {
  static thread_local Recent<RowKey, Launch> recent;
  const bool invariant = batch_invariant();
  const RowKey key(call, device, invariant, tables_version.load(std::memory_order_acquire));
  if (cooperative) {
    if (const Launch* found = recent.find(key)) return *found;
  }
  const Phase phase(call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), call.layout, call.reduces());
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  const CudaPlan plan = plan_cuda(call.layout, call.x_type, call.y_type, phase, gpu, invariant);
  const Launch made = launch_by(plan, call, device);
  if (cooperative) recent.put(key, made);
  return made;
}

bool launch(const Launch& made, void** arguments, void* stream) {
  const Configured as(made, stream);
  const Result result = driver().launch(&as.config, made.kernel, arguments, nullptr);
  if (made.cooperative() && (result == kTooLarge || result == kNotSupported)) return false;
  check(result, "cuLaunchKernelEx");
  return true;
}

bool launch(const Launch& made, const Call& call, void* parts, void* stream) {
  const void* x = call.x;
  void* y = call.y;
  int64_t rows = call.layout.rows, n = call.layout.n;
  int64_t x_stride = call.layout.row_x_stride(), y_stride = call.layout.row_y_stride();
  std::array<int, 3> numbers = made.numbers;
  // The kernels of the tiers stream, of warp, block and cluster, and of flat take fewer: the last ones are not read.
  void* arguments[] = {&x, &y, &rows, &n, &x_stride, &y_stride, &numbers[0], &numbers[1], &numbers[2], &parts};
  return launch(made, arguments, stream);
}

}  // namespace onepass::cuda
