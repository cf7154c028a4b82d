// columns.cpp: launches over columns in place, forward and backward.
#include "columns.h"

#include <map>
#include <mutex>
#include <optional>

#include "../column_plan.h"
#include "../tensors.h"
#include "current.h"
#include "driver.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

// Blocks of a launch that run at a time. Known kernels are not asked of again.
int64_t resident(const LaunchConfig& config, Handle kernel, int split, const Gpu& gpu) {
  static std::mutex mutex;
  static std::map<std::pair<Handle, unsigned>, int64_t> known;
  const std::lock_guard lock(mutex);
  const auto [found, fresh] = known.try_emplace({kernel, config.shared_bytes}, 0);
  if (fresh) {
    int count = 0;
    if (split > 1) {
      check(driver().active_clusters(&count, kernel, &config), "cuOccupancyMaxActiveClusters");
      found->second = int64_t(count) * split;
    } else {
      check(driver().active_blocks(&count, kernel, int(config.block_x), config.shared_bytes),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor");
      found->second = int64_t(count) * gpu.multiprocessors;
    }
  }
  return found->second > split ? found->second : split;
}

// What a thread's part of a column, what is made of a whole one, a vector of all operands, and a message take: bytes.
struct Sizes {
  int part, whole, vector, message;
};

// False where the driver refuses a cooperative launch.
bool launch(const CudaPlan& plan, Handle loaded, Tiles tiles, const Sizes& sizes, std::vector<void*> arguments,
            const Gpu& gpu, const Operand& like) {
  tiles.waiting = int(waiting_bytes(plan, sizes.vector));
  const int64_t shared = column_bytes(tiles, plan, sizes.part, sizes.whole), room = gpu.shared - kStaticShared;
  if (shared > room) {
    fail("a block may have " + std::to_string(room) + " bytes of shared memory here, the plan takes " +
         std::to_string(shared));
  }
  LaunchAttribute attribute = {};
  LaunchConfig config = {unsigned(plan.split),
                         1,
                         1,
                         unsigned(plan.threads()),
                         1,
                         1,
                         unsigned(shared),
                         static_cast<Handle>(current_stream(like.device_index)),
                         &attribute,
                         0};
  const int64_t all = tiles.side * tiles.tall;
  std::optional<Owned> messages;
  if (plan.in_grid()) {
    // As many groups of blocks as there are tiles and places for.
    int64_t groups = resident(config, loaded, 1, gpu) / plan.split;
    groups = groups < all ? groups > 1 ? groups : 1 : all;
    const int64_t words = 2 * groups * plan.split * tiles.pitch * sizes.message / 4, unit = 1;
    messages.emplace(empty_strided(1, &words, &unit, DType::float32, like));
    tiles.messages = Operand(messages->get()).mutable_data();
    config.grid_y = unsigned(groups);
    attribute.id = kCooperative;
    attribute.cooperative = 1;
    config.attribute_count = 1;
  } else {
    if (plan.split > 1) {
      attribute.id = kClusterDimension;
      attribute.cluster[0] = unsigned(plan.split), attribute.cluster[1] = attribute.cluster[2] = 1;
      config.attribute_count = 1;
    }
    const int64_t groups = (plan.ahead() ? resident(config, loaded, plan.split, gpu) : CudaPlan::kMaxGrid) / plan.split;
    config.grid_x = unsigned((groups < all ? groups : all) * plan.split);
  }
  arguments.push_back(&tiles);
  const Result result = driver().launch(&config, loaded, arguments.data(), nullptr);
  if (plan.in_grid() && (result == kTooLarge || result == kNotSupported)) return false;
  return check(result, "cuLaunchKernelEx"), true;
}

// Launches by the plan given or by its own; where the driver refuses a cooperative launch, by one without. `gpu` is the
// planner's.
template <class Launch>
bool launched(const ColumnPlanner& planner, Gpu& gpu, const CudaPlan* forced, Launch launch) {
  if (forced) {
    if (const std::string why = column_refusal(planner.view, *forced, gpu); !why.empty()) fail(why);
    if (!launch(*forced)) fail("the driver refuses a cooperative launch of this plan");
    return true;
  }
  if (launch(planner.plan())) return true;
  gpu.cooperative = 0;
  return launch(planner.plan());
}

}  // namespace

bool run_columns(const Call& call, const Operand& like, const CudaPlan* forced) {
  const int device = like.device_index;
  Gpu gpu = device_info(device);
  const ColumnView view =
      column_view(call.layout, call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), call.reduces());
  if (!view.served) return false;
  const ColumnPlanner planner = column_planner(view, gpu, call.x_type, call.y_type, call.reduces());
  const void* x = call.x;
  void* y = call.y;
  const int scalar = call.y_type == DType::float64 ? 8 : 4;
  return launched(planner, gpu, forced, [&](const CudaPlan& plan) {
    const Sizes sizes = {2 * scalar, 3 * scalar, plan.vector * planner.read,
                         int(message_bytes(call.x_type, call.y_type))};
    const Handle loaded = kernel(call.function, call.x_type, call.y_type, plan, device);
    return launch(plan, loaded, tiles_of(view, plan), sizes, {&x, &y}, gpu, like);
  });
}

bool run_backward_columns(const BackwardCall& call, const Operand& like, const CudaPlan* forced) {
  const int device = like.device_index;
  Gpu gpu = device_info(device);
  const ColumnView view = column_view(call);
  if (!view.served) return false;
  const ColumnPlanner planner = column_planner(view, gpu, call);
  void* dx = call.dx;
  const void *saved = call.saved, *grad = call.grad, *lse = call.lse;
  const int scalar = call.type == DType::float64 ? 8 : 4;
  const Pass pass = is_even(call) ? Pass::backward_even : Pass::backward;
  return launched(planner, gpu, forced, [&](const CudaPlan& plan) {
    const Sizes sizes = {scalar, scalar, planner.operands * plan.vector * planner.read,
                         int(message_bytes(call.type, call.dx_type))};
    const Handle loaded = kernel(call.function, call.type, call.dx_type, plan, device, pass);
    return launch(plan, loaded, tiles_of(view, plan), sizes, {&dx, &saved, &grad, &lse}, gpu, like);
  });
}

}  // namespace onepass::cuda
