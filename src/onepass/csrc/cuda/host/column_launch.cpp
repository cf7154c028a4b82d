// column_launch.cpp: launches over columns in place, forward and backward.
#include "column_launch.h"

#include <map>
#include <mutex>
#include <tuple>

#include "../../plan/columns.h"
#include "../../core/batch_invariant.h"
#include "launch_cache.h"

namespace onepass::cuda {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("onepass: " + why); }

// Blocks of a launch that run at a time. Known kernels are not asked of again.
int64_t resident(const Launch& made, const Gpu& gpu) {
  static std::mutex mutex;
  static std::map<std::tuple<Handle, unsigned, unsigned>, int64_t> known;
  const std::lock_guard lock(mutex);
  const auto [found, fresh] = known.try_emplace({made.kernel, made.threads, made.shared}, 0);
  if (fresh) {
    int count = 0;
    if (made.cluster) {
      const Configured as(made, nullptr);
      check(driver().active_clusters(&count, made.kernel, &as.config), "cuOccupancyMaxActiveClusters");
      found->second = int64_t(count) * made.cluster;
    } else {
      check(driver().active_blocks(&count, made.kernel, int(made.threads), made.shared),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor");
      found->second = int64_t(count) * gpu.multiprocessors;
    }
  }
  return found->second;
}

// Bytes of a number of a column, and of a message.
struct Sizes {
  int scalar;
  bool gradient;
  int64_t message;
};

Sizes sizes_of(const Call& call) {
  const int scalar = call.y_type == DType::float64 ? 8 : 4;
  return {scalar, false, message_bytes(call.x_type, call.y_type)};
}
Sizes sizes_of(const BackwardCall& call) {
  const int scalar = call.type == DType::float64 ? 8 : 4;
  return {scalar, true, message_bytes(call.type, call.dx_type)};
}

Handle kernel_of(const CudaPlan& plan, const Call& call, int device) {
  return kernel(call.function, call.x_type, call.y_type, plan, device);
}
Handle kernel_of(const CudaPlan& plan, const BackwardCall& call, int device) {
  return kernel(call.function, call.type, call.dx_type, plan, device,
                is_even(call) ? Pass::backward_broadcast : Pass::backward);
}

template <class AnyCall>
ColumnLaunch made_by(const CudaPlan& plan, const AnyCall& call, const ColumnPlanner& planner, int device) {
  const Gpu& gpu = planner.gpu;
  const Sizes sizes = sizes_of(call);
  ColumnLaunch made = {};
  Tiles& tiles = made.tiles = tiles_of(planner.view, plan);
  tiles.waiting = int(waiting_bytes(plan, planner.operands * plan.vector * planner.read));
  const int64_t shared = column_bytes(tiles, plan, sizes.scalar, sizes.gradient, planner.half),
                room = gpu.shared - kColumnStatic;
  if (shared > room) {
    refuse("a block may have " + std::to_string(room) + " bytes of shared memory here, the plan takes " +
           std::to_string(shared));
  }
  made.kernel = kernel_of(plan, call, device);
  made.blocks = unsigned(plan.split), made.groups = 1;
  made.threads = unsigned(plan.threads()), made.shared = unsigned(shared);
  const bool in_grid = plan.in_grid();
  if (!in_grid && plan.split > 1) made.cluster = plan.split;
  // As many groups of blocks as there are tiles; and where they wait for each other, or for what they fetched ahead, as
  // there are places for.
  const int64_t all = tiles.side * tiles.tall;
  const int64_t places = (in_grid || plan.ahead() ? resident(made, gpu) : CudaPlan::kMaxGrid) / plan.split;
  const int64_t groups = places < all ? places > 1 ? places : 1 : all;
  (in_grid ? made.groups : made.blocks) *= unsigned(groups);
  // Two messages of a block for each column; of the gradient of logsumexp, which merges nothing, none.
  if (in_grid && planner.merges) made.parts = 2 * groups * plan.split * tiles.pitch * sizes.message;
  return made;
}

thread_local Recent<ColumnKey, ColumnLaunch> recent;

template <class AnyCall>
ColumnLaunch forced(const CudaPlan& plan, const AnyCall& call, int device) {
  const Gpu& gpu = device_info(device);
  const ColumnView view = column_view(call);
  if (const std::string why = column_refusal(view, plan, gpu); !why.empty()) refuse(why);
  return made_by(plan, call, column_planner(view, gpu, call), device);
}

template <class AnyCall>
ColumnLaunch planned(const AnyCall& call, int device, bool cooperative) {
  const ColumnKey key(call, device, batch_invariant(), tables_version.load(std::memory_order_acquire));
  if (cooperative) {
    if (const ColumnLaunch* found = recent.find(key)) return *found;
  }
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  const ColumnView view = column_view(call);
  const ColumnPlanner planner = column_planner(view, gpu, call);
  const ColumnLaunch made = made_by(planner.plan(), call, planner, device);
  if (cooperative) recent.put(key, made);
  return made;
}

}  // namespace

ColumnLaunch columns_by(const CudaPlan& plan, const Call& call, int device) { return forced(plan, call, device); }
ColumnLaunch columns_by(const CudaPlan& plan, const BackwardCall& call, int device) {
  return forced(plan, call, device);
}
ColumnLaunch columns_of(const Call& call, int device, bool cooperative) { return planned(call, device, cooperative); }
ColumnLaunch columns_of(const BackwardCall& call, int device, bool cooperative) {
  return planned(call, device, cooperative);
}

bool launch(ColumnLaunch& made, const Call& call, void* parts, void* stream) {
  const void* x = call.x;
  void* y = call.y;
  made.tiles.messages = parts;
  void* arguments[] = {&x, &y, &made.tiles};
  return launch(made, arguments, stream);
}

bool launch(ColumnLaunch& made, const BackwardCall& call, void* parts, void* stream) {
  void* dx = call.dx;
  const void *saved = call.saved, *grad = call.grad, *lse = call.lse;
  made.tiles.messages = parts;
  void* arguments[] = {&dx, &saved, &grad, &lse, &made.tiles};
  return launch(made, arguments, stream);
}

}  // namespace onepass::cuda
