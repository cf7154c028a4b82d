// cuda_driver.cpp: opens libcuda and asks it about devices.
#include "cuda_driver.h"

#include <atomic>
#include <mutex>

namespace onepass::cuda {

namespace {

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library) throw std::runtime_error("onepass: no CUDA driver here (libcuda.so.1 does not load)");
  Driver d;
#define ONEPASS_LOAD(member, symbol, arguments) load_symbol(library, #symbol, &d.member, "the CUDA driver");
  ONEPASS_DRIVER_FUNCTIONS(ONEPASS_LOAD)
#undef ONEPASS_LOAD
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
  if (gpu_of_dry_run) return *gpu_of_dry_run;
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
