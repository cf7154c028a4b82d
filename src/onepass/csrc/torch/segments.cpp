// segments.cpp: the operators of rows of unequal length. They return whether an engine has a kernel for the call. If it
// has, the result has been computed; otherwise plain torch arithmetic computes it (segment_arithmetic.py).
#include <atomic>

#include "../core/segment_problem.h"

#include "operators.h"

namespace onepass {

namespace {

bool is_int32(const TensorRef& indices) { return indices.dtype_code() == aoti_torch_dtype_int32(); }

// Sets the members that both directions share, and runs the problem. `tensors` are in the order of SegmentProblem.
bool run(SegmentProblem& problem, const TensorRef* const (&tensors)[SegmentProblem::kTensors], const TensorRef& offsets,
         const TensorRef* order, StackArguments& given) {
  using P = SegmentProblem;
  problem.function = Function(given.take<int64_t>());
  const int dim = int(given.take<int64_t>());
  problem.factor = given.take<double>();
  const TensorRef& like = *tensors[problem.is_backward() ? P::kOfDx : P::kOfX];
  if (dim < 0 || dim >= like.rank) fail("no such dim: " + std::to_string(dim));
  const bool has_planes = problem.function == Function::state;
  for (int t = 0; t < P::kTensors; ++t) {
    if (!tensors[t]) continue;
    problem.data[t] = t == problem.result() ? tensors[t]->mutable_data() : tensors[t]->data();
    problem.types[t] = tensors[t]->dtype();
    problem.steps[t] = tensors[t]->strides[dim + (has_planes && t == P::kOfY)];
  }
  for (int d = 0; d < like.rank; ++d) {
    if (d == dim) continue;
    DimOf<P::kTensors> each = {like.sizes[d], {}};
    for (int t = 0; t < P::kTensors; ++t) {
      if (tensors[t]) each.strides[t] = tensors[t]->strides[d + (has_planes && t == P::kOfY)];
    }
    problem.inner.insert(each);
    problem.columns *= each.size;
  }
  if (problem.columns) problem.inner.merge();
  if (has_planes) problem.plane = tensors[P::kOfY]->strides[0];
  problem.items = like.sizes[dim], problem.segments = offsets.numel() - 1;
  problem.offsets = offsets.data(), problem.order = order ? order->data() : nullptr;
  problem.has_wide_indices = !is_int32(offsets);
  if (problem.segments < 0) fail("offsets are one more than the segments, got none");
  if (order && (is_int32(*order) != is_int32(offsets) || order->numel() != problem.items)) {
    fail("an order has a place for each item, of the dtype of the offsets");
  }
  if (problem.columns == 0) return true;
  if (like.is_cuda()) return cuda::run_segments(problem, like);
  if (problem.is_backward() || !problem.is_reduction()) {
    advise_huge_pages(*tensors[problem.result()], problem.types[problem.result()]);
  }
  run_segments_cpu(problem);
  return true;
}

// (x, offsets, order, bias, y, numbers)
void run_segment_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  SegmentProblem problem;
  const TensorRef *const x = given.take_tensor(), *const offsets = given.take_tensor();
  const TensorRef *const order = given.take_maybe_tensor(), *const bias = given.take_maybe_tensor();
  const TensorRef* const y = given.take_tensor();
  stack[0] = stable::from(run(problem, {x, bias, y, nullptr, nullptr}, *offsets, order, given));
}

// (grad, y, x, offsets, order, bias, dx, numbers)
void run_segment_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  SegmentProblem problem;
  problem.direction = Direction::backward;
  const TensorRef *const grad = given.take_tensor(), *const y = given.take_tensor();
  const TensorRef *const x = given.take_maybe_tensor(), *const offsets = given.take_tensor();
  const TensorRef *const order = given.take_maybe_tensor(), *const bias = given.take_maybe_tensor();
  const TensorRef* const dx = given.take_tensor();
  stack[0] = stable::from(run(problem, {x, bias, y, grad, dx}, *offsets, order, given));
}

// Segments of an index, which has the segment of each item ------------------------------------------------------------

// A stable counting sort of items by their segments. Each thread counts its own part of the items. The result does not
// depend on the number of threads.
template <class Index, class Place>
struct ItemSort {
  const Index* index;
  int64_t items, segments;
  Place *offsets, *order;  // `order` is null if the index must already be sorted

  template <class Work>
  static void run_parts(int64_t count, int64_t grain, const Work& work) {
    count <= grain ? work(int64_t(0), count) : torch::stable::parallel_for(0, count, grain, work);
  }
  // Finds where segments begin if the index is sorted and has valid segments only. Otherwise returns false.
  bool find_offsets() {
    if (items && (index[0] < 0 || int64_t(index[items - 1]) >= segments)) return false;
    std::atomic<bool> sorted{true};
    run_parts(items, 1 << 16, [&](int64_t begin, int64_t end) {
      int64_t last = begin > 0 ? int64_t(index[begin - 1]) : -1;
      for (int64_t k = begin; k < end; ++k) {
        const int64_t now = index[k];
        if (now == last) continue;
        if (now < last || now >= segments) return sorted.store(false);
        for (; last < now; ++last) offsets[last + 1] = Place(k);
      }
    });
    if (!sorted) return false;
    for (int64_t s = items ? int64_t(index[items - 1]) + 1 : 0; s <= segments; ++s) offsets[s] = Place(items);
    return true;
  }
  void check() {
    std::atomic<int64_t> wrong{-1};
    run_parts(items, 1 << 16, [&](int64_t begin, int64_t end) {
      int64_t outside = 0;
      for (int64_t k = begin; k < end; ++k) outside += uint64_t(index[k]) >= uint64_t(segments);
      for (int64_t k = begin; outside && k < end; ++k) {
        if (uint64_t(index[k]) >= uint64_t(segments)) wrong = k;
      }
    });
    if (wrong < 0) return;
    fail("index has segments from 0 to " + std::to_string(segments - 1) + ", got " + std::to_string(index[wrong]) +
         " at " + std::to_string(wrong));
  }
  void sort() {
    const int64_t threads = int64_t(torch::stable::get_num_threads());
    const int64_t most = std::min(items / (segments + 1), items >> 16);  // counts take at most as much memory as items
    const int64_t parts = std::clamp<int64_t>(most, 1, threads), size = ceil_div(items, parts);
    std::vector<Place> counts(size_t(parts * segments));
    const auto each_item = [&](int64_t part, auto work) {
      for (int64_t k = part * size; k < std::min((part + 1) * size, items); ++k)
        work(k, counts[part * segments + index[k]]);
    };
    run_parts(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) each_item(part, [](int64_t, Place& count) { ++count; });
    });
    Place total = 0;
    for (int64_t s = 0; s < segments; ++s) {
      offsets[s] = total;
      for (int64_t part = 0; part < parts; ++part) {
        Place& count = counts[part * segments + s];
        total += std::exchange(count, total);
      }
    }
    offsets[segments] = total;
    run_parts(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        each_item(part, [&](int64_t k, Place& next) { order[next++] = Place(k); });
      }
    });
  }
  bool run() {
    if (find_offsets()) return true;
    check();
    if (order) sort();
    return false;
  }
};

// (index, offsets, order). Returns whether the index is sorted. If it is not, `order` has been filled, unless it is
// null.
void run_segment_sort(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef *const index = given.take_tensor(), *const offsets = given.take_tensor();
  const TensorRef* const order = given.take_maybe_tensor();
  const auto sort = [&](auto item, auto place) {
    using Index = decltype(item);
    using Place = decltype(place);
    ItemSort<Index, Place> of{static_cast<const Index*>(index->data()), index->numel(), offsets->numel() - 1,
                              static_cast<Place*>(offsets->mutable_data()),
                              order ? static_cast<Place*>(order->mutable_data()) : nullptr};
    return of.run();
  };
  const auto sort_to = [&](auto place) { return is_int32(*index) ? sort(int32_t(), place) : sort(int64_t(), place); };
  stack[0] = stable::from(is_int32(*offsets) ? sort_to(int32_t()) : sort_to(int64_t()));
}

// The same on a GPU. There the index must be sorted; it is not read before the kernel runs.
void find_offsets_cuda(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef *const index = given.take_tensor(), *const offsets = given.take_tensor();
  if (given.take_maybe_tensor()) fail("CUDA has no sort of an index");
  cuda::find_offsets(*index, *offsets);
  stack[0] = stable::from(true);
}

// (from, to, local, places, is_into_order). Tensors are contiguous, and items have 2, 4 or 8 bytes (item_route.py).
void move_items_cuda(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef *const from = given.take_tensor(), *const to = given.take_tensor();
  const TensorRef *const local = given.take_tensor(), *const places = given.take_maybe_tensor();
  cuda::move_items(*from, *to, *local, places, given.take<bool>());
}

void implement_all(stable::StableLibrary& m) {
  m.impl("_segment_kernel", run_segment_forward);
  m.impl("_segment_backward_kernel", run_segment_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def(
      "_segment_kernel(Tensor x, Tensor offsets, Tensor? order, Tensor? bias, Tensor(a!) y, int function, int dim, "
      "float factor) -> bool");
  m.def(
      "_segment_backward_kernel(Tensor grad, Tensor y, Tensor? x, Tensor offsets, Tensor? order, Tensor? bias, "
      "Tensor(a!) dx, int function, int dim, float factor) -> bool");
  m.def("_move_items(Tensor source, Tensor(a!) to, Tensor local, Tensor? places, bool is_into_order) -> ()");
  m.def("_segment_sort(Tensor index, Tensor(a!) offsets, Tensor(b!)? order) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) {
  implement_all(m);
  m.impl("_segment_sort", run_segment_sort);
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) {
  implement_all(m);
  m.impl("_segment_sort", find_offsets_cuda);
  m.impl("_move_items", move_items_cuda);
}

}  // namespace onepass
