// dispatch.cpp: makes a problem from checked tensors, and runs it on the engine of their device.
#include <atomic>
#include <limits>
#include <mutex>
#include <numeric>

#include "../core/batch_invariant.h"
#include "../core/divergence_problem.h"
#include "../core/loss_problem.h"
#include "../core/scored_problem.h"
#include "../core/segment_problem.h"
#include "../cpu/isa_dispatch.h"
#include "gathered_rows.h"

namespace onepass {

namespace {

template <class Work>
void run_parallel(int64_t count, int64_t grain_size, const Work& work) {
  if (count <= grain_size) return work(int64_t(0), count);
  torch::stable::parallel_for(0, count, grain_size, work);
}

void run_cpu(const Problem& problem) {
  cpu_engine().execute(problem,
                       [](int64_t count, int64_t grain_size, auto&& work) { run_parallel(count, grain_size, work); });
}

// In the batch-invariant mode rows are contiguous, gathered if necessary: the bits of a row depend on how it is
// computed, which depends on its layout.
bool is_gathered_on_cpu(const Problem& problem) {
  return batch_invariant() && !problem.has_rows() && problem.layout.n > 0;
}

Layout layout_of(const TensorArgs& args, bool contiguous) {
  const TensorRef& x = *args.tensors[kX];
  const int64_t numel = contiguous && args.dims.is_last ? x.numel() : 0;
  if (numel) {
    return contiguous_layout(numel / x.sizes[x.rank - 1], x.sizes[x.rank - 1], args.is_reduction());
  }
  int64_t y_strides[kMaxDims];
  args.get_strides(kY, y_strides);
  return make_forward_layout(x.rank, x.sizes, x.strides, y_strides, args.dims.reduced, args.is_reduction());
}

// Copies x to y, which has the same shape, with the dims sorted by the strides of y. torch copies to a contiguous
// tensor in tiles. To a transposed view of that tensor it copies element by element, which takes five times as long.
void copy_in_order(const TensorRef& y, const TensorRef& x) {
  int order[kMaxDims];
  std::iota(order, order + y.rank, 0);
  std::stable_sort(order, order + y.rank, [&](int a, int b) { return y.strides[a] > y.strides[b]; });
  const auto reorder = [&](const TensorRef& tensor) {
    int64_t sizes[kMaxDims], strides[kMaxDims];
    for (int i = 0; i < y.rank; ++i) sizes[i] = tensor.sizes[order[i]], strides[i] = tensor.strides[order[i]];
    return as_strided(tensor, sizes, strides);
  };
  const OwnedTensor to = reorder(y), from = reorder(x);
  check_torch(aoti_torch_copy_(to.get(), from.get(), 0));
}

// Fills the result of a reduction over no elements with -inf: the maximum of nothing, and log(0). The sum of a state is
// 0.
void fill_with_nothing(Function function, const TensorRef& y) {
  Tensor fill(new_reference(y));
  if (traits_of(function).leading_planes) {
    torch::stable::fill_(fill, 0);
    fill = torch::stable::narrow(fill, 0, 0, 1);
  }
  torch::stable::fill_(fill, -std::numeric_limits<double>::infinity());
}

// A scale that is the same for all rows becomes a part of the factor.
void take_scale_as_number(ScoredProblem& problem) {
  const auto& dims = problem.outer.dims;
  const auto differs = [](const auto& dim) { return dim.strides[kScale] != 0; };
  if (!problem.has(kScale) || std::any_of(dims, dims + problem.outer.count, differs)) return;
  const void* const scale = problem.data[kScale];
  const bool wide = problem.accumulator() == DType::float64;
  problem.factor *= wide ? *static_cast<const double*>(scale) : double(*static_cast<const float*>(scale));
  problem.data[kScale] = nullptr;
}

// Whether the gradient of a scored problem is a plain gradient of rows, times a number or a scale per row.
bool is_plain_gradient(const ScoredProblem& problem) {
  const bool marks_empty = problem.function == Function::log_softmax && problem.empty_is_zero;
  return problem.is_backward() && !is_reduction(problem.function) && problem.softcap == 0 && !problem.has(kMask) &&
         !problem.has_window() && !marks_empty && cpu_fuses_backward(problem.function, problem.in, problem.out);
}
// Returns false if the route is `tiles` and there is a scale per row, which tiles do not take.
bool run_plain_gradient(const ScoredProblem& scored) {
  constexpr ScoredTensor kBy[] = {kResult, kInput, kGradOf, kScale};
  constexpr int kScales = kLse;
  int64_t sizes[kMaxDims], strides[kBackwardTensors][kMaxDims] = {};
  bool reduce[kMaxDims];
  int rank = 0;
  for (const auto* group : {&scored.outer, &scored.reduced}) {
    for (int d = 0; d < group->count; ++d, ++rank) {
      sizes[rank] = group->dims[d].size, reduce[rank] = group == &scored.reduced;
      for (int t = kDx; t <= kScales; ++t) strides[t][rank] = group->dims[d].strides[kBy[t]];
    }
  }
  const int64_t* const each[] = {strides[0], strides[1], strides[2], strides[3]};
  Problem problem =
      Problem::backward(make_backward_layout(rank, sizes, each, reduce, false), scored.function, scored.in, scored.out,
                        scored.data[kResult], scored.data[kInput], scored.data[kGradOf]);
  problem.factor = scored.factor;
  problem.tensors[kScales] = {DType::float32, scored.data[kScale]};
  problem.threads = scored.threads;
  if (scored.has(kScale) && cpu_engine().plan(problem).route == CpuRoute::tiles) return false;
  run_cpu(problem);
  return true;
}

}  // namespace

void run_scored_cpu(ScoredProblem& problem) {
  take_scale_as_number(problem);
  problem.threads = int64_t(torch::stable::get_num_threads());
  if (is_plain_gradient(problem) && run_plain_gradient(problem)) return;
  const CpuEngine& engine = cpu_engine();
  const ScoredPlan plan = engine.plan_scored(problem);
  std::vector<ScoredState> states(plan.reduces ? size_t(plan.work_items + problem.rows) : 0);
  const auto run_phase = [&](CpuPhase phase) {
    run_parallel(plan.work_items, plan.grain_size, [&](int64_t begin, int64_t end) {
      engine.run_scored(problem, plan, phase, states.data(), begin, end);
    });
  };
  if (!plan.reduces) return run_phase(CpuPhase::whole);
  run_phase(CpuPhase::states);
  engine.run_scored(problem, plan, CpuPhase::merge, states.data(), 0, 0);
  if (plan.stores) run_phase(CpuPhase::finish);
}

void run_sum_cpu(const SumProblem& problem) {
  const CpuEngine& engine = cpu_engine();
  const SumPlan plan = engine.plan_sum(problem);
  std::vector<double> parts(size_t(plan.parts()));
  run_parallel(plan.tiles * plan.chunks, plan.grain_size,
               [&](int64_t begin, int64_t end) { engine.run_sum(problem, plan, parts.data(), begin, end); });
  if (parts.empty()) return;
  run_parallel(plan.tiles, plan.grain_size,
               [&](int64_t begin, int64_t end) { engine.merge_sums(problem, plan, parts.data(), begin, end); });
}

void run_loss_cpu(const LossProblem& problem) {
  const CpuEngine& engine = cpu_engine();
  const LossPlan plan = engine.plan_loss(problem);
  run_parallel(plan.work_items, plan.grain_size,
               [&](int64_t begin, int64_t end) { engine.run_loss(problem, plan, begin, end); });
}

void run_divergence_cpu(const DivergenceProblem& problem) {
  const CpuEngine& engine = cpu_engine();
  const DivergencePlan plan = engine.plan_divergence(problem);
  run_parallel(plan.work_items, plan.grain_size,
               [&](int64_t begin, int64_t end) { engine.run_divergence(problem, plan, begin, end); });
}

namespace {

// Checks the offsets and the order: throws if they are not valid. Returns the number of items of the longest segment.
int64_t check_segments(const SegmentProblem& p) {
  constexpr int64_t kPart = 1 << 16;
  const int64_t first = p.offset(0), last = p.offset(p.segments);
  if (first != 0 || last != p.items) {
    fail("offsets go from 0 to " + std::to_string(p.items) + ", the items of the dim, got " + std::to_string(first) +
         " to " + std::to_string(last));
  }
  std::mutex lock;
  int64_t longest = 0, shortest = 0;
  const auto find_lengths = [&](const auto* offsets, int64_t begin, int64_t end) {
    int64_t most = 0, least = 0;
    for (int64_t s = begin; s < end; ++s) {
      const int64_t n = int64_t(offsets[s + 1]) - int64_t(offsets[s]);
      most = std::max(most, n), least = std::min(least, n);
    }
    const std::lock_guard<std::mutex> guard(lock);
    longest = std::max(longest, most), shortest = std::min(shortest, least);
  };
  run_parallel(p.segments, kPart, [&](int64_t begin, int64_t end) {
    p.has_wide_indices ? find_lengths(static_cast<const int64_t*>(p.offsets), begin, end)
                       : find_lengths(static_cast<const int32_t*>(p.offsets), begin, end);
  });
  for (int64_t s = 0; shortest < 0 && s < p.segments; ++s) {
    if (p.offset(s + 1) >= p.offset(s)) continue;
    fail("offsets do not fall, got " + std::to_string(p.offset(s)) + " and then " + std::to_string(p.offset(s + 1)) +
         " at " + std::to_string(s + 1));
  }
  std::atomic<int64_t> wrong{-1};
  run_parallel(p.order ? p.items : 0, kPart, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (uint64_t(p.place(k)) >= uint64_t(p.items)) wrong = k;
    }
  });
  if (wrong >= 0) {
    fail("an order has places from 0 to " + std::to_string(p.items - 1) + ", got " + std::to_string(p.place(wrong)));
  }
  return longest;
}

}  // namespace

void run_segments_cpu(const SegmentProblem& problem) {
  const CpuEngine& engine = cpu_engine();
  const SegmentPlan plan = engine.plan_segments(problem, check_segments(problem));
  std::vector<SegmentState> states(plan.reduces ? size_t(plan.chunks * plan.tiles * plan.width) : 0);
  const auto run_phase = [&](CpuPhase phase) {
    run_parallel(plan.work_items, plan.grain_size, [&](int64_t begin, int64_t end) {
      engine.run_segments(problem, plan, phase, states.data(), begin, end);
    });
  };
  if (!plan.reduces) return run_phase(CpuPhase::whole);
  run_phase(CpuPhase::states);
  engine.run_segments(problem, plan, CpuPhase::merge, states.data(), 0, 0);
  if (problem.is_backward() || !problem.is_reduction()) run_phase(CpuPhase::finish);
}

// `contiguous`: whether both input and result are contiguous.
void run_forward(const TensorArgs& args, DType x_type, DType y_type, bool contiguous, const CudaPlan* plan) {
  const TensorRef &x = *args.tensors[kX], &y = *args.tensors[kY];
  if (y.numel() == 0) return;
  const auto with = [&](const TensorRef& from, const TensorRef& to) {
    TensorArgs others = args;
    others.tensors[kX] = &from, others.tensors[kY] = &to;
    return others;
  };
  if (!x.is_cuda() && !cpu_fuses(args.function, x_type, y_type)) {
    const OwnedTensor rounded = cast(x, y_type);
    return run_forward(with(TensorRef(rounded.get()), y), y_type, y_type, contiguous, plan);
  }
  const Problem problem =
      Problem::forward(layout_of(args, contiguous), args.function, x_type, y_type, x.data(), y.mutable_data());
  if (!x.is_cuda() && is_gathered_on_cpu(problem)) return run_gathered(problem, args, run_cpu);
  if (!x.is_cuda() && !args.is_reduction() && problem.layout.view == View::strided) {
    const Copied what = copied(problem.layout, layout_of(with(x, x), false), layout_of(with(y, y), false));
    if (what == Copied::input) {
      copy_in_order(y, x);  // this rounds to the type of the result, as the problem has to do first
      return run_forward(with(y, y), y_type, y_type, y.is_contiguous(), plan);
    }
    if (what == Copied::result) {
      const OwnedTensor owned = empty_like(x, y_type, false);
      const TensorRef result(owned.get());
      // For an expanded input, the layout of this result may differ from that of the input.
      if (const Layout layout = layout_of(with(x, result), false);
          layout.has_unit_rows() || layout.view == View::columns) {
        run_forward(with(x, result), x_type, y_type, false, plan);
        return copy_in_order(y, result);
      }
    }
  }
  if (problem.layout.n == 0) {
    fill_with_nothing(args.function, y);
  } else if (x.is_cuda()) {
    cuda::run(problem, args, plan);
  } else {
    run_cpu(problem);
  }
}

void run_backward(const TensorArgs& args, DType result_type, DType dx_type, const CudaPlan* plan) {
  const TensorRef& dx = *args.tensors[kDx];
  if (dx.numel() == 0) return;
  if (!dx.is_cuda() && !cpu_fuses_backward(args.function, result_type, dx_type)) {
    // Rare pairs of types: the operands are cast to a type that holds both. If necessary, so is the result.
    const bool doubles = result_type == DType::float64 || dx_type == DType::float64;
    const DType wide = doubles ? DType::float64 : DType::float32;
    const OwnedTensor saved = cast(*args.tensors[kSaved], wide), grad = cast(*args.tensors[kGrad], wide);
    const TensorRef wide_saved(saved.get()), wide_grad(grad.get());
    TensorArgs others = args;
    others.tensors[kSaved] = &wide_saved, others.tensors[kGrad] = &wide_grad;
    if (cpu_fuses_backward(args.function, wide, dx_type)) return run_backward(others, wide, dx_type, plan);
    const OwnedTensor owned = empty_like(dx, wide, dx.is_contiguous());
    const TensorRef wide_dx(owned.get());
    others.tensors[kDx] = &wide_dx;
    run_backward(others, wide, wide, plan);
    return check_torch(aoti_torch_copy_(dx.handle, wide_dx.handle, 0));
  }
  int64_t strides[kBackwardTensors][kMaxDims];
  for (int t = 0; t < kBackwardTensors; ++t) {
    if (args.tensors[t]) {
      args.get_strides(t, strides[t]);
    } else {
      std::fill_n(strides[t], dx.rank, 0);
    }
  }
  const int64_t* const each[kBackwardTensors] = {strides[0], strides[1], strides[2], strides[3]};
  const auto data_of = [&](int t) { return args.tensors[t] ? args.tensors[t]->data() : nullptr; };
  Problem problem = Problem::backward(
      make_backward_layout(dx.rank, dx.sizes, each, args.dims.reduced, args.is_reduction()), args.function, result_type,
      dx_type, dx.mutable_data(), data_of(kSaved), data_of(kGrad), data_of(kLse));
  if (!dx.is_cuda()) {
    problem.threads = int64_t(torch::stable::get_num_threads());
    return is_gathered_on_cpu(problem) ? run_gathered(problem, args, run_cpu) : run_cpu(problem);
  }
  cuda::run(problem, args, plan);
}

}  // namespace onepass
