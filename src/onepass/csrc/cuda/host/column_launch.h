// column_launch.h: launches over rows that are not one piece of memory each, forward and backward.
#pragma once

#include "../../core/backward_layout.h"
#include "launch.h"
#include "../kernels/column_params.cuh"

namespace onepass::cuda {

// All of a launch but its addresses and its stream.
struct ColumnLaunch : Launch {
  Tiles tiles;
};

// The launch of a call by a plan that is given; throws where it cannot serve the call.
ColumnLaunch columns_by(const CudaPlan& plan, const Call& call, int device);
ColumnLaunch columns_by(const CudaPlan& plan, const BackwardCall& call, int device);

// By the plan it has; with `cooperative`, if the device takes cooperative launches. Those made lately by this thread
// are remembered.
ColumnLaunch columns_of(const Call& call, int device, bool cooperative = true);
ColumnLaunch columns_of(const BackwardCall& call, int device, bool cooperative = true);

// As those of launch.h. The address of the room for parts goes into `made`, which is the caller's own.
bool launch(ColumnLaunch& made, const Call& call, void* parts, void* stream);
bool launch(ColumnLaunch& made, const BackwardCall& call, void* parts, void* stream);

// Serves a call whose dims fit into tiles. `start` launches a ColumnLaunch.
template <class AnyCall, class Start>
void run_columns(const AnyCall& call, int device, const CudaPlan* forced, Start start) {
  serve(
      forced, [&](const CudaPlan& plan) { return columns_by(plan, call, device); },
      [&](bool cooperative) { return columns_of(call, device, cooperative); }, start);
}

}  // namespace onepass::cuda
