// launch.h: one launch of a CUDA kernel over rows of unit stride.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "../call.h"
#include "driver.h"

namespace onepass::cuda {

// All of a launch but its addresses and its stream.
struct Launch {
  Handle kernel;
  Tier tier;
  int cluster;                 // blocks of a cluster, 0 where there are none
  unsigned blocks, groups;     // blocks of a group, of which the tier grid has several
  unsigned threads;            // of a block
  unsigned shared;             // bytes of shared memory of a block beyond what its kernel declares
  std::array<int, 3> numbers;  // that the kernel takes after the strides, if its tier has any
  int64_t parts;               // the tier grid: bytes of the room for what blocks tell each other
};

// What a kernel computes: a function, its gradient, or that from a gradient of the result which has one value a row.
enum class Pass { forward, backward, backward_even };

// The source file and the defines that make the kernel of a plan, of elements of type `x` to results of type `y`.
const char* source_of(Tier tier);
const char* source_of(Pass pass, Function function, Tier tier);
std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan,
                                    Pass pass = Pass::forward);

// A loaded kernel, compiled or read from disk where this process has not got it yet. The caller is in the context.
Handle kernel(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass = Pass::forward);

// Compiles or loads the kernel of a plan on `device`, where this process has not got it yet.
void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass);

// Of what a block of the tier grid tells the others, as grid.cuh has it.
constexpr int64_t message_bytes(DType x, DType y) { return x == DType::float64 || y == DType::float64 ? 48 : 16; }

// The launch of a call (of View::rows) by a plan. Compiles or loads the kernel where this process has not got it yet;
// throws where the plan takes more shared memory than there is.
Launch launch_by(const CudaPlan& plan, const Call& call, int device);

// The launch of a call by the plan it has; with `cooperative`, if the device takes cooperative launches. Those made
// lately by this thread are remembered.
Launch launch_of(const Call& call, int device, bool cooperative = true);

// Launches on `stream`, in the current context. False where the driver refuses a cooperative launch.
bool launch(const Launch& made, const Call& call, void* parts, void* stream);

}  // namespace onepass::cuda
