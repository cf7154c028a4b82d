// cuda_driver.cpp: open libcuda and ask it about devices.
#include "cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace onepass::cuda {

namespace {

template <class F>
void load_symbol(void* library, const char* symbol, F* function) {
  void* found = dlsym(library, symbol);
  if (!found)
    throw std::runtime_error(std::string("onepass: the CUDA driver has no ") + symbol + "; it is older than CUDA 11.8");
  *function = reinterpret_cast<F>(found);
}

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library) throw std::runtime_error("onepass: no CUDA driver here (libcuda.so.1 does not load)");
  Driver d;
  load_symbol(library, "cuInit", &d.init);
  load_symbol(library, "cuGetErrorString", &d.error_string);
  load_symbol(library, "cuDeviceGet", &d.device_get);
  load_symbol(library, "cuDeviceGetAttribute", &d.device_attribute);
  load_symbol(library, "cuDeviceGetName", &d.device_name);
  load_symbol(library, "cuCtxGetCurrent", &d.context_current);
  load_symbol(library, "cuCtxSetCurrent", &d.context_set);
  load_symbol(library, "cuDevicePrimaryCtxRetain", &d.primary_retain);
  load_symbol(library, "cuModuleLoadData", &d.module_load);
  load_symbol(library, "cuModuleGetFunction", &d.module_function);
  load_symbol(library, "cuFuncGetAttribute", &d.function_get);
  load_symbol(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", &d.active_blocks);
  load_symbol(library, "cuOccupancyMaxActiveClusters", &d.active_clusters);
  load_symbol(library, "cuFuncSetAttribute", &d.function_set);
  load_symbol(library, "cuLaunchKernelEx", &d.launch);
  const Result result = d.init(0);
  if (result) throw std::runtime_error("onepass: cuInit failed with error " + std::to_string(result));
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver opened = open_driver();
  return opened;
}

void check(Result result, const char* call) {
  if (!result) return;
  const char* words = nullptr;
  driver().error_string(result, &words);
  throw std::runtime_error(std::string("onepass: ") + call + " failed: " + (words ? words : "unknown CUDA error") +
                           " (" + std::to_string(result) + ")");
}

constexpr int kMaxDevices = 128;

const Gpu& device_info(int device) {
  static Gpu known[kMaxDevices];
  static char names[kMaxDevices][256];
  static std::once_flag asked[kMaxDevices];
  if (device < 0 || device >= kMaxDevices)
    throw std::runtime_error("onepass: no CUDA device " + std::to_string(device));
  std::call_once(asked[device], [device] {
    int handle, major, minor;
    check(driver().device_get(&handle, device), "cuDeviceGet");
    check(driver().device_attribute(&major, kMajor, handle), "cuDeviceGetAttribute");
    check(driver().device_attribute(&minor, kMinor, handle), "cuDeviceGetAttribute");
    Gpu& gpu = known[device];
    check(driver().device_attribute(&gpu.sm_count, kMultiprocessors, handle), "cuDeviceGetAttribute");
    check(driver().device_attribute(&gpu.shared, kSharedOfBlock, handle), "cuDeviceGetAttribute");
    check(driver().device_attribute(&gpu.cooperative, kCooperativeLaunch, handle), "cuDeviceGetAttribute");
    check(driver().device_name(names[device], sizeof names[device], handle), "cuDeviceGetName");
    gpu.name = names[device];
    gpu.arch = major * 10 + minor;
  });
  return known[device];
}

void enter_context(int device) {
  Handle current = nullptr;
  check(driver().context_current(&current), "cuCtxGetCurrent");
  if (current) return;
  int handle;
  check(driver().device_get(&handle, device), "cuDeviceGet");
  check(driver().primary_retain(&current, handle), "cuDevicePrimaryCtxRetain");
  check(driver().context_set(current), "cuCtxSetCurrent");
}

bool in_context(int device) {
  static std::atomic<Handle> primary[kMaxDevices];
  Handle current = nullptr;
  if (device < 0 || device >= kMaxDevices || driver().context_current(&current) || !current) return false;
  Handle known = primary[device].load(std::memory_order_relaxed);
  if (!known) {
    int handle;
    if (driver().device_get(&handle, device) || driver().primary_retain(&known, handle)) return false;
    primary[device].store(known, std::memory_order_relaxed);
  }
  return known == current;
}

}  // namespace onepass::cuda
