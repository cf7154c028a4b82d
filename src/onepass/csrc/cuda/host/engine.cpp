// engine.cpp: runs a problem on torch tensors: makes the launches, allocates their buffers and starts them on torch's
// current stream.
#include <dlfcn.h>

#include <optional>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"
#include "../../torch/gathered_rows.h"
#include "cuda_driver.h"

namespace onepass::cuda {

namespace {

// The function is in libtorch_cuda, which is loaded whenever a CUDA tensor exists. This library is not linked with it.
void* current_stream(int device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!symbol) fail("this torch has no CUDA (libtorch_cuda.so is not loaded)");
    return reinterpret_cast<Get>(symbol);
  }();
  void* stream = nullptr;
  if (get(device, &stream)) fail("no current CUDA stream for device " + std::to_string(device));
  return stream;
}

// Makes `device` the current one for its lifetime, and makes sure that the thread has a context. If both are the case
// already, this costs one call of the driver.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (in_context(device)) return;
    int32_t now;
    check_torch(aoti_torch_get_current_device_index(&now));
    if (now != device) guard_.emplace(device);
    enter_context(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

OwnedTensor empty_messages(const Launch& launch, const TensorRef& like) {
  const int64_t words = launch.message_bytes / 4;
  return empty_contiguous(1, &words, DType::float32, like);
}

void launch_on_stream(const Problem& problem, const TensorRef& like, const CudaPlan* plan) {
  launch_with_fallback(problem, like.device_index, plan, [&](const Launch& launch) {
    void* const stream = current_stream(like.device_index);
    if (!launch.message_bytes) return start(launch, problem, nullptr, stream);
    const OwnedTensor messages = empty_messages(launch, like);
    return start(launch, problem, TensorRef(messages.get()).mutable_data(), stream);
  });
}

}  // namespace

void run(const Problem& problem, const TensorArgs& args, const CudaPlan* plan) {
  const DeviceScope scope(args.like().device_index);
  const bool in_place =
      problem.has_rows() || (!batch_invariant() && (!plan || plan->of_columns()) && fits_tiles(problem.layout));
  if (in_place) return launch_on_stream(problem, args.like(), plan);
  run_gathered(problem, args, [&](const Problem& rows) { launch_on_stream(rows, args.like(), plan); });
}

bool run_scored(const ScoredProblem& problem, const TensorRef& like) {
  if (!can_launch_scored(problem)) return false;
  const DeviceScope scope(like.device_index);
  void* const stream = current_stream(like.device_index);
  launch_scored(problem, like.device_index, nullptr, [&](const ScoredLaunch& launch) {
    if (!launch.message_bytes) return start_scored(launch, nullptr, stream);
    const OwnedTensor messages = empty_messages(launch, like);
    return start_scored(launch, TensorRef(messages.get()).mutable_data(), stream);
  });
  return true;
}

bool run_loss(const LossProblem& problem, const LossResult& loss, const TensorRef& like) {
  if (!can_launch_loss(problem)) return false;
  const int device = like.device_index;
  const DeviceScope scope(device);
  void* const stream = current_stream(device);
  const LossLaunch launch = make_loss_launch(problem, device);
  // The states come first in memory, then the sums.
  const int64_t sums = loss.result ? 4 * launch.sums() * size_of(problem.accumulator()) : 0;
  const int64_t words = (launch.state_bytes + sums) / 4;
  std::optional<OwnedTensor> memory;
  if (words) memory.emplace(empty_contiguous(1, &words, DType::float32, like));
  char* const states = memory ? static_cast<char*>(TensorRef(memory->get()).mutable_data()) : nullptr;
  void* const partials = sums ? states + launch.state_bytes : nullptr;
  start_loss(launch, states, partials, stream);
  if (!sums) return true;
  start_loss_total(problem, {partials, launch.sums(), loss.result, loss.total, loss.is_mean, problem.is_wide}, device,
                   stream);
  return true;
}

bool run_divergence(const DivergenceProblem& problem, const TensorRef& like) {
  if (!can_launch_divergence(problem)) return false;
  const int device = like.device_index;
  const DeviceScope scope(device);
  const LossLaunch launch = make_divergence_launch(problem, device);
  const int64_t words = launch.state_bytes / 4;
  std::optional<OwnedTensor> states;
  if (words) states.emplace(empty_contiguous(1, &words, DType::float32, like));
  start_loss(launch, states ? TensorRef(states->get()).mutable_data() : nullptr, nullptr, current_stream(device));
  return true;
}

bool run_segments(const SegmentProblem& problem, const TensorRef& like) {
  if (!can_launch_segments(problem)) return false;
  const int device = like.device_index;
  const DeviceScope scope(device);
  const SegmentLaunch launch = make_segment_launch(problem, device);
  const int64_t words = launch.message_bytes / 4;
  std::optional<OwnedTensor> messages;
  if (words) messages.emplace(empty_contiguous(1, &words, DType::float32, like));
  start_segments(launch, messages ? TensorRef(messages->get()).mutable_data() : nullptr, current_stream(device));
  return true;
}

void find_offsets(const TensorRef& index, const TensorRef& offsets) {
  const int device = index.device_index;
  const DeviceScope scope(device);
  const auto is_wide = [](const TensorRef& t) { return t.dtype_code() != aoti_torch_dtype_int32(); };
  start_segment_offsets(
      {index.data(), offsets.mutable_data(), index.numel(), offsets.numel() - 1, is_wide(index), is_wide(offsets)},
      device, current_stream(device));
}

void move_items(const TensorRef& from, const TensorRef& to, const TensorRef& local, const TensorRef* places,
                bool is_into_order) {
  const int device = from.device_index;
  const DeviceScope scope(device);
  const int64_t items = local.numel();
  if (items == 0) return;
  const int item_bytes = int(from.numel() / items) * size_of(from.dtype());
  start_item_moves(
      {from.data(), to.mutable_data(), local.data(), places ? places->data() : nullptr, items, is_into_order},
      item_bytes, device, current_stream(device));
}

void merge_states(const TensorRef& parts, const TensorRef& planes) {
  const int device = parts.device_index;
  const DeviceScope scope(device);
  const int64_t count = parts.sizes[0], rows = planes.numel() / 4;
  start_state_merge({parts.data(), planes.mutable_data(), rows, count}, parts.dtype(), device, current_stream(device));
}

}  // namespace onepass::cuda
