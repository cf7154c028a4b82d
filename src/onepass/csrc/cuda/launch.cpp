// launch.cpp: from a plan to a loaded kernel to a launch.
#include "launch.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "driver.h"

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

// Everything that tells two kernels of one process apart, in 64 bits. The numbers of threads and of rows do so in the
// tiers warp and flat only, the number of blocks in clusters.
uint64_t identity(const Rows& call, int device) {
  const CudaPlan& plan = call.plan;
  const bool lanes = plan.tier == Tier::warp || plan.tier == Tier::flat, cluster = plan.tier == Tier::cluster;
  uint64_t id = uint64_t(device);
  const auto add = [&](int value, int bits) { id = id << bits | uint64_t(value); };
  add(int(call.function), 3), add(int(call.x_type), 2), add(int(call.y_type), 2), add(int(plan.tier), 3);
  add(lanes ? plan.lanes : 0, 6), add(lanes ? plan.rows_per_block : 0, 11), add(plan.values, 8), add(plan.vector, 4);
  add(cluster ? plan.split : 0, 5), add(plan.shelved(), 1), add(plan.apart, 1);
  return id;
}

Handle load(const Rows& call, int device) {
  const Gpu& gpu = device_info(device);
  const std::string code =
      cubin(source_of(call.plan.tier), defines_of(call.function, call.x_type, call.y_type, call.plan), gpu.compute);
  Handle module, function;
  check(driver().module_load(&module, code.data()), "cuModuleLoadData");
  check(driver().module_function(&function, module, "onepass_kernel"), "cuModuleGetFunction");
  if (call.plan.tier == Tier::cluster && call.plan.split > kPortableCluster)
    check(driver().function_set(function, kNonPortableCluster, 1), "cuFuncSetAttribute");
  int declared;
  check(driver().function_get(&declared, kSharedStatic, function), "cuFuncGetAttribute");
  check(driver().function_set(function, kSharedDynamic, gpu.shared - declared), "cuFuncSetAttribute");
  return function;
}

Handle kernel(const Rows& call, int device) {
  static std::shared_mutex mutex;
  static std::unordered_map<uint64_t, Handle> kernels;
  const uint64_t id = identity(call, device);
  {
    std::shared_lock lock(mutex);
    if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  }
  std::unique_lock lock(mutex);
  if (const auto found = kernels.find(id); found != kernels.end()) return found->second;
  return kernels.emplace(id, load(call, device)).first->second;
}

// Bytes of the piece of memory that a tile of the tier flat takes in shared memory.
int64_t tile_bytes(const CudaPlan& plan, int64_t n, int size) {
  return (plan.group() * n * size + 2 * 16 - 1) / 16 * 16;
}

// Are tiles of the tier flat written apart from where they were read? So they are where the two begin at different
// bytes of a vector, or elements differ in size.
bool written_apart(const Rows& call) {
  const bool reduces = call.function == Function::logsumexp || call.function == Function::state;
  return !reduces && (size_of(call.x_type) != size_of(call.y_type) || (uint64_t(call.x) ^ uint64_t(call.y)) % 16);
}

}  // namespace

int64_t grid_blocks(const CudaPlan& plan, int64_t rows, const Gpu& gpu) { return plan.grid(rows, gpu.multiprocessors); }

int64_t parts_bytes(const Rows& call, const Gpu& gpu) {
  const int message = call.y_type == DType::float64 ? 48 : 16;
  return call.plan.tier == Tier::grid ? 2 * grid_blocks(call.plan, call.rows, gpu) * message : 0;
}

int64_t shared_bytes(const Rows& call) {
  const CudaPlan& plan = call.plan;
  if (plan.tier == Tier::flat) {
    return tile_bytes(plan, call.n, size_of(call.x_type)) +
           (written_apart(call) ? tile_bytes(plan, call.n, size_of(call.y_type)) : 0);
  }
  return int64_t(plan.shelf) * plan.lanes * plan.vector * size_of(call.x_type);
}

const char* source_of(Tier tier) {
  return tier == Tier::stream ? "stream.cu"
         : tier == Tier::flat ? "flat.cu"
         : tier == Tier::grid ? "grid.cu"
                              : "rows.cu";
}

std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan) {
  const auto define = [](const char* name, const std::string& value) { return std::string("-D") + name + "=" + value; };
  const bool lanes = plan.tier == Tier::warp || plan.tier == Tier::flat;
  return {define("IN", type_name(x)),
          define("OUT", type_name(y)),
          define("FUNCTION", macro_name(function)),
          define("LANES", std::to_string(lanes ? plan.lanes : 0)),
          define("ROWS", std::to_string(plan.rows_per_block)),
          define("SLOTS", std::to_string(plan.slots())),
          define("VECTOR", std::to_string(plan.vector)),
          define("CLUSTER", std::to_string(plan.tier == Tier::cluster ? plan.split : 1)),
          define("SHELVED", plan.shelved() ? "1" : "0"),
          define("APART", plan.apart ? "1" : "0")};
}

void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device) {
  enter_context(device);
  kernel({function, x, y, nullptr, nullptr, 0, 0, 0, 0, plan, nullptr}, device);
}

bool launch(const Rows& call, int device, void* stream) {
  enter_context(device);
  const CudaPlan& plan = call.plan;
  const Gpu& gpu = device_info(device);
  const Handle loaded = kernel(call, device);
  Rows copy = call;
  int tile = int(plan.group()), apart = written_apart(call) ? int(tile_bytes(plan, call.n, size_of(call.x_type))) : 0;
  int split = plan.split, shelf = plan.shelf;
  void* arguments[11] = {&copy.x, &copy.y, &copy.rows, &copy.n, &copy.x_stride, &copy.y_stride};
  if (plan.tier == Tier::warp || plan.tier == Tier::block || plan.tier == Tier::cluster) arguments[6] = &shelf;
  if (plan.tier == Tier::flat) arguments[6] = &tile, arguments[7] = &apart;
  int together = 0, extra = 0;
  if (plan.tier == Tier::grid) {
    together = int(grid_blocks(plan, call.rows, gpu) / split), extra = int(plan.extra(call.n));
    arguments[6] = &split, arguments[7] = &together, arguments[8] = &shelf, arguments[9] = &extra;
    arguments[10] = &copy.parts;
  }
  LaunchConfig config = {};
  LaunchAttribute attribute = {};
  config.grid_x = unsigned(plan.grid(call.rows));
  config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
  config.block_x = unsigned(plan.threads());
  config.shared_bytes = unsigned(shared_bytes(call));
  config.stream = static_cast<Handle>(stream);
  config.attributes = &attribute;
  if (plan.tier == Tier::cluster) {
    attribute.id = kClusterDimension;
    attribute.cluster[0] = unsigned(split), attribute.cluster[1] = attribute.cluster[2] = 1;
    config.attribute_count = 1;
  } else if (plan.tier == Tier::grid) {
    attribute.id = kCooperative;
    attribute.cooperative = 1;
    config.attribute_count = 1;
    config.grid_x = unsigned(grid_blocks(plan, call.rows, gpu));
  }
  const Result result = driver().launch(&config, loaded, arguments, nullptr);
  if (plan.tier == Tier::grid && (result == kTooLarge || result == kNotSupported)) return false;
  check(result, "cuLaunchKernelEx");
  return true;
}

}  // namespace onepass::cuda
