// stream.h: the device and the stream that a call runs on, and memory for it.
#pragma once

#include <dlfcn.h>

#include <optional>

#include "../../core/stable_tensor.h"
#include "cuda_driver.h"

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

// Launches a call on the current stream of the device of `like`, where the blocks get room for what they tell each
// other. False where the driver refuses a cooperative launch.
template <class Made, class AnyCall>
bool launched(Made& made, const AnyCall& call, const Operand& like) {
  void* const stream = current_stream(like.device_index);
  if (!made.parts) return launch(made, call, nullptr, stream);
  const int64_t floats = made.parts / 4, unit = 1;
  const Owned parts = empty_strided(1, &floats, &unit, DType::float32, like);
  return launch(made, call, Operand(parts.get()).mutable_data(), stream);
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
