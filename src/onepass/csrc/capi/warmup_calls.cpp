// warmup_calls.cpp: which kernels the calls of losses, of segments and with scores may need: a plain C function for
// ctypes, as in warmup.cpp. It makes the launches of sample calls in a dry run. The samples are chosen so that every
// call has the same launches as one of them, except for launch numbers.
#include <array>
#include <set>
#include <vector>

#include "../cuda/host/launch.h"
#include "c_api.h"
#include "calls.h"
#include "walks.h"

namespace {

using namespace onepass;

// The kernels of launches, each once.
class Kernels {
 public:
  explicit Kernels(const Gpu& gpu) : run_(gpu) {}

  // Calls `make`, which makes launches, and notes their kernels. Returns the plan of the first one.
  template <class Make>
  const CudaPlan* note(const Make& make) {
    run_.kernels.clear(), run_.launches.clear();
    make();
    for (const auto& [kind, plan] : run_.kernels) {
      const Numbers numbers = {int(kind.function),   int(kind.pass),        int(kind.in),
                               int(kind.out),        int(plan.tier),        plan.threads_per_row,
                               plan.rows_per_block,  plan.items_per_thread, plan.vec_size,
                               plan.blocks_per_row,  plan.smem_vecs,        int(plan.access),
                               int(kind.loss_parts), int(kind.loss_step),   int(kind.segment_parts),
                               int(kind.bias),       int(kind.score_parts)};
      if (seen_.insert(numbers).second) add(kind, plan, numbers);
    }
    return &run_.kernels[0].plan;
  }
  std::string json() const { return json_.empty() ? "{}" : json_ + "}"; }

 private:
  using Numbers = std::array<int, 17>;
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

// Lengths for losses: all short ones, then in steps of 1%, each time an odd length and a multiple of the widest vector.
std::vector<int64_t> lengths_of_losses() {
  constexpr int64_t kLongest = int64_t(1) << 30;
  std::vector<int64_t> lengths;
  for (int64_t n = 1; n <= kEveryWalked; ++n) lengths.push_back(n);
  for (double n = kEveryWalked; n < double(kLongest); n *= 1.01) {
    lengths.push_back(int64_t(n) | 1), lengths.push_back(int64_t(n) & ~7);
  }
  return lengths;
}

// Numbers of rows for losses: one between each two limits at which fewer threads share a row, and the largest numbers
// at which rows are still cut into parts.
std::vector<int64_t> rows_of_losses(const Gpu& gpu) {
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
// In a gradient, the kernels for each result that a call may ask for: the gradient of x, of y, and of both.
void note_divergence(DivergenceProblem problem, Kernels* kernels) {
  if (!cuda::can_launch_divergence(problem)) return;
  void* const made = address_of(problem.type);
  for (const int of : {1, 2, 3}) {
    if (problem.is_backward()) problem.dx = of & 1 ? made : nullptr, problem.dy = of & 2 ? made : nullptr;
    kernels->note([&] { cuda::make_divergence_launch(problem, 0); });
    if (!problem.is_backward()) break;
  }
}

// Notes the kernels of a call over the middle dim of a contiguous tensor (outer, n, inner).
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
    for (const bool in_place : {false, true}) {  // where the gradient is written
      if (call.backward) problem.dx = address_of(call.in, in_place ? first : 0);
      if (!in_place || (call.backward && first)) note_loss(problem, kernels);
    }
  }
}

// Notes the kernels of segments of `mean` items, each with `columns` elements.
void note_segments(const Call& call, int64_t segments, int64_t mean, int64_t columns, Kernels* kernels) {
  using P = SegmentProblem;
  const SegmentProblem all = segment_problem(call);
  // A bias has the type and the layout of x, or it has the accumulator's type and may be the same for all items.
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

// Notes the kernels of scores over contiguous rows. A bias or a mask has an element for each score, or is broadcast
// along one of the two dims.
class ScoredRows {
 public:
  ScoredRows(const Call& call, Kernels* kernels) : call_(call), kernels_(kernels) {}

  void note(int64_t rows, int64_t n) {
    rows_ = rows, n_ = n;
    const ScoredProblem plain = scored_problem(call_);
    for (const bool scale_of_rows : {false, true}) {
      if (scale_of_rows && !call_.has("scale")) break;
      for (const bool sink_of_rows : {false, true}) {
        if (sink_of_rows && !call_.has("sink")) break;
        for (const DType bias : {plain.in, plain.accumulator()}) {
          if (bias != plain.in && !plain.has(kBias)) continue;
          ScoredProblem problem = plain;
          problem.bias_type = bias;
          if (scale_of_rows) problem.data[kScale] = address_of(problem.accumulator());
          if (sink_of_rows) problem.sink = -std::numeric_limits<double>::infinity();
          if (sink_of_rows && !call_.backward) problem.data[kSink] = address_of(problem.accumulator());
          note_views(problem, {int(bias), scale_of_rows, sink_of_rows});
        }
        if (call_.backward && call_.has("bias") && !is_reduction(plain.function) && !call_.has("lse"))
          note_bias_grads(plain, scale_of_rows);
      }
    }
  }

 private:
  // Kernels that also compute the gradient of a bias: in the bias's type, or in the type of the computation, whole or
  // in parts.
  void note_bias_grads(ScoredProblem problem, bool scale_of_rows) {
    const DType wide = problem.accumulator();
    if (scale_of_rows) problem.data[kScale] = address_of(wide);
    for (const auto& [type, parts] : {std::pair(problem.in, 1), {wide, 1}, {wide, 2}}) {
      problem.data[kBias] = address_of(type), problem.bias_type = type, problem.bias_parts = parts;
      note_views(problem, {int(type), scale_of_rows, 2 * parts});
    }
  }
  // Views that begin anywhere. The upstream gradient may begin at another element of a vector than the result.
  void note_views(ScoredProblem problem, std::vector<int> key) {
    const bool has_grads = problem.is_backward() && !is_reduction(problem.function);
    for (const int first : kFirsts) {
      problem.data[kInput] = address_of(problem.in, first);
      for (const bool in_place : {false, true}) {
        if (in_place && !first) break;
        problem.data[kResult] = address_of(problem.out, in_place ? first : 0);
        for (const int grad : kFirsts) {
          if (grad && !has_grads) break;
          if (has_grads) problem.data[kGradOf] = address_of(problem.in, grad);
          note_layouts(problem, key, {first, in_place, grad, int(n_ % 16)});
        }
      }
    }
  }
  // Kernels differ by the layouts of bias and mask as often as by plans. These layouts are the same for all lengths
  // whose rows begin and end at the same elements of vectors. So they are walked once for each plan of such lengths.
  void note_layouts(const ScoredProblem& problem, std::vector<int> key, std::initializer_list<int> more) {
    const CudaPlan* const plan = note_one(problem, -1, -1);
    if (!plan) return;
    key.insert(key.end(), more);
    for (const int number : {int(plan->tier), plan->threads_per_row, plan->rows_per_block, plan->items_per_thread,
                             plan->vec_size, plan->blocks_per_row, plan->smem_vecs, int(plan->access)})
      key.push_back(number);
    if (!seen_.insert(key).second) return;
    for (int bias_lacks = -1; bias_lacks < (problem.has(kBias) ? 2 : 0); ++bias_lacks) {
      for (int mask_lacks = -1; mask_lacks < (problem.has(kMask) ? 2 : 0); ++mask_lacks)
        note_one(problem, bias_lacks, mask_lacks);
    }
  }
  // `bias_lacks`, `mask_lacks`: the dim along which the tensor is broadcast, or -1.
  const CudaPlan* note_one(ScoredProblem problem, int bias_lacks, int mask_lacks) {
    const int64_t sizes[] = {rows_, n_}, all[] = {n_, 1}, of_rows[] = {1, 0}, broadcast[][2] = {{0, 1}, {n_, 0}};
    const bool reduce[] = {false, true};
    const auto beside = [&](int lacks) { return lacks < 0 ? all : broadcast[lacks]; };
    const int64_t* strides[kDistance];
    for (int t = 0; t < kDistance; ++t) {
      const bool is_of_rows = t == kScale || t == kSink || t == kAlibi || t == kRowLse;
      strides[t] = t == kBias ? beside(bias_lacks) : t == kMask ? beside(mask_lacks) : is_of_rows ? of_rows : all;
    }
    if (is_reduction(problem.function)) strides[problem.is_backward() ? kGradOf : kResult] = of_rows;
    problem.lay_out(2, sizes, strides, reduce, {});
    if (!cuda::can_launch_scored(problem)) return nullptr;
    return kernels_->note([&] { cuda::make_scored_launch(problem, 0, nullptr, true); });
  }

  const Call& call_;
  Kernels* const kernels_;
  int64_t rows_ = 0, n_ = 0;
  std::set<std::vector<int>> seen_;
};

std::string kernels_of(const Call& call, const Gpu& gpu, const std::vector<int64_t>& lengths, bool dims) {
  Kernels kernels(gpu);
  if (call.is_of_segments()) {
    Call in_order = call;  // for items that have been moved
    in_order.options.erase("order");
    std::vector<int64_t> means = lengths;
    for (int64_t mean = 1; lengths.empty() && mean <= int64_t(1) << 24; mean *= 2) means.push_back(mean);
    for (const int64_t mean : means) {
      for (int64_t segments = 1; segments <= int64_t(1) << 24; segments *= 8) {
        for (const int64_t columns : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256}) {
          note_segments(call, segments, mean, columns, &kernels);
          if (call.has("order")) note_segments(in_order, segments, mean, columns, &kernels);
        }
      }
    }
    if (!call.backward) {  // the kernels that find offsets, or move items into their order
      if (!call.has("order")) kernels.note([&] { cuda::start_segment_offsets({}, 0, nullptr); });
      for (const int bytes : {2, 4, 8})
        if (call.has("order")) kernels.note([&] { cuda::start_item_moves({}, bytes, 0, nullptr); });
    }
    return kernels.json();
  }
  if (call.is_scored()) {
    if (dims) throw std::runtime_error("onepass: scores have kernels of rows listed alone");
    ScoredRows scored(call, &kernels);
    std::vector<int64_t> numbers_of_rows = rows_to_walk(gpu);
    // For a reduction, how many threads stream a row depends on how evenly rows fill the multiprocessors.
    for (int64_t full = gpu.sm_count; full <= 8 * gpu.sm_count; full += gpu.sm_count) {
      const int64_t most = full * 3 / 5;
      if (is_reduction(scored_problem(call).function))
        numbers_of_rows.insert(numbers_of_rows.end(), {most - 1, most + 1, full, full + 1});
    }
    for (const int64_t n : lengths.empty() ? lengths_to_walk(tables_of(gpu.name)) : lengths) {
      for (const int64_t rows : numbers_of_rows) scored.note(rows, n);
      if (n > 1 || !call.backward) continue;
      for (const int64_t line : lengths_to_walk(tables_of(gpu.name)))
        scored.note(line, n);  // rows of one element are one line
    }
    return kernels.json();
  }
  for (const int64_t n : lengths.empty() ? lengths_of_losses() : lengths) {
    for (const int64_t rows : rows_of_losses(gpu)) note_rows(call, rows, n, 1, &kernels);
    if (!dims || n == 1) continue;
    for (const int64_t inner : {2, 3, 4, 6, 8, 1000, 1001, 1002, 1004}) {
      for (const int64_t rows : rows_of_losses(gpu)) note_rows(call, ceil_div(rows, inner), n, inner, &kernels);
    }
  }
  return kernels.json();
}

}  // namespace

// The kernels that the calls described by `words` (calls.h) may need, over the last dim of contiguous tensors and, with
// `dims`, over other dims too. As JSON: {name: numbers}, which are function, pass and types as in launch.h, and the
// numbers that the functions of warmup.cpp take. `lengths`: `count` lengths of rows, or mean lengths of segments; none:
// any length. The GPU is `device` or, if that is negative, a full GPU of `arch`.
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
