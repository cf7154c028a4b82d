// current.h: the device and the stream that a call runs on.
#pragma once

#include <dlfcn.h>

#include <optional>

#include "../tensors.h"
#include "driver.h"

namespace onepass::cuda {

// libtorch_cuda has it, and is loaded wherever a CUDA tensor exists; this library is not linked with it.
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

// Makes `device` the current one for the length of a call, and sees to it that the thread has a context; costs one
// look where all is so already.
class Current {
 public:
  explicit Current(int device) {
    if (in_context(device)) return;
    int32_t now;
    checked(aoti_torch_get_current_device_index(&now));
    if (now != device) guard_.emplace(device);
    enter_context(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace onepass::cuda
