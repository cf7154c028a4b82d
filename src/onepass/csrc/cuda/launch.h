// launch.h: one launch of a CUDA kernel over rows of unit stride.
#pragma once

#include <string>
#include <vector>

#include "../plan.h"

namespace onepass::cuda {

struct Rows {
  Function function;
  DType x_type, y_type;
  const void* x;
  void* y;
  int64_t rows, n, x_stride, y_stride;  // strides in elements
  CudaPlan plan;
  void* parts;  // the tier grid: room for what blocks tell each other, `parts_bytes` of it
};

int64_t parts_bytes(const Rows& call, const Gpu& gpu);

// Blocks of the tier grid that take part: as many groups of `split` as there are rows and multiprocessors for.
int64_t grid_blocks(const CudaPlan& plan, int64_t rows, const Gpu& gpu);

// Shared memory of a block beyond what its kernel declares.
int64_t shared_bytes(const Rows& call);

// The source file and the defines that make the kernel of a plan.
const char* source_of(Tier tier);
std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan);

// Compiles or loads the kernel of a plan on `device`, where this process has not got it yet.
void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device);

// Compiles or loads the kernel where this process has not got it yet, then launches it on `stream` of `device`. False
// where the driver refuses a cooperative launch.
bool launch(const Rows& call, int device, void* stream);

}  // namespace onepass::cuda
