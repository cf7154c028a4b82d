// A program without Python: loads the native core beside libtorch and calls an operator through the dispatcher, as a
// graph exported to C++ does. Prints the softmax of 1, 2, 3, 4 over its two rows.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdio>
#include <optional>
#include <vector>

int main(int, char** arguments) {
  if (!dlopen(arguments[1], RTLD_NOW)) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  float values[] = {1, 2, 3, 4};
  const int64_t sizes[] = {2, 2}, strides[] = {2, 1};
  AtenTensorHandle made;
  if (aoti_torch_create_tensor_from_blob(values, 2, sizes, strides, 0, aoti_torch_dtype_float32(),
                                         aoti_torch_device_type_cpu(), 0, &made)) {
    return 2;
  }
  const torch::stable::Tensor input(made);
  std::array<StableIValue, 3> stack{torch::stable::detail::from(input),
                                    torch::stable::detail::from(std::vector<int64_t>{-1}),
                                    torch::stable::detail::from(std::nullopt)};
  if (torch_call_dispatcher("onepass::softmax", "", stack.data(), TORCH_ABI_VERSION)) return 3;
  const auto result = torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
  const float* y = static_cast<const float*>(result.data_ptr());
  std::printf("%.6f %.6f %.6f %.6f\n", y[0], y[1], y[2], y[3]);
}
