// emulated.cpp: problems as the CUDA engine launches them, with a driver that runs the kernels' translations. For
// ctypes: functions give what went wrong, or "".
#include "../native/fake_driver.h"
#include "core/batch_invariant.h"
#include "host.h"
#include "plan/columns.h"
// Sources that take less time with this one than each by itself.
#include "cuda/host/launch.cpp"
#include "cuda/host/ranks.cpp"
#include "cuda/host/scored.cpp"
#include "host.cpp"
#include "plan/tables.cpp"

using emulator::said_by;
using emulator::way;

namespace {

// Makes of a source file, an architecture and defines the library of a kernel's translation; null where it fails.
const char* (*translate)(const char* words);

const emulator::Code& code_of(const std::string& words) {
  static std::map<std::string, const emulator::Code*> known;
  const emulator::Code*& code = known[words];
  if (!code) {
    const char* const file = translate(words.c_str());
    if (!file) throw std::runtime_error("no translation of " + words);
    code = &emulator::code_of(file);
  }
  return *code;
}

CudaPlan plan_of(const int* numbers) {
  return {Tier(numbers[0]), numbers[1], numbers[2], numbers[3],
          numbers[4],       numbers[5], numbers[6], VecAccess(numbers[7])};
}

// Calls `start` with a buffer for messages, which may have held anything before.
template <class Start>
bool start_with_messages(const Launch& launch, const Start& start) {
  std::vector<char> buffer(size_t(launch.message_bytes) + 16);
  std::mt19937 draw(way.seed);
  for (char& byte : buffer) byte = char(draw());
  char* const messages = buffer.data() + (16 - uint64_t(buffer.data()) % 16) % 16;
  way.ranges.push_back({messages, launch.message_bytes, true});
  return start(launch.message_bytes ? messages : nullptr);
}

// Launches as the engine does, by a plan that is given or by the problem's own.
void run(const Problem& problem, const CudaPlan* plan) {
  launch_with_fallback(problem, 0, plan, [&](const Launch& launch) {
    return start_with_messages(launch, [&](void* messages) { return start(launch, problem, messages, nullptr); });
  });
}
void run(const ScoredProblem& problem, const CudaPlan* plan) {
  if (!can_launch_scored(problem)) throw std::runtime_error("no kernel for this scored problem");
  launch_scored(problem, 0, plan, [&](const ScoredLaunch& launch) {
    return start_with_messages(launch, [&](void* messages) { return start_scored(launch, messages, nullptr); });
  });
}

// Starts the kernels of a loss, with memory for the states of rows in parts and, of a loss, for the sums of blocks.
void run(const LossLaunch& launch, const LossProblem* problem, const LossTotal& total) {
  const int64_t sums = total.result ? 4 * launch.sums() : 0, bytes = launch.state_bytes + 8 * sums;
  std::vector<double> memory(size_t(bytes / 8 + 2));
  char* const states = reinterpret_cast<char*>(memory.data());
  void* const partials = sums ? states + up_to(launch.state_bytes, 8) : nullptr;
  way.ranges.push_back({states, bytes + 8, true});
  start_loss(launch, states, partials, nullptr);
  if (!sums) return;
  LossTotal of = total;
  of.partials = partials, of.count = launch.sums();
  start_loss_total(*problem, of, 0, nullptr);
}

}  // namespace

// A launch, on the emulator.
Result onepass::cuda::take_launch(const LaunchConfig& config, Handle kernel, void** arguments) {
  emulator::launch(
      {config.grid_x, config.grid_y, config.block_x, cluster_of(config), config.shared_bytes, is_cooperative(config)},
      code_of(words_of(kernel)), arguments);
  return 0;
}

extern "C" {

void translate_by(const char* (*by)(const char*)) {
  translate = by;
  at_a_time = 1;  // so that few tiles are more than the chip takes at a time
}

void set_batch_invariant(bool value) { onepass::process_invariant = value; }

// `strides`: of each of the problem's tensors. `plan` may be null.
const char* solve(bool backward, int function, int in_type, int out_type, void* const* tensors, int rank,
                  const int64_t* sizes, const int64_t* strides, const bool* reduce, const int* plan) {
  const Function which = Function(function);
  const bool reduces = is_reduction(which);
  const int64_t* const each[] = {strides, strides + rank, strides + 2 * rank, strides + 3 * rank};
  const Problem problem =
      backward ? Problem::backward(make_backward_layout(rank, sizes, each, reduce, reduces), which, DType(in_type),
                                   DType(out_type), tensors[kDx], tensors[kSaved], tensors[kGrad], tensors[kLse])
               : Problem::forward(make_forward_layout(rank, sizes, each[kX], each[kY], reduce, reduces), which,
                                  DType(in_type), DType(out_type), tensors[kX], tensors[kY]);
  const CudaPlan given = plan ? plan_of(plan) : CudaPlan{};
  return said_by([&] { run(problem, plan ? &given : nullptr); });
}

// A scored problem. `strides`: of each of its tensors, null where it has none. `numbers`: factor, softcap, sink;
// `window`: the least and the most distance, and the offset. `plan` may be null.
const char* solve_scored(bool backward, int function, const int* types, void* const* tensors, void* const* ends,
                         int rank, const int64_t* sizes, const int64_t* const* strides, const bool* reduce,
                         const double* numbers, const int64_t* window, bool empty_is_zero, bool of_scores,
                         int bias_parts, const int* plan) {
  ScoredProblem problem = {};
  problem.function = Function(function), problem.direction = backward ? Direction::backward : Direction::forward;
  problem.in = DType(types[0]), problem.out = DType(types[1]), problem.bias_type = DType(types[2]);
  std::copy_n(tensors, int(kDistance), problem.data);
  std::copy_n(ends, int(kDistance), problem.storage_end);
  problem.factor = numbers[0], problem.softcap = numbers[1], problem.sink = numbers[2];
  problem.least = window[0], problem.most = window[1], problem.empty_is_zero = empty_is_zero;
  problem.of_scores = of_scores, problem.bias_parts = bias_parts;
  problem.lay_out(rank, sizes, strides, reduce, window[2]);
  const CudaPlan given = plan ? plan_of(plan) : CudaPlan{};
  return said_by([&] { run(problem, plan ? &given : nullptr); });
}

// A problem of losses. `tensors`: x, dx, index, weight, weight_sum, scale, terms, result, grads, total, grad_lse, loss
// and what its sum of weights goes to; null where there is none. `strides`: of x and dx. `numbers`: factor, softcap,
// smoothing, z_loss. `flags`: has_spread, has_entropy, is_cross, grads_per_row, is_mean.
const char* solve_loss(bool backward, int type, void* const* tensors, int rank, const int64_t* sizes,
                       const int64_t* const* strides, int dim, int64_t picks, int64_t ignore_index,
                       const double* numbers, const bool* flags, int device) {
  LossProblem problem = {};
  problem.direction = backward ? Direction::backward : Direction::forward;
  problem.type = DType(type);
  const auto step = [&](int tensor, int d) { return strides[tensor] ? strides[tensor][d] : 0; };
  for (int d = 0; d < rank; ++d) {
    if (d != dim) problem.add_dim(sizes[d], step(0, d), step(1, d));
  }
  problem.n = sizes[dim], problem.x_step = step(0, dim), problem.dx_step = backward ? step(1, dim) : 1;
  problem.x = tensors[0], problem.dx = tensors[1], problem.index = static_cast<const int64_t*>(tensors[2]);
  problem.picks = picks, problem.weight = tensors[3], problem.weight_sum = tensors[4], problem.scale = tensors[5];
  problem.terms = tensors[6], problem.result = tensors[7], problem.grads = tensors[8], problem.total = tensors[9];
  problem.grad_lse = tensors[10], problem.ignore_index = ignore_index, problem.is_wide = true;
  problem.factor = numbers[0], problem.softcap = numbers[1];
  problem.smoothing = numbers[2], problem.z_loss = numbers[3];
  problem.has_spread = flags[0], problem.has_entropy = flags[1], problem.is_cross = flags[2];
  problem.grads_per_row = flags[3];
  return said_by([&] {
    const LossTotal total = {nullptr, 0, tensors[11], tensors[12], flags[4], true};
    run(make_loss_launch(problem, device), &problem, total);
  });
}

// A problem of divergences. `kind`: 0 a cross-entropy, 1 a KL divergence, 2 a product. `tensors`: x, y, dx, dy, weight,
// terms, grads. `strides`: of the first four. `numbers`: factor, softcap, smoothing.
const char* solve_divergence(bool backward, int type, void* const* tensors, int rank, const int64_t* sizes,
                             const int64_t* const* strides, int dim, int kind, const double* numbers, int device) {
  DivergenceProblem problem = {};
  problem.direction = backward ? Direction::backward : Direction::forward;
  problem.type = DType(type), problem.is_kl = kind == 1, problem.is_product = kind == 2;
  for (int d = 0; d < rank; ++d) {
    int64_t by[DivergenceProblem::kTensors];
    for (int t = 0; t < DivergenceProblem::kTensors; ++t) by[t] = strides[t] ? strides[t][d] : 0;
    if (d != dim) problem.add_dim(sizes[d], by);
    for (int t = 0; d == dim && t < DivergenceProblem::kTensors; ++t) problem.steps[t] = strides[t] ? by[t] : 1;
  }
  problem.n = sizes[dim];
  problem.x = tensors[0], problem.y = tensors[1], problem.dx = tensors[2], problem.dy = tensors[3];
  problem.weight = tensors[4], problem.terms = tensors[5], problem.grads = tensors[6];
  problem.factor = numbers[0], problem.softcap = numbers[1], problem.smoothing = numbers[2];
  return said_by([&] { run(make_divergence_launch(problem, device), nullptr, {}); });
}

// A problem of segments. `tensors`, `types`, `strides`: x, bias, y, grad, dx; with state, y has the plane first.
const char* solve_segments(bool backward, int function, const int* types, void* const* tensors, int rank,
                           const int64_t* sizes, const int64_t* const* strides, int dim, int64_t segments,
                           const void* offsets, const void* order, bool wide, double factor, int device) {
  using P = SegmentProblem;
  P problem;
  problem.direction = backward ? Direction::backward : Direction::forward, problem.function = Function(function);
  const auto skipped = [&](int t) { return problem.function == Function::state && t == P::kOfY; };
  for (int t = 0; t < P::kTensors; ++t) {
    if (!tensors[t]) continue;
    problem.data[t] = tensors[t], problem.types[t] = DType(types[t]), problem.steps[t] = strides[t][dim + skipped(t)];
  }
  for (int d = 0; d < rank; ++d) {
    if (d == dim) continue;
    DimOf<P::kTensors> each = {sizes[d], {}};
    for (int t = 0; t < P::kTensors; ++t) {
      if (tensors[t]) each.strides[t] = strides[t][d + skipped(t)];
    }
    problem.inner.insert(each);
    problem.columns *= each.size;
  }
  problem.inner.merge();
  if (problem.function == Function::state) problem.plane = strides[P::kOfY][0];
  problem.items = sizes[dim], problem.segments = segments, problem.offsets = offsets, problem.order = order;
  problem.has_wide_indices = wide, problem.factor = factor;
  return said_by([&] {
    const SegmentLaunch launch = make_segment_launch(problem, device);
    start_with_messages(launch, [&](void* messages) {
      start_segments(launch, messages, nullptr);
      return true;
    });
  });
}

// Where the segments of a sorted index begin.
const char* find_offsets(const void* index, void* offsets, int64_t items, int64_t segments, bool wide_index,
                         bool wide_offsets, int device) {
  return said_by([&] {
    start_segment_offsets({index, offsets, items, segments, wide_index, wide_offsets}, device, nullptr);
  });
}

// A pass of items that move to an order, or back.
const char* move_items(const void* from, void* to, const void* local, const void* places, int64_t items, int bytes,
                       bool is_into_order, int device) {
  return said_by([&] { start_item_moves({from, to, local, places, items, is_into_order}, bytes, device, nullptr); });
}

// A problem of contiguous rows that are split over ranks, each of which is a process. `memory`: of each rank.
const char* solve_over_ranks(bool backward, int function, int in_type, int out_type, void* const* tensors, int64_t rows,
                             int64_t n, void* memory, void* fault, int64_t patience, int ranks, int rank) {
  const RankLinks links = {
      static_cast<char**>(memory), static_cast<int*>(fault), uint64_t(patience), ranks, rank, 0, 0, 0};
  constexpr int kSmall = 4;  // the device
  way.others = true;
  return said_by([&] {
    start_over_ranks(Function(function), backward, DType(in_type), DType(out_type), tensors, rows, n, links, kSmall,
                     nullptr);
  });
}
}
