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

// Everything that tells two kernels of one process apart, in 64 bits. The number of threads does so in the warp tier
// only.
uint64_t identity(const Rows& call, int device) {
  const CudaPlan& plan = call.plan;
  uint64_t id = uint64_t(device);
  for (const int part : {int(call.function), int(call.x_type), int(call.y_type), int(plan.tier)}) id = id * 8 + part;
  for (const int part : {plan.tier == Tier::warp ? plan.lanes : 0, plan.rows_per_block, plan.values, plan.cluster})
    id = id * 2048 + part;
  return id * 32 + plan.vector;
}

Handle load(const Rows& call, int device) {
  const std::string code =
      cubin(source_of(call.plan.tier), defines_of(call.function, call.x_type, call.y_type, call.plan),
            device_info(device).compute);
  Handle module, function;
  check(driver().module_load(&module, code.data()), "cuModuleLoadData");
  check(driver().module_function(&function, module, "onepass_kernel"), "cuModuleGetFunction");
  if (call.plan.cluster > kPortableCluster)
    check(driver().function_set(function, kNonPortableCluster, 1), "cuFuncSetAttribute");
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
  Handle& function = kernels[id];
  if (!function) {
    try {
      function = load(call, device);
    } catch (...) {
      kernels.erase(id);
      throw;
    }
  }
  return function;
}

}  // namespace

const char* source_of(Tier tier) { return tier == Tier::stream ? "stream.cu" : "rows.cu"; }

std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan) {
  const auto define = [](const char* name, const std::string& value) { return std::string("-D") + name + "=" + value; };
  return {define("IN", type_name(x)),
          define("OUT", type_name(y)),
          define("FUNCTION", macro_name(function)),
          define("LANES", std::to_string(plan.tier == Tier::warp ? plan.lanes : 0)),
          define("ROWS", std::to_string(plan.rows_per_block)),
          define("SLOTS", std::to_string(plan.slots())),
          define("VECTOR", std::to_string(plan.vector)),
          define("CLUSTER", std::to_string(plan.cluster))};
}

void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device) {
  enter_context(device);
  kernel({function, x, y, nullptr, nullptr, 0, 0, 0, 0, plan}, device);
}

void launch(const Rows& call, int device, void* stream) {
  enter_context(device);
  const Handle function = kernel(call, device);
  Rows copy = call;
  void* arguments[] = {&copy.x, &copy.y, &copy.rows, &copy.n, &copy.x_stride, &copy.y_stride};
  LaunchConfig config = {};
  config.grid_x = unsigned(call.plan.grid(call.rows));
  config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
  config.block_x = unsigned(call.plan.threads());
  config.stream = static_cast<Handle>(stream);
  LaunchAttribute cluster = {kClusterDimension, 0, {{unsigned(call.plan.cluster), 1, 1}}};
  if (call.plan.cluster > 1) {
    config.attributes = &cluster;
    config.attribute_count = 1;
  }
  check(driver().launch(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace onepass::cuda
