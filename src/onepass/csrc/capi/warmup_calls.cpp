// warmup_calls.cpp: which kernels the calls of losses and of segments may ask for: a plain C function for ctypes, as in
// warmup.cpp. Launches are made of calls such that those of any call, but for launch numbers, are those of one of them.
#include <array>
#include <set>
#include <vector>

#include "../cuda/host/launch.h"
#include "c_api.h"
#include "calls.h"

namespace {

using namespace onepass;

// With which element of a vector a tensor begins: the first where the allocator has it, another if it is a view.
constexpr int kFirsts[] = {0, 1, 2, 4};

// The kernels of launches, each once.
class Kernels {
 public:
  explicit Kernels(const Gpu& gpu) : run_(gpu) {}

  // Makes launches, and notes their kernels.
  template <class Make>
  void note(const Make& make) {
    run_.kernels.clear(), run_.launches.clear();
    make();
    for (const auto& [kind, plan] : run_.kernels) {
      const Numbers numbers = {int(kind.function),   int(kind.pass),        int(kind.in),
                               int(kind.out),        int(plan.tier),        plan.threads_per_row,
                               plan.rows_per_block,  plan.items_per_thread, plan.vec_size,
                               plan.blocks_per_row,  plan.smem_vecs,        int(plan.access),
                               int(kind.loss_parts), int(kind.loss_step),   int(kind.segment_parts),
                               int(kind.bias)};
      if (seen_.insert(numbers).second) add(kind, plan, numbers);
    }
  }
  std::string json() const { return json_.empty() ? "{}" : json_ + "}"; }

 private:
  using Numbers = std::array<int, 16>;
  void add(const cuda::KernelKind& kind, const CudaPlan& plan, const Numbers& numbers) {
    std::string name = cuda::kernel_name(kind, plan), list;
    if (!names_.insert(name).second) return;
    for (const int number : numbers) list += (list.empty() ? "" : ", ") + std::to_string(number);
    json_ += (json_.empty() ? "{\"" : ", \"") + name + "\": [" + list + "]";
  }

  cuda::DryRun run_;
  std::set<Numbers> seen_;
  std::set<std::string> names_;
  std::string json_;
};

// All short lengths, then those in steps of 1%, odd ones and multiples of the widest vector.
std::vector<int64_t> lengths_to_walk() {
  constexpr int64_t kEvery = 4224, kLongest = int64_t(1) << 30;
  std::vector<int64_t> lengths;
  for (int64_t n = 1; n <= kEvery; ++n) lengths.push_back(n);
  for (double n = kEvery; n < double(kLongest); n *= 1.01) {
    lengths.push_back(int64_t(n) | 1), lengths.push_back(int64_t(n) & ~7);
  }
  return lengths;
}

// Numbers of rows: one between each two at which fewer threads share a row, and the last ones that are so few that rows
// are cut into parts.
std::vector<int64_t> rows_to_walk(const Gpu& gpu) {
  std::vector<int64_t> rows = {1, 16, int64_t(1) << 24};
  for (int threads = 1; threads <= 512; threads *= 2) {
    const int64_t most = cuda::kResidentThreads * gpu.sm_count / threads;
    rows.push_back(most), rows.push_back(most - 1);
  }
  return rows;
}

void note_loss(const LossProblem& problem, Kernels* kernels) {
  if (!cuda::can_launch_loss(problem)) return;
  kernels->note([&] {
    cuda::make_loss_launch(problem, 0);
    if (problem.is_cross && !problem.is_backward()) cuda::start_loss_total(problem, {}, 0, nullptr);
  });
}
// The gradients that a call may ask for: of x, of y and of both.
void note_divergence(DivergenceProblem problem, Kernels* kernels) {
  if (!cuda::can_launch_divergence(problem)) return;
  void* const made = address_of(problem.type);
  for (const int of : {1, 2, 3}) {
    if (problem.is_backward()) problem.dx = of & 1 ? made : nullptr, problem.dy = of & 2 ? made : nullptr;
    kernels->note([&] { cuda::make_divergence_launch(problem, 0); });
    if (!problem.is_backward()) break;
  }
}

// A contiguous tensor (outer, n, inner) over the middle dim.
void note_rows(const Call& call, int64_t outer, int64_t n, int64_t inner, Kernels* kernels) {
  if (call.is_divergence()) {
    DivergenceProblem problem = divergence_problem(call);
    const int64_t slice = n * inner;
    problem.add_dim(outer, {slice, slice, slice, slice}), problem.add_dim(inner, {1, 1, 1, 1});
    problem.n = n;
    for (int64_t& step : problem.steps) step = inner;
    for (const int x : kFirsts) {
      for (const int apart : kFirsts) {
        problem.x = address_of(call.in, x), problem.y = address_of(call.in, x + apart);
        note_divergence(problem, kernels);
      }
    }
    return;
  }
  LossProblem problem = loss_problem(call);
  problem.add_dim(outer, n * inner, n * inner), problem.add_dim(inner, 1, 1);
  problem.n = n, problem.x_step = problem.dx_step = inner;
  for (const int first : kFirsts) {
    problem.x = address_of(call.in, first);
    for (const bool in_place : {false, true}) {  // the gradient
      if (call.backward) problem.dx = address_of(call.in, in_place ? first : 0);
      if (!in_place || (call.backward && first)) note_loss(problem, kernels);
    }
  }
}

// Segments of `mean` items, with `columns` places beside each.
void note_segments(const Call& call, int64_t segments, int64_t mean, int64_t columns, Kernels* kernels) {
  using P = SegmentProblem;
  const SegmentProblem all = segment_problem(call);
  // A bias has the type of x and lies as x does, or it has the accumulator's and may be the same for all items.
  const DType wide = call.in == DType::float64 ? DType::float64 : DType::float32;
  for (const bool broadcast : {false, true}) {
    if (broadcast && !all.has(P::kOfBias)) break;
    P problem = all;
    if (broadcast) problem.types[P::kOfBias] = wide;
    problem.items = segments * mean, problem.segments = segments, problem.columns = columns;
    DimOf<P::kTensors> each = {columns, {}};
    for (int t = 0; t < P::kTensors; ++t) {
      if (problem.has(t)) problem.steps[t] = columns, each.strides[t] = 1;
    }
    for (const bool repeats : {false, true}) {
      if (repeats && !broadcast) break;
      if (repeats) problem.steps[P::kOfBias] = 0;
      P call_of = problem;
      call_of.inner.insert(each);
      for (const int first : kFirsts) {  // of what is read; the result is fresh
        for (int t = 0; t < P::kTensors; ++t) {
          if (problem.has(t) && t != problem.result()) call_of.data[t] = address_of(problem.types[t], first);
        }
        if (cuda::can_launch_segments(call_of)) kernels->note([&] { cuda::make_segment_launch(call_of, 0); });
      }
    }
  }
}

std::string kernels_of(const Call& call, const Gpu& gpu, const std::vector<int64_t>& lengths, bool dims) {
  Kernels kernels(gpu);
  if (call.is_of_segments()) {
    std::vector<int64_t> means = lengths;
    for (int64_t mean = 1; lengths.empty() && mean <= int64_t(1) << 24; mean *= 2) means.push_back(mean);
    for (const int64_t mean : means) {
      for (int64_t segments = 1; segments <= int64_t(1) << 24; segments *= 8) {
        for (const int64_t columns : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256}) {
          note_segments(call, segments, mean, columns, &kernels);
        }
      }
    }
    return kernels.json();
  }
  for (const int64_t n : lengths.empty() ? lengths_to_walk() : lengths) {
    for (const int64_t rows : rows_to_walk(gpu)) note_rows(call, rows, n, 1, &kernels);
    if (!dims || n == 1) continue;
    for (const int64_t inner : {2, 3, 4, 6, 8, 1000, 1001, 1002, 1004}) {
      for (const int64_t rows : rows_to_walk(gpu)) note_rows(call, ceil_div(rows, inner), n, inner, &kernels);
    }
  }
  return kernels.json();
}

}  // namespace

// The kernels that the calls which `words` name (calls.h) may ask for, over the last dim of contiguous tensors, with
// `dims` over other dims too, as JSON: {name: its numbers}: function, pass and types as in launch.h, and those that the
// functions of warmup.cpp take. `lengths` are those of the rows, or the mean of the segments' (`count` of them; none:
// of any length). On `device`, or where it is negative on a full GPU of `arch`.
ONEPASS_API int onepass_call_kernels(const char* words, bool backward, int in_type, int out_type, int device, int arch,
                                     const int64_t* lengths, int64_t count, bool dims, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Gpu gpu = device < 0 ? typical(arch) : cuda::device_info(device);
    const Call call(words, backward, in_type, out_type);
    const std::string json = kernels_of(call, gpu, std::vector<int64_t>(lengths, lengths + count), dims);
    if (int64_t(json.size()) >= size) throw std::runtime_error("onepass: too many kernels");
    return json;
  });
}
