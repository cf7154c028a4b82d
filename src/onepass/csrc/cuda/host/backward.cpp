// backward.cpp: from a gradient's tensors to a launch.
#include "backward.h"

#include "../../plan/rows_backward.h"
#include "../../plan/column_view.h"
#include "../../core/batch_invariant.h"
#include "column_launch.h"
#include "stream.h"

namespace onepass::cuda {

namespace {

void check_forced(const CudaPlan& plan, const BackwardCall& call, const BackwardPhase& phase, const Gpu& gpu) {
  const int64_t n = call.layout.n;
  const bool begins_within = phase.begins_within(plan.vector);
  if (plan.of_columns()) fail("the tiers of columns are for rows that are not one piece of memory each");
  if (plan.tier == Tier::flat || (plan.shelf && plan.tier != Tier::grid))
    fail("gradients have the tiers warp, block, cluster, grid and stream, and a shelf in the tier grid alone");
  if (plan.tier == Tier::grid) {
    const int chunk = GridCut(plan, n).chunk;
    if (plan.slots() % chunk || plan.slots() > 4 * chunk || plan.shelf % chunk)
      fail("gradients in the tier grid keep up to " + std::to_string(4 * chunk) + " vectors a thread");
    if (plan.split > gpu.multiprocessors)
      fail("up to " + std::to_string(gpu.multiprocessors) + " blocks a row here, got " + std::to_string(plan.split));
  }
  if (call.function == Function::logsumexp && plan.tier != Tier::warp && plan.tier != Tier::stream)
    fail("the gradient of logsumexp has the tiers warp and stream, which takes pieces of rows");
  if (plan.tier == Tier::stream && plan.lanes > 512) fail("the tier stream has up to 512 threads here");
  if (plan.vector > phase.widest && plan.edges != kApart) {
    fail("a vector of " + std::to_string(plan.vector) + " elements: the addresses or strides of this call allow " +
         std::to_string(phase.widest));
  }
  if (plan.edges == kWhole && (n % plan.vector || begins_within))
    fail("rows of whole vectors of " + std::to_string(plan.vector) + " elements, these are not");
  const bool resident = plan.tier != Tier::stream && plan.tier != Tier::grid;
  const int split = plan.tier == Tier::cluster ? plan.split : 1;
  if (split > most_cluster(gpu))
    fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " + std::to_string(split));
  if (resident && plan.threads() > most_threads(gpu.compute, split))
    fail("up to " + std::to_string(most_threads(gpu.compute, split)) + " threads a block here");
  const int64_t room = int64_t(plan.lanes) * plan.values * split;
  const int64_t window = begins_within && plan.edges != kApart ? n + plan.vector - 1 : n;
  if (resident && room < window)
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(window));
}

// Launches by a plan; false where the driver refuses a cooperative launch.
bool launch_by(const CudaPlan& plan, const BackwardCall& call, bool even, const Operand& like) {
  const int device = like.device_index;
  const Gpu& gpu = device_info(device);
  const Handle loaded =
      kernel(call.function, call.type, call.dx_type, plan, device, even ? Pass::backward_broadcast : Pass::backward);
  int64_t rows = call.layout.rows, n = call.layout.n, pieces = 1, strides[kBackwardTensors];
  for (int t = 0; t < kBackwardTensors; ++t) strides[t] = call.layout.outer.innermost().strides[t];
  void* dx = call.dx;
  const void *saved = call.saved, *grad = call.grad, *lse = call.lse;
  std::vector<void*> arguments = {&dx, &saved, &grad, &rows, &n, &strides[kDx], &strides[kSaved], &strides[kGrad]};
  LaunchConfig config = {unsigned(plan.grid(rows)),
                         1,
                         1,
                         unsigned(plan.threads()),
                         1,
                         1,
                         0,
                         static_cast<Handle>(current_stream(device)),
                         nullptr,
                         0};
  LaunchAttribute attribute = {};
  if (plan.tier == Tier::cluster) {
    attribute.id = kClusterDimension;
    attribute.cluster[0] = unsigned(plan.split), attribute.cluster[1] = attribute.cluster[2] = 1;
    config.attributes = &attribute;
    config.attribute_count = 1;
  } else if (call.lse) {
    if (plan.tier == Tier::stream) {
      pieces = ceil_div(n + plan.vector - 1, int64_t(plan.lanes) * plan.values);
      config.grid_x = unsigned(rows < CudaPlan::kMaxGrid / pieces ? rows * pieces : CudaPlan::kMaxGrid);
    }
    arguments.insert(arguments.end(), {&lse, &strides[kLse], &pieces});
  } else if (plan.tier == Tier::grid) {
    const GridCut cut(plan, n);
    // As many groups of blocks as there are rows and multiprocessors for, and two messages of each block.
    const int64_t blocks = plan.grid(rows, gpu.multiprocessors);
    const int64_t words = 2 * blocks * message_bytes(call.type, call.dx_type) / 4, unit = 1;
    const Owned parts = empty_strided(1, &words, &unit, DType::float32, like);
    void* messages = Operand(parts.get()).mutable_data();
    int places = plan.shelf / cut.chunk, wide = int(cut.wide), most = int(cut.most);
    arguments.insert(arguments.end(), {&places, &wide, &most, &messages});
    config.grid_x = unsigned(plan.split), config.grid_y = unsigned(blocks / plan.split);
    config.shared_bytes = unsigned(plan.shelf * plan.lanes * plan.vector * size_of(call.type) * (even ? 1 : 2));
    attribute.id = kCooperative;
    attribute.cooperative = 1;
    config.attributes = &attribute;
    config.attribute_count = 1;
    const Result result = driver().launch(&config, loaded, arguments.data(), nullptr);
    if (result == kTooLarge || result == kNotSupported) return false;
    return check(result, "cuLaunchKernelEx"), true;
  }
  check(driver().launch(&config, loaded, arguments.data(), nullptr), "cuLaunchKernelEx");
  return true;
}

void launch_rows(const BackwardCall& call, const Operand& like, const CudaPlan* forced) {
  Gpu gpu = device_info(like.device_index);
  const bool even = call.even();
  const BackwardPhase phase(call, even);
  const auto by = [&](const CudaPlan& plan) { return check_forced(plan, call, phase, gpu), plan; };
  const auto own = [&](bool cooperative) {
    gpu.cooperative = gpu.cooperative && cooperative;
    return BackwardPlanner(call, phase, gpu, batch_invariant()).plan();
  };
  serve(forced, by, own, [&](const CudaPlan& plan) { return launch_by(plan, call, even, like); });
}

// A tensor's dims as rows: outer dims first, then the reduced ones. `one_a_row`: of those the first element alone. (A
// view has as many dims as its tensor.)
struct Gathered {
  std::vector<int64_t> sizes, strides;

  Gathered(const BackwardTensors& tensors, int t, bool one_a_row) {
    const bool has_all = tensors.each[t]->rank == tensors.rank;
    for (const bool pass : {false, true}) {
      for (int i = 0; i < tensors.rank; ++i) {
        if (tensors.reduced[i] != pass || (pass && !has_all)) continue;
        sizes.push_back(pass && one_a_row ? 1 : tensors.sizes[i]);
        strides.push_back(tensors.strides[t][i]);
      }
    }
  }
  Tensor view(const Operand& of) const { return as_strided(shared(of), sizes, strides); }
  Tensor copied(const Operand& of, DType type) const {
    const Tensor made = empty_strided(sizes, contiguous_strides(sizes), type, shared(of));
    checked(aoti_torch_copy_(made.get(), view(of).get(), 1));
    return made;
  }
};

}  // namespace

void run_backward(const BackwardCall& call, const BackwardTensors& tensors, const CudaPlan* forced) {
  const Current current(tensors.each[kDx]->device_index);
  if (call.layout.view == View::rows && call.layout.outer.count <= 1)
    return launch_rows(call, *tensors.each[kDx], forced);
  if (!batch_invariant() && (!forced || forced->of_columns()) && fits_tiles(call.layout)) {
    return run_columns(call, tensors.each[kDx]->device_index, forced,
                       [&](ColumnLaunch made) { return launched(made, call, *tensors.each[kDx]); });
  }

  bool even = true;  // has the result's gradient one value a row?
  for (int i = 0; i < tensors.rank; ++i)
    even &= !tensors.reduced[i] || tensors.sizes[i] == 1 || tensors.strides[kGrad][i] == 0;
  const Gathered of_dx(tensors, kDx, false), of_grad(tensors, kGrad, even || call.lse);
  const Tensor saved = Gathered(tensors, kSaved, false).copied(*tensors.each[kSaved], call.saved_type());
  const Tensor grad = of_grad.copied(*tensors.each[kGrad], call.type);
  const Tensor dx =
      empty_strided(of_dx.sizes, contiguous_strides(of_dx.sizes), call.dx_type, shared(*tensors.each[kDx]));
  BackwardCall gathered = call;
  std::optional<Tensor> lse;
  if (call.lse) {
    lse = Gathered(tensors, kLse, true).copied(*tensors.each[kLse], call.type);
    gathered.lse = lse->const_data_ptr();
  }
  gathered.saved = saved.const_data_ptr();
  gathered.grad = grad.const_data_ptr();
  gathered.dx = dx.mutable_data_ptr();
  const int64_t n = call.layout.n;
  gathered.layout.outer.count = gathered.layout.reduced.count = 0;
  gathered.layout.outer.insert({call.layout.rows, {n, n, even ? 1 : n, call.lse ? 1 : 0}});
  gathered.layout.reduced.insert({n, {1, 1, even ? 0 : 1, 0}});
  gathered.layout.view = View::rows;
  launch_rows(gathered, *tensors.each[kDx], forced);
  checked(aoti_torch_copy_(of_dx.view(*tensors.each[kDx]).get(), dx.get(), 1));
}

}  // namespace onepass::cuda
