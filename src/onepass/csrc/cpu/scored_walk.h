// scored_walk.h: where the elements of a scored problem are: walks through its rows, the runs of their elements, and
// the part of a run that is inside the window.
#pragma once

#include "../core/scored_problem.h"
#include "plan.h"

#include <initializer_list>

namespace onepass::ONEPASS_ISA {

constexpr int64_t kStepsAhead = 4;  // steps of a tile of columns that are prefetched

using ScoredGroup = DimGroupOf<kScoredTensors>;

// Steps through the dims of a group in order, except through the innermost ones. `at` is the offset in each tensor. It
// is read and written as whole vectors: a vector that was written in parts could be read only after all earlier writes
// have reached the cache.
struct ScoredWalk {
  static constexpr int kOffsets = int(up_to(kScoredTensors, 64 / sizeof(int64_t)));
  const ScoredGroup& group;
  const int count;
  alignas(64) int64_t at[kOffsets] = {}, step[kOffsets] = {};  // step: strides of the fastest dim
  int64_t index[kMaxDims];

  __attribute__((noinline)) ScoredWalk(const ScoredGroup& over, int64_t first, int innermost, const int64_t* origin)
      : group(over), count(over.count > innermost ? over.count - innermost : 0) {
    std::copy_n(origin, int(kScoredTensors), at);
    for (int i = count - 1; i >= 0; --i) {
      index[i] = first % group.dims[i].size;
      first /= group.dims[i].size;
      for (int t = 0; t < kScoredTensors; ++t) at[t] += index[i] * group.dims[i].strides[t];
    }
    if (count) std::copy_n(group.dims[count - 1].strides, int(kScoredTensors), step);
  }
  // The number of elements of the fastest dim from here on.
  int64_t rest() const { return count ? group.dims[count - 1].size - index[count - 1] : 1; }
  ONEPASS_INLINE void next() {
    if (!count) return;
    for (int t = 0; t < kOffsets; t += kLanes<int64_t>) {
      store_as(at + t, load_as<int64_t>(at + t) + load_as<int64_t>(step + t));
    }
    if (++index[count - 1] == group.dims[count - 1].size) carry();
  }

 private:
  // Steps through the slower dims.
  __attribute__((noinline)) void carry() {
    for (int i = count - 1; i >= 0 && index[i] == group.dims[i].size; --i) {
      for (int t = 0; t < kScoredTensors; ++t) {
        at[t] += (i > 0 ? group.dims[i - 1].strides[t] : 0) - index[i] * group.dims[i].strides[t];
      }
      index[i] = 0;
      if (i > 0) ++index[i - 1];
    }
  }
};

// Elements at a fixed stride: `count` elements from index `first` on, of those that begin at `origin`.
struct ScoredRun {
  const int64_t *origin, *step;
  int64_t first, count;

  int64_t at(ScoredTensor tensor) const { return origin[tensor] + first * step[tensor]; }
  // The elements [begin, end) of this run.
  ScoredRun part(int64_t begin, int64_t end) const { return {origin, step, first + begin, end - begin}; }
};

// The offset of the first element of a run in each tensor.
struct RunPlace {
  int64_t of[kScoredTensors];
  explicit RunPlace(const ScoredRun& run) {
    for (int t = 0; t < kScoredTensors; ++t) of[t] = run.at(ScoredTensor(t));
  }
};

struct Span {
  int64_t first, last;
};

// The rows of a call, and the runs that they consist of.
struct ScoredRows {
  const ScoredProblem& p;
  DimOf<kScoredTensors> inner = p.reduced.innermost();
  int64_t origin[kScoredTensors] = {};

  explicit ScoredRows(const ScoredProblem& problem) : p(problem) {
    if (p.reduced.count == 0) std::fill_n(inner.strides, int(kScoredTensors), 0);
    origin[kDistance] = p.distance;
  }
  ScoredWalk from(int64_t row) const { return {p.outer, row, 0, origin}; }
  bool is_one_run() const { return p.reduced.count <= 1; }
  // Whether consecutive rows are contiguous in these tensors, as if they were one long row.
  bool follow_each_other(std::initializer_list<ScoredTensor> tensors) const {
    if (!is_one_run() || p.outer.count == 0) return false;
    const auto& row = p.outer.dims[p.outer.count - 1];
    return std::all_of(tensors.begin(), tensors.end(), [&](ScoredTensor tensor) {
      return !p.has(tensor) || row.strides[tensor] == p.n * inner.strides[tensor];
    });
  }
  template <class T>
  T* data(ScoredTensor tensor, const int64_t* at) const {
    return static_cast<T*>(p.data[tensor]) + at[tensor];
  }
  template <class T>
  T* data(ScoredTensor tensor, const ScoredRun& run) const {
    return static_cast<T*>(p.data[tensor]) + run.at(tensor);
  }

  // Calls work(run, index of its first element) for the runs of the elements [first, last) of the row at `row`.
  template <class Work>
  ONEPASS_INLINE void for_each_run(const int64_t* row, int64_t first, int64_t last, Work work) const {
    if (is_one_run()) return work(ScoredRun{row, inner.strides, first, last - first}, int64_t(0));
    ScoredWalk walk(p.reduced, first / inner.size, 1, row);
    for (int64_t i = first - first % inner.size; i < last; i += inner.size, walk.next()) {
      const int64_t begin = std::max(first - i, int64_t(0)), end = std::min(last - i, inner.size);
      work(ScoredRun{walk.at, inner.strides, begin, end - begin}, i + begin - first);
    }
  }

  // Calls work(tile) for tiles of up to `width` rows that lie side by side. A tile is the run of the rows' first
  // elements.
  template <class Work>
  void for_each_tile(int64_t begin, int64_t end, int64_t width, Work work) const {
    const auto& column = p.outer.dims[p.outer.count - 1];
    const int64_t tiles = ceil_div(column.size, width);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % tiles * width, count = std::min(width, column.size - first);
      const ScoredWalk start(p.outer, item / tiles, 1, origin);
      work(ScoredRun{start.at, column.strides, first, count});
    }
  }
  // Calls work(run, index) for the elements [first, last) of the rows of a tile. A run has one element of each row.
  template <class Work>
  ONEPASS_INLINE void for_each_step(const ScoredRun& tile, int64_t first, int64_t last, Work work) const {
    ScoredWalk walk(p.reduced, first, 0, tile.origin);
    for (int64_t i = first; i < last; ++i, walk.next()) work(ScoredRun{walk.at, tile.step, tile.first, tile.count}, i);
  }

  // Prefetches the elements of a tensor that are some steps behind this step of a tile.
  ONEPASS_INLINE void fetch_step(ScoredTensor tensor, DType type, const ScoredRun& step) const {
    if (!p.has(tensor) || step.step[tensor] == 0 || inner.strides[tensor] == 0) return;
    const int64_t size = size_of(type), at = step.at(tensor) + kStepsAhead * inner.strides[tensor];
    const char* const elements = static_cast<const char*>(p.data[tensor]) + at * size;
    for (int64_t j = 0; j < step.count * size; j += kLine) __builtin_prefetch(elements + j);
  }
  // The part of a run that is inside the window.
  Span inside(const ScoredRun& run) const { return inside(run.at(kDistance), run.step[kDistance], run.count); }
  // The same for a run with the distance d of its first element, the step between distances, and its count.
  Span inside(int64_t d, int64_t step, int64_t count) const {
    if (!p.has_window()) return {0, count};
    constexpr int64_t far = int64_t(1) << 62;
    const int64_t least = std::max(p.least, -far), most = std::min(p.most, far);
    if (step == 0) return {0, d < least || d > most ? 0 : count};
    const int64_t from = step > 0 ? least - d : d - most, to = step > 0 ? most - d : d - least;
    const int64_t first = std::clamp<int64_t>(from, 0, count);
    return {first, std::clamp<int64_t>(to + 1, first, count)};
  }
};

}  // namespace onepass::ONEPASS_ISA
