// stream.h: the device and the stream that a launch runs on.
#pragma once

#include <dlfcn.h>

#include <optional>

#include "../../core/stable_tensor.h"
#include "cuda_driver.h"

namespace onepass::cuda {

// The function is in libtorch_cuda, which is loaded wherever a CUDA tensor exists; this library is not linked with it.
inline void* current_stream(int device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!symbol) fail("this torch has no CUDA (libtorch_cuda.so is not loaded)");
    return reinterpret_cast<Get>(symbol);
  }();
  void* stream = nullptr;
  if (get(device, &stream)) fail("no current CUDA stream for device " + std::to_string(device));
  return stream;
}

// Makes `device` the current one for its lifetime, and sees to it that the thread has a context. Where both are so
// already, it costs one call of the driver.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (in_context(device)) return;
    int32_t now;
    check_torch(aoti_torch_get_current_device_index(&now));
    if (now != device) guard_.emplace(device);
    enter_context(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace onepass::cuda
