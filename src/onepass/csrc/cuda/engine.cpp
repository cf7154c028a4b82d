// engine.cpp: from a call on torch tensors to launches.
#include "engine.h"

#include <dlfcn.h>

#include "driver.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

// libtorch_cuda has it, and is loaded wherever a CUDA tensor exists; this library is not linked with it.
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

// Makes `device` the current one for the length of a call; costs one look-up where it is that already.
class Current {
 public:
  explicit Current(int device) {
    int32_t now;
    checked(aoti_torch_get_current_device_index(&now));
    if (now != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

void run_rows(const Call& call, int device, const CudaPlan* forced) {
  const Layout& layout = call.layout;
  const Phase phase(call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), layout, call.reduces());
  Rows rows = {call.function, call.x_type,           call.y_type,           call.x, call.y, layout.rows,
               layout.n,      layout.row_x_stride(), layout.row_y_stride(), {}};
  const Gpu& gpu = device_info(device);
  if (forced) {
    rows.plan = *forced;
    if (forced->vector > phase.widest) {
      fail("a vector of " + std::to_string(forced->vector) + " elements: the addresses or strides of this call allow " +
           std::to_string(phase.widest));
    }
    if (forced->cluster > most_cluster(gpu)) {
      fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " +
           std::to_string(forced->cluster));
    }
    if (forced->tier != Tier::stream && forced->lanes > most_threads(gpu.compute, forced->cluster))
      fail("up to " + std::to_string(most_threads(gpu.compute, forced->cluster)) + " threads a block here");
    const int64_t room = int64_t(forced->lanes) * forced->values * forced->cluster;
    const bool phased = phase.begins_within(forced->vector);
    const int64_t window = phased ? layout.n + forced->vector - 1 : layout.n;
    if (forced->tier != Tier::stream && room < window) {
      fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(window) +
           (phased ? " (a row may begin within a vector)" : ""));
    }
  } else {
    rows.plan = plan_cuda(layout, call.x_type, call.y_type, phase, gpu);
  }
  launch(rows, device, current_stream(device));
}

}  // namespace

CudaPlan checked_plan(const std::vector<int64_t>& numbers) {
  const auto power = [](int64_t v, int64_t most) { return v >= 1 && v <= most && (v & (v - 1)) == 0; };
  if (numbers.size() != 6) fail("a plan is (tier, lanes, rows a block, values, vector, cluster)");
  const int64_t tier = numbers[0], lanes = numbers[1], rows = numbers[2], values = numbers[3], vector = numbers[4];
  const int64_t cluster = numbers[5];
  if (tier < 0 || tier > 3) {
    fail("tier is 0 (warp), 1 (block), 2 (cluster) or 3 (stream), got " + std::to_string(tier));
  }
  if (!power(vector, 8) || values < vector || values > 64 || values % vector)
    fail("vector is a power of two up to 8, values a multiple of it up to 64");
  if (!power(cluster, 16) || (Tier(tier) == Tier::cluster) != (cluster > 1))
    fail("cluster is a power of two: 2 to 16 in the cluster tier, 1 in the others");
  if (Tier(tier) == Tier::warp) {
    if (!power(lanes, 32) || !power(rows, 1024) || lanes * rows > 1024 || lanes * rows < 32)
      fail("the warp tier has a power of two of lanes up to 32, and 32 to 1024 threads");
  } else if (lanes % 32 || lanes < 32 || lanes > 1024 || rows != 1) {
    fail("the block, cluster and stream tiers have one row a block and a multiple of 32 threads up to 1024");
  }
  return {Tier(tier), int(lanes), int(rows), int(values), int(vector), int(cluster)};
}

void run(const Call& call, const Tensor& input, const Tensor& out, const bool* reduced, bool keepdim,
         const CudaPlan* forced) {
  const int device = input.get_device_index();
  const Current current(device);
  if (call.layout.view == View::rows) return run_rows(call, device, forced);

  // The gather: outer dims first, then the reduced ones, contiguous.
  std::vector<int64_t> sizes, x_strides, y_sizes, y_strides;
  const int rank = int(input.dim()), planes = call.function == Function::state;
  if (planes) {  // the maxima and the sums, before all other dims
    y_sizes.push_back(2);
    y_strides.push_back(out.stride(0));
  }
  for (const bool pass : {false, true}) {
    for (int i = 0, at = planes; i < rank; ++i) {
      const bool kept = !call.reduces() || !reduced[i] || keepdim;
      if (reduced[i] == pass) {
        sizes.push_back(input.size(i));
        x_strides.push_back(input.stride(i));
        if (kept) {
          y_sizes.push_back(out.size(at));
          y_strides.push_back(out.stride(at));
        }
      }
      at += kept;
    }
  }
  const Tensor x = empty_strided(sizes, contiguous_strides(sizes), call.x_type, input);
  checked(aoti_torch_copy_(x.get(), as_strided(input, sizes, x_strides).get(), 1));
  const Tensor y = empty_strided(y_sizes, contiguous_strides(y_sizes), call.y_type, input);
  Call gathered = call;
  gathered.x = x.const_data_ptr();
  gathered.y = y.mutable_data_ptr();
  gathered.layout.outer.count = gathered.layout.reduced.count = 0;
  gathered.layout.outer.insert({call.layout.rows, call.layout.n, call.reduces() ? 1 : call.layout.n});
  gathered.layout.reduced.insert({call.layout.n, 1, 1});
  gathered.layout.view = View::rows;
  run_rows(gathered, device, forced);
  checked(aoti_torch_copy_(as_strided(out, y_sizes, y_strides).get(), y.get(), 1));
}

}  // namespace onepass::cuda
