// gallery.cpp: the gallery's CUDA kernels for ctypes: compiled, loaded, launched. Each function returns 0, or 1 with
// the reason in `text`.
#include <sstream>

#include "../cuda/host/cuda_driver.h"
#include "c_api.h"

namespace {

using namespace onepass;

std::vector<std::string> lines_of(const char* text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

// Compiles `source`, a file of the gallery, with `options` (one a line), and stores the loaded function `name` in
// `kernel`.
ONEPASS_API int onepass_kernel_load(const char* source, const char* name, const char* options, int device,
                                    void** kernel, char* text, int64_t size) {
  return return_text(text, size, [&] {
    cuda::enter_context(device);
    const std::string code = cuda::cubin(source, lines_of(options), cuda::device_info(device).arch);
    cuda::Handle module, function;
    cuda::check(cuda::driver().module_load(&module, code.data()), "cuModuleLoadData");
    cuda::check(cuda::driver().module_function(&function, module, name), "cuModuleGetFunction");
    *kernel = function;
    return std::string();
  });
}

// Launches `kernel` on `stream` with the arguments that `arguments` points to.
ONEPASS_API int onepass_kernel_launch(void* kernel, unsigned blocks, unsigned threads, void* stream, void** arguments,
                                      char* text, int64_t size) {
  return return_text(text, size, [&] {
    cuda::LaunchConfig config = {};
    config.grid_x = blocks;
    config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
    config.block_x = threads;
    config.stream = static_cast<cuda::Handle>(stream);
    cuda::check(cuda::driver().launch(&config, static_cast<cuda::Handle>(kernel), arguments, nullptr),
                "cuLaunchKernelEx");
    return std::string();
  });
}

// Compiles `source` with `options` for sm_<arch> into the file `path`.
ONEPASS_API int onepass_kernel_compile(const char* source, const char* options, int arch, const char* path, char* text,
                                       int64_t size) {
  return return_text(text, size, [&] { return write_file(cuda::cubin(source, lines_of(options), arch), path); });
}
