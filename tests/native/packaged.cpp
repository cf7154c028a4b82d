// A program without Python: runs a graph that AOTInductor compiled, with the native core beside libtorch. Arguments:
// the native core, the package, rows, columns. The input counts 0, 0.1, 0.2... row by row; prints all results.
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

int main(int, char** arguments) try {
  if (!dlopen(arguments[1], RTLD_NOW)) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  const int64_t rows = std::atoi(arguments[3]), columns = std::atoi(arguments[4]);
  std::vector<float> values(rows * columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * float(i);
  for (const at::Tensor& result : model.run({at::from_blob(values.data(), {rows, columns})})) {
    const at::Tensor flat = result.contiguous();
    for (int64_t i = 0; i < flat.numel(); ++i) std::printf("%.6f\n", flat.data_ptr<float>()[i]);
  }
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 2;
}
