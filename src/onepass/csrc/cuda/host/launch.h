// launch.h: one launch of a CUDA kernel, and those over rows of unit stride.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../core/problem.h"
#include "cuda_driver.h"

namespace onepass::cuda {

// All of a launch but its addresses and its stream.
struct Launch {
  Handle kernel;
  unsigned blocks, groups;     // blocks of a group, of which the tiers of the whole chip have several
  int cluster;                 // blocks of a cluster, 0 where there are none
  unsigned threads;            // of a block
  unsigned shared;             // bytes of shared memory of a block beyond what its kernel declares
  std::array<int, 3> numbers;  // that the kernel takes after the strides, if its tier has any
  int64_t parts;               // bytes of the room for what blocks tell each other, which are launched cooperatively

  bool cooperative() const { return parts > 0; }
};

// A launch as the driver takes it, which points into itself.
struct Configured {
  LaunchConfig config;
  LaunchAttribute attribute;

  Configured(const Launch& made, void* stream)
      : config{made.blocks, made.groups, 1, made.threads, 1, 1, made.shared, static_cast<Handle>(stream), nullptr, 0} {
    if (!made.cluster && !made.cooperative()) return;
    attribute = {};
    attribute.id = made.cluster ? kClusterDimension : kCooperative;
    if (made.cluster) {
      attribute.cluster[0] = unsigned(made.cluster), attribute.cluster[1] = attribute.cluster[2] = 1;
    } else {
      attribute.cooperative = 1;
    }
    config.attributes = &attribute;
    config.attribute_count = 1;
  }
  Configured(const Configured&) = delete;
};

// What a kernel computes: a function, its gradient, or that from a gradient of the result which has one value a row.
enum class Pass { forward, backward, backward_broadcast };

// The source file and the defines that make the kernel of a plan, of elements of type `x` to results of type `y`.
const char* source_of(Tier tier);
const char* source_of(Pass pass, Function function, Tier tier);
std::vector<std::string> defines_of(Function function, DType x, DType y, const CudaPlan& plan,
                                    Pass pass = Pass::forward);

// A loaded kernel, compiled or read from disk where this process has not got it yet. The caller is in the context.
Handle kernel(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass = Pass::forward);

// Compiles or loads the kernel of a plan on `device`, where this process has not got it yet.
void prepare(Function function, DType x, DType y, const CudaPlan& plan, int device, Pass pass);

// Of what a block of the tier grid tells the others, as grid_sync.cuh has it.
constexpr int64_t message_bytes(DType x, DType y) { return x == DType::float64 || y == DType::float64 ? 48 : 16; }

// The launch of a call (of View::rows) by a plan. Compiles or loads the kernel where this process has not got it yet;
// throws where the plan takes more shared memory than there is.
Launch launch_by(const CudaPlan& plan, const Call& call, int device);

// The launch of a call by the plan it has; with `cooperative`, if the device takes cooperative launches. Those made
// lately by this thread are remembered.
Launch launch_of(const Call& call, int device, bool cooperative = true);

// Launches on `stream`, in the current context: with the kernel's arguments, or over rows. False where the driver
// refuses a cooperative launch.
bool launch(const Launch& made, void** arguments, void* stream);
bool launch(const Launch& made, const Call& call, void* parts, void* stream);

// Serves a call by the plan given, or by its own; where the driver refuses a cooperative launch, by the one that it has
// without. `by` makes of a plan what `start` launches, and `own` does of whether there are cooperative launches.
template <class By, class Own, class Start>
void serve(const CudaPlan* forced, By by, Own own, Start start) {
  if (forced) {
    if (!start(by(*forced))) throw std::runtime_error("onepass: the driver refuses a cooperative launch of this plan");
  } else if (!start(own(true))) {
    start(own(false));
  }
}

}  // namespace onepass::cuda
